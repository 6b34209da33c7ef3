"""`relvit export`: exported files compute the classifier's outputs, also in a process without relvit."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest
import torch
from command_line import fit, only, rows, without_figures, write_checkpoint_like
from photos import CLASSES
from PIL import Image

import relvit
from relvit.app.cli import main
from relvit.app.evaluation import export_model
from relvit.app.evaluation.deploy import onnx_and_pt2 as module
from relvit.app.evaluation.exported import ExportedClassifier
from relvit.app.training import load_classifier

# This script loads an exported program with PyTorch alone.
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


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    """The folder of a short training of one block, because an export of two takes twice the time."""
    options = ["--trainer.max_epochs=4", "--model.lr=5e-3", "--model.warmup_epochs=1", "--model.model_kwargs.depth=1"]
    with without_figures():
        return fit(photos, tmp_path_factory.mktemp("runs"), *options)


@pytest.fixture(scope="module")
def best(run):
    return run / "checkpoints" / "best.ckpt"


@pytest.fixture(scope="module")
def classifier(best):
    return load_classifier(best).requires_grad_(False)


@pytest.fixture(scope="module")
def folder(best, tmp_path_factory):
    """The run's best checkpoint as ONNX."""
    made = tmp_path_factory.mktemp("exported")
    assert main(["export", str(best), f"--output={made / 'model.onnx'}"]) == 0
    return made


@pytest.fixture(scope="module")
def program(best, folder):
    """The run's best checkpoint as a program of `torch.export`."""
    export_model(relvit.load(best), folder / "model.pt2")
    return folder / "model.pt2"


@pytest.fixture(scope="module")
def session(folder):
    return onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])


@pytest.mark.slow
def test_files_name_no_folder_of_this_machine(program, folder):
    for file in (program, folder / "model.onnx"):
        content = file.read_bytes()
        assert b"class_names" in content
        assert not re.findall(rb"[\w/.-]*\.py\b", content), file


@pytest.mark.slow
def test_program(program, classifier, tmp_path):
    torch.save(images(), tmp_path / "images.pt")
    arguments = [sys.executable, "-c", STANDALONE, program, tmp_path / "images.pt", tmp_path / "logits.pt"]
    subprocess.run(arguments, check=True)
    for x, logits in zip(images(), torch.load(tmp_path / "logits.pt"), strict=True):
        torch.testing.assert_close(logits, classifier(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_onnx_and_its_description_are_enough_to_predict(best, folder, session, classifier, photos):
    for x in images():
        (logits,) = session.run(["logits"], {"images": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), classifier(x), rtol=1e-4, atol=1e-5)
    description = json.loads(session.get_modelmeta().custom_metadata_map["relvit"])
    assert description["input"] == ["batch", 3, "8*height_in_patches", "8*width_in_patches"]
    assert description["class_names"] == list(CLASSES)
    # Predict from the file's description alone, with Pillow and NumPy. An image of 17 x 17 px already covers the crop
    # of 16 x 16 px, so one resizing is enough.
    assert int(description["img_size"][0] / description["crop_pct"]) == 17
    pixels = np.asarray(Image.open(photos / "test" / "dog" / "0.jpg").resize((17, 17)))
    x = ((pixels[:16, :16] / 255 - description["mean"]) / description["std"]).astype(np.float32)
    (logits,) = session.run(["logits"], {"images": x.transpose(2, 0, 1)[None]})
    prediction = relvit.load(best).predict(pixels)
    assert description["class_names"][logits.argmax()] == prediction.name
    probabilities = np.exp(logits[0]) / np.exp(logits[0]).sum()
    assert sorted(probabilities, reverse=True) == pytest.approx(prediction.probabilities, abs=1e-5)


def table(runs):
    return rows(only(runs) / "predictions.csv")


def same_predictions(ours, theirs):
    assert [list(row) for row in ours] == [list(row) for row in theirs]
    for one, other in zip(ours, theirs, strict=True):
        for name, value in one.items():
            if name.startswith("probability"):
                assert float(value) == pytest.approx(float(other[name]), abs=2e-6)
            else:
                assert value == other[name]


@pytest.mark.slow
@pytest.mark.parametrize("size", [[], ["--img_size=[24,40]"]])
def test_predict_by_the_file_alone(best, folder, photos, tmp_path, size, capsys):
    """`predict` with the exported file writes the table of the checkpoint, at any size, and skips broken files."""
    (tmp_path / "broken.jpg").write_bytes(b"nothing")
    paths = [str(photos / "test"), str(tmp_path / "broken.jpg"), *size]
    assert main(["predict", str(best), *paths, f"--runs={tmp_path / 'theirs'}", "--trainer.accelerator=cpu"]) == 0
    assert main(["predict", "--model", str(folder / "model.onnx"), *paths, f"--runs={tmp_path / 'ours'}"]) == 0
    assert "18 predictions in " in capsys.readouterr().out
    same_predictions(table(tmp_path / "ours"), table(tmp_path / "theirs"))
    tables = [(only(tmp_path / name) / "unreadable.csv").read_text() for name in ("ours", "theirs")]
    assert tables[0] == tables[1]


@pytest.fixture(scope="module")
def other(best, tmp_path_factory):
    """A checkpoint with its own class names, of a model whose export takes seconds."""
    target = tmp_path_factory.mktemp("other") / "other.ckpt"
    kwargs = {"dynamic_img_size": False, "patch_size": 8, "embed_dim": 16, "depth": 1}
    return write_checkpoint_like(
        best, target, "test_vit", kwargs, img_size=[16, 16], class_names=["one", "two", "three"]
    )


@pytest.mark.slow
def test_files_beside_each_other_keep_their_own_classes(folder, other, photos, tmp_path):
    shutil.copy(folder / "model.onnx", tmp_path)
    export_model(relvit.load(other), tmp_path / "model.pt2")
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "model.pt2"}
    found = {"relvit.json": ""}
    torch.export.load(tmp_path / "model.pt2", extra_files=found)
    assert json.loads(found["relvit.json"])["class_names"] == ["one", "two", "three"]
    arguments = [str(photos / "test"), f"--runs={tmp_path / 'runs'}"]
    assert main(["predict", "--model", str(tmp_path / "model.onnx"), *arguments]) == 0
    assert {row["class"] for row in table(tmp_path / "runs")} <= set(CLASSES)


@pytest.mark.slow
@pytest.mark.parametrize("int8", [False, True])
def test_weights_of_a_large_model_are_in_a_file_that_carries_its_name(other, tmp_path, monkeypatch, int8):
    """PyTorch writes the weights into a second file if the .onnx would be larger than 2 GB."""
    monkeypatch.setattr("torch.onnx._internal.exporter._onnx_program._LARGE_MODEL_THRESHOLD", 0)
    predictor = relvit.load(other)
    export_model(predictor, tmp_path / "large.onnx", int8)
    assert {path.name for path in tmp_path.iterdir()} == {"large.onnx"} | ({"large.onnx.data"} if not int8 else set())
    found = ExportedClassifier(tmp_path / "large.onnx")
    assert found.description["class_names"] == ["one", "two", "three"]
    x = torch.randn(2, 3, 16, 16)
    if not int8:
        torch.testing.assert_close(found(x), predictor.model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("default", [torch.bfloat16, torch.device("meta")], ids=str)
def test_files_do_not_depend_on_pytorchs_defaults(other, tmp_path, default):
    x = torch.randn(2, 3, 16, 16)
    expected = relvit.load(other).model(x)
    try:
        if isinstance(default, torch.dtype):
            torch.set_default_dtype(default)
        else:
            torch.set_default_device(default)
        for name in ("model.pt2", "model.onnx"):
            export_model(relvit.load(other), tmp_path / name)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    for run in (torch.export.load(tmp_path / "model.pt2").module(), ExportedClassifier(tmp_path / "model.onnx")):
        torch.testing.assert_close(run(x), expected, rtol=1e-4, atol=1e-5)


def copy_of(path):
    """Return a replacement for the exporter that copies a file, for tests of the steps after the export."""

    def write(net, images, dynamic, output, description):
        shutil.copy(path, output)
        return net

    return write


@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True])
def test_int8_and_what_it_costs(run, best, folder, photos, tmp_path, monkeypatch, capsys, static):
    monkeypatch.setattr(module, "_onnx", copy_of(folder / "model.onnx"))
    options = ["--int8", *(["--calibration", str(photos / "train")] if static else [])]
    assert main(["export", str(best), "--output", str(tmp_path / "model.onnx"), *options]) == 0
    out = capsys.readouterr().out
    steps = ["Tracing the model into an ONNX graph", "Comparing the file with the model", "Quantising the weights"]
    assert [line for line in out.splitlines() if line.endswith(" ...")] == [
        f"{steps[0]}, which may take a minute ...",
        *(f"{step} ..." for step in steps[1:]),
    ]
    before, after, same = re.search(
        r"18 images of val: (\S+) before int8, (\S+) after; the same prediction for (\S+)%", out
    ).groups()
    summary = json.loads((run / "summary.json").read_text())
    assert float(before) == pytest.approx(summary["val/acc1"], abs=5e-5)
    assert abs(float(after) - float(before)) <= 1 - float(same) / 100 + 1e-4
    x = torch.randn(4, 3, 16, 16)
    quantised, exact = ExportedClassifier(tmp_path / "model.onnx"), load_classifier(best)(x)
    assert 0 < (quantised(x) - exact).abs().max() < 0.1 * exact.abs().max()
    assert quantised.description == ExportedClassifier(folder / "model.onnx").description
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def check_refusals(net, folder, session):
    """Check that images whose height or width is not a multiple of the patch are refused."""
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
def test_so_do_those_of_timms_own_embedding_of_patches(best, tmp_path):
    kwargs = {"dynamic_img_size": True, "patch_size": 8, "embed_dim": 16, "depth": 1}
    best = write_checkpoint_like(best, tmp_path / "best.ckpt", "test_vit", kwargs)
    for name in ("model.pt2", "model.onnx"):
        export_model(relvit.load(best), tmp_path / name)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    check_refusals(load_classifier(best), tmp_path, session)


@pytest.mark.slow
def test_a_model_of_one_size_in_a_folder_that_is_made(best, tmp_path, capsys, fails):
    kwargs, size = {"dynamic_img_size": False, "embed_dim": 16, "depth": 1}, [32, 48]
    best = write_checkpoint_like(best, tmp_path / "best.ckpt", "test_vit", kwargs, img_size=size)
    output = tmp_path / "new" / "folder" / "model.pt2"
    assert "int8 is for files that end in .onnx" in fails(["export", best, f"--output={output}", "--int8"])
    assert "cannot take images of 20 x 20 px" in fails(["export", best, f"--output={output}", "--img_size=20"])
    assert list(tmp_path.iterdir()) == [best]
    assert main(["export", str(best), f"--output={output}"]) == 0
    assert "(checked with images 2 x 3 x 32 x 48 and 3 x 3 x 32 x 48)" in capsys.readouterr().out
    assert [path.name for path in output.parent.iterdir()] == ["model.pt2"]
    found = {"relvit.json": ""}
    program = torch.export.load(output, extra_files=found).module()
    assert json.loads(found["relvit.json"])["input"] == ["batch", 3, 32, 48]
    x = torch.randn(4, 3, 32, 48)
    expected = load_classifier(best)(x)
    torch.testing.assert_close(program(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_model_whose_graph_is_for_one_size(best, tmp_path):
    kwargs = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "bucket_size": 1}
    best = write_checkpoint_like(best, tmp_path / "best.ckpt", "test_relvit_lsh", kwargs)
    export_model(relvit.load(best), tmp_path / "model.pt2")
    torch.export.load(tmp_path / "model.pt2", extra_files=(found := {"relvit.json": ""}))
    assert json.loads(found["relvit.json"])["input"] == ["batch", 3, 16, 16]


@pytest.mark.slow
def test_native_shapes_of_timms_model(best, photos, tmp_path):
    kwargs = {"embed_dim": 16, "depth": 1, "num_heads": 2, "patch_size": 8}
    native = {"native": True, "patch_size": 8, "max_tokens": 9}
    best = str(write_checkpoint_like(best, tmp_path / "best.ckpt", "naflexvit_base_patch16_gap", kwargs, **native))
    assert main(["export", best, f"--output={tmp_path / 'model.onnx'}"]) == 0
    paths = [str(photos / "test"), f"--runs={tmp_path / 'ours'}"]
    assert main(["predict", "--model", str(tmp_path / "model.onnx"), *paths]) == 0
    assert main(["predict", best, paths[0], f"--runs={tmp_path / 'theirs'}", "--trainer.accelerator=cpu"]) == 0
    same_predictions(table(tmp_path / "ours"), table(tmp_path / "theirs"))


@pytest.mark.slow
def test_sizes_that_no_file_takes_are_refused_with_one_that_it_does(best, tmp_path, fails):
    kwargs = {"dynamic_img_size": True, "dynamic_img_pad": True, "embed_dim": 16, "depth": 1}
    best = str(write_checkpoint_like(best, tmp_path / "best.ckpt", "test_vit", kwargs, img_size=[20, 40]))
    expected = "two whole patches of 16 x 16 pixels or more on each side; give another (--img_size '[32,48]')"
    assert expected in fails(["export", best, f"--output={tmp_path / 'model.pt2'}"])
    assert main(["export", best, f"--output={tmp_path / 'model.pt2'}", "--img_size", "[32, 48]"]) == 0


@pytest.mark.slow
def test_compiled_by_aotinductor(best, tmp_path, monkeypatch, capfd):
    output, kwargs = tmp_path / "model.pt2", {"patch_size": 8, "embed_dim": 16, "depth": 1, "max_distance": 2}
    best = write_checkpoint_like(best, tmp_path / "best.ckpt", "test_relvit", kwargs)
    # The C++ compiler takes most of the time of this test, so compile without optimisation, and no headers beforehand.
    with torch._inductor.config.patch({"aot_inductor.debug_compile": True, "aot_inductor.precompile_headers": False}):
        assert main(["export", str(best), f"--output={output}", "--aot"]) == 0
    assert "does not notice images of a wrong size" in capfd.readouterr().out
    with pytest.raises(
        ValueError, match=r"compiled by relvit export --aot, so only torch\._inductor\.aoti_load_package"
    ):
        relvit.load(output)
    packaged = torch._inductor.aoti_load_package(str(output))
    assert json.loads(packaged.get_metadata()["relvit"])["class_names"] == list(CLASSES)
    for x in images():
        torch.testing.assert_close(packaged(x), load_classifier(best)(x), rtol=1e-4, atol=1e-5)
    monkeypatch.setenv("AOTI_RUNTIME_CHECK_INPUTS", "1")
    checking = torch._inductor.aoti_load_package(str(output))
    checking(torch.zeros(2, 3, 24, 24))
    with pytest.raises(RuntimeError):
        checking(torch.zeros(2, 3, 20, 24))


@pytest.mark.slow
def test_sizes_and_names_that_predict_refuses(folder, photos, tmp_path, fails):
    file, images = str(folder / "model.onnx"), str(photos / "test")
    for arguments, message in {
        (file, images, "--img_size=[16,20]"): "the width must be a multiple of 8, at least 16 pixels",
        (file, images, "--img_size=8"): "the height must be a multiple of 8, at least 16 pixels",
        (file,): "is an exported file, which does not say where the images of the training are",
        (file, "nowhere.jpg"): "no file or folder 'nowhere.jpg'",
        ("none.onnx", "photo.jpg"): "no file none.onnx: relvit export CKPT --output none.onnx",
        ("none.pt2", "photo.jpg"): "no file none.pt2: relvit export CKPT --output none.pt2",
        (file, images, "--reach=logn"): "reach 'logn' must be chosen when",
    }.items():
        assert message in fails(["predict", *arguments, f"--runs={tmp_path}"])
    assert not list(tmp_path.iterdir())
