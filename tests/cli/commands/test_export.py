"""`relvit export`: what the files compute where relvit is not, against the classifier."""

import json
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest
import torch
from photos import CLASSES, TINY
from PIL import Image

import relvit
from relvit.cli import main
from relvit.evaluation import ExportError, export_model
from relvit.evaluation import export as module
from relvit.training import load_classifier

# Loads the program with PyTorch alone.
STANDALONE = """
import sys, torch
model = torch.export.load(sys.argv[1]).module()
images = torch.load(sys.argv[2])
torch.save([model(image) for image in images], sys.argv[3])
assert not {"relvit", "timm"} & set(sys.modules)
"""


def images():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((3, 3, 16, 16), (1, 3, 64, 16), (5, 3, 32, 72))]


def export(run, output):
    return main(["export", f"--ckpt_path={run / 'checkpoints' / 'best.ckpt'}", f"--output={output}"])


@pytest.fixture(scope="module")
def classifier(run):
    return load_classifier(run / "checkpoints" / "best.ckpt").requires_grad_(False)


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory):
    """The run's best checkpoint as ONNX."""
    made = tmp_path_factory.mktemp("exported")
    assert export(run, made / "model.onnx") == 0
    return made


@pytest.fixture(scope="module")
def program(run, folder):
    """The same as a program of `torch.export`."""
    assert export(run, folder / "model.pt2") == 0
    return folder / "model.pt2"


@pytest.fixture(scope="module")
def session(folder):
    return onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])


@pytest.mark.slow
def test_program(program, classifier, tmp_path):
    torch.save(images(), tmp_path / "images.pt")
    arguments = [sys.executable, "-c", STANDALONE, program, tmp_path / "images.pt", tmp_path / "logits.pt"]
    subprocess.run(arguments, check=True)
    for x, logits in zip(images(), torch.load(tmp_path / "logits.pt"), strict=True):
        torch.testing.assert_close(logits, classifier(x), rtol=1e-4, atol=1e-5)


def test_onnx_and_its_description_are_enough_to_predict(run, folder, session, classifier, photos):
    for x in images():
        (logits,) = session.run(["logits"], {"images": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), classifier(x), rtol=1e-4, atol=1e-5)
    description = json.loads((folder / "model.json").read_text())
    assert description["input"] == ["batch", 3, "8*height_in_patches", "8*width_in_patches"]
    assert description["class_names"] == list(CLASSES)
    # by the description alone, with Pillow and NumPy; 17 x 17 covers the crop of 16 x 16 already
    assert int(description["img_size"][0] / description["crop_pct"]) == 17
    pixels = np.asarray(Image.open(photos / "test" / "dog" / "0.jpg").resize((17, 17)))
    x = ((pixels[:16, :16] / 255 - description["mean"]) / description["std"]).astype(np.float32)
    (logits,) = session.run(["logits"], {"images": x.transpose(2, 0, 1)[None]})
    prediction = relvit.load(run / "checkpoints" / "best.ckpt").predict(pixels)
    assert description["class_names"][logits.argmax()] == prediction.name
    probabilities = np.exp(logits[0]) / np.exp(logits[0]).sum()
    assert sorted(probabilities, reverse=True) == pytest.approx(prediction.probabilities, abs=1e-5)


def check_refusals(net, folder, session):
    """Of images whose sides are no multiples of the patch, in either direction."""
    program = torch.export.load(folder / "model.pt2").module()
    for height, width in ((20, 24), (24, 20), (17, 23)):
        x = torch.randn(2, 3, height, width)
        with pytest.raises((ValueError, AssertionError)):
            net(x)
        with pytest.raises(AssertionError, match="Guard failed"):
            program(x)
        with pytest.raises(Exception, match="cannot be reshaped"):
            session.run(["logits"], {"images": x.numpy()})


@pytest.mark.slow
def test_files_refuse_sizes_that_the_model_refuses(classifier, program, folder, session):
    check_refusals(classifier, folder, session)


@pytest.mark.slow
def test_so_do_those_of_timms_own_embedding_of_patches(photos, tmp_path):
    tiny = [f"--model.model_kwargs.{name}" for name in ("dynamic_img_size=true", "patch_size=8", "embed_dim=16")]
    tiny += ["--model=test_vit", "--model.model_kwargs.depth=1", "--epochs=1", f"--runs={tmp_path / 'runs'}"]
    assert main(["fit", f"--root={photos}", "--img_size=16", "--num_workers=0", *tiny, *TINY[-2:]]) == 0
    best = next((tmp_path / "runs").glob("*/checkpoints/best.ckpt"))
    for name in ("model.pt2", "model.onnx"):
        export_model(relvit.load(best), tmp_path / name)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    check_refusals(load_classifier(best), tmp_path, session)


def test_a_model_of_one_size(photos, tmp_path):
    fit = ["fit", "--data=ImageFolderData", f"--data.root={photos}", f"--runs={tmp_path}", "--model.model=test_vit"]
    fit += ["--model.model_kwargs.dynamic_img_size=false"]
    data = ["--data.img_size=[32,48]", "--data.num_workers=0", "--trainer.max_epochs=1"]
    assert main([*fit, *data, *TINY[-2:]]) == 0
    (folder,) = tmp_path.iterdir()
    output = tmp_path / "model.pt2"
    shapes = export_model(relvit.load(folder / "checkpoints" / "best.ckpt"), output)
    assert shapes == [(2, 3, 32, 48), (3, 3, 32, 48)]
    assert json.loads((tmp_path / "model.json").read_text())["input"] == ["batch", 3, 32, 48]
    x = torch.randn(4, 3, 32, 48)
    expected = load_classifier(folder / "checkpoints" / "best.ckpt")(x)
    torch.testing.assert_close(torch.export.load(output).module()(x), expected, rtol=1e-4, atol=1e-5)


def test_a_file_that_computes_something_else_is_not_kept(run, tmp_path, monkeypatch):
    def wrong(net, images, dynamic, output):
        output.touch()
        return lambda images: net(images) + 0.01 * (len(images) == 1)

    monkeypatch.setattr(module, "_program", wrong)
    with pytest.raises(ExportError, match=r"for images \(1, 3, 16, 16\) the exported model differs from the model"):
        export_model(relvit.load(run / "checkpoints" / "best.ckpt"), tmp_path / "model.pt2")
    assert list(tmp_path.iterdir()) == []


def test_mistakes(run, tmp_path, monkeypatch, capsys):
    assert export(run, tmp_path / "model.onxx") == 2
    assert "ends in '.onxx'; allowed are .onnx, .pt2 (did you mean '.onnx'?)" in capsys.readouterr().err
    assert export(run, tmp_path / "none" / "model.onnx") == 2
    assert "is in a folder that does not exist" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert export(run, tmp_path / "model.onnx") == 2
    assert 'ONNX needs the package onnxscript: pip install "relvit[onnx]"' in capsys.readouterr().err
