"""`--reach` of evaluating commands: results equal those of a model with this reach, and files record the reach."""

import json

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from command_line import QUIET, evaluate, first_block, printed, rows, summary

import relvit
from relvit.app.cli import main
from relvit.app.data import DigitsData
from relvit.app.training import load_classifier
from relvit.models import set_reach


@pytest.fixture(scope="module")
def best(digits_run, tmp_path_factory):
    """A checkpoint trained on images of 8 x 8 pixels, 2 x 2 patches, whose weights make offsets matter."""
    content = first_block(digits_run / "checkpoints" / "best.ckpt")
    for name, tensor in content["state_dict"].items():
        if "attn." in name:
            tensor *= 20 if ".position." in name else 3
    path = tmp_path_factory.mktemp("reach") / "best.ckpt"
    torch.save(content, path)
    return str(path)


def images_of(split, img_size):
    """Return images and labels of a split."""
    data = DigitsData(img_size=img_size).dataset(split)
    return [torch.stack([torch.as_tensor(part) for part in parts]) for parts in zip(*data, strict=True)]


def computed(best, split, img_size, reach):
    """Compute the logits of a split with a reach, and its labels; without the reach the logits differ."""
    classifier, (images, labels) = load_classifier(best), images_of(split, img_size)
    with torch.no_grad():
        as_trained = classifier(images)
        set_reach(classifier.net, reach, (8, 8))
        logits = classifier(images)
    assert (logits - as_trained).abs().max() > 0.1
    return logits, labels


def test_test(best, tmp_path):
    logits, labels = computed(best, "test", 24, "stretch")
    results = summary(evaluate("test", best, tmp_path, "--img_size=24", "--reach=stretch"))
    assert (results["reach"], results["img_size"]) == ("stretch", [24, 24])
    assert results["test/loss"] == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-5)


def test_predict_and_load(best, tmp_path):
    logits, _ = computed(best, "test", 24, "bands")
    folder = evaluate("predict", best, tmp_path, "--img_size=24", "--reach=bands")
    found = [float(row["probability"]) for row in rows(folder / "predictions.csv")]
    assert found == pytest.approx(logits.softmax(-1).amax(-1).tolist(), abs=1e-5)
    loaded = relvit.load(best, 24, "bands").probabilities(images_of("test", 24)[0])
    torch.testing.assert_close(loaded, logits.softmax(-1), rtol=0, atol=1e-6)


def test_validate(best, capsys):
    logits, labels = computed(best, "val", 24, "stretch-logn")
    assert main(["validate", best, "--img_size=24", "--reach=stretch-logn", *QUIET]) == 0
    assert printed("val/loss", capsys.readouterr().out) == pytest.approx(
        float(F.cross_entropy(logits, labels)), rel=1e-5
    )


def test_resolutions(best, tmp_path):
    logits, labels = computed(best, "val", 24, "stretch")
    table = tmp_path / "table.csv"
    options = ["--sizes=[8,24]", "--reach=stretch", f"--output={table}", "--accelerator=cpu"]
    assert main(["resolutions", best, *options]) == 0
    found = rows(table)
    assert [row["reach"] for row in found] == ["stretch"] * 2
    assert float(found[1]["loss"]) == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-5)


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
    """PyTorch makes an .onnx of the same program that a .pt2 holds."""
    model = relvit.load(best, reach=reach).model
    assert main(["export", best, f"--output={tmp_path / 'model.onnx'}", f"--reach={reach}"]) == 0
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert json.loads(session.get_modelmeta().custom_metadata_map["relvit"])["reach"] == reach
    for height, width in ((8, 8), (64, 24), (16, 72)):
        images = torch.randn(2, 1, height, width, generator=torch.Generator().manual_seed(0))
        (logits,) = session.run(["logits"], {"images": images.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), model(images), rtol=0, atol=1e-4)


def test_refused_before_anything_is_written(best, tmp_path, fails):
    message = "--reach must be one of 'trained', 'stretch', 'logn', 'stretch-logn', 'windows', 'bands', 'mirror', "
    message += "'stretch-mirror', got strech (did you mean 'stretch'?)"
    assert message in fails(["test", best, "--reach=strech", f"--runs={tmp_path / 'runs'}", *QUIET])
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ValueError, match=r"reach is 'log'; .* \(did you mean 'logn'"):
        relvit.load(best, reach="log")
    message = fails(["export", best, f"--output={tmp_path / 'model.pt2'}", "--reach=windows"])
    assert "reach 'windows' cannot be exported" in message
    assert not (tmp_path / "model.pt2").exists()
