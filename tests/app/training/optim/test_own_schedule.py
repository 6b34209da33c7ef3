"""A user's own schedule: its rates, a resume, and its name, which is imported only for a training."""

import pytest
import torch
from photos import TINY
from small_training import Record, build, train

import relvit
from relvit.app.cli import main
from relvit.app.training.optim.schedule import warmup_cosine

MODULE = "def falling(step, total, warmup, floor):\n    return max(floor, 1 - (step / total) ** 2)\n"


def falling(step, total, warmup, floor):
    return max(floor, 1 - (step / total) ** 2)


def trained(path, ckpt_path=None, **options):
    module = build(lr=0.5, min_lr=0.1, warmup_epochs=1, **options)
    record = Record(module)
    trainer = train(module, ckpt_path=ckpt_path, max_epochs=2 if ckpt_path else 1)
    trainer.save_checkpoint(path)
    return record.rates


def test_rates_are_those_of_the_function_also_after_a_resume(tmp_path):
    rates = trained(tmp_path / "one.ckpt", schedule=falling)
    assert rates == pytest.approx([0.5 * falling(step, 6, 3, 0.2) for step in range(6)])
    rates = trained(tmp_path / "two.ckpt", tmp_path / "one.ckpt", schedule=falling)
    assert rates == pytest.approx([0.5 * falling(step, 12, 6, 0.2) for step in range(6, 12)])
    with pytest.warns(UserWarning, match="loaders"):
        assert relvit.load(tmp_path / "two.ckpt").checkpoint.model["schedule"] == f"{__name__}.falling"
    assert (
        build(schedule=warmup_cosine).hparams.schedule
        == build().hparams.schedule
        == "relvit.app.training.warmup_cosine"
    )


@pytest.mark.slow
def test_by_name_on_the_command_line(tmp_path, monkeypatch, capsys, fails):
    (tmp_path / "rates_of_mine.py").write_text(MODULE)
    (tmp_path / "never.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    fit = ["fit", "--data=DigitsData", *(option for option in TINY if not option.startswith("--data."))]
    fit += ["--model.model_kwargs.patch_size=4", "--batch_size=256", "--lr_find=false", "-q"]
    assert main([*fit, "--model.schedule=rates_of_mine.falling", "--epochs=1"]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert main(["fit", "--resume", str(run), "--epochs=2"]) == 0
    last = run / "checkpoints" / "last.ckpt"
    content = torch.load(last, weights_only=True)
    assert content["relvit"]["model"]["schedule"] == "rates_of_mine.falling"
    assert "give --model.schedule rates_of_mine.falling" in fails([*fit[:2], f"--ckpt_path={last}", "--epochs=3"])
    content["relvit"]["model"]["schedule"] = "never.falling"
    torch.save(content, "foreign.ckpt")
    assert main(["validate", "foreign.ckpt", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]) == 0
    assert "give --model.schedule never.falling" in fails([*fit[:2], "--ckpt_path=foreign.ckpt", "--epochs=3"])
    assert "schedule 'nowhere.f' is not a function" in fails([*fit, "--model.schedule=nowhere.f", "--epochs=1"])


def test_a_function_of_other_arguments_is_refused():
    with pytest.raises(TypeError, match=r"schedule .* must take \(step, total, warmup, floor\)"):
        build(schedule=lambda step: 1.0)
