"""Two processes with folders of their own, as on machines that do not share a disk: a training is refused at once."""

import os
import shutil

import pytest
from photos import TINY
from processes import Ranks, as_torchrun

from relvit.app.cli import main

pytestmark = pytest.mark.slow


def in_own_folder(*arguments):
    """Run the command line in the folder of this process."""
    os.chdir(f"machine{os.environ['RANK']}")
    raise SystemExit(main(arguments))


def refused(photos, folder, *options, lost=()):
    """Train in two processes, each with its own copy of the images, and return the text that each prints.

    The second copy lacks the images in `lost`.
    """
    for rank in range(2):
        train = shutil.copytree(photos, folder / f"machine{rank}" / "photos") / "train"
        # relvit warns of this image, which is in no class folder.
        shutil.copy(train / "cat" / "1.jpg", train)
    for name in lost:
        (train / name).unlink()
    ranks = Ranks(["fit", "--root=photos", *TINY, *options], folder, as_torchrun(), in_own_folder)
    assert ranks.finish() == [2, 2], ranks.text()
    return [log.read_text() for log in ranks.logs]


def test_an_incomplete_copy_of_the_images(photos, tmp_path):
    main_process, other = refused(photos, tmp_path, "--runs=../runs", lost=["dog/5.jpg"])
    for text in (main_process, other):
        assert "process 1 has 17 images of train, and the main process has 18: give all machines the same" in text
    assert "is beside the class folders" in main_process
    assert "Warning" not in other
    assert not list(tmp_path.glob("runs/*"))


def test_a_folder_of_runs_that_one_machine_does_not_see(photos, tmp_path):
    for text in refused(photos, tmp_path, "--runs=runs"):
        assert "not all machines see the folder runs/" in text
    assert not list(tmp_path.glob("machine*/runs"))
