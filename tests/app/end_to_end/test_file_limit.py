"""Commands that write files, under a limit of the file size: older files stay complete, and no new file is cut off."""

import contextlib
import resource
import shutil

import numpy as np
import pytest
from command_line import QUIET, write_checkpoint_like
from onnx import helper
from onnx_files import classifier_of
from photos import TINY

from relvit.app.cli import main
from relvit.app.evaluation.deploy import quantise
from relvit.app.utils.files import disk_errors_name

pytestmark = pytest.mark.slow

LIMIT = 200
DATA = ["--data=ImageFolderData", "--data.root=photos", "--data.img_size=16", "--data.num_workers=0"]
FIT = ["fit", *DATA, *TINY, "--trainer.max_epochs=1"]
# Each command has its arguments, and the name of the file or folder in the error message.
COMMANDS = {
    "fit": (FIT, "config.yaml"),
    "test": (["test", "best.ckpt", "--root=photos", *QUIET], "confusion.png"),
    "predict": (["predict", "best.ckpt", "photos/test", *QUIET], "--runs"),
    "predict by .onnx": (["predict", "--model=tiny.onnx", "photos/test", "--num_workers=0"], "--runs"),
    "predict --step_maps": (["predict", "halting.ckpt", "photos/test", "--step_maps", *QUIET], ".png"),
    "validate": (["validate", "best.ckpt", "--root=photos", *QUIET], None),
    "resolutions": (["resolutions", "best.ckpt", "--sizes=16", "--root=photos", "--output=old"], "old/resolutions.csv"),
    "probe": (["probe", "best.ckpt", *DATA, "--output=old"], "old/probe.csv"),
    "embed to .npz": (["embed", "best.ckpt", "photos/test", "--output=old/a.npz", "--num_workers=0"], "old/a.npz"),
    "embed to .csv": (["embed", "best.ckpt", "photos/test", "--output=old/a.csv", "--num_workers=0"], "old/a.csv"),
    "embed to .parquet": (["embed", "best.ckpt", "photos", "--output=old/a.parquet", "--num_workers=0"], "old/a.parq"),
    "show": (["show", "best.ckpt", "--kind=tables", "--output=old"], "old/tables-2.png"),
    "calibrate": (["calibrate", "best.ckpt", "--root=photos", "--split=train"], "best_calibrated.ckpt"),
    "average": (["average", "best.ckpt", "last.ckpt", "--output=mean.ckpt"], "mean.ckpt"),
    "check-data": (["check-data", "photos", "--output=old/a.json"], "old/a.json"),
    "publish": (["publish", "best.ckpt", "--to=published"], "published"),
    "export to .pt2": (["export", "vit.ckpt", "--output=old/a.pt2"], "old/a.pt2"),
    "export to .onnx": (["export", "vit.ckpt", "--output=old/a.onnx"], "old/a.onnx"),
    "export --aot": (["export", "vit.ckpt", "--output=old/a.pt2", "--aot"], "old/a.pt2"),
}
OLD = ["resolutions.csv", "resolutions.json", "probe.json", "tables.png"]
OLD += ["a.npz", "a.csv", "a.parquet", "a.onnx", "a.pt2", "a.json"]


@contextlib.contextmanager
def file_limit(size):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def place(run, photos, tmp_path, monkeypatch):
    """A working folder with checkpoints, images, older results and an older published folder."""
    for name in ("best.ckpt", "last.ckpt"):
        shutil.copy(run / "checkpoints" / name, tmp_path / name)
    shutil.copytree(photos, tmp_path / "photos")
    # `calibrate` needs an image with a wrong label: without mistakes no temperature is best.
    shutil.copy(photos / "train" / "dog" / "1.jpg", tmp_path / "photos" / "train" / "cat" / "dog.jpg")
    (tmp_path / "old").mkdir()
    for name in OLD:
        (tmp_path / "old" / name).write_text("older")
    (tmp_path / "published").mkdir()
    for name in ("config.json", "model.safetensors", "README.md"):
        (tmp_path / "published" / name).write_text('{"relvit": "older"}')
    classifier_of(tmp_path / "tiny.onnx")
    kwargs = {"halting": "act", "patch_size": 8}
    best = tmp_path / "best.ckpt"
    write_checkpoint_like(best, tmp_path / "halting.ckpt", "test_relvit_universal", kwargs)
    # A model for a single image size is exported in seconds.
    kwargs = {"dynamic_img_size": False, "patch_size": 8, "embed_dim": 16, "depth": 1}
    write_checkpoint_like(best, tmp_path / "vit.ckpt", "test_vit", kwargs, img_size=[16, 16])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", COMMANDS)
def test_an_older_file_stays_and_none_is_cut(place, figures, capsys, name):
    arguments, named = COMMANDS[name]
    before = contents(place)
    with file_limit(LIMIT):
        status = main(arguments)
    error = capsys.readouterr().err
    if named is None:
        assert status == 0
    else:
        assert status == 1, error
        assert "File too large: " in error
        assert named in error
        assert ".part" not in error
        assert "(with --debug" not in error
    after = contents(place)
    assert before.items() <= after.items()
    # Files that are smaller than the limit may have been completed before the error.
    assert [path for path in after.keys() - before.keys() if len(after[path]) >= LIMIT or ".part" in path.name] == []


def test_int8(tmp_path):
    """`export --int8` writes a larger file first, so the other test stops before the quantisation."""
    linear = helper.make_node("MatMul", ["row", "matrix"], ["extra"], name="linear")
    weights = {"row": np.ones((1, 3), np.float32), "matrix": np.eye(3, dtype=np.float32)}
    source = classifier_of(tmp_path / "a.onnx", nodes=[linear], weights=weights)
    target = tmp_path / "b.onnx"
    with file_limit(LIMIT), pytest.raises(OSError, match="File too large"), disk_errors_name(target, target):
        quantise(source, target)
