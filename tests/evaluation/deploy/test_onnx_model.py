"""int8 files against the formula of dynamic quantisation, and the comparison of a file with its model."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from command_line import summary
from onnx import TensorProto, helper, numpy_helper

from relvit.evaluation import Predictor
from relvit.evaluation.deploy import OnnxClassifier, compare, quantise


def session(path):
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


@pytest.fixture
def graph(tmp_path):
    """A linear layer, then a product with a table of three dimensions: the file, and the two weights."""
    generator = np.random.default_rng(0)
    linear, table = (generator.normal(size=shape).astype(np.float32) for shape in ((8, 6), (2, 3, 5)))
    nodes = [
        helper.make_node("MatMul", ["x", "linear"], ["hidden"], name="one"),
        helper.make_node("Reshape", ["hidden", "shape"], ["heads"], name="two"),
        helper.make_node("MatMul", ["heads", "table"], ["y"], name="three"),
    ]
    weights = [numpy_helper.from_array(linear, "linear"), numpy_helper.from_array(table, "table")]
    weights.append(numpy_helper.from_array(np.array([2, -1, 3]), "shape"))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    made = helper.make_graph(nodes, "graph", inputs, outputs, weights)
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), tmp_path / "a.onnx")
    return tmp_path / "a.onnx", linear, table


def test_int8_of_linear_layers_alone(graph, tmp_path):
    path, linear, table = graph
    quantise(path, tmp_path / "b.onnx")
    x = np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)
    (found,) = session(tmp_path / "b.onnx").run(None, {"x": x})
    # Weights: symmetric, a scale per output channel; activations: one scale and one zero point for all.
    scale = np.abs(linear).max(0) / 127
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


def test_comparison_on_val(run, best):
    """With a file that calls everything the first class."""
    predictor = Predictor(best)
    data = predictor.checkpoint.data_module(num_workers=0)
    found = compare(predictor, lambda images: torch.eye(3)[:1].expand(len(images), 3), data)
    assert found.images == 18
    assert found.model == pytest.approx(summary(run)["val/acc1"])
    assert found.file == pytest.approx(1 / 3)
    predicted = [predictor.predict(path).name for path, _ in data.dataset("val").samples]
    assert found.same == pytest.approx(predicted.count("cat") / 18)


def test_files_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file .*a\.onnx: relvit export CKPT --output .*a\.onnx writes"):
        OnnxClassifier(tmp_path / "a.onnx")
    (tmp_path / "a.onnx").write_bytes(b"nothing")
    with pytest.raises(FileNotFoundError, match=r"no file .*a\.json"):
        OnnxClassifier(tmp_path / "a.onnx")
    (tmp_path / "a.json").write_text('{"input": ["batch", 3, 16, 16]}')
    with pytest.raises(ValueError, match=r"a\.onnx and a\.json are no files of relvit export"):
        OnnxClassifier(tmp_path / "a.onnx")
