"""Search for options with Optuna: values within the space, interrupted trials, failures, and one real search."""

import json
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml
from processes import is_open
from scripts import load

from relvit.app.training import RunLock

pytest.importorskip("optuna")
sweep = load("sweep")

SPACE = {
    "model.lr": {"low": 1e-4, "high": 1e-2, "log": True},
    "model.weight_decay": [0.0, 0.1],
    "model.model_kwargs.max_distance": {"low": 1, "high": 3},
}


def stop(*_, **__):
    raise KeyboardInterrupt


def chosen(options):
    return dict(option.removeprefix("--").split("=") for option in options[1:])


@pytest.fixture
def search(monkeypatch, tmp_path):
    """Return a function that runs a search of six trials, and the list of its trainings: folders and options.

    The third training is killed and the fifth fails.
    """
    calls, ends = [], {2: KeyboardInterrupt, 4: subprocess.CalledProcessError(1, "fit")}

    def fit(folder, options):
        calls.append((folder.name, options))
        if error := ends.pop(len(calls) - 1, None):
            raise error
        return -abs(float(chosen(options)["model.lr"]) - 1e-3)

    monkeypatch.setattr(sweep, "fit", fit)
    return lambda: sweep.search(SPACE, tmp_path, 6, ["--config=digits"]), calls


@pytest.fixture
def searched(search):
    """The study and the trainings of a search that was resumed after a trial had been killed."""
    run, calls = search
    with pytest.raises(KeyboardInterrupt):
        run()
    return run(), calls


def test_values_are_of_the_space(searched):
    for _, options in searched[1]:
        assert options[0] == "--config=digits"
        values = chosen(options)
        assert 1e-4 <= float(values["model.lr"]) <= 1e-2
        assert values["model.weight_decay"] in ("0.0", "0.1")
        assert values["model.model_kwargs.max_distance"] in ("1", "2", "3")


def test_an_interrupted_trial_is_repeated_with_its_options_in_its_folder(search, monkeypatch):
    run, calls = search
    with pytest.raises(KeyboardInterrupt):
        run()
    # Kill the search once more, before the trial goes on.
    with monkeypatch.context() as killed:
        killed.setattr(sweep, "fit", stop)
        with pytest.raises(KeyboardInterrupt):
            run()
    run()
    assert [name for name, _ in calls] == [f"trial_{number}" for number in (0, 1, 2, 2, 3, 4, 5)]
    assert calls[2] == calls[3]


def test_a_search_that_ends_by_an_error_closes_its_lock(search, tmp_path):
    with pytest.raises(KeyboardInterrupt) as error:
        search[0]()
    # The error, which is still referred to here, keeps all objects of the search alive.
    assert error.value
    assert not is_open(tmp_path / RunLock.NAME)


def test_a_training_that_fails_is_no_candidate(searched):
    study, _ = searched
    values = [trial.value for trial in study.trials if trial.value is not None]
    assert len(values) == 5
    assert study.best_value == max(values)


def test_a_finished_search_trains_no_more(search, searched):
    (run, calls), (study, _) = search, searched
    trained = len(calls)
    assert len(run().trials) == len(study.trials)
    assert len(calls) == trained == 7


def test_a_search_that_goes_on_tries_other_values(searched):
    values = [chosen(options)["model.lr"] for _, options in searched[1]]
    assert len(set(values)) == len(values) - 1, "only the interrupted trial has the same values twice"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([None, True, [1, 2], "none", 0.1], {"--o=null", "--o=true", "--o=[1, 2]", "--o=none", "--o=0.1"}),
        ({"low": 1, "high": 3, "step": 2}, {"--o=1", "--o=3"}),
        ({"low": 1, "high": 2, "step": 0.5}, {"--o=1.0", "--o=1.5", "--o=2.0"}),
        # YAML reads numbers such as 1e-4 as text.
        ({"low": "1e-4", "high": "1e-4", "log": True}, {"--o=0.0001"}),
    ],
)
def test_values_are_given_as_the_command_line_reads_them(values, words, monkeypatch, tmp_path):
    given = set()
    monkeypatch.setattr(sweep, "fit", lambda _, options: given.update(options) or 0.0)
    sweep.search({"o": values}, tmp_path, 20, [])
    assert given == words


@pytest.mark.parametrize(
    "values",
    [
        0.1,
        "abc",
        [],
        {"low": 1},
        {"lr": [1, 2]},
        {"low": 2, "high": 1},
        {"low": 0, "high": 0.1, "log": True},
        {"low": 1, "high": 2, "lgo": True},
    ],
    ids=str,
)
def test_a_space_given_wrong_is_refused_before_anything_is_written(values, tmp_path):
    with pytest.raises(ValueError, match=r"^model\.lr: .* in the space: "):
        sweep.search({"model.lr": values}, tmp_path / "work", 1, [])
    with pytest.raises(ValueError, match="the space must be options with their values"):
        sweep.search(None, tmp_path / "work", 1, [])
    assert not (tmp_path / "work").exists()


def test_trainings_of_another_space_or_other_options_are_not_compared(monkeypatch, tmp_path):
    monkeypatch.setattr(sweep, "fit", lambda folder, _: (folder / "run").mkdir(parents=True) or 0.5)
    sweep.search({"model.lr": [0.1]}, tmp_path, 1, ["--epochs=1"])
    for space, options in (({"model.lr": [0.1]}, ["--epochs=2"]), ({"model.lr": [0.1, 0.2]}, ["--epochs=1"])):
        with pytest.raises(ValueError, match=r"has trainings of another space or other options.*give another --work"):
            sweep.search(space, tmp_path, 2, options)


def test_options_that_fit_refuses_end_a_search_that_can_be_corrected(monkeypatch, tmp_path):
    def fit(folder, options):
        folder.mkdir(parents=True, exist_ok=True)
        if options != ["--model.lr=0.1"]:
            (folder / "log.txt").write_text("relvit fit: error: unknown option --model.lrr\n")
            raise subprocess.CalledProcessError(2, "fit")
        return 0.5

    monkeypatch.setattr(sweep, "fit", fit)
    with pytest.raises(ValueError, match=r"relvit fit refuses --model\.lrr=\S+: unknown option --model\.lrr"):
        sweep.search({"model.lrr": [0.1, 0.2]}, tmp_path, 3, [])
    assert len(sweep.search({"model.lr": [0.1]}, tmp_path, 3, []).trials) == 3


def test_a_search_without_a_result_says_so(monkeypatch, tmp_path, capsys):
    def fit(*_):
        raise subprocess.CalledProcessError(1, "fit")

    monkeypatch.setattr(sweep, "fit", fit)
    (tmp_path / "space.yaml").write_text("model.lr: [0.1]")
    with pytest.raises(SystemExit):
        sweep.main([f"--space={tmp_path / 'space.yaml'}", f"--work={tmp_path / 'work'}", "--trials=2"])
    assert "no training has succeeded" in capsys.readouterr().err


def test_the_score_of_several_labels_and_a_training_without_a_validation(monkeypatch, tmp_path):
    (tmp_path / "trial/run").mkdir(parents=True)
    (tmp_path / "trial/run/summary.json").write_text('{"val/map": 0.25}')
    assert sweep.fit(tmp_path / "trial", []) == 0.25
    monkeypatch.setattr(sweep.sys, "executable", shutil.which("true"))
    with pytest.raises(ValueError, match="has ended without a validation"):
        sweep.fit(tmp_path / "other", [])


@pytest.mark.slow
def test_one_process_at_a_time_and_no_training_without_its_search(tmp_path):
    """A second search is refused; a search that is killed stops its training, which can save a checkpoint."""
    (tmp_path / "space.yaml").write_text("model.lr: [0.1]")
    (tmp_path / "relvit.py").write_text(
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path('saved').touch(), sys.exit(1)))\n"
        "pathlib.Path('training').touch()\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, sweep.__file__, "--space=space.yaml", "--work=work"]
    with subprocess.Popen(command, cwd=tmp_path) as process:
        while not (tmp_path / "training").exists():
            assert process.poll() is None
            time.sleep(0.05)
        with pytest.raises(BlockingIOError, match="is in use by another training"):
            sweep.search({"model.lr": [0.1]}, tmp_path / "work", 1, [])
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    assert (tmp_path / "saved").exists()


@pytest.mark.slow
def test_a_training(tmp_path, capsys):
    space = tmp_path / "space.yaml"
    space.write_text(yaml.safe_dump({"model.lr": [1e-3, 5e-3]}))
    options = ["--config=digits", "--epochs=1", "--trainer.limit_train_batches=2", "--accelerator=cpu"]
    sweep.main([f"--space={space}", f"--work={tmp_path / 'work'}", "--trials=1", *options])
    (summary,) = tmp_path.glob("work/trial_0/*/summary.json")
    accuracy = json.loads(summary.read_text())["val/acc1"]
    assert f"best of 1: trial_0, {accuracy:.4f}\n  --model.lr=0.00" in capsys.readouterr().out
