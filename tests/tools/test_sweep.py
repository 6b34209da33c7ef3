"""Search for options with Optuna: values within the space, interrupted trials, failures, and one real search."""

import json
import subprocess

import pytest
import yaml
from scripts import load

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
    # Kill the search once more, after it has queued the trial again and before the trial starts.
    with monkeypatch.context() as killed:
        killed.setattr("optuna.study.Study.optimize", stop)
        with pytest.raises(KeyboardInterrupt):
            run()
    run()
    assert [name for name, _ in calls] == ["trial_0", "trial_1", "trial_2", "trial_2", "trial_4", "trial_5", "trial_6"]
    assert calls[2] == calls[3]


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


@pytest.mark.slow
def test_a_training(tmp_path, capsys):
    space = tmp_path / "space.yaml"
    space.write_text(yaml.safe_dump({"model.lr": [1e-3, 5e-3]}))
    options = ["--config=digits", "--epochs=1", "--trainer.limit_train_batches=2", "--accelerator=cpu"]
    sweep.main([f"--space={space}", f"--work={tmp_path / 'work'}", "--trials=1", *options])
    (summary,) = tmp_path.glob("work/trial_0/*/summary.json")
    accuracy = json.loads(summary.read_text())["val/acc1"]
    assert f"best of 1: trial_0, {accuracy:.4f}\n  --model.lr=0.00" in capsys.readouterr().out
