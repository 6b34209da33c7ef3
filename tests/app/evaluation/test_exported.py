"""Exported files in place of a checkpoint: their predictions, and the commands that refuse them."""

import json
import re
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import timm
import torch
from onnx import helper
from onnx_files import DESCRIPTION, classifier_of, save
from PIL import Image

import relvit
from relvit.app.cli import main
from relvit.app.evaluation.exported import ExportedClassifier


@pytest.fixture
def program(tmp_path):
    """A .pt2 whose logits are averages over the pixels."""

    class Mean(torch.nn.Module):
        def forward(self, images):
            return images.mean((2, 3))

    shapes = ({0: torch.export.Dim("batch"), 2: torch.export.Dim("height"), 3: torch.export.Dim("width")},)
    made = torch.export.export(Mean(), (torch.randn(2, 3, 16, 24),), dynamic_shapes=shapes)
    torch.export.save(made, tmp_path / "a.pt2", extra_files={"relvit.json": json.dumps(DESCRIPTION)})
    return tmp_path / "a.pt2"


@pytest.mark.parametrize("ending", ["onnx", "pt2"])
def test_a_file_predicts_as_a_checkpoint_does(request, tmp_path, ending):
    """The logits of the file are averages over the pixels, so the probabilities are known."""
    path = request.getfixturevalue("program") if ending == "pt2" else classifier_of(tmp_path / "a.onnx")
    image = torch.zeros(3, 16, 16)
    image[1] = 0.6
    loaded = relvit.load(path, (16, 24))
    logits = (torch.tensor([0.0, 0.6, 0.0]) - 0.5) / 0.2
    expected = logits.softmax(0)
    for mirror in (False, True):
        found = loaded.predict(image, top=3, mirror=mirror)
        assert found.name == "dog"
        torch.testing.assert_close(torch.tensor(found.probabilities), expected.sort(descending=True)[0])
    assert loaded.img_size == (16, 24)
    assert loaded.class_names == ["cat", "dog", "owl"]


def test_timm_makes_the_transform_of_a_file_as_the_documentation_says(tmp_path):
    text = (Path(__file__).parents[3] / "docs" / "publish.md").read_text()
    (code,) = re.findall(r"`(timm\.data\.create_transform\(about\[.*?)`", text)
    transform = eval(code, {"timm": timm, "about": DESCRIPTION})
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8))
    torch.testing.assert_close(transform(image), relvit.load(classifier_of(tmp_path / "a.onnx")).transform(image))


def test_what_a_file_cannot_do_is_refused_in_a_line(tmp_path):
    path = classifier_of(tmp_path / "a.onnx")
    loaded, image = relvit.load(path), torch.zeros(3, 16, 16)
    for call in (lambda: loaded.embed(image), lambda: loaded.attention(image), lambda: loaded.model):
        with pytest.raises(ValueError, match=r"a\.onnx is an exported file, .*: give the"):
            call()
    with pytest.raises(
        ValueError, match=r"img_size is \[16, 20\]; for .* the width must be a multiple of 8, at least 16 pixels"
    ):
        relvit.load(path, (16, 20))
    with pytest.raises(ValueError, match=r"reach 'stretch' must be chosen when .*a\.onnx"):
        relvit.load(path, reach="stretch")


@pytest.mark.parametrize(
    "command", ["resolutions --sizes=16", "calibrate", "publish --to=new", "export --output=b.onnx"]
)
def test_commands_that_need_the_checkpoint_say_so(tmp_path, monkeypatch, fails, command):
    monkeypatch.chdir(tmp_path)
    name, *options = command.split()
    classifier_of(tmp_path / "a.onnx")
    expected = "a.onnx is an exported file, which only predict, test and validate take: give the checkpoint"
    assert expected in fails([name, "a.onnx", *options])


@pytest.mark.parametrize("command", ["test", "validate", "predict"])
def test_commands_that_need_images_say_how_to_give_them(program, fails, command):
    message = fails([command, program])
    assert "a.pt2 is an exported file, which does not say where the images of the training are: give" in message
    assert (
        "class folders by --root DIR, or other images by --data NAME; relvit predict takes images by their paths, too"
        in message
    )


@pytest.mark.parametrize("command", ["test", "validate", "predict"])
def test_a_folder_alone_holds_class_folders(program, tmp_path, command, capsys):
    colours = {"cat": "red", "dog": "lime", "owl": "blue"}
    for number, (name, colour) in enumerate(colours.items()):
        for split in ("train", "val", "test"):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for each in range(number + 1):
                Image.new("RGB", (24, 16), colour).save(folder / f"{each}.png")
    options = ["--root", str(tmp_path / "photos"), "--runs", str(tmp_path / "runs")]
    assert main([command, str(program), *options[: 2 if command == "validate" else 4]]) == 0
    out = capsys.readouterr().out
    assert ("owl/2.png: owl" if command == "predict" else "1.0000") in out, out


def test_a_compiled_program_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt2", "w") as archive:
        archive.writestr("a/data/aotinductor/model/a.so", b"")
    with pytest.raises(
        ValueError,
        match=r"a\.pt2 was compiled by relvit export --aot, .* torch\._inductor\.aoti_load_package .* without --aot",
    ):
        ExportedClassifier(tmp_path / "a.pt2")


def test_a_description_in_the_file(tmp_path):
    several = DESCRIPTION | {"thresholds": [0.5, 0.0, 1.0], "input": ["batch", 3, 16, 16]}
    assert ExportedClassifier(classifier_of(tmp_path / "b.onnx", several)).labels.thresholds == [0.5, 0.0, 1.0]
    native = {name: DESCRIPTION[name] for name in ("class_names", "input", "mean", "std")}
    native |= {"img_size": [16, 40], "patch_size": [8, 8], "max_tokens": 10}
    predictor = relvit.load(classifier_of(tmp_path / "c.onnx", native))
    assert (predictor.img_size, predictor.shape.max_tokens) == ((16, 40), 10)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"class_names": ["cat", "dog"]}, "class_names"),
        ({"class_names": ["cat", "dog", 3]}, "class_names"),
        ({"class_names": "owl"}, "class_names"),
        ({"input": ["batch", 1, 16, 16]}, "mean"),
        ({"input": ["batch", 3, "height", 16]}, "input"),
        ({"input": ["batch", 3, 16]}, "input"),
        ({"input": None}, "input"),
        ({"img_size": [16, 16.5]}, "img_size"),
        ({"img_size": [0, 16]}, "img_size"),
        ({"crop_pct": float("nan")}, "crop_pct"),
        ({"crop_pct": "1"}, "crop_pct"),
        ({"mean": [0.5, 0.5, float("inf")]}, "mean"),
        ({"std": [0.5, 0.5]}, "std"),
        ({"std": [0.5, 0.5, 0]}, "std"),
        ({"thresholds": [0.5, 0.5]}, "thresholds"),
        ({"thresholds": [0.5, 0.5, 1.5]}, "thresholds"),
        ({"max_tokens": 0, "patch_size": [8, 8]}, "max_tokens"),
        ({"max_tokens": 9}, "patch_size"),
    ],
)
def test_a_description_with_a_wrong_part_is_refused(tmp_path, change, wrong):
    path = classifier_of(tmp_path / "a.onnx", DESCRIPTION | change)
    with pytest.raises(
        ValueError,
        match=rf"a\.onnx was not written .*: {wrong} is missing or has a wrong value; write it anew by relvit export",
    ):
        ExportedClassifier(path)


def test_logits_that_are_not_finite_become_no_probabilities(tmp_path):
    model = ExportedClassifier(classifier_of(tmp_path / "a.onnx", DESCRIPTION))
    with pytest.raises(ValueError, match="probabilities that are not a number"):
        model.predict_step((torch.full((2, 3, 16, 16), torch.nan), ["a", "b"]), 0)


def test_a_file_that_takes_more_memory_than_there_is_is_refused(tmp_path):
    """The file makes a tensor of 4 TB, whose size depends on the images, so no check before the run can find it."""
    filled = [
        helper.make_node("Shape", ["images"], ["count"], start=0, end=1),
        helper.make_node("Mul", ["count", "times"], ["size"]),
        helper.make_node("ConstantOfShape", ["size"], ["large"]),
        helper.make_node("ReduceSum", ["large"], ["extra"], keepdims=0),
    ]
    model = ExportedClassifier(classifier_of(tmp_path / "a.onnx", DESCRIPTION, filled, {"times": np.array([2**40])}))
    with pytest.raises(ValueError, match=r"a\.onnx cannot be computed: .*Available memory of \d+ is smaller"):
        model(torch.zeros(1, 3, 16, 16))


def test_files_that_are_none(tmp_path):
    path = tmp_path / "none" / "a.onnx"
    path.parent.mkdir()
    with pytest.raises(FileNotFoundError, match=r"no file .*a\.onnx: relvit export CKPT --output .*a\.onnx writes"):
        ExportedClassifier(path)
    with pytest.raises(ValueError, match=r"download https://127\.0\.0\.1/a\.onnx, then give its path$"):
        ExportedClassifier("https://127.0.0.1/a.onnx")
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"^cannot open .*a\.onnx: "):
        ExportedClassifier(path)
    for text in ("[" * 100_000, "{", "[]", "3"):
        with pytest.raises(ValueError, match=r"a\.onnx was not written by relvit export.*: "):
            ExportedClassifier(classifier_of(path, text))
    with pytest.raises(
        ValueError, match=r"^cannot open .*c\.onnx: it has \['x', 'y'\], not images and .*: give a file"
    ):
        ExportedClassifier(
            save(tmp_path / "c.onnx", [helper.make_node("Abs", ["x"], ["y"])], {}, ("x", [1]), ("y", [1]))
        )
    with pytest.raises(ValueError, match=r"b\.onnx has no class names in it: relvit export CKPT --output .*b\.onnx"):
        ExportedClassifier(classifier_of(path.with_name("b.onnx"), None))


def test_weights_in_another_file(tmp_path):
    path, weights = tmp_path / "a.onnx", tmp_path / "a.onnx.data"
    model = onnx.load(classifier_of(path))
    onnx.external_data_helper.set_external_data(model.graph.initializer[1], weights.name)
    onnx.save(model, path)
    weights.rename(tmp_path / "elsewhere")
    with pytest.raises(
        ValueError, match=r"^cannot open .*a\.onnx: .*; the weights of .* in a\.onnx\.data: copy them, too$"
    ):
        ExportedClassifier(path)
    (tmp_path / "elsewhere").rename(weights)
    ExportedClassifier(path)
