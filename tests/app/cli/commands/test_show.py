"""`relvit show`: which pictures it writes for which models, and which arguments it refuses."""

import re
import shutil
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import relvit
from relvit.app.cli import main
from relvit.app.cli.commands import show
from relvit.app.evaluation.pictures import NotApplicableError, draw
from relvit.app.plots import picture_of

pytestmark = pytest.mark.usefixtures("figures")

ATTENTION = {"tables", "kernels", "logits", "attention", "rollout"}


@pytest.fixture
def place(best, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pytorch_grad_cam", None)
    shutil.copy(best, "best.ckpt")
    shutil.copytree(photos / "test" / "owl", "owls")
    return tmp_path


@pytest.mark.slow
def test_all_kinds_that_apply_with_everything_at_its_default(place, capsys):
    assert main(["show", "best.ckpt", "owls/0.jpg"]) == 0
    out = capsys.readouterr().out
    written = {path.name for path in (place / "pictures").iterdir()}
    assert written == {"tables.png", *(f"0-{kind}.png" for kind in ATTENTION - {"tables"})}
    assert {line for line in out.splitlines() if line.endswith(".png")} == {f"pictures/{name}" for name in written}
    assert "left out: aft-windows: RelVisionTransformer has no attention-free layers" in out
    assert 'left out: cam: Grad-CAM needs the package pytorch_grad_cam: pip install "relvit[show]"' in out


def test_grad_cam(place, monkeypatch):
    monkeypatch.undo()
    pytest.importorskip("pytorch_grad_cam")
    monkeypatch.chdir(place)
    assert main(["show", "best.ckpt", "owls/0.jpg", "--kind", "cam", "--layer", "0"]) == 0
    assert [path.name for path in (place / "pictures").iterdir()] == ["0-cam.png"]


def test_the_probability_of_grad_cam_is_calibrated(place, monkeypatch):
    monkeypatch.undo()
    pytest.importorskip("pytorch_grad_cam")
    monkeypatch.chdir(place)
    content = torch.load("best.ckpt", weights_only=True)
    content["relvit"]["temperature"] = 0.05
    torch.save(content, "best.ckpt")
    titles = []
    monkeypatch.setattr(show, "save_figure", lambda figure, path: titles.append(figure.get_suptitle()))
    assert main(["show", "best.ckpt", "owls/0.jpg", "--kind", "cam"]) == 0
    best = relvit.load("best.ckpt").predict("owls/0.jpg")
    assert titles[0].startswith(f"Grad-CAM of {best.name}, the most probable class ({best.probability:.0%})")


def test_what_cannot_be_drawn_does_not_keep_back_the_rest(place, capsys, fails):
    error = fails(["show", "best.ckpt", "owls/0.jpg", "--kind", "cam", "attention", "aft-windows"])
    assert [path.name for path in (place / "pictures").iterdir()] == ["0-attention.png"]
    assert "aft-windows: RelVisionTransformer has no attention-free layers" in error
    assert 'cam: Grad-CAM needs the package pytorch_grad_cam: pip install "relvit[show]"' in error


def test_all_zero_maps_are_named(place, capsys):
    """Tables of a model that was just retrofitted are zero."""
    content = torch.load("best.ckpt", weights_only=True)
    for key in [key for key in content if isinstance(content[key], dict)]:
        for name, values in content[key].items():
            if "position" in name and isinstance(values, torch.Tensor):
                values.zero_()
    torch.save(content, "best.ckpt")
    assert main(["show", "best.ckpt", "owls/0.jpg", "--kind", "tables", "kernels", "attention"]) == 0
    assert set(capsys.readouterr().out.splitlines()) == {
        "pictures/tables.png: all its numbers are 0",
        "pictures/0-kernels.png: all its numbers are 0",
        "pictures/0-attention.png",
    }


@pytest.mark.slow
def test_sizes_patches_and_layers_and_nothing_is_overwritten(place, capsys):
    options = ["--kind", "logits", "--patch", "1", "4", "--layer", "0", "--img_size", "[24,40]", "--output", "a/b"]
    assert main(["show", "best.ckpt", "owls/1.jpg", *options]) == 0
    first, second = place / "a" / "b" / "1-logits.png", place / "a" / "b" / "1-logits-2.png"
    before = first.read_bytes()
    assert main(["show", "best.ckpt", "owls/1.jpg", *options]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "a/b/1-logits-2.png"
    assert {path: path.read_bytes() for path in first.parent.iterdir()} == {first: before, second: before}
    clf = relvit.load("best.ckpt", (24, 40))
    image = clf.transform(Image.open("owls/1.jpg").convert("RGB"))
    picture = picture_of(image, clf.mean, clf.std, 400)
    draw("logits", clf.model, image, picture, patch=(1, 4), layer=0).savefig("expected.png")
    np.testing.assert_array_equal(np.asarray(Image.open("a/b/1-logits.png")), np.asarray(Image.open("expected.png")))


def test_without_images(place, capsys):
    assert main(["show", "best.ckpt"]) == 0
    assert [path.name for path in (place / "pictures").iterdir()] == ["tables.png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["owls", "--kind", "tables"], "--kind tables shows the model alone, not owls: leave the images or --kind out"),
        (["--kind", "aft-windows"], "RelVisionTransformer has no attention-free layers with biases"),
        (["owls", "--kind", "cam"], 'Grad-CAM needs the package pytorch_grad_cam: pip install "relvit[show]"'),
        (
            ["owls", "--kind", "tabels"],
            "--kind must be one or several of 'tables', 'kernels', .*, got tabels (did you mean 'tables'?)",
        ),
        (["--kind", "kernels"], "--kind kernels needs an image: relvit show CKPT IMAGE --kind kernels"),
        (["owls", "--patch", "2", "0"], "patch (2, 0): give a row from 0 to 1 and a column from 0 to 1"),
        (["owls", "--patch", "2"], "--patch must be a pair such as"),
        (["owls", "--layer", "2", "--kind", "logits"], "layer is 2, the model has 2: give a number from 0 to 1"),
        (["owls", "--output", "owl.png"], "output owl.png is the name of an image: give a folder"),
        (["owls/7.jpg"], "no file or folder 'owls/7.jpg'"),
        (
            ["owls", "--img_size", "24", "--reach", "windows", "--kind", "kernels"],
            "attention within windows or parts has no logits",
        ),
    ],
)
def test_what_is_refused(place, arguments, message, fails):
    assert re.search(re.escape(message).replace(r"\.\*", ".*"), fails(["show", "best.ckpt", *arguments]))
    assert not [path for path in place.rglob("*.png") if "tables" not in path.name]


def test_a_broken_image(place, fails):
    """The error suggests only options that `show` has."""
    (place / "broken.jpg").write_text("no image")
    error = fails(["show", "best.ckpt", "broken.jpg"])
    assert "broken.jpg: it is not an image" in error
    assert "check-data" in error
    assert "on_error" not in error


def test_each_picture_is_written_before_the_next_image_is_read(place, fails):
    (place / "broken.jpg").write_text("no image")
    fails(["show", "best.ckpt", "owls/0.jpg", "broken.jpg", "--kind", "attention"])
    assert [path.name for path in (place / "pictures").iterdir()] == ["0-attention.png"]


@pytest.mark.parametrize(
    ("images", "cure"), [(["owls/0.jpg"], "the lines above say why"), ([], "give an image, relvit")]
)
def test_a_model_without_pictures_is_refused(place, monkeypatch, fails, images, cure):
    def refuse(*_given, **_options):
        raise NotApplicableError("it has none")

    monkeypatch.setattr("relvit.app.cli.commands.show.draw", refuse)
    assert f"no picture was drawn: {cure}" in fails(["show", "best.ckpt", *images])
