"""int8 files against the formula of dynamic quantisation, and the comparison of a file with its model."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from command_line import summary
from onnx import TensorProto, helper
from onnx_files import DESCRIPTION, classifier_of, save

from relvit.app.evaluation import Predictor
from relvit.app.evaluation.deploy import OnnxClassifier, compare, quantise


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
    weights = {"linear": linear, "table": table, "shape": np.array([2, -1, 3])}
    return save(tmp_path / "a.onnx", nodes, weights, ("x", ["n", 8]), ("y", None)), linear, table


def test_int8_of_linear_layers_alone(graph, tmp_path):
    path, linear, table = graph
    quantise(path, tmp_path / "b.onnx")
    x = np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)
    (found,) = session(tmp_path / "b.onnx").run(None, {"x": x})
    # Weights: symmetric, 7 bits, a scale per output channel; activations: one scale and one zero point for all.
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


def test_static_int8_has_the_ranges_of_its_calibration(graph, tmp_path):
    path, linear, table = graph
    model = onnx.load(path)
    model.graph.input[0].name = model.graph.node[0].input[0] = "images"
    onnx.save(model, path)
    given = torch.randn(5, 1, 8, generator=torch.Generator().manual_seed(2))
    quantise(path, tmp_path / "b.onnx", given)
    # Weights as above; activations: one scale for all images, and zero is zero. What is larger is cut off.
    scale, step = np.abs(linear).max(0) / 64, float(given.abs().max()) / 127
    x = np.array(given[0]) * np.float32([[1], [3]])
    rounded = np.clip(np.round(x / step), -128, 127) * step
    assert rounded.max() < x.max() or rounded.min() > x.min()
    expected = (rounded @ (np.round(linear / scale) * scale)).reshape(2, -1, 3) @ table
    (found,) = session(tmp_path / "b.onnx").run(None, {"images": x})
    np.testing.assert_allclose(found, expected, atol=1e-4)
    operators = {node.op_type for node in onnx.load(tmp_path / "b.onnx").graph.node}
    assert operators == {"QuantizeLinear", "DequantizeLinear", "MatMul", "Reshape"}


def test_comparison_on_val(run, best):
    """The file predicts the first class for every image."""
    predictor = Predictor(best)
    data = predictor.checkpoint.data_module(num_workers=0)
    found = compare(predictor, lambda images: torch.eye(3)[:1].expand(len(images), 3), data)
    assert found.images == 18
    assert found.model == pytest.approx(summary(run)["val/acc1"])
    assert found.file == pytest.approx(1 / 3)
    predicted = [predictor.predict(path).name for path, _ in data.dataset("val").samples]
    assert found.same == pytest.approx(predicted.count("cat") / 18)


def test_a_description_in_the_file(tmp_path):
    found = OnnxClassifier(classifier_of(tmp_path / "a.onnx", DESCRIPTION)).data_arguments((24, 32))
    assert found == {name: DESCRIPTION[name] for name in DESCRIPTION if name != "input"} | {"img_size": (24, 32)}
    several = DESCRIPTION | {"thresholds": [0.5, 0.0, 1.0], "input": ["batch", 3, 16, 16]}
    assert OnnxClassifier(classifier_of(tmp_path / "b.onnx", several)).labels.thresholds == [0.5, 0.0, 1.0]
    native = {name: DESCRIPTION[name] for name in ("class_names", "input", "mean", "std")}
    native |= {"patch_size": [8, 8], "max_tokens": 9}
    assert OnnxClassifier(classifier_of(tmp_path / "c.onnx", native)).data_arguments()["max_tokens"] == 9


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
    with pytest.raises(ValueError, match=rf"a\.onnx is no file of relvit export: {wrong} is not what it should be"):
        OnnxClassifier(path)


def test_logits_that_are_not_finite_become_no_probabilities(tmp_path):
    model = OnnxClassifier(classifier_of(tmp_path / "a.onnx", DESCRIPTION))
    with pytest.raises(ValueError, match="probabilities that are not a number"):
        model.predict_step((torch.full((2, 3, 16, 16), torch.nan), ["a", "b"]), 0)


def test_a_file_that_takes_more_memory_than_there_is_is_refused(tmp_path):
    """A constant of 4 TB, which depends on the images, so that no preparation finds it."""
    filled = [
        helper.make_node("Shape", ["images"], ["count"], start=0, end=1),
        helper.make_node("Mul", ["count", "times"], ["size"]),
        helper.make_node("ConstantOfShape", ["size"], ["large"]),
        helper.make_node("ReduceSum", ["large"], ["extra"], keepdims=0),
    ]
    model = OnnxClassifier(classifier_of(tmp_path / "a.onnx", DESCRIPTION, filled, {"times": np.array([2**40])}))
    with pytest.raises(ValueError, match=r"a\.onnx cannot be computed: .*Available memory of \d+ is smaller"):
        model(torch.zeros(1, 3, 16, 16))


def test_files_that_are_none(tmp_path, graph):
    path = tmp_path / "none" / "a.onnx"
    path.parent.mkdir()
    with pytest.raises(FileNotFoundError, match=r"no file .*a\.onnx: relvit export CKPT --output .*a\.onnx writes"):
        OnnxClassifier(path)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"a\.onnx is no file of relvit export: "):
        OnnxClassifier(path)
    for text in ("[" * 100_000, "{", "[]", "3"):
        with pytest.raises(ValueError, match=r"a\.onnx is no file of relvit export: "):
            OnnxClassifier(classifier_of(path, text))
    with pytest.raises(ValueError, match=r"a\.onnx is no file of relvit export: it computes \['x', 'y'\], not"):
        OnnxClassifier(graph[0])
    with pytest.raises(ValueError, match=r"b\.onnx has no class names in it: relvit export CKPT --output .*b\.onnx"):
        OnnxClassifier(classifier_of(path.with_name("b.onnx"), None))
