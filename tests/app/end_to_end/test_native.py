"""`--data.native true`: train, validate, test, predict and embed images of many shapes, in one and in two processes."""

import contextlib
import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from command_line import QUIET, evaluate, only, rows, summary
from photos import write_photos
from PIL import Image
from processes import Ranks, as_torchrun

import relvit
from relvit.app.cli import main
from relvit.app.data.batches import images_of

pytestmark = pytest.mark.slow

FIT = ["fit", "--data=ImageFolderData", "--data.native=true", "--model.model=test_relvit", "--trainer.max_epochs=1"]
FIT += ["--model.model_kwargs.pos_embed=learn"]
SMALL = ["--data.patch_size=8", "--data.max_tokens=9", "--data.batch_size=4", "--data.num_workers=0"]
SMALL += [f"--model.model_kwargs.{given}" for given in ("patch_size=8", "embed_dim=16", "depth=2", "max_distance=2")]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """Noisy photographs of several shapes, one of them a banner."""
    root = write_photos(tmp_path_factory.mktemp("shapes") / "photos", count=4)
    for split in ("train", "test"):
        Image.new("RGB", (200, 10), (200, 40, 40)).save(root / split / "cat" / "banner.png")
    # These images are in the folder of another class, so that the model makes a mistake.
    for name, size in (("owl", (60, 20)), ("another", (20, 50))):
        Image.new("RGB", size, (40, 40, 200)).save(root / "test" / "dog" / f"{name}.png")
    return root


def check(best, root, test, predict):
    """Check that every image counts once, with the probabilities of the model for the image at its exact size."""
    predictor = relvit.load(best)
    right = 0
    for row in (table := rows(predict / "predictions.csv")):
        pixels, _ = next(predictor.batches([row["path"]]))
        (image,) = images_of(pixels)
        with torch.no_grad():
            both = [predictor.model(x[None]).softmax(-1)[0] for x in (image, image.flip(-1))]
        best_class = torch.stack(both).mean(0)
        assert float(row["probability"]) == pytest.approx(float(best_class.max()), abs=5e-6)
        right += row["class"] == (root / row["path"]).parent.name
    paths = sorted(str(path) for path in (root / "test").glob("*/*"))
    assert [row["path"] for row in table] == paths
    results = summary(test)
    assert results["images"] == len(paths)
    assert results["test/acc1"] == pytest.approx(right / len(paths))
    assert len(rows(test / "mistakes.csv")) == len(paths) - right > 0
    assert (test / "mistakes.png").is_file()


@pytest.fixture(
    scope="module",
    # By default the budget is 196 patches of 16 px, the number of patches of an image of 224 px.
    params=[(SMALL, 9, 8), ([], 196, 16)],
    ids=("small", "default"),
)
def trained(request, shapes, tmp_path_factory):
    """A run in one process: its folder, its output, the budget of patches per image, and the side of a patch."""
    (options, budget, side), place = request.param, tmp_path_factory.mktemp("trained")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*FIT, f"--data.root={shapes}", f"--runs={place / 'runs'}", *QUIET, *options]) == 0
    run = only(place / "runs")
    return SimpleNamespace(
        run=run, best=run / "checkpoints" / "best.ckpt", text=out.getvalue(), budget=budget, side=side, place=place
    )


@pytest.fixture(scope="module")
def predicted(trained, shapes):
    """The folder of predictions of the test images, averaged with mirrored images."""
    return evaluate("predict", trained.best, trained.place / "predict", shapes / "test", "--mirror=true")


def test_the_training_names_its_budget_and_draws_images(trained):
    assert f"native shapes of up to {trained.budget} patches of {trained.side} x {trained.side} px x 3" in trained.text
    assert "could not be drawn" not in trained.text
    assert (trained.run / "training_images.png").is_file()


def test_the_last_line_suggests_a_larger_budget_and_the_command_works(trained):
    assert f"relvit validate {trained.best} --data.max_tokens {round(1.5 * trained.budget)}" in trained.text
    assert main(["validate", str(trained.best), "--data.max_tokens=49", *QUIET]) == 0


def test_test_and_predict_count_each_image_at_its_exact_size(trained, predicted, shapes, tmp_path):
    tested = evaluate("test", trained.best, tmp_path / "test", f"--data.root={shapes}", "--mirror=true")
    check(trained.best, shapes, tested, predicted)


def test_features_are_those_of_the_exact_size(trained, shapes, tmp_path):
    assert main(["embed", str(trained.best), f"--root={shapes / 'test'}", f"--output={tmp_path / 'x.npz'}"]) == 0
    found, predictor = np.load(tmp_path / "x.npz"), relvit.load(trained.best)
    for path, features in list(zip(found["path"], found["features"], strict=True))[::4]:
        pixels, _ = next(predictor.batches([str(path)]))
        model, (image,) = predictor.model, images_of(pixels)
        expected = model.forward_head(model.forward_features(image[None]), pre_logits=True)[0]
        torch.testing.assert_close(torch.from_numpy(features), expected, atol=1e-5, rtol=1e-4)


def test_pictures_of_one_image(trained, shapes, tmp_path):
    path, options = str(next((shapes / "test").glob("*/*"))), ["--kind", "logits", "rollout", f"--output={tmp_path}"]
    assert main(["show", str(trained.best), path, *options]) == 0
    assert len(list(tmp_path.iterdir())) == 2


def test_the_predictor_has_the_probabilities_of_the_command(trained, predicted):
    table = rows(predicted / "predictions.csv")
    found = relvit.load(trained.best).predict([row["path"] for row in table], mirror=True)
    assert [prediction.probability for prediction in found] == [
        pytest.approx(float(row["probability"]), abs=5e-6) for row in table
    ]


def test_another_budget_has_another_result(trained, predicted, shapes, tmp_path):
    given = ["predict", str(trained.best), str(shapes / "test"), "--mirror", f"--runs={tmp_path}", *QUIET]
    assert main([*given, f"--data.max_tokens={2 * trained.budget}"]) == 0
    tables = [rows(folder / "predictions.csv") for folder in (only(tmp_path), predicted)]
    assert len({tuple(row["probability"] for row in table) for table in tables}) == 2


def test_an_image_size_in_place_of_the_budget(trained, capsys):
    """The image size replaces the budget of the training, as `img_size` does in Python."""
    assert main(["validate", str(trained.best), "--img_size=32", *QUIET]) == 0
    shape = relvit.load(trained.best, img_size=32).shape
    assert shape.max_tokens == (32 // trained.side) ** 2 != trained.budget
    assert f"images of val at {shape.words()}, accuracy" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["predict", "test"])
def test_windows_are_for_images_of_one_size(trained, shapes, tmp_path, fails, command):
    images = [shapes / "test"] if command == "predict" else []
    message = fails([command, trained.best, *images, f"--runs={tmp_path}", *QUIET, "--reach=windows"])
    assert "reach 'windows' is for images of one size," in message


def test_the_embedding_can_be_mirrored(trained, predicted, shapes, tmp_path):
    folder = evaluate("predict", trained.best, tmp_path, shapes / "test", "--reach=mirror")
    predictor = relvit.load(trained.best, reach="mirror")
    as_trained = relvit.load(trained.best)
    differences = []
    for row in rows(folder / "predictions.csv"):
        (image,) = images_of(next(predictor.batches([row["path"]]))[0])
        with torch.no_grad():
            found, other = (each.model(image[None]).softmax(-1)[0] for each in (predictor, as_trained))
        assert float(row["probability"]) == pytest.approx(float(found.max()), abs=5e-6)
        differences.append(float((found - other).abs().max()))
    assert max(differences) > 1e-5


def test_attention_is_on_the_grid_of_the_shape(trained, shapes):
    height, width = relvit.load(trained.best).attention(str(shapes / "test" / "cat" / "banner.png")).grid
    assert 9 * height <= width <= trained.budget // height


def test_two_processes(shapes, tmp_path):
    arguments = [*FIT, f"--data.root={shapes}", f"--runs={tmp_path / 'runs'}", *QUIET, *SMALL]
    ranks = Ranks(arguments, tmp_path, as_torchrun())
    assert ranks.finish() == [0, 0], ranks.text()[-3000:]
    best = only(tmp_path / "runs") / "checkpoints" / "best.ckpt"
    # There are 15 images, so the second process has one image and one batch fewer.
    folders = []
    for command in ("test", "predict"):
        given = [command, f"--ckpt_path={best}", f"--data.root={shapes}", f"--runs={tmp_path / command}"]
        ranks = Ranks([*given, "--mirror=true", "--data.batch_size=7", *QUIET], tmp_path, as_torchrun())
        assert ranks.finish() == [0, 0], ranks.text()[-3000:]
        folders.append(only(tmp_path / command))
    check(best, shapes, *folders)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--data.augment=none", "--model.mixup=0.8"],
            "mixup needs images of one size, the data have native",
        ),
        (
            ["--model.model_kwargs.patch_size=4"],
            "test_relvit has patches of 4 x 4 px, the data of 8 x 8 px: give --data",
        ),
        (["--data.img_size=32"], "--data.max_tokens sets the size of the images: give no --img_size beside it"),
    ],
    ids=str,
)
def test_errors(shapes, tmp_path, options, message, fails):
    assert message in fails([*FIT, f"--data.root={shapes}", f"--runs={tmp_path / 'runs'}", *QUIET, *SMALL, *options])
