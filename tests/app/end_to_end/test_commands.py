"""Every command but `fit`, with its defaults, once with a terminal and once with its output in a file.

The numbers are checked in `tests/app/cli`, which runs the same commands in its own process.
"""

import csv
import json
import shutil

import pytest
from command_line import write_checkpoint_like
from photos import CLASSES
from PIL import Image
from processes import Ranks, as_torchrun, in_terminal
from processes import run as run_relvit

# Each command has the text that it prints, and the files that it writes.
COMMANDS = {
    "validate best.ckpt --root photos --img_size 24": (["val/acc1", "val/loss"], []),
    "test best.ckpt --root photos": (
        [
            "18 images of test at 16 x 16 px, accuracy",
            "; always the commonest class: 0.3333",
            "mean F1",
            "Files: runs/",
        ],
        ["runs/*/summary.json", "runs/*/classes.csv", "runs/*/confusion.png", "runs/*/mistakes.csv"],
    ),
    "predict best.ckpt photos/test/*/*.jpg more": (
        ["19 predictions in runs/", "1 image could not be read and was left out", "1 file left out: 1 .heic"],
        ["runs/*/predictions.csv", "runs/*/unreadable.csv"],
    ),
    "resolutions best.ckpt vit.ckpt --sizes 16 24 [16,32] --root photos --output curves": (
        [
            *("1  best.ckpt: test_relvit, trained at 16 x 16 px", "2  vit.ckpt: vit_tiny_patch16_224, trained at"),
            *("18 images of val; crop: as timm", "test_relvit at 24 x 24", "acc1", " 16 x 32 1 "),
            "written: curves/resolutions.png",
        ],
        [f"curves/resolutions.{suffix}" for suffix in ("csv", "json", "png")],
    ),
    "embed best.ckpt photos/test --output features.npz": (["18 images, 16 features each, in"], ["features.npz"]),
    "export vit.ckpt --output model.onnx": (["model.onnx computes what the model does"], ["model.onnx"]),
    "show best.ckpt more/owl.gif photos/test/cat/0.jpg --img_size [24,40]": (
        ["pictures/owl-kernels.png", "pictures/0-rollout.png", "left out: aft-windows: RelVisionTransformer has no"],
        ["pictures/tables.png", *(f"pictures/owl-{kind}.png" for kind in ("logits", "attention", "rollout"))],
    ),
    "calibrate best.ckpt --root photos --split train": (
        ["negative log-likelihood", "images say little", "relvit test best_c"],
        ["best_calibrated.ckpt"],
    ),
    "probe best.ckpt test_vit --random --root photos --output probe": (
        ["1  best.ckpt", "accuracy on 18 images of val", "20-NN", "written: probe/probe.png"],
        [f"probe/probe.{suffix}" for suffix in ("csv", "json", "png")],
    ),
    "average best.ckpt last.ckpt --output mean.ckpt": (["relvit validate mean.ckpt"], ["mean.ckpt"]),
    "check-data photos --output report.json": (
        ["files that cannot be read: 0", "1 file left out: 1 .heic", "the same image under different classes: 1"],
        ["report.json"],
    ),
}
# These commands show no progress bar, so they print the same text in a terminal and into a file.
ALIKE = ("export", "average")


@pytest.fixture(scope="module")
def origin(run, photos, tmp_path_factory):
    """A working directory with checkpoints and photos, some of which cannot be read or are in another format."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("best.ckpt", "last.ckpt"):
        shutil.copy(run / "checkpoints" / name, folder / name)
    tiny = {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
    write_checkpoint_like(folder / "best.ckpt", folder / "vit.ckpt", "vit_tiny_patch16_224", tiny)
    shutil.copytree(photos, folder / "photos")
    (folder / "more").mkdir()
    Image.new("RGB", (24, 20), CLASSES["owl"]).save(folder / "more" / "owl.gif")
    (folder / "more" / "empty.jpg").touch()
    (folder / "more" / "phone.heic").touch()
    shutil.copy(folder / "more" / "phone.heic", folder / "photos" / "train" / "cat")
    shutil.copy(folder / "photos" / "train" / "dog" / "1.jpg", folder / "photos" / "train" / "cat" / "dog.jpg")
    return folder


@pytest.fixture
def place(origin, tmp_path):
    return shutil.copytree(origin, tmp_path / "place")


def relvit_in(where, place, arguments):
    """Return what the command prints; only a terminal gets escape codes."""
    if where == "terminal":
        found, text = in_terminal(arguments, place)
    else:
        found, out, err = run_relvit(arguments, place)
        text = f"{out}\n{err}"
        assert "\x1b" not in text
    assert found == 0, text[-3000:]
    assert "Traceback" not in text
    return text


def check(command, place, text):
    words, files = COMMANDS[command]
    for word in words:
        assert word in text, text[-3000:]
    for pattern in files:
        assert len(list(place.glob(pattern))) == 1, pattern
    assert (place / "runs").exists() == any(pattern.startswith("runs") for pattern in files)


CASES = [
    pytest.param(command, where, id=f"{command.split()[0]}-{where}")
    for command in COMMANDS
    for where in ("file", "terminal")
    if where == "file" or not command.startswith(ALIKE)
]


# These tests start processes; the tests in `tests/app/cli`, which are not slow, cover the same in their own process.
@pytest.mark.slow
@pytest.mark.parametrize(("command", "where"), CASES)
def test_command(command, where, place):
    check(command, place, relvit_in(where, place, command.split()))


# In `test_lost_process.py` and `test_fit.py` Lightning starts the second process itself.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["validate", "test", "predict"])
def test_two_processes(name, place):
    command = next(command for command in COMMANDS if command.startswith(name))
    ranks = Ranks([*command.split(), "--accelerator=cpu"], place, as_torchrun())
    assert ranks.finish() == [0, 0], ranks.text()[-3000:]
    check(command, place, ranks.text())
    if name == "predict":
        with open(next(place.glob("runs/*/predictions.csv")), newline="") as file:
            assert len(list(csv.DictReader(file))) == 19
    if name == "test":
        assert json.loads(next(place.glob("runs/*/summary.json")).read_text())["images"] == 18
