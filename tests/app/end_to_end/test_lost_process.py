"""Training in two processes of which one fails or is killed: one message, the exit status, and complete files."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from photos import TINY
from processes import Ranks, as_torchrun, run

pytestmark = pytest.mark.slow


def arguments(photos, folder):
    """Return the options of a training in two processes on the images in `folder`."""
    photos = shutil.copytree(photos, folder / "photos")
    data = ["--data=ImageFolderData", f"--data.root={photos}", *TINY, "--trainer.max_epochs=500"]
    return ["fit", *data, "--devices=2", "--accelerator=cpu", "--runs=runs"]


def train(photos, folder):
    """Start the main process of a training, which starts the second process."""
    return Ranks(arguments(photos, folder), folder, [{}])


def wait_for_checkpoint(ranks, folder):
    """Return the folder of a training after its first epoch."""
    deadline = time.monotonic() + 120
    while not list(folder.glob("runs/*/checkpoints/last.ckpt")):
        assert all(process.is_alive() for process in ranks.processes), ranks.text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (run,) = folder.glob("runs/*")
    return run


def second_process(process):
    """Return the process that another process has started, or None if it has not started yet."""
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout
    for child in children.split():
        # Other children, such as a compiler, may end before their environment is read.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if b"LOCAL_RANK=1" in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                return int(child)
    return None


# Each process validates every other image.
def test_an_image_that_the_second_process_cannot_read(photos, tmp_path):
    ranks = train(photos, tmp_path)
    folder = wait_for_checkpoint(ranks, tmp_path)
    (tmp_path / "photos" / "val" / "cat" / "1.jpg").write_text("no image")
    assert ranks.finish() == [2], ranks.text()
    check_unreadable(ranks.text(), folder, "cat/1.jpg")


def test_an_image_that_the_first_process_cannot_read(photos, tmp_path):
    ranks = Ranks(arguments(photos, tmp_path), tmp_path, as_torchrun())
    folder = wait_for_checkpoint(ranks, tmp_path)
    (tmp_path / "photos" / "val" / "cat" / "0.jpg").write_text("no image")
    assert ranks.finish()[0] == 2, ranks.text()
    check_unreadable(ranks.text(), folder, "cat/0.jpg")


def check_unreadable(text, folder, name):
    assert text.count("error:") == 1, text
    assert f"val/{name}: it is not an image" in text
    assert (folder / "curves.png").is_file()
    assert (folder / "checkpoints" / "last.ckpt").is_file()


def test_a_process_that_is_killed(photos, tmp_path):
    ranks = train(photos, tmp_path)
    folder = wait_for_checkpoint(ranks, tmp_path)
    os.kill(second_process(ranks.processes[0]), signal.SIGKILL)
    assert ranks.finish() == [1], ranks.text()
    text = ranks.text()
    assert "process 1 was ended by SIGKILL, as the system does where memory runs out; to go on: relvit fit --re" in text
    assert text.count("error:") == 1, text
    assert "GLHF" not in text
    assert (folder / "curves.png").is_file()


def test_the_second_process_ends_where_the_first_is_killed_while_it_starts(photos, tmp_path):
    (process,) = train(photos, tmp_path).processes
    deadline = time.monotonic() + 120
    while (second := second_process(process)) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.join()
    while Path(f"/proc/{second}").exists() and "State:\tZ" not in Path(f"/proc/{second}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_two_processes_predict_without_notes_of_others(photos, best, tmp_path):
    options = ["--devices=2", "--accelerator=cpu", "--runs=runs"]
    status, out, err = run(["predict", best, photos / "val", *options], tmp_path)
    assert status == 0
    assert "predictions in " in out
    assert not err
