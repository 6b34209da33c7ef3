"""A resumed training must have the same images, but they may be in another folder."""

import shutil

import pytest
import torch
from command_line import QUIET
from processes import Ranks, as_torchrun
from resumed_runs import files

from relvit.app.cli import main


@pytest.fixture
def moved(stopped, photos, tmp_path):
    """The images of the run in another folder, and arguments that resume the run with these images."""
    root = shutil.copytree(photos, tmp_path / "moved")
    return root, ["fit", f"--resume={stopped}", "--trainer.max_epochs=5", f"--data.root={root}"]


def swap(root):
    """Exchange two images between two classes."""
    one, other = root / "train" / "cat" / "1.jpg", root / "train" / "dog" / "1.jpg"
    assert one.stat().st_size != other.stat().st_size
    for old, new in ((one, root / "x"), (other, one), (root / "x", other)):
        old.rename(new)


def test_the_images_stay_the_same(stopped, moved, capsys):
    root, arguments = moved
    swap(root)
    (root / "val" / "owl" / "0.jpg").unlink()
    # The images of test may change, because a training does not use them.
    (root / "test" / "owl" / "0.jpg").unlink()
    before = files(stopped)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (
        "the checkpoint is from a training on other images (train: 2 of another size ('cat/1.jpg', 'dog/1.jpg'); val: "
        "1 removed ('owl/0.jpg')): go on with the same images, in whatever folder, or start another training from "
        "these weights with --model.pretrained"
    ) in err
    assert "changed since" not in out
    assert files(stopped) == before
    # A new run from the checkpoint refuses other images, too, and leaves no folder.
    arguments[1] = f"--ckpt_path={stopped / 'checkpoints' / 'last.ckpt'}"
    assert main([*arguments, f"--runs={root / 'runs'}", *QUIET]) == 2
    assert "train: 2 of another size ('cat/1.jpg', 'dog/1.jpg'); val: 1 removed" in capsys.readouterr().err
    assert not (root / "runs").exists()


UNKNOWN = "the checkpoint does not say which images its training had"


def forget_images(run, layout=None):
    """Remove the record of the images, as in a checkpoint that a user's own Trainer has written."""
    last = run / "checkpoints" / "last.ckpt"
    content = torch.load(last, weights_only=True)
    assert content["callbacks"].pop("DataRecord")["images"]["train"]["images"] == 18
    content["position"]["layout"] = layout or content["position"]["layout"]
    torch.save(content, last)
    (run / "images.csv.gz").unlink()


def test_images_that_no_checkpoint_knows_are_warned_of_once(stopped, moved, recwarn, capsys):
    """An epoch has three steps, so the limit of 14 steps ends the training in the middle of the fifth epoch."""
    root, arguments = moved
    forget_images(stopped)
    arguments[2] = "--trainer.max_epochs=-1"
    assert main([*arguments, "--trainer.max_steps=14"]) == 0
    assert torch.load(stopped / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 14
    assert [str(warning.message)[: len(UNKNOWN)] for warning in recwarn].count(UNKNOWN) == 1
    recwarn.clear()
    # The new checkpoint records the images, so a change of the images is refused.
    swap(root)
    assert main([*arguments, "--trainer.max_steps=15"]) == 2
    assert "train: 2 of another size" in capsys.readouterr().err
    assert not [warning for warning in recwarn if UNKNOWN in str(warning.message)]


@pytest.mark.slow
def test_two_processes_compare_the_images_once(stopped, moved, tmp_path):
    root, arguments = moved
    forget_images(stopped, layout=[2, 4, 1, 2])
    arguments += ["--data.batch_size=4", "--trainer.devices=auto", *QUIET]
    ranks = Ranks(arguments, tmp_path, as_torchrun())
    assert ranks.finish() == [0, 0], ranks.text()[-3000:]
    assert ranks.text().count(UNKNOWN) == 1
    swap(root)
    arguments[2] = "--trainer.max_epochs=6"
    ranks = Ranks(arguments, tmp_path, as_torchrun())
    assert ranks.finish() == [2, 2], ranks.text()[-3000:]
    assert "train: 2 of another size ('cat/1.jpg', 'dog/1.jpg')" in ranks.text()
