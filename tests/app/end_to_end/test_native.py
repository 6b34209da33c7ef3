"""`--data.native true`: train, validate, test, predict and embed images of many shapes, in one process and in two."""

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

FIT = ["fit", "--data=ImageFolderData", "--data.native=true", "--model.model=test_relvit", "--trainer.max_epochs=1"]
SMALL = ["--data.patch_size=8", "--data.max_tokens=9", "--data.batch_size=4", "--data.num_workers=0"]
SMALL += [f"--model.model_kwargs.{given}" for given in ("patch_size=8", "embed_dim=16", "depth=2", "max_distance=2")]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """Noisy photographs of mixed shapes, one of them a banner."""
    root = write_photos(tmp_path_factory.mktemp("shapes") / "photos", count=4)
    for split in ("train", "test"):
        Image.new("RGB", (200, 10), (200, 40, 40)).save(root / split / "cat" / "banner.png")
    # In the wrong folder, so that there is a mistake.
    for name, size in (("owl", (60, 20)), ("another", (20, 50))):
        Image.new("RGB", size, (40, 40, 200)).save(root / "test" / "dog" / f"{name}.png")
    return root


def check(best, root, test, predict):
    """Every image counts once, with the probabilities that its exact size has in the ordinary way."""
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


@pytest.mark.parametrize(
    ("options", "budget", "side"),
    # By default as many patches of 16 px as 224 px have.
    [(SMALL, 9, 8), pytest.param([], 196, 16, marks=pytest.mark.slow)],
    ids=("small", "default"),
)
def test_one_process(shapes, tmp_path, capsys, options, budget, side):
    assert main([*FIT, f"--data.root={shapes}", f"--runs={tmp_path / 'runs'}", *QUIET, *options]) == 0
    run = only(tmp_path / "runs")
    text = capsys.readouterr().out
    assert f"native shapes of up to {budget} patches of {side} x {side} px x 3" in text
    assert "could not be drawn" not in text
    assert (run / "training_images.png").is_file()
    best = run / "checkpoints" / "best.ckpt"
    # As the last line of the training suggests.
    assert f"relvit validate {best} --data.max_tokens {round(1.5 * budget)}" in text
    assert main(["validate", str(best), "--data.max_tokens=49", *QUIET]) == 0
    tested = evaluate("test", best, tmp_path / "test", f"--data.root={shapes}", "--mirror=true")
    predicted = evaluate("predict", best, tmp_path / "predict", shapes / "test", "--mirror=true")
    check(best, shapes, tested, predicted)
    assert main(["embed", str(best), f"--root={shapes / 'test'}", f"--output={tmp_path / 'x.npz'}"]) == 0
    found = np.load(tmp_path / "x.npz")
    predictor = relvit.load(best)
    for path, features in list(zip(found["path"], found["features"], strict=True))[::4]:
        pixels, _ = next(predictor.batches([str(path)]))
        model, (image,) = predictor.model, images_of(pixels)
        expected = model.forward_head(model.forward_features(image[None]), pre_logits=True)[0]
        torch.testing.assert_close(torch.from_numpy(features), expected, atol=1e-5, rtol=1e-4)
    path = str(next((shapes / "test").glob("*/*")))
    assert main(["show", str(best), path, "--kind", "logits", "rollout", f"--output={tmp_path / 'pictures'}"]) == 0
    assert len(list((tmp_path / "pictures").iterdir())) == 2
    table = rows(predicted / "predictions.csv")
    for row, prediction in zip(table, predictor.predict([row["path"] for row in table], mirror=True), strict=True):
        assert float(row["probability"]) == pytest.approx(prediction.probability, abs=5e-6)
    # Another budget is another result.
    given = ["predict", str(best), str(shapes / "test"), "--mirror", f"--runs={tmp_path / 'other'}", *QUIET]
    assert main([*given, f"--data.max_tokens={2 * budget}"]) == 0
    other = rows(only(tmp_path / "other") / "predictions.csv")
    assert [row["probability"] for row in other] != [row["probability"] for row in table]
    capsys.readouterr()
    for command in (given, ["test", str(best), *QUIET]):
        assert main([*command, "--reach=windows"]) == 2
        assert "reach 'windows' is for images of one size, and" in capsys.readouterr().err
    height, width = predictor.attention(str(shapes / "test" / "cat" / "banner.png")).grid
    assert 9 * height <= width <= budget // height


@pytest.mark.slow
def test_two_processes(shapes, tmp_path):
    arguments = [*FIT, f"--data.root={shapes}", f"--runs={tmp_path / 'runs'}", *QUIET, *SMALL]
    ranks = Ranks(arguments, tmp_path, as_torchrun())
    assert ranks.finish() == [0, 0], ranks.text()[-3000:]
    best = only(tmp_path / "runs") / "checkpoints" / "best.ckpt"
    # 15 images: the second process has one fewer, and a batch fewer.
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
        (["--data.augment=none", "--model.mixup=0.8"], "native images do not go with mixup, which needs images of one"),
        (
            ["--model.model_kwargs.patch_size=4"],
            "test_relvit has patches of 4 x 4 px, the data of 8 x 8 px: give --data",
        ),
        (["--data.img_size=32"], "--data.max_tokens sets the size of native images: give no --img_size beside it"),
    ],
    ids=str,
)
def test_errors(shapes, tmp_path, options, message, fails):
    assert message in fails([*FIT, f"--data.root={shapes}", f"--runs={tmp_path / 'runs'}", *QUIET, *SMALL, *options])
