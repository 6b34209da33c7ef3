"""If the test after a training is interrupted, the training stays complete, and `--resume` does only the test."""

import shutil
import signal

import pytest
from command_line import only, summary
from photos import TINY

from relvit.app.cli import main


@pytest.mark.slow
@pytest.mark.parametrize("end", ["unreadable image", "SIGINT", "SIGTERM"])
def test_the_checkpoints_stay_and_the_test_follows(photos, tmp_path, monkeypatch, capsys, request, end):
    root, runs = shutil.copytree(photos, tmp_path / "photos"), tmp_path / "runs"
    image = root / "test" / "cat" / "0.jpg"
    # The test uses the averaged weights, but a resumed training must start from the raw weights.
    options = ["--model.ema_decay=0.9", "--trainer.max_epochs=3", "--trainer.callbacks=failures.EndTest"]
    if end == "unreadable image":
        image.write_text("no image")
    else:
        monkeypatch.setenv("END_TEST", end)
    # If a shell has started the tests in the background, SIGINT is ignored: restore Python's handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    status = main(["fit", "--data=ImageFolderData", f"--data.root={root}", f"--runs={runs}", *TINY, *options])
    assert status == (2 if end == "unreadable image" else 128 + getattr(signal, end))
    assert ("To go on: relvit fit --resume " in capsys.readouterr().out) == (end != "unreadable image")
    run = only(runs)
    last, epoch = (run / "checkpoints" / name for name in ("last.ckpt", "epoch.ckpt"))
    # `last.ckpt` is a hard link to the checkpoint of the last epoch.
    assert last.samefile(epoch)
    written = last.read_bytes()

    monkeypatch.delenv("END_TEST", raising=False)
    shutil.copyfile(photos / "test" / "cat" / "0.jpg", image)
    assert main(["fit", f"--resume={run}"]) == 0
    assert "The training is complete; its test, figures and summary are left." in capsys.readouterr().out
    assert summary(run)["epochs"] == 3
    assert "test/acc1" in summary(run)
    assert last.read_bytes() == written
