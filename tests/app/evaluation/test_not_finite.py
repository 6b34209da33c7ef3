"""No command writes probabilities that are not finite."""

import copy

import numpy as np
import pytest
import torch
from onnx_files import classifier_of
from vits import images, small

from relvit.app.training.base_classifier import finite_features
from relvit.app.training.labels import OneLabel, SeveralLabels


def test_labels_refuse_them():
    for labels in (OneLabel(), SeveralLabels([0.5, 0.5])):
        for bad in ((0.0, torch.nan), (torch.inf, torch.inf) if labels.thresholds is None else (torch.nan, 0.0)):
            with pytest.raises(ValueError, match="probabilities that are not a number"):
                labels.probabilities(torch.tensor([[0.0, 1.0], bad]))


def test_features_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match=r"are NaN or infinite: check .* \(no std may be 0\), and the images"):
        finite_features(small("test_relvit").eval(), images() * torch.nan, "cpu")


SPOILT = {
    "temperature": {"temperature": 1e-300},
    "std": {"std": (torch.nan,) * 3},
    "tiny std": {"std": (1e-300,) * 3},
    "mean": {"mean": (torch.inf,) * 3},
}


@pytest.mark.parametrize(
    ("command", "spoilt"),
    [
        ("predict", "temperature"),
        ("test", "tiny std"),
        ("validate", "temperature"),
        ("resolutions", "temperature"),
        ("embed", "std"),
        ("test", "mean"),
    ],
)
def test_a_checkpoint_that_computes_them_is_refused(command, spoilt, best, photos, tmp_path, fails, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = copy.copy(torch.load(best, weights_only=True))
    for name, value in SPOILT[spoilt].items():
        where = content["relvit"] if name == "temperature" else content["relvit"]["data"]["init_args"]
        where[name] = value
    torch.save(content, "bad.ckpt")
    given = {"predict": [photos / "test"], "embed": [photos / "test"], "resolutions": ["--sizes", "16"]}
    options = [] if command in ("embed", "resolutions") else ["--num_workers=0"]
    fails([command, "bad.ckpt", *given.get(command, []), *options])
    assert not any("nan" in path.read_text() for path in tmp_path.rglob("*.csv"))


def test_a_file_of_onnx_with_such_weights_is_refused(photos, tmp_path, fails, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, number in (("nan", np.nan), ("infinite", np.inf)):
        classifier_of(tmp_path / f"{name}.onnx", weights={"extra": np.full(3, number, np.float32)})
        arguments = ["predict", "--model", f"{name}.onnx", photos / "test", "--num_workers=0"]
        assert "probabilities that are not a number" in fails(arguments)
    assert not any(tmp_path.rglob("*.csv"))
