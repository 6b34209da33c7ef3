"""One graph serves all image sizes: compiled, exported, in ONNX; and timm's symbolic tracing works."""

import onnxruntime
import pytest
import timm
import torch
from timm.models import create_feature_extractor

import relvit  # noqa: F401

SIZES = [(24, 16), (16, 80), (136, 32), (64, 64)]


def build(**kwargs):
    torch.manual_seed(0)
    return timm.create_model("test_relvit", patch_size=8, depth=1, class_token=True, rel_init_std=0.5, **kwargs).eval()


def images(height, width):
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))


def any_size():
    height, width = (8 * torch.export.Dim(name, min=2, max=64) for name in ("height", "width"))
    return ({2: height, 3: width},)


VARIANTS = [{"rel_terms": terms} for terms in ("", "k", "v", "b", "qkvb")]
VARIANTS += [
    {"bucketing": "piecewise", "shared_heads": False},
    {"pos_embed": "learn", "img_size": 32},
    {"pos_embed": "axial-sum", "img_size": (32, 48)},
    {"rel_terms": "qkvb", "layout": "joint"},
]
# Within SIZES smaller and larger ones, of both axes.
ABSOLUTE = [{"pos_embed": "learn", "img_size": 32, "rel_terms": "qkvb"}, {"pos_embed": "axial", "img_size": (32, 48)}]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_exported_once_for_all_sizes(variant):
    model = build(**variant)
    exported = torch.export.export(model, (images(24, 16),), dynamic_shapes=any_size()).module()
    for size in SIZES:
        torch.testing.assert_close(exported(images(*size)), model(images(*size)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("variant", [{"layout": "joint"}, *ABSOLUTE], ids=str)
def test_onnx_runtime_gives_the_same_at_all_sizes(variant, tmp_path):
    model = build(**variant)
    program = torch.onnx.export(model, (images(24, 16),), dynamic_shapes=any_size(), dynamo=True, verbose=False)
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for size in SIZES:
        (logits,) = session.run(None, {session.get_inputs()[0].name: images(*size).numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), model(images(*size)).detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("variant", ABSOLUTE, ids=str)
def test_compiled_without_break_into_one_graph_for_all_sizes(variant):
    model = build(**variant)
    graphs = []

    def count(graph, _example):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=count)
    with torch.no_grad():
        for size in SIZES:
            torch.testing.assert_close(compiled(images(*size)), model(images(*size)), rtol=0, atol=1e-5)
    assert len(graphs) == 1


@pytest.mark.parametrize("variant", ABSOLUTE, ids=str)
def test_compiled_training_step_has_the_gradients_of_the_plain_one(variant):
    model = build(**variant)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in SIZES[:2]:
        grads = [
            torch.autograd.grad(net(images(*size)).square().sum(), list(model.parameters()))
            for net in (model, compiled)
        ]
        for expected, grad in zip(*grads, strict=True):
            torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", [{}, {"rel_terms": "qkvb"}, {"layout": "joint"}, *ABSOLUTE], ids=str)
def test_symbolic_tracing_for_feature_extraction(variant):
    model = build(**{"img_size": 32, **variant})
    traced = create_feature_extractor(model, ["head"])
    x = images(32, 32)
    assert torch.equal(traced(x)["head"], model(x))
