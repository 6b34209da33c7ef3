"""Damaged and hostile files of every kind give the results of the original file, or are refused in one or two lines.

FUZZ_EXAMPLES=400 pytest -m fuzz tests/app/fuzz/test_damaged_files.py --hypothesis-seed=31

A damaged file has changed bytes; a hostile file has a description that someone else chose. Reading them must open
neither another file nor a connection. The original file of each example is read in the same way.
"""

import faulthandler
import io
import json
import random
import shutil
import socket
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import write_checkpoint_like
from fuzzed import fuzzed
from hypothesis import note
from PIL import Image
from sample_files import FAMILIES, SMALL, images, picture, publish_sample, write_sample
from spoil import ODD, damaged, foreign

import relvit
from relvit.app.cli import main
from relvit.app.data import ImageListData, ReaderData
from relvit.app.evaluation.deploy import export_model
from relvit.app.training.checkpoints.pretrained import Pretrained

pytestmark = pytest.mark.fuzz


class Watch:
    """An audit hook that records, while it is on, openings of files named secret, and connections."""

    on, seen = False, ()

    def __call__(self, event, arguments):
        # Worker processes use sockets within the machine, which are allowed.
        if event == "socket.connect" and arguments[0].family == socket.AF_UNIX:
            return
        if self.on and (event == "socket.connect" or (event == "open" and "secret.pth" in str(arguments[0]))):
            self.seen += ((event, str(arguments)),)

    def __enter__(self):
        self.on, self.seen = True, ()
        return self

    def __exit__(self, *_):
        self.on = False


WATCH = Watch()


# The original files: a checkpoint of each family, a published folder, an ONNX file and a run.
SAMPLES = Path(tempfile.mkdtemp())


@pytest.fixture(autouse=True, scope="module")
def samples(digits_run):
    for name in FAMILIES:
        write_sample(SAMPLES / f"{name}.ckpt", name)
    publish_sample(SAMPLES / "tables.ckpt", SAMPLES / "published")
    # A model for a single image size is exported in seconds.
    kwargs = SMALL | {"dynamic_img_size": False}
    vit = write_checkpoint_like(SAMPLES / "tables.ckpt", SAMPLES / "vit.ckpt", "test_vit", kwargs)
    export_model(relvit.load(vit), SAMPLES / "model.onnx")
    shutil.copytree(digits_run, SAMPLES / "run")
    sys.addaudithook(WATCH)
    yield
    shutil.rmtree(SAMPLES)


def nested(chance):
    """Return lists that contain each other twice: few bytes become a huge number of leaves."""
    value = ["x"]
    for _ in range(chance.randint(20, 60)):
        value = [value, value]
    return value


class RefusedError(Exception):
    """The file or the command is refused."""


def command(*line):
    """Run a command in this process, and raise an error if it refuses a file."""
    kept = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
    try:
        status = main(list(map(str, line)))
        out, err = sys.stdout.getvalue(), sys.stderr.getvalue()
    finally:
        sys.stdout, sys.stderr = kept
    assert "Traceback" not in out + err, err
    assert "\x1b[31m" not in err, err
    if status == 2:
        message = err[err.index("error:") :].strip()
        assert len(message.splitlines()) <= 2, err
        raise RefusedError(message)
    assert status == 0, (status, err)


def predictions(model):
    """Predict two pictures, one of them unreadable; return the rows of the table."""
    Path("pictures").mkdir(exist_ok=True)
    Image.fromarray(picture()[:20]).save("pictures/a.png")
    Path("pictures/b.png").write_bytes(b"no image")
    shutil.rmtree("runs", ignore_errors=True)
    command("predict", model, "pictures", "--runs", "runs")
    rows = next(Path("runs").rglob("predictions.csv")).read_text().splitlines()
    assert "nan" not in rows[1]
    assert "inf" not in rows[1]
    return rows[1:]


# Each function writes the original file, or the file changed by `chance`, and reads it as a user would.


def checkpoint(chance, changed):
    """Change bytes of a checkpoint."""
    name, by_command = chance.choice(list(FAMILIES)), chance.random() < 0.3
    content = (SAMPLES / f"{name}.ckpt").read_bytes()
    Path("a.ckpt").write_bytes(damaged(content, chance) if changed else content)
    if by_command:
        return predictions("a.ckpt")
    predictor = relvit.load("a.ckpt")
    with torch.inference_mode():
        return predictor.model(images()[..., :16]).tolist()


def description(chance, changed):
    """Change the description of model and data in a checkpoint."""
    content = torch.load(SAMPLES / f"{chance.choice(list(FAMILIES))}.ckpt", weights_only=True)
    if changed and chance.random() < 0.15:
        part = chance.choice(["model", "data"])
        content["relvit"][part][chance.choice(list(content["relvit"][part]))] = nested(chance)
    elif changed:
        content["relvit"] = foreign(content["relvit"], chance)
    torch.save(content, "a.ckpt")
    predictions("a.ckpt")


def weights(chance, changed):
    """Change weights: infinite values, other shapes, types and names."""
    content = torch.load(SAMPLES / f"{chance.choice(list(FAMILIES))}.ckpt", weights_only=True)
    state = content["state_dict"]
    content.pop("ema_state_dict", None)
    if changed:
        name = chance.choice([name for name, tensor in state.items() if tensor.is_floating_point()])
        tensor = state.pop(name)
        match chance.randrange(5):
            case 0:
                state[name] = tensor.clone()
                state[name].view(-1)[chance.randrange(tensor.numel())] = chance.choice([float("nan"), float("inf")])
            case 1:
                state[name] = tensor[None, ..., None]
            case 2:
                state[f"{name}x"] = tensor
            case 3:
                state[name] = chance.choice(ODD)
    torch.save(content, "a.ckpt")
    found = predictions("a.ckpt")
    # A change of the weights must be refused.
    assert not changed
    return found


def onnx_file(chance, changed):
    """Cut an ONNX file, or change the description in it."""
    import onnx

    model, cut = onnx.load(SAMPLES / "model.onnx"), chance.random() < 0.5
    (about,) = (entry for entry in model.metadata_props if entry.key == "relvit")
    if changed and not cut:
        about.value = json.dumps(foreign(json.loads(about.value), chance))
    content = model.SerializeToString()
    Path("model.onnx").write_bytes(content[: chance.randrange(len(content))] if changed and cut else content)
    predictions("model.onnx")


def folder(chance, changed):
    """Change the files of a published folder."""
    shutil.rmtree("published", ignore_errors=True)
    shutil.copytree(SAMPLES / "published", "published")
    config, tensors = Path("published/config.json"), Path("published/model.safetensors")
    if changed and chance.random() < 0.3:
        tensors.write_bytes(tensors.read_bytes()[: chance.randrange(tensors.stat().st_size)])
    elif changed and chance.random() < 0.3:
        config.write_bytes(damaged(config.read_bytes(), chance))
    elif changed:
        config.write_text(json.dumps(foreign(json.loads(config.read_text()), chance)))
    architecture, found = Pretrained("published").architecture(), Pretrained("published").weights()
    assert all(torch.isfinite(tensor).all() for tensor in found.state.values())
    return architecture.model if not changed else None


def image_list(chance, changed):
    """Change bytes of a list of images in a CSV file."""
    rows = [f"{label}/{number}.png,{label}" for label in ("cat", "dog", "owl") for number in range(4)]
    content = "\n".join(["path,label", *rows]).encode() + b"\n"
    for name in rows:
        path = Path("listed", name.partition(",")[0])
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8)).save(path)
    Path("listed/train.csv").write_bytes(damaged(content, chance) if changed else content)
    data = ImageListData("listed/train.csv", img_size=8, num_workers=0)
    data.setup("fit")
    return [len(data.dataset(split)) for split in ("train", "val")] if not changed else None


def archive(chance, changed):
    """Change bytes of a tar archive."""
    pixels = {}
    stored = io.BytesIO()
    with tarfile.open(fileobj=stored, mode="w") as tar:
        for split, label, number in ((s, c, n) for s in ("train", "val") for c in ("cat", "dog") for n in range(3)):
            image = Image.fromarray(np.random.default_rng(number).integers(0, 256, (8, 8), dtype=np.uint8))
            file = io.BytesIO()
            image.save(file, "PNG")
            about = tarfile.TarInfo(f"{split}/{label}/{number}.png")
            about.size = len(file.getvalue())
            tar.addfile(about, io.BytesIO(file.getvalue()))
            pixels[about.name] = np.asarray(image)
    content = stored.getvalue()
    Path("archives").mkdir(exist_ok=True)
    Path("archives/images.tar").write_bytes(damaged(content, chance) if changed else content)
    data = ReaderData("archives/images.tar", val_split="val", img_size=8, num_workers=0)
    data.setup("fit")
    for split in ("train", "val"):
        for member, _ in data.dataset(split).samples:
            assert not changed or 0 <= member.size <= len(content)
    return len(data.dataset("train")) if not changed else None


def run(chance, changed):
    """Change the records of a run that is resumed."""
    shutil.rmtree("run", ignore_errors=True)
    shutil.copytree(SAMPLES / "run", "run")
    name = chance.choice(["run.json", "metrics.csv", "summary.json", "config.yaml"])
    file = Path("run", name)
    if changed:
        content = file.read_bytes()
        if name.endswith("json") and chance.random() < 0.5:
            file.write_text(json.dumps(foreign(json.loads(content), chance)))
        else:
            file.write_bytes(damaged(content, chance, near_start=1))
    command("fit", "--resume", "run", "--epochs", "3", "--accelerator", "cpu")
    if name not in ("run.json", "config.yaml"):
        return json.loads(Path("run/summary.json").read_text())["test/loss"]
    return None


KINDS = [checkpoint] * 6 + [description] * 4 + [weights] * 2 + [onnx_file, folder, folder, image_list, archive, archive]
# Each of these examples takes seconds.
KINDS += [run]


def read(kind, chance, changed):
    """Return the results of the file and None, or None and the refusal; if reading hangs, end this process."""
    found = refusal = None
    faulthandler.dump_traceback_later(120, exit=True)
    try:
        with WATCH:
            found = kind(chance, changed)
    except (RefusedError, ValueError, FileNotFoundError) as error:
        refusal = str(error)
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert not WATCH.seen, WATCH.seen
    assert refusal is None or len(refusal.strip().splitlines()) <= 2, refusal
    assert refusal is None or "\x1b[31m" not in refusal
    return found, refusal


@fuzzed(20)
def test_damaged_and_foreign_files_compute_the_same_or_are_refused(tmp_path, monkeypatch, chance):
    monkeypatch.chdir(tmp_path)
    Path("secret.pth").write_bytes(b"of the machine")
    kind = chance.choice(KINDS)
    note(kind.__name__)
    # `twin` draws the same original file, so that only the changes differ.
    twin = random.Random()
    twin.setstate(chance.getstate())
    honest, refusal = read(kind, twin, False)
    assert refusal is None, f"the honest file is refused: {refusal}"
    found, _ = read(kind, chance, True)
    assert found is None or found == honest, "the numbers differ"
