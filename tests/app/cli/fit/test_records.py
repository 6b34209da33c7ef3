"""Files in which a run records its options and versions, and runs that repeat bit by bit."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from command_line import fit, rows
from lightning import Trainer

from relvit.app.training.run.record import git_state, record_run


def test_the_table_has_a_row_per_epoch_with_all_quantities(run):
    table = rows(run / "metrics.csv")
    assert [(row["epoch"], row["step"]) for row in table] == [("0", "3"), ("1", "6"), ("2", "9"), ("3", "12")]
    for row in table:
        assert all(row.values())
        assert float(row["system/images_per_second"]) > 0
        assert 0 <= float(row["system/data_wait"]) <= 1
        assert float(row["train/grad_norm"]) > 0


def test_the_record_of_a_run(resumed):
    folder, _ = resumed
    first, second = json.loads((folder / "run.json").read_text())["sessions"]
    assert second["command"] == ["relvit", "fit", f"--resume={folder}", "--trainer.max_epochs=6"]
    assert first["seed"] == second["seed"] == 0
    assert first["versions"]["torch"] == str(torch.__version__)
    assert first["devices"] == {"count": 1, "kind": "cpu", "precision": "32-true"}
    # `started` is rounded to seconds, so both may be equal.
    assert first["started"] <= second["started"]


@pytest.mark.parametrize("content", ["[]", "{", "{}", '{"sessions": 3}', ""])
def test_a_damaged_record_is_kept_and_begun_again(content, tmp_path):
    (tmp_path / "run.json").write_text(content)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.warns(UserWarning, match=r"run.json is damaged \(.*it is now run.damaged.json, and a new one begins"):
        record_run(tmp_path, ["relvit", "fit"], 0, trainer)
    assert (tmp_path / "run.damaged.json").read_text() == content
    assert len(json.loads((tmp_path / "run.json").read_text())["sessions"]) == 1


def test_the_state_of_the_repository(tmp_path):
    assert git_state(tmp_path / "none") is None
    who = ["-c", "user.name=A", "-c", "user.email=a@example.org"]

    def git(*arguments):
        subprocess.run(["git", "-C", tmp_path, *who, *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    clean = git_state(tmp_path)
    assert len(clean["commit"]) == 40
    assert clean["changed"] is False
    (tmp_path / "untracked").write_text("1")
    assert git_state(tmp_path) == clean
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path) == clean | {"changed": True}


def test_the_files_of_a_run_do_not_depend_on_the_locale(photos, tmp_path, monkeypatch):
    by_locale, real = [], open

    def note(file, mode="r", *arguments, encoding=None, **options):
        if str(tmp_path) in str(file) and "b" not in mode and encoding is None:
            by_locale.append(Path(file).name)
        return real(file, mode, *arguments, encoding=encoding, **options)

    monkeypatch.setattr("builtins.open", note)
    fit(photos, tmp_path, "--trainer.max_steps=1")
    # The lock is empty.
    assert by_locale == [".lock"]


@pytest.mark.slow
def test_deterministic_trainings_are_bit_equal(photos, tmp_path):
    """The seed decides everything. Neither earlier random numbers nor the number of workers matters."""
    contents = []
    for workers in (0, 2):
        torch.rand(workers + 1)
        options = [f"--data.num_workers={workers}", "--data.augment=deit", "--model.mixup=0.8", "--model.cutmix=1"]
        options += ["--model.model_kwargs.drop_rate=0.1", "--model.ema_decay=0.9", "--trainer.max_epochs=2"]
        options += ["--trainer.deterministic=true", "--model.warmup_epochs=0"]
        made = fit(photos, tmp_path / str(workers), *options)
        assert json.loads((made / "run.json").read_text())["sessions"][0]["deterministic"] is True
        contents.append(torch.load(made / "checkpoints" / "last.ckpt", weights_only=True))
        torch.use_deterministic_algorithms(False)
    first, second = contents
    for key in ("state_dict", "ema_state_dict"):
        assert all(torch.equal(first[key][name], second[key][name]) for name in first[key])
    moments = [content["optimizer_states"][0]["state"] for content in contents]
    assert all(torch.equal(moments[0][i][name], moments[1][i][name]) for i in moments[0] for name in moments[0][i])
