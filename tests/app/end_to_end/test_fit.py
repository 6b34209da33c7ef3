"""`relvit fit` as users run it: with progress bar, loader workers, loggers and checkpoints."""

import re

import pytest
import yaml
from command_line import only, rows
from processes import Ranks, as_torchrun, in_terminal, run

# Two epochs of a small model: the digits are 1,437 images to train on and validate.
SMALL = ["--config", "digits", "--trainer.accelerator=cpu", "--model.model_kwargs.depth=1"]
SMALL += ["--model.model_kwargs.embed_dim=16", "--data.batch_size=128", "--model.warmup_epochs=0.5"]
LINE = re.compile(
    r"epoch (\d+)/(\d+): train loss ([\d.]+), val loss ([\d.]+), val accuracy ([\d.]+), lr ([\de.-]+), \d+ images/s, "
    r"elapsed \d+:\d\d:\d\d, remaining \d+:\d\d:\d\d"
)
RESULT = ("effective batch ", "Best validation accuracy: ", "Test accuracy of that checkpoint: ", "Next:")


def table(folder):
    return rows(only(folder / "runs") / "metrics.csv")


def check_lines(text, folder, epochs, total):
    """Check that each of these epochs, counted from 1, has a line with the numbers of the table."""
    lines = [LINE.fullmatch(line) for line in text.splitlines() if line.startswith("epoch ")]
    assert all(lines), text
    assert [(int(line[1]), int(line[2])) for line in lines] == [(epoch, total) for epoch in epochs]
    for line, epoch in zip(lines, epochs, strict=True):
        row = table(folder)[epoch - 1]
        names = ("train/loss", "val/loss", "val/acc1", "lr")
        assert [float(cell) for cell in line.groups()[2:]] == pytest.approx([float(row[n]) for n in names], rel=6e-3)


@pytest.mark.slow
def test_in_a_terminal(tmp_path):
    status, text = in_terminal(["fit", *SMALL, "--trainer.max_epochs=2"], tmp_path)
    assert status == 0, text
    assert all(text.count(words) == 1 for words in RESULT), text
    assert re.search(r"Epoch 1/2 .* remaining: \d:\d\d:\d\d loss: \d.\d+ acc: \d.\d+", text), text
    assert re.search(r"Epoch 2/2 .* val/loss: \d.\d+ val/acc1: \d.\d+", text), text
    assert "Epoch 0" not in text
    assert not LINE.search(text)


@pytest.mark.slow
def test_in_a_narrow_terminal_the_bar_stays_in_its_line(tmp_path):
    status, text = in_terminal(["fit", *SMALL, "--trainer.max_epochs=1"], tmp_path, columns=80)
    assert status == 0, text
    assert re.search(r"Epoch 1/1 .* \d+/\d+ remaining: \d:\d\d:\d\d loss: \d.\d+ acc: \d.\d+", text), text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "lines", "bars"),
    [
        (["--trainer.enable_progress_bar=false"], True, None),
        (["-q", "--trainer.callbacks+=TQDMProgressBar"], False, None),
        (["--trainer.callbacks+=RichProgressBar"], False, "Epoch 0/0"),
    ],
)
def test_what_a_terminal_shows_can_be_chosen(options, lines, bars, tmp_path):
    status, text = in_terminal(["fit", *SMALL, "--trainer.max_epochs=1", *options], tmp_path)
    assert status == 0, text
    assert all(text.count(words) == 1 for words in RESULT), text
    assert bool(LINE.search(text)) == lines
    assert bool(re.search(r"━━|\d%\|", text)) == (bars is not None)
    assert bars is None or bars in text


@pytest.mark.slow
def test_into_a_file_and_on_with_early_stopping(tmp_path):
    options = ["--trainer.max_epochs=2", "--model.ema_decay=0.9", "--trainer.accumulate_grad_batches=3"]
    status, out, err = run(["fit", *SMALL, *options, "--patience=1"], tmp_path)
    assert status == 0, err
    assert all(out.count(words) == 1 for words in RESULT), out
    assert "\x1b" not in out + err
    assert "\r" not in out + err
    assert err == ""
    check_lines(out, tmp_path, [1, 2], 2)
    folder = only(tmp_path / "runs")
    status, out, err = run(["fit", f"--resume={folder}", "--trainer.max_epochs=4", "-q"], tmp_path)
    assert status == 0, err
    assert not LINE.search(out)
    assert yaml.safe_load((folder / "config.yaml").read_text())["quiet"] is True
    assert [int(row["epoch"]) for row in table(tmp_path)] == list(range(len(table(tmp_path))))


@pytest.mark.slow
def test_two_processes_at_several_sizes_in_a_terminal_and_on_into_a_file(tmp_path):
    options = ["--trainer.devices=2", "--patience=5", "--model.ema_decay=0.9"]
    options += ["--trainer.accumulate_grad_batches=2", "--trainer.max_epochs=1", "--data.train_sizes=[8,[8,12],16]"]
    status, text = in_terminal(["fit", *SMALL, *options], tmp_path)
    assert status == 0, text
    assert all(text.count(words) == 1 for words in RESULT), text
    assert re.search(r"━━|\d%\|", text)
    ranks = Ranks(["fit", f"--resume={only(tmp_path / 'runs')}", "--trainer.max_epochs=2"], tmp_path, as_torchrun())
    assert ranks.finish() == [0, 0], ranks.text()
    check_lines(ranks.text(), tmp_path, [2], 2)
    assert [row["epoch"] for row in table(tmp_path)] == ["0", "1"]


@pytest.mark.slow
def test_after_ctrl_c_within_an_epoch_two_processes_go_on_from_the_end_of_the_epoch_before(tmp_path):
    options = ["--trainer.max_epochs=3", "--trainer.callbacks=failures.Stop"]
    status, out, err = run(["fit", *SMALL, *options, "-q"], tmp_path)
    assert status == 130, out + err
    # Each of the two processes has half the batch, so an optimiser step has as many images as before.
    ranks = Ranks(
        ["fit", f"--resume={only(tmp_path / 'runs')}", "--devices=2", "--batch_size=64"], tmp_path, as_torchrun()
    )
    assert ranks.finish() == [0, 0], ranks.text()
    assert re.search(r"goes on from the end of epoch \d and repeats \d+ steps?", ranks.text()), ranks.text()
    assert [row["epoch"] for row in table(tmp_path)] == ["0", "1", "2"]
