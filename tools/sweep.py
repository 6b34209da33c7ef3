"""Search for good options of `relvit fit` with Optuna; the same command continues an interrupted trial.

    pip install -e ".[sweep]"
    python tools/sweep.py --space space.yaml --work sweep --trials 20 --config digits --epochs 5

`relvit fit` gets all options that this script does not have. The space is a YAML file of options, each with a list of
values or with bounds (the value is an integer if both bounds are integers):

    model.lr: {low: 1.e-4, high: 5.e-3, log: true}
    model.weight_decay: [0.02, 0.05, 0.1]
    model.model_kwargs.max_distance: {low: 1, high: 7}

Trials maximise the best validation accuracy. WORK has a folder for each trial, and Optuna's journal; one process at a
time may use WORK. A training that fails counts as a failed trial, and the search continues.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
import yaml
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

STATES = (TrialState.WAITING, TrialState.RUNNING, TrialState.FAIL, TrialState.COMPLETE)


def suggest(trial: optuna.Trial, name: str, values: Sequence[Any] | Mapping[str, Any]) -> Any:
    """Choose a value of one option."""
    if not isinstance(values, Mapping):
        return trial.suggest_categorical(name, values)
    whole = all(isinstance(values[bound], int) for bound in ("low", "high"))
    return (trial.suggest_int if whole else trial.suggest_float)(name, **values)


def fit(folder: Path, options: Sequence[str]) -> float:
    """Train, or resume an interrupted training; return the best validation accuracy."""
    if not list(folder.glob("*/summary.json")):
        begun = sorted(folder.glob("*/checkpoints/last.ckpt"))
        arguments = [f"--resume={begun[-1].parent.parent}"] if begun else [*options, f"--runs={folder}"]
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "log.txt", "a") as log:
            command = [sys.executable, "-m", "relvit", "fit", *arguments]
            subprocess.run(command, stdout=log, stderr=log, check=True)
    return json.loads(next(folder.glob("*/summary.json")).read_text())["val/acc1"]


def search(space: Mapping[str, Any], work: Path, trials: int, options: Sequence[str]) -> optuna.Study:
    """Run trials until there are `trials` of them; an interrupted trial is continued first."""
    work.mkdir(parents=True, exist_ok=True)
    storage = JournalStorage(JournalFileBackend(str(work / "journal.log")))
    sampler = optuna.samplers.TPESampler(seed=0)
    study = optuna.create_study(
        storage=storage, study_name="sweep", sampler=sampler, direction="maximize", load_if_exists=True
    )
    # The latest trial of each folder counts. Optuna regards a trial that was killed as running or waiting.
    latest = {folder_of(trial): trial for trial in study.get_trials(states=STATES)}
    stopped = [trial for trial in latest.values() if trial.value is None and "failed" not in trial.user_attrs]
    for trial in stopped:
        if trial.state is TrialState.RUNNING:
            study.tell(trial.number, state=TrialState.FAIL)
        if trial.state is not TrialState.WAITING:
            study.enqueue_trial(trial.params, user_attrs={"folder": folder_of(trial)})

    def objective(trial: optuna.Trial) -> float:
        chosen = [f"--{name}={suggest(trial, name, values)}" for name, values in space.items()]
        name = folder_of(trial)
        try:
            accuracy = fit(work / name, [*options, *chosen])
        except subprocess.CalledProcessError:
            trial.set_user_attr("failed", True)
            raise
        print(f"{name}: {accuracy:.4f} with {' '.join(chosen)}", flush=True)
        return accuracy

    study.optimize(objective, max(0, trials - len(latest) + len(stopped)), catch=subprocess.CalledProcessError)
    return study


def folder_of(trial: optuna.Trial | optuna.trial.FrozenTrial) -> str:
    """Return the name of a trial's folder; a trial that is continued keeps the folder of the interrupted one."""
    return trial.user_attrs.get("folder", f"trial_{trial.number}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Search, and print the best trial."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--space", type=Path, required=True, help="YAML file of options and their values")
    add("--work", type=Path, required=True, help="folder of the trials")
    add("--trials", type=int, default=20, help="how many there are to be in all")
    given, options = parser.parse_known_args(arguments)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = yaml.safe_load(given.space.read_text())
    best = search(space, given.work, given.trials, options).best_trial
    print(f"best of {given.trials}: {folder_of(best)}, {best.value:.4f}")
    print("\n".join(f"  --{name}={value}" for name, value in best.params.items()))


if __name__ == "__main__":
    main()
