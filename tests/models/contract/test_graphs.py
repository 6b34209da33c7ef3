"""One graph serves all image sizes: compiled, exported, or ONNX, for relvit's and retrofitted models."""

from functools import cache

import pytest
import timm
import torch
from functorch.compile import make_boxed_func
from retrofit_cases import OWN, retrofitted
from retrofit_cases import build as build_original
from torch._dynamo.backends.common import aot_autograd
from vits import small

import relvit
from relvit.models import set_reach

# Each test compiles or exports, which takes long; tests of commands that are not slow export one model.
pytestmark = pytest.mark.slow

SIZES = [(24, 16), (16, 80), (136, 32), (64, 64)]


def build(reach="trained", **kwargs):
    """Build a retrofitted model for `case`, or else a relvit model with these arguments."""
    if (case := kwargs.get("case")) in OWN:
        return retrofitted(build_original(case)).float()
    if case:
        return set_reach(retrofitted(build_original(case, depth=1), "kv", max_distance=2).float(), reach)
    if "name" in kwargs:
        return small(**{"depth": 1, **kwargs}).eval()
    torch.manual_seed(0)
    start = {} if "position" in kwargs else {"rel_init_std": 0.5}
    arguments = {"patch_size": 8, "depth": 1, "class_token": True, **start, **kwargs}
    model = timm.create_model("test_relvit", **arguments).eval()
    return set_reach(model, reach)


def images(height, width):
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))


def any_size(variant):
    batch = {0: torch.export.Dim("batch", min=1, max=8)} if variant in FREE else {}
    height, width = (8 * torch.export.Dim(name, min=2, max=64) for name in ("height", "width"))
    return (batch | {2: height, 3: width},)


# The grid of the absolute embedding is smaller than some of SIZES and larger than others, along both axes.
PER_HEAD = {"pos_embed": "learn", "img_size": 32, "rel_terms": "kvb", "shared_heads": False}
FREE = [
    {"name": "test_relvit_aft", "class_token": True, "kernel_size": 3},
    {"name": "test_relvit_aft", "mixer": "local", "img_size": (32, 48)},
]
HALTING = {"name": "test_relvit_universal", "depth": 2, "halting": "act", "class_token": True}
# These models have a bias per pair of offsets; BEiT's prefix tokens have their own bias.
JOINT = [{"case": "beit"}, {"case": "relpos"}]
VARIANTS = [
    PER_HEAD | {"reach": "stretch-logn"},
    {"case": "clip", "reach": "stretch-mirror"},
    {"case": "eva02", "reach": "mirror"},
    {"pos_embed": "axial-sum", "img_size": (32, 48), "layout": "joint", "mlp_chunk": 4},
    {"case": "rope mixed"},
    {"position": "fire", "img_size": 32, "reach": "stretch"},
    {"position": "cpb"},
    {"position": "pape", "img_size": 32, "reach": "stretch"},
    {"position": "low-rank"},
    {"rope": "mixed", "embed_dim": 64, "rel_terms": "v", "prefix_bias": True},
    {"position": "xl", "band_rows": 2, "memory_rows": 3, "class_token": False},
    {"rel_terms": "kb", "bucketing": "piecewise"},
    {"case": "beit"},
    {"case": "relpos mlp"},
    *FREE,
    HALTING,
]


@cache
def exported(number):
    """Return a model of VARIANTS and its exported program for all sizes."""
    model = build(**VARIANTS[number])
    # timm's own DINOv3 cannot be exported for all sizes, either.
    return model, torch.export.export(model, (images(32, 40),), dynamic_shapes=any_size(VARIANTS[number]))


def name(number):
    return str(VARIANTS[number])


@pytest.mark.parametrize("number", range(len(VARIANTS)), ids=name)
def test_exported_once_for_all_sizes(number):
    model, program = exported(number)
    module = program.module()
    for size in SIZES:
        torch.testing.assert_close(module(images(*size)), model(images(*size)), rtol=0, atol=1e-4)


@pytest.mark.parametrize("rel_terms", ["kb", "qkvb"])
def test_exported_for_any_number_of_images_it_takes_one(rel_terms):
    model, batch = build(rel_terms=rel_terms, img_size=32), {0: torch.export.Dim("batch", min=1, max=8)}
    shapes = (batch | any_size({})[0],)
    module = torch.export.export(model, (images(32, 40),), dynamic_shapes=shapes).module()
    for x in (images(24, 16)[:1], images(24, 16)):
        torch.testing.assert_close(module(x), model(x), rtol=0, atol=1e-4)


@pytest.mark.parametrize("number", [0, 1, VARIANTS.index(FREE[0])], ids=name)
def test_onnx_runtime_gives_the_same_at_all_sizes(number, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model, program = exported(number)
    torch.onnx.export(program, dynamo=True, verbose=False).save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for size in SIZES:
        (logits,) = session.run(None, {session.get_inputs()[0].name: images(*size).numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), model(images(*size)).detach(), rtol=0, atol=1e-5)


FOUR_JOINT = {"layout": "joint", "rel_terms": "qkvb"}


@pytest.mark.parametrize(
    "variant", [PER_HEAD, FOUR_JOINT, {"case": "clip", "reach": "mirror"}, *JOINT, FREE[1], HALTING], ids=str
)
def test_the_older_onnx_exporter_serves_other_numbers_of_images(variant, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model, file = build(**variant), tmp_path / "model.onnx"
    size = variant.get("img_size", 32)
    two = images(*(size if isinstance(size, tuple) else (size, size)))
    options = {"input_names": ["images"], "dynamic_axes": {"images": {0: "batch"}}}
    torch.onnx.export(model, (two[:1],), file, dynamo=False, **options)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"images": two.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), model(two).detach(), rtol=0, atol=1e-5)


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
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        # The second size is not square: the graph of a square one would not serve the third size.
        for size in ((64, 64), (48, 80), (32, 32)):
            torch.testing.assert_close(compiled(images(*size)), model(images(*size)), rtol=0, atol=1e-5)
