"""`--reach` of the evaluating commands: the numbers of the model with that reach, and where they are recorded."""

import csv
import json
import re

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F

import relvit
from relvit.cli import main
from relvit.data import DigitsData
from relvit.models import set_reach
from relvit.training import load_classifier

QUIET = ["--accelerator=cpu", "--trainer.enable_progress_bar=false"]
AT_48 = ["--img_size=48", "--reach=stretch"]


@pytest.fixture(scope="module")
def best(digits_run, tmp_path_factory):
    """A checkpoint trained on images of 8 x 8 pixels, 2 x 2 patches, with weights for which offsets matter."""
    content = torch.load(digits_run / "checkpoints" / "best.ckpt")
    for name, tensor in content["state_dict"].items():
        if "attn." in name:
            tensor *= 20 if ".position." in name else 3
    path = tmp_path_factory.mktemp("reach") / "best.ckpt"
    torch.save(content, path)
    return str(path)


def evaluated(best, split, img_size, reach):
    """Logits of a split's images with that reach and as trained, and the labels."""
    classifier, data = load_classifier(best), DigitsData(img_size=img_size).dataset(split)
    images, labels = (torch.stack([torch.as_tensor(part) for part in parts]) for parts in zip(*data, strict=True))
    with torch.no_grad():
        as_trained = classifier(images)
        positions = [block.attn.position for block in set_reach(classifier.net, reach).blocks]
        assert {position.trained_grid for position in positions} == {(2, 2)}
        logits = classifier(images)
    assert (logits - as_trained).abs().max() > 0.1
    return logits, labels


def test_test_and_predict(best, tmp_path):
    logits, labels = evaluated(best, "test", 48, "stretch")
    assert main(["test", best, *AT_48, f"--runs={tmp_path / 'test'}", *QUIET]) == 0
    summary = json.loads(next((tmp_path / "test").glob("*/summary.json")).read_text())
    assert (summary["reach"], summary["img_size"]) == ("stretch", [48, 48])
    assert summary["test/loss"] == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-5)
    assert main(["predict", best, *AT_48, f"--runs={tmp_path / 'predict'}", *QUIET]) == 0
    with open(next((tmp_path / "predict").glob("*/predictions.csv")), newline="") as file:
        found = [float(row["probability"]) for row in csv.DictReader(file)]
    assert found == pytest.approx(logits.softmax(-1).amax(-1).tolist(), abs=1e-5)


def test_bands_in_test_predict_and_load(best, tmp_path):
    # Of the trained height, two rows of patches, with two rows of memory: the numbers are those under a mask.
    classifier, data = load_classifier(best), DigitsData(img_size=24).dataset("test")
    images, labels = (torch.stack([torch.as_tensor(part) for part in parts]) for parts in zip(*data, strict=True))
    row = torch.arange(36) // 6
    mask = (row < (row // 2 * 2 + 2)[:, None]) & (row >= (row // 2 * 2 - 2)[:, None])
    with torch.no_grad():
        logits = classifier.net(images, attn_mask=mask)
        assert (logits - classifier.net(images)).abs().max() > 0.05
    at_24 = ["--img_size=24", "--reach=bands"]
    assert main(["test", best, *at_24, f"--runs={tmp_path / 'test'}", *QUIET]) == 0
    summary = json.loads(next((tmp_path / "test").glob("*/summary.json")).read_text())
    assert (summary["reach"], summary["img_size"]) == ("bands", [24, 24])
    assert summary["test/loss"] == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-5)
    assert main(["predict", best, *at_24, f"--runs={tmp_path / 'predict'}", *QUIET]) == 0
    with open(next((tmp_path / "predict").glob("*/predictions.csv")), newline="") as file:
        found = [float(row["probability"]) for row in csv.DictReader(file)]
    assert found == pytest.approx(logits.softmax(-1).amax(-1).tolist(), abs=1e-5)
    loaded = relvit.load(best, 24, "bands").probabilities(images)
    torch.testing.assert_close(loaded, logits.softmax(-1), rtol=0, atol=1e-6)


def test_validate(best, capsys):
    logits, labels = evaluated(best, "val", 24, "stretch-logn")
    assert main(["validate", best, "--img_size=24", "--reach=stretch-logn", *QUIET]) == 0
    found = float(re.search(r"val/loss\W+([\d.]+)", capsys.readouterr().out)[1])
    assert found == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-5)


def test_resolutions(best, tmp_path):
    logits, labels = evaluated(best, "val", 24, "stretch")
    table = tmp_path / "table.csv"
    options = ["--sizes=[8,24]", "--reach=stretch", f"--output={table}", "--accelerator=cpu"]
    assert main(["resolutions", best, *options]) == 0
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["reach"] for row in rows] == ["stretch"] * 2
    assert float(rows[1]["loss"]) == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-5)


def test_embed(best, photos, tmp_path):
    folder, output = str(photos / "test"), tmp_path / "features.npz"
    assert main(["embed", best, folder, f"--output={output}", "--img_size=[40,24]", "--reach=logn"]) == 0
    found = np.load(output)["features"]
    features = {reach: relvit.load(best, (40, 24), reach).embed(folder).numpy() for reach in ("trained", "logn")}
    assert found == pytest.approx(features["logn"], abs=1e-6)
    assert abs(found - features["trained"]).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("reach", ["stretch-logn", "bands"])
def test_export_computes_the_same_at_all_sizes(best, reach, tmp_path):
    model = relvit.load(best, reach=reach).model
    for ending in ("pt2", "onnx"):
        output = tmp_path / f"model.{ending}"
        assert main(["export", best, f"--output={output}", f"--reach={reach}"]) == 0
        assert json.loads((tmp_path / "model.json").read_text())["reach"] == reach
    program = torch.export.load(tmp_path / "model.pt2").module()
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for height, width in ((8, 8), (64, 24), (16, 72)):
        images = torch.randn(2, 1, height, width, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(program(images), model(images), rtol=0, atol=1e-4)
        (logits,) = session.run(["logits"], {"images": images.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), model(images), rtol=0, atol=1e-4)


def test_refused_before_anything_is_written(best, tmp_path, capsys):
    assert main(["test", best, "--reach=strech", f"--runs={tmp_path / 'runs'}", *QUIET]) == 2
    assert (
        "--reach must be one of 'trained', 'stretch', 'logn', 'stretch-logn', 'windows', 'bands', got strech "
        "(did you mean 'stretch'?)" in capsys.readouterr().err
    )
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ValueError, match=r"reach is 'log'; .* \(did you mean 'logn'"):
        relvit.load(best, reach="log")
    assert main(["export", best, f"--output={tmp_path / 'model.pt2'}", "--reach=windows"]) == 2
    assert "reach 'windows' cannot be exported" in capsys.readouterr().err
    assert not (tmp_path / "model.pt2").exists()
