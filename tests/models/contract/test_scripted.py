"""TorchScript and symbolic tracing: the numbers of the eager model, at other image sizes and in another process too."""

import subprocess
import sys

import pytest
import timm
import torch
from timm.layers import set_scriptable
from timm.models import create_feature_extractor
from vits import SMALL, assert_same, images, small

from relvit.layers import RelativeAttention, RelativePosition2d
from relvit.ops import AxisTables, JointTable, RelativeTerms, make_grid, relative_attention
from relvit.ops.backends.scripted import scripted_attention

SIZES = [(24, 16), (16, 40), (8, 72)]
VARIANTS = [
    {"rel_terms": "qkvb", "class_token": True, "reg_tokens": 2, "bucketing": "piecewise", "shared_heads": False},
    {"rel_terms": "qkvb", "layout": "joint", "pos_embed": "axial-sum"},
    {"position": "slopes", "class_token": True, "global_pool": "token", "pos_embed": "learn"},
    {"position": "xl", "class_token": True},
    {"position": "slopes-euclidean", "class_token": True},
    {"position": "fire"},
    {"position": "cpb"},
    {"position": "pape", "class_token": True},
    {"position": "low-rank"},
    {"rope": "mixed", "embed_dim": 16, "rel_terms": "kb", "class_token": True, "prefix_bias": True},
    {"rope": "axial", "embed_dim": 16, "rel_terms": ""},
    {"position": "slopes", "max_distance": (1, 2), "dynamic_img_pad": True, "pos_embed": "axial"},
    {"rel_terms": "", "patch_drop_rate": 0.5, "init_values": 0.1},
    {"name": "test_relvit_lsh", "patch_size": 4, "bucket_size": 2},
    *({"name": "test_relvit_universal", "halting": halting, "class_token": True} for halting in ("", "act")),
]
FREE = [
    {"name": "test_relvit_aft", "kernel_size": (3, 5)},
    {"name": "test_relvit_aft", "mixer": "full", "bias_dim": 5, "reg_tokens": 1},
    {"name": "test_relvit_aft", "mixer": "local", "bias_dim": 5, "window": (1, 2)},
    {"name": "test_relvit_aft", "mixer": "simple"},
]


def scriptable(**kwargs):
    with set_scriptable(True):
        return small(**{"depth": 2, **kwargs}).eval()


@pytest.mark.parametrize("variant", [*VARIANTS, *FREE], ids=str)
def test_scripted_at_all_sizes(variant):
    model = scriptable(**variant)
    scripted = torch.jit.script(model)
    # Of sums over steps TorchScript makes kernels of its own.
    atol = 1e-6 if variant.get("halting") else 0
    for size in SIZES * 2:  # TorchScript compiles again once it has seen sizes
        assert_same(scripted(images(*size)), model(images(*size)), atol=atol)
    if variant.get("dynamic_img_pad"):
        assert_same(scripted(images(20, 13)), model(images(20, 13)), atol=0)
    else:
        with pytest.raises(torch.jit.Error, match="image height 21 is not a multiple of the patch size"):
            scripted(images(21, 16))


@pytest.mark.parametrize("variant", VARIANTS[:4], ids=str)
def test_scripted_with_masks(variant):
    model = scriptable(**variant)
    scripted = torch.jit.script(model)
    mask = torch.rand(1, 1, *[model.num_prefix_tokens + 10] * 2) > 0.3
    assert_same(scripted(images(16, 40), attn_mask=mask), model(images(16, 40), attn_mask=mask), atol=0)
    assert_same(scripted(images(16, 40), is_causal=True), model(images(16, 40), is_causal=True), atol=0)


@pytest.mark.parametrize("variant", [*VARIANTS[1:4], *FREE], ids=str)
def test_scripted_training_step(variant):
    model = scriptable(drop_path_rate=0.2, **variant).train()
    results = []
    for net in (model, torch.jit.script(model)):
        torch.manual_seed(3)
        out = net(images(16, 40))
        grads = torch.autograd.grad(out.square().sum(), list(net.parameters()), allow_unused=True)
        results.append([out, *grads])
    assert_same(*results, atol=1e-4)


@pytest.mark.parametrize("variant", [*VARIANTS[:5], FREE[0], FREE[2]], ids=str)
def test_traced_for_all_sizes(variant):
    model = scriptable(depth=1, **variant)
    traced = torch.jit.trace(model, images())
    for size, batch in zip(SIZES, (2, 5, 1), strict=True):
        assert_same(traced(images(*size, batch=batch)), model(images(*size, batch=batch)), atol=1e-5)


@pytest.mark.slow
def test_saved_scripts_need_relvit_imported_and_saved_traces_nothing(tmp_path):
    model = scriptable(class_token=True)
    torch.jit.script(model).save(tmp_path / "scripted.pt")
    torch.jit.trace(model, images()).save(tmp_path / "traced.pt")
    torch.save([images(), images(16, 40), model(images()), model(images(16, 40))], tmp_path / "expected.pt")
    code = """
import sys, torch
here, there, at_here, at_there = torch.load(sys.argv[1] + "/expected.pt")
for name in ("traced", "scripted"):
    if name == "scripted":
        import relvit
    net = torch.jit.load(f"{sys.argv[1]}/{name}.pt")
    torch.testing.assert_close(net(here), at_here, rtol=0, atol=1e-6)
    torch.testing.assert_close(net(there), at_there, rtol=0, atol=1e-6)
print("same", [name for name in ("lightning", "pytorch_lightning", "matplotlib") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    # And relvit imports neither Lightning nor Matplotlib.
    assert done.stdout == "same []\n"


@pytest.mark.parametrize("variant", [*VARIANTS[:5], *FREE], ids=str)
def test_symbolic_tracing_has_the_same_outputs_and_gradients(variant):
    model = scriptable(**variant)
    traced = create_feature_extractor(model, ["blocks.0", "head"])
    x = images()
    first = model.forward_intermediates(x, [0], output_fmt="NLC", return_prefix_tokens=True, intermediates_only=True)[0]
    first = torch.cat((first[1], first[0]), dim=1) if model.num_prefix_tokens else first
    expected, got = model(x), traced(x)
    assert_same(got["head"], expected, atol=0)
    assert_same(got["blocks.0"], first, atol=0)
    names = [name for name, _ in model.named_parameters()]
    grads = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    of_traced = torch.autograd.grad(got["head"].square().sum(), [traced.get_parameter(name) for name in names])
    assert_same(of_traced, grads, atol=0)
    assert_same(torch.jit.script(traced)(x)["head"], expected.detach(), atol=0)


@pytest.mark.parametrize("kind", ["separate", "joint"])
def test_operator_is_the_operation(kind):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    q, k, v = draw(2, 2, 7, 4), draw(2, 2, 7, 4), draw(2, 2, 7, 4)
    if kind == "separate":
        terms = RelativeTerms(key=AxisTables(draw(3, 4), draw(5, 4)), bias=AxisTables(draw(2, 3), draw(2, 5)))
    else:
        terms = RelativeTerms(query=JointTable(draw(3, 5, 4)), value=JointTable(draw(2, 3, 5, 4)))
    leaves = [q, k, v, *[table for term in terms[:4] if term is not None for table in term]]
    coords = torch.stack((torch.arange(6) // 4, torch.arange(6) % 4), dim=-1)
    valid = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    grid = make_grid(2, 4, prefix=1, coords=coords, valid=valid)
    mask = torch.rand(7, 7, generator=generator) > 0.2
    got = scripted_attention(q, k, v, terms, grid, mask, False, 0.0, 0.3, "auto")
    expected = relative_attention(q, k, v, terms, grid, attn_mask=mask, scale=0.3, backend="reference")
    assert_same(got, expected)
    assert_same(*(torch.autograd.grad(out.sin().sum(), leaves) for out in (got, expected)))


def test_scripted_layer_on_a_grid_of_its_own():
    position = RelativePosition2d(head_dim=6, num_heads=2, rel_terms="kvb", max_distance=1)
    coords = torch.rand(2, 8, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :5]
    grid = make_grid(2, 4, prefix=1, coords=torch.stack((coords // 4, coords % 4), dim=-1))
    x = torch.randn(2, 6, 12)
    for net in (RelativeAttention(12, 2, position=position).eval(), RelativeAttention(12, 2).eval()):
        assert_same(torch.jit.script(net)(x, grid), net(x, grid), atol=0)


def test_timm_makes_models_scriptable_by_argument():
    torch.manual_seed(0)
    model = timm.create_model("test_relvit", scriptable=True, **SMALL).eval()
    assert_same(torch.jit.script(model)(images()), model(images()), atol=0)
