"""One compiled graph serves all image sizes, for relvit's and retrofitted models, and trains them."""

import pytest
import timm
import torch
from functorch.compile import make_boxed_func
from graph_cases import FREE, HALTING, JOINT, SIZES, VARIANTS, build, images
from torch._dynamo.backends.common import aot_autograd

import relvit

# Each test compiles, which takes long.
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("variant", "most"),
    [
        ({"rel_terms": "qkvb", "pos_embed": "axial", "img_size": (32, 48), "reach": "stretch-logn"}, 1),
        # The rotary embedding is stored for one size, which gets its own graph.
        ({"case": "dinov3"}, 2),
        *((variant, 1) for variant in (*JOINT, *FREE, HALTING)),
    ],
    ids=str,
)
def test_compiled_without_break_into_one_graph_for_all_sizes(variant, most):
    model, graphs = build(**variant), []

    def count(graph, _example):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=count)
    with torch.no_grad():
        for size in [*SIZES[1:], SIZES[0]]:
            torch.testing.assert_close(compiled(images(*size)), model(images(*size)), rtol=0, atol=1e-5)
    assert len(graphs) <= most


@pytest.mark.parametrize("variant", [VARIANTS[0], JOINT[0]], ids=str)
def test_compiled_training_step_has_the_gradients_of_the_plain_one(variant):
    model = build(**variant)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    parameters = [p for name, p in model.named_parameters() if "pos" in name or "prefix_bias" in name]
    # By default Dynamo first makes a graph for any values of Python's floats, and later one for the actual values.
    with torch._dynamo.config.patch(specialize_float=True):
        for size in SIZES[:2]:
            want, got = (
                torch.autograd.grad(net(images(*size)).square().sum(), parameters) for net in (model, compiled)
            )
            for expected, grad in zip(want, got, strict=True):
                torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", JOINT, ids=str)
def test_the_pairs_of_a_compiled_joint_bias_have_two_axes(variant):
    """With one axis of pairs, Inductor needs minutes to find rows and columns, because sizes are expressions."""
    model, shapes = build(**variant), []

    def record(graph, _example):
        values = (node.meta.get("val") for node in graph.graph.nodes)
        shapes.extend(tuple(value.shape) for value in values if isinstance(value, torch.Tensor))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=record))
    compiled(images(*SIZES[0])).square().sum().backward()
    tokens = SIZES[0][0] * SIZES[0][1] // 8**2 + (variant["case"] == "beit")
    assert any(shape[-2:] == (tokens, tokens) for shape in shapes)
    assert not [shape for shape in shapes if tokens**2 in shape]


def test_a_second_size_compiled_by_inductor():
    model = timm.create_model("vit_relpos_small_patch16_224", depth=1, embed_dim=32, num_heads=2, num_classes=3)
    for name, parameter in model.named_parameters():
        if "mlp" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    relvit.retrofit(model.eval())
    torch._dynamo.reset()
    names = []

    def backend(graph, examples):
        # `test_beit_sam_swin.py` has Inductor compile the graph of a first size.
        names.append("inductor" if names else "eager")
        return torch._dynamo.lookup_backend(names[-1])(graph, examples)

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        # The second size is not square: the graph of a square one would not serve the third size.
        for size in ((64, 64), (48, 80), (32, 32)):
            torch.testing.assert_close(compiled(images(*size)), model(images(*size)), rtol=0, atol=1e-5)
    assert names == ["eager", "inductor"]
