"""OpenVINO, ExecuTorch and Core ML compute exported models as PyTorch does, and TensorRT has all operators."""

import shutil

import onnx
import pytest
import torch
from command_line import first_block
from onnx import TensorProto, helper
from scripts import load
from vits import small

from relvit.app.evaluation import export_model
from relvit.app.training import load_classifier

runtimes = load("runtimes")
pytestmark = pytest.mark.elsewhere

SHAPES = ((2, 3, 16, 16), (1, 3, 40, 64), (3, 3, 24, 136))


def needs(package, extra):
    return pytest.importorskip(package, reason=f"pip install 'relvit[{extra}]' brings {package}")


@pytest.fixture(scope="module")
def best(best, tmp_path_factory):
    target = tmp_path_factory.mktemp("best") / "best.ckpt"
    torch.save(first_block(best), target)
    return target


@pytest.fixture(scope="module")
def files(best, photos, tmp_path_factory):
    """The run's best checkpoint, its first block, as .onnx, in float32 and in static int8."""
    import relvit
    from relvit.app.evaluation.deploy import quantise

    folder = tmp_path_factory.mktemp("exported")
    predictor = relvit.load(best)
    export_model(predictor, folder / "model.onnx")
    quantise(folder / "model.onnx", folder / "int8.onnx", torch.randn(4, 1, 3, 16, 16))
    quantise(folder / "model.onnx", folder / "dynamic.onnx")
    return folder


@pytest.fixture(scope="module")
def model(best):
    return load_classifier(best).net.eval().requires_grad_(False)


def assert_parity(run, model, shapes):
    for shape in shapes:
        images = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        assert runtimes.difference(run(images), model(images)) <= 1e-4, shape


def test_nan_is_the_largest_difference():
    assert max(0.0, runtimes.difference(torch.tensor([1.0, torch.nan]), torch.ones(2))) == torch.inf


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_parity_from_the_onnx_file(runtime, files, model):
    needs(runtime, {"onnxruntime": "onnx"}.get(runtime, runtime))
    assert_parity(getattr(runtimes, runtime)(files / "model.onnx"), model, SHAPES)


def test_openvino_reads_static_int8(files, model):
    needs("openvino", "openvino")
    run, reference = (getattr(runtimes, name)(files / "int8.onnx") for name in ("openvino", "onnxruntime"))
    images = torch.randn(SHAPES[1], generator=torch.Generator().manual_seed(3))
    assert runtimes.difference(run(images), reference(images)) <= 0.02
    assert runtimes.difference(run(images), model(images)) <= 0.2


def test_executorch_takes_images_of_all_sizes_up_to_its_largest(model, tmp_path):
    needs("executorch", "executorch")
    run = runtimes.executorch(model, tmp_path / "model.pte", largest=17)
    assert_parity(run, model, [(1, *shape[1:]) for shape in SHAPES])
    with pytest.raises(RuntimeError):
        run(torch.randn(1, 3, 16, 18 * 8))


@pytest.mark.parametrize("options", [{}, {"class_token": True, "rel_terms": "qkvb"}])
def test_coreml_converts_at_three_shapes(options):
    needs("coremltools", "coreml")
    model = small(depth=1, **options).eval().requires_grad_(False)
    found = [runtimes.coreml_operators(runtimes.coreml(model, torch.randn(shape))) for shape in SHAPES]
    assert found[0] == found[1] == found[2]
    # Indices are constants in the program, so its operators are those of products, sums and lookups.
    assert {"conv", "matmul", "softmax", "gather_along_axis", "scatter_along_axis"} <= found[0].keys()
    assert found[0]["softmax"] == 1


def test_tensorrt_has_the_operators_of_the_file_and_of_static_int8_alone(files):
    assert runtimes.tensorrt_lacks(files / "model.onnx") == []
    assert runtimes.tensorrt_lacks(files / "int8.onnx") == []
    assert runtimes.tensorrt_lacks(files / "dynamic.onnx") == ["DynamicQuantizeLinear", "MatMulInteger"]


def test_tensorrt_wants_axes_beforehand(tmp_path):
    nodes = [helper.make_node("Squeeze", ["x", "axes"], ["y"]), helper.make_node("Det", ["y"], ["z"])]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2, 2])]
    inputs += [helper.make_tensor_value_info("axes", TensorProto.INT64, [1])]
    outputs = [helper.make_tensor_value_info("z", TensorProto.FLOAT, [])]
    made = helper.make_graph(nodes, "graph", inputs, outputs)
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 22)], ir_version=10), tmp_path / "a.onnx")
    assert runtimes.tensorrt_lacks(tmp_path / "a.onnx") == ["Det", "Squeeze with axes that are computed", "opset 22"]


def test_graphs_take_no_remainder_of_a_negative_number():
    """The remainder of a negative number in ExecuTorch, as in C, has another sign than in Python."""
    sides = {axis: 8 * torch.export.Dim(name, min=2, max=64) for axis, name in ((2, "rows"), (3, "cols"))}
    model = small(depth=1).eval().requires_grad_(False)
    graph = torch.export.export(model, (torch.randn(1, 3, 40, 56),), dynamic_shapes=(sides,)).graph
    names = [getattr(node.target, "__name__", "") for node in graph.nodes]
    assert "mod" in names
    assert "neg" not in names


def test_the_tool(best, files, capsys, monkeypatch):
    monkeypatch.setattr(runtimes, "export_model", lambda _, path: shutil.copy(files / "model.onnx", path))
    assert runtimes.main([str(best), "--rounds=1"]) == 0
    out = capsys.readouterr().out
    assert "| onnxruntime " in out
    assert "TensorRT (matrix of onnx-tensorrt 10.1) lacks: nothing" in out
    with pytest.raises(SystemExit):
        runtimes.main([str(best.with_name("bset.ckpt"))])
    assert "no checkpoint at " in capsys.readouterr().err
