"""int8 files compared with the formula of dynamic quantisation, and the comparison of a file with its model."""

import logging
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from command_line import summary
from onnx import TensorProto, helper
from onnx_files import save

from relvit.app.evaluation import Predictor
from relvit.app.evaluation.deploy import compare, quantise


def session(path):
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


@pytest.fixture
def graph(tmp_path):
    """An ONNX file with a linear layer and a product with a table of three dimensions, and both weights."""
    generator = np.random.default_rng(0)
    linear, table = (generator.normal(size=shape).astype(np.float32) for shape in ((8, 6), (2, 3, 5)))
    nodes = [
        helper.make_node("MatMul", ["x", "linear"], ["hidden"], name="one"),
        helper.make_node("Reshape", ["hidden", "shape"], ["heads"], name="two"),
        helper.make_node("MatMul", ["heads", "table"], ["y"], name="three"),
    ]
    weights = {"linear": linear, "table": table, "shape": np.array([2, -1, 3])}
    return save(tmp_path / "a.onnx", nodes, weights, ("x", ["n", 8]), ("y", None)), linear, table


def test_int8_of_linear_layers_alone(graph, tmp_path):
    path, linear, table = graph
    quantise(path, tmp_path / "b.onnx")
    x = np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)
    (found,) = session(tmp_path / "b.onnx").run(None, {"x": x})
    # Weights have 7 bits, no zero point, and a scale for each output channel. Activations have one scale and one zero
    # point.
    scale = np.abs(linear).max(0) / 64
    weights = np.round(linear / scale) * scale
    step = (max(x.max(), 0) - min(x.min(), 0)) / 255
    zero = np.round(-min(x.min(), 0) / step)
    rounded = (np.clip(np.round(x / step) + zero, 0, 255) - zero) * step
    expected = (rounded @ weights).reshape(2, -1, 3) @ table
    np.testing.assert_allclose(found, expected, atol=1e-4)
    exact = (x @ linear).reshape(2, -1, 3) @ table
    assert 1e-3 < np.abs(found - exact).max() < 0.2
    stored = {weight.name: weight.data_type for weight in onnx.load(tmp_path / "b.onnx").graph.initializer}
    assert stored["linear_quantized"] == TensorProto.INT8
    assert stored["table"] == TensorProto.FLOAT


def test_logging_that_the_user_has_disabled_stays_disabled(graph, tmp_path):
    logging.disable(logging.ERROR)
    try:
        quantise(graph[0], tmp_path / "b.onnx")
        assert logging.root.manager.disable == logging.ERROR
    finally:
        logging.disable(logging.NOTSET)


def test_static_int8_has_the_ranges_of_its_calibration(graph, tmp_path):
    path, linear, table = graph
    model = onnx.load(path)
    model.graph.input[0].name = model.graph.node[0].input[0] = "images"
    onnx.save(model, path)
    given = torch.randn(5, 1, 8, generator=torch.Generator().manual_seed(2))
    quantise(path, tmp_path / "b.onnx", given)
    # Weights are quantised as above. Activations have one scale for all images and no zero point; larger values are
    # clipped.
    scale, step = np.abs(linear).max(0) / 64, float(given.abs().max()) / 127
    x = np.array(given[0]) * np.float32([[1], [3]])
    rounded = np.clip(np.round(x / step), -128, 127) * step
    assert rounded.max() < x.max() or rounded.min() > x.min()
    expected = (rounded @ (np.round(linear / scale) * scale)).reshape(2, -1, 3) @ table
    (found,) = session(tmp_path / "b.onnx").run(None, {"images": x})
    np.testing.assert_allclose(found, expected, atol=1e-4)
    operators = {node.op_type for node in onnx.load(tmp_path / "b.onnx").graph.node}
    assert operators == {"QuantizeLinear", "DequantizeLinear", "MatMul", "Reshape"}


@pytest.mark.parametrize("calibration", [None, [torch.zeros(1, 3, 8, 8)]], ids=["dynamic", "static"])
def test_a_model_without_linear_layers_has_no_int8(tmp_path, calibration):
    """The model has a convolution and a classifier, as a ResNet has."""
    nodes = [
        helper.make_node("Conv", ["images", "kernel"], ["patch"], name="one"),
        helper.make_node("Flatten", ["patch"], ["features"], name="two"),
        helper.make_node("Gemm", ["features", "classifier"], ["logits"], name="three"),
    ]
    weights = {"kernel": np.ones((4, 3, 8, 8), np.float32), "classifier": np.ones((4, 5), np.float32)}
    path = save(tmp_path / "a.onnx", nodes, weights, ("images", ["n", 3, 8, 8]), ("logits", ["n", 5]))
    with pytest.raises(ValueError, match="this model has none but its classifier: leave int8 out"):
        quantise(path, tmp_path / "b.onnx", calibration)
    assert not (tmp_path / "b.onnx").exists()


def test_comparison_on_val(run, best):
    """The exported file predicts the first class for every image."""
    predictor = Predictor(best)
    data = predictor.checkpoint.data_module(num_workers=0)
    first = SimpleNamespace(probabilities=lambda images: torch.eye(3)[:1].expand(len(images), 3))
    found = compare(predictor, first, data)
    assert found.images == 18
    assert found.model == pytest.approx(summary(run)["val/acc1"])
    assert found.file == pytest.approx(1 / 3)
    predicted = [predictor.predict(path).name for path, _ in data.dataset("val").samples]
    assert found.same == pytest.approx(predicted.count("cat") / 18)
