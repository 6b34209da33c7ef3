"""The choice of a backend: `choose` names the backend that runs, and follows the rules for GPUs."""

import pytest
import torch
from draws import draw_case, leaves
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from relvit.ops import RelativeTerms, attention, choose, make_grid, relative_attention
from relvit.ops.inputs import AttentionInputs, checked
from relvit.utils.old_torch import BUILDS_KERNELS

pytestmark = pytest.mark.usefixtures("several_tiles")


@pytest.mark.parametrize(
    ("case", "options", "backend", "reason"),
    [
        ({}, {"attn_mask": torch.ones(54, 54, dtype=torch.bool), "dropout_p": 0.1}, "tiled", "on the CPU"),
        ({"batch": 40}, {}, "tiled", "passes over a tile"),
        ({}, {}, "lean", "so few pairs"),
        ({"layout": "joint"}, {}, "gathered", "joint tables"),
        ({"layout": "joint", "which": "b", "per_head": "b"}, {}, "fused", "small grid"),
        (
            {"layout": "joint", "which": "b", "dim": 2, "height": 9, "batch": 12},
            {},
            "tiled",
            "slices add the joint bias",
        ),
        ({"which": ""}, {}, "fused", "without relative terms"),
    ],
)
@pytest.mark.parametrize("gradient", [False, True])
def test_auto_runs_what_it_says(case, options, backend, reason, gradient, monkeypatch):
    q, k, v, terms, grid = draw_case(**{"height": 6, "width": 9, **case})
    if gradient:
        leaves(q, k, v, terms)
    ran = spied_backends(monkeypatch)
    relative_attention(q, k, v, terms, grid, **options)
    choice = choose(q, k, v, terms, grid, **options)
    assert ran == [backend] == [choice.backend]
    assert reason in choice.reason
    assert ("no gradient" in choice.keeps) == (not gradient)


def spied_backends(monkeypatch):
    """Record the names of the backends that have run so far."""
    ran = []
    for name, module in attention.BACKENDS.items():
        original = module.relative_attention
        spy = lambda *inputs, name=name, run=original, **named: ran.append(name) or run(*inputs, **named)  # noqa: E731
        monkeypatch.setattr(module, "relative_attention", spy)
    return ran


def test_auto_takes_what_has_all_derivatives_where_they_are_asked_for(monkeypatch):
    q, k, v, terms, grid = draw_case(3, 4)
    ran = spied_backends(monkeypatch)
    with sdpa_kernel(SDPBackend.MATH):
        relative_attention(q, k, v, terms, grid)
        assert "second derivatives" in choose(q, k, v, terms, grid).reason
    torch.func.vmap(lambda q: relative_attention(q[None], k[:1], v[:1], terms, grid))(q)
    assert ran == ["fused", "gathered"]


def test_tiles_refuse_to_be_part_of_graphs_and_transforms():
    q, k, v, terms, grid = draw_case(3, 4)

    def attend(q, k, v):
        return relative_attention(q, k, v, terms, grid, backend="tiled")

    # The compiler of PyTorch 2.8 raises an error that does not contain the message.
    with pytest.raises(Exception, match=r"backend 'tiled' cannot be compiled|Observed exception"):
        torch.compile(attend, backend="eager", fullgraph=True)(q, k, v)
    with pytest.raises(ValueError, match="backend 'tiled' cannot be compiled"):
        torch.func.grad(lambda q: attend(q, k, v).sum())(q)


def on_a_gpu(width=96, dtype=torch.bfloat16, layout="separate", field=0, which="kv"):
    q, k, v, terms, grid = draw_case(8, width - 64 - 8, layout=layout, which=which, dim=64, batch=1)
    # The width is 64 for the contents, plus 8 rows, plus the columns.
    inputs = AttentionInputs(q.to(dtype), k.to(dtype), v.to(dtype), terms, grid)
    return attention._choose(checked(inputs), "cuda")[field]


@pytest.mark.skipif(not BUILDS_KERNELS, reason="PyTorch >= 2.9")
def test_kernels_of_our_own_where_stock_ones_end():
    pytest.importorskip("triton")
    reasons = {width: on_a_gpu(width=width, field=1) for width in (96, 129, 256)}
    assert [width for width, reason in reasons.items() if "'triton' keeps half" in reason] == [129, 256]
    assert on_a_gpu(width=257) == on_a_gpu(width=257, dtype=torch.float32) == "triton"
    # 'tiled' computes inputs that these kernels refuse.
    assert on_a_gpu(width=257, dtype=torch.float64) == on_a_gpu(width=257, which="qkv") == "tiled"


@pytest.mark.skipif(not BUILDS_KERNELS, reason="PyTorch >= 2.9")
def test_a_joint_bias_takes_kernels_of_its_own_on_gpus(monkeypatch):
    pytest.importorskip("triton")
    assert on_a_gpu(layout="joint", which="b") == "triton"
    assert "look the joint bias up" in on_a_gpu(layout="joint", which="b", field=1)
    assert on_a_gpu(layout="joint", which="kb") == "gathered"
    # The grids have 704 and 2,944 tokens.
    small, large = (on_a_gpu(layout="joint", which="b", dtype=torch.float64, width=width) for width in (160, 440))
    assert (small, large) == ("fused", "gathered")
    monkeypatch.setattr(attention, "is_eager", lambda: False)
    assert on_a_gpu(layout="joint", which="b") == "gathered"


def test_the_rules_for_gpus(monkeypatch):
    assert on_a_gpu() == on_a_gpu(width=256) == on_a_gpu(dtype=torch.float32) == "lean"
    assert on_a_gpu(which="qkv") == "fused"
    assert on_a_gpu(dtype=torch.float64) == "tiled"
    monkeypatch.setattr(attention.triton, "refusal", lambda *_: "is not installed")
    assert on_a_gpu(width=257) == "tiled"
    monkeypatch.setattr(attention, "is_compiling", lambda: True)
    assert on_a_gpu(width=257) == on_a_gpu(layout="joint", which="b") == "fused"
    assert on_a_gpu(layout="joint") == "gathered"


def test_a_device_may_have_a_number():
    *tensors, grid = draw_case(4, 5)
    q, k, v, terms = tree_map_only(torch.Tensor, torch.Tensor.float, tensors)
    expected = choose(q, k, v, terms, grid, device="cuda")
    assert expected.backend == "lean"
    for device in ("cuda:0", torch.device("cuda", 1)):
        assert choose(q, k, v, terms, grid, device=device) == expected
    # Tensors on the meta device are enough.
    assert (
        choose(*tree_map_only(torch.Tensor, lambda part: part.to("meta"), (q, k, v, terms)), grid, device="cuda")
        == expected
    )
    with pytest.raises(RuntimeError, match="device string: gpu"):
        choose(q, k, v, terms, grid, device="gpu")


@pytest.mark.parametrize(("name", "given"), [("backend", "fused"), ("scal", 1.0)])
def test_arguments_that_it_lacks(name, given):
    q, k, v = torch.randn(3, 1, 2, 4, 8).unbind()
    with pytest.raises(TypeError, match=f"choose has no argument '{name}'.*, allowed: .*scale"):
        choose(q, k, v, RelativeTerms(), make_grid(2, 2), **{name: given})
