"""Search for good options of `relvit fit` with Optuna; the same command continues an interrupted trial.

    pip install -e ".[sweep]"
    python tools/sweep.py --space space.yaml --work sweep --trials 20 --config digits --epochs 5

`relvit fit` gets all options that this script does not have. The space is a YAML file of options, each with a list of
values or with bounds (the value is an integer if the bounds, and `step` if it is given, are integers):

    model.lr: {low: 1.e-4, high: 5.e-3, log: true}
    model.weight_decay: [0.02, 0.05, 0.1]
    model.model_kwargs.max_distance: {low: 1, high: 7}

Trials maximise the best validation accuracy (with several labels per image, the mean average precision). WORK has a
folder for each trial, and Optuna's journal; one process at a time may use WORK, for one space and the same options. A
training that fails counts as a failed trial, and the search continues, unless `relvit fit` refuses the first options.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import optuna
import yaml
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from relvit.app.training.run.run_folder import RunLock


def distributions_of(space: Any) -> dict[str, BaseDistribution]:
    """Return the distribution of the values of each option.

    Raises:
        ValueError: The space is not written as the head of this file says.
    """
    if not isinstance(space, Mapping) or not space:
        raise ValueError(f"the space must be options with their values, as model.lr: [1.e-3, 1.e-2], got {space!r}")
    found = {}
    for name, values in space.items():
        try:
            found[name] = _distribution(values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: {values!r} in the space: {error}") from error
    return found


def _distribution(values: Any) -> BaseDistribution:
    if isinstance(values, list):
        # The command line takes null, true and lists as JSON writes them, not as Python does.
        return CategoricalDistribution([each if isinstance(each, str) else json.dumps(each) for each in values])
    if not isinstance(values, Mapping) or not {"low", "high"} <= values.keys() <= {"low", "high", "log", "step"}:
        raise ValueError("give a list of values, or {low: 1, high: 9}, with or without log: true or step: 2")
    # YAML reads 1e-4, without a point, as text.
    given = {name: float(value) if isinstance(value, str) else value for name, value in values.items()}
    whole = all(isinstance(value, int) for value in given.values())
    return (IntDistribution if whole else FloatDistribution)(**given)


def fit(folder: Path, options: Sequence[str]) -> float:
    """Train, or resume an interrupted training; return the best validation accuracy."""
    if not list(folder.glob("*/summary.json")):
        begun = sorted(folder.glob("*/checkpoints/last.ckpt"))
        arguments = [f"--resume={begun[-1].parent.parent}"] if begun else [*options, f"--runs={folder}"]
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "relvit", "fit", *arguments]
        with open(folder / "log.txt", "a") as log, subprocess.Popen(command, stdout=log, stderr=log) as training:
            try:
                status = training.wait()
            except BaseException:
                # If the search is stopped, no training may go on without it. Wait until its checkpoint is saved.
                training.terminate()
                training.wait()
                raise
        if status:
            raise subprocess.CalledProcessError(status, command)
    if (summary := next(folder.glob("*/summary.json"), None)) is None:
        raise ValueError(f"the training in {folder} has ended without a validation: its log.txt says why")
    results = json.loads(summary.read_text())
    return next(results[score] for score in ("val/acc1", "val/map") if score in results)


def search(space: Mapping[str, Any], work: Path, trials: int, options: Sequence[str]) -> optuna.Study:
    """Run trials until there are `trials` of them; an interrupted trial is continued first.

    Raises:
        BlockingIOError: Another process uses `work`.
        ValueError: The space is wrong; `work` has trainings of another space or other options; `relvit fit` refuses the
            options before there is a training; or a training has no validation.
    """
    distributions = distributions_of(space)
    work.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.callback(RunLock(work).release)
        study = _study(work, json.dumps([space, options], default=str))
        # Another seed for each number of trials, so that a search that is continued does not repeat its first values.
        study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
        # Optuna regards a trial that was killed as running.
        stopped = study.get_trials(states=[TrialState.RUNNING])
        while stopped or len(study.get_trials(deepcopy=False)) < trials:
            trial = stopped.pop(0) if stopped else study.ask(distributions)
            chosen, folder = words(trial.params), work / f"trial_{trial.number}"
            try:
                accuracy = fit(folder, [*options, *chosen])
            except subprocess.CalledProcessError as error:
                study.tell(trial.number, state=TrialState.FAIL)
                if error.returncode == 2 and not _trained(work):
                    reason = (folder / "log.txt").read_text().strip().rpartition("error: ")[2]
                    raise ValueError(f"relvit fit refuses {shlex.join(chosen)}: {reason}") from error
                what = f"failed (exit status {error.returncode}, see {folder / 'log.txt'})"
                print(f"{folder.name}: {what} with {shlex.join(chosen)}", flush=True)
            else:
                study.tell(trial.number, accuracy)
                print(f"{folder.name}: {accuracy:.4f} with {shlex.join(chosen)}", flush=True)
    return study


def _study(work: Path, asked: str) -> optuna.Study:
    """Open or begin the study of a space and options, which are given as text."""
    storage = JournalStorage(JournalFileBackend(str(work / "journal.log")))
    for _ in range(2):
        study = optuna.create_study(storage=storage, study_name="sweep", direction="maximize", load_if_exists=True)
        begun = study.user_attrs.get("asked", asked)
        if begun == asked:
            break
        if _trained(work):
            raise ValueError(f"{work} has trainings of another space or other options, {begun}: give another --work")
        # Nothing was trained with the earlier options, which `relvit fit` refused.
        optuna.delete_study(study_name="sweep", storage=storage)
    study.set_user_attr("asked", asked)
    return study


def _trained(work: Path) -> bool:
    """Return whether there is the folder of a run, which a training has only after `relvit fit` took its options."""
    return any(work.glob("trial_*/*/"))


def words(parameters: Mapping[str, Any]) -> list[str]:
    """Return the options of a trial as words of the command line."""
    return [f"--{name}={value}" for name, value in parameters.items()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Search, and print the best trial."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--space", type=Path, required=True, help="YAML file of options and their values")
    add("--work", type=Path, required=True, help="folder of the trials")
    add("--trials", type=int, default=20, help="how many there are to be in all")
    given, options = parser.parse_known_args(arguments)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = search(yaml.safe_load(given.space.read_text()), given.work, given.trials, options)
    except (OSError, ValueError, yaml.YAMLError) as error:
        parser.error(str(error))
    complete = study.get_trials(states=[TrialState.COMPLETE])
    if not complete:
        parser.error(f"no training has succeeded: {given.work}/trial_*/log.txt say why")
    best = study.best_trial
    print(f"best of {len(complete)}: trial_{best.number}, {best.value:.4f}")
    print("\n".join(f"  {shlex.quote(word)}" for word in words(best.params)))
    print(f"its files: {next(given.work.glob(f'trial_{best.number}/*/summary.json')).parent}")


if __name__ == "__main__":
    # By default SIGTERM, with which clusters and `kill` end a process, would leave the training running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
