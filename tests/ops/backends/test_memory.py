"""No N x N tensor is kept: neither among the tensors for backward nor among all allocations."""

import weakref
from functools import partial

import pytest
import torch
from draws import draw_case
from torch.utils.checkpoint import checkpoint

from relvit.ops import AxisTables, JointTable, RelativeTerms, make_grid, relative_attention
from relvit.ops.backends import gathered, tiled
from relvit.utils.memory import allocations

HEIGHT, WIDTH, PREFIX, HEADS, BATCH, DIM = 20, 16, 1, 2, 2, 32
TOKENS = HEIGHT * WIDTH + PREFIX
ONE_SQUARE = BATCH * HEADS * TOKENS * TOKENS
ONE_AUGMENTED = BATCH * HEADS * TOKENS * (DIM + HEIGHT + WIDTH + 8)
TILE = BATCH * HEADS * TOKENS * 32
assert max(TILE, ONE_AUGMENTED) < ONE_SQUARE / 4


def attention_of(which, mask="none", **options):
    """Return the operation as a function without arguments."""
    generator = torch.Generator().manual_seed(0)
    grid = make_grid(HEIGHT, WIDTH, PREFIX)
    if mask == "valid":
        grid = grid._replace(valid=torch.rand(BATCH, TOKENS - PREFIX, generator=generator) < 0.7)
    elif mask == "keys":
        options["attn_mask"] = torch.rand(BATCH, 1, 1, TOKENS, generator=generator) < 0.7
    q, k, v = (torch.randn(BATCH, HEADS, TOKENS, DIM, generator=generator).requires_grad_() for _ in range(3))
    table = lambda: torch.randn(15, DIM, generator=generator).requires_grad_()  # noqa: E731
    terms = RelativeTerms(*(AxisTables(table(), table()) if letter in which else None for letter in "qkv"))
    if "b" in which:
        bias = torch.randn(HEADS, 7, 7, generator=generator)
        terms = terms._replace(bias=JointTable(bias.requires_grad_()))
    return partial(relative_attention, q, k, v, terms, grid, **options)


def measured(attend):
    """Count the float32 numbers that forward keeps, including the output, and those of the largest allocation."""
    out = []
    attend()  # The first call caches the indices of the raster.
    kept = sum(allocations(lambda: out.append(attend())))
    largest = max(allocations(lambda: attend().sum().backward()))
    return kept // 4, largest // 4


@pytest.mark.parametrize(("which", "mask"), [("k", "none"), ("kv", "valid"), ("v", "keys")])
def test_fused_keeps_and_computes_nothing_of_n_by_n(which, mask):
    kept, largest = measured(attention_of(which, mask, backend="fused"))
    # 'fused' keeps the augmented output, its sum with the value term, logits and marginals; augmented q, k and v would
    # be three more tensors.
    assert kept < 3 * ONE_AUGMENTED
    assert largest <= ONE_AUGMENTED


@pytest.mark.parametrize(
    ("backend", "layout"), [("fused", "separate"), ("gathered", "separate"), ("gathered", "joint")]
)
def test_a_checkpoint_around_attention_keeps_its_own_inputs_alone(backend, layout):
    x, *_, terms, grid = draw_case(HEIGHT, WIDTH, PREFIX, which="qkvb", dim=DIM, layout=layout)
    x, out = x.requires_grad_(), []

    def attend(x):
        return relative_attention(x + 1, x + 2, x + 3, terms, grid, backend=backend)

    # The first call also caches the indices of the raster, so do not measure it.
    whole = attend(x)
    assert sum(allocations(lambda: out.append(checkpoint(attend, x, use_reentrant=False)))) < 1.1 * x.nbytes
    got, expected = (torch.autograd.grad(part.square().sum(), x) for part in (out[0], whole))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["lean", "tiled", "fused", "gathered"])
def test_a_graph_without_backward_is_freed_with_its_output(backend):
    """A model that is evaluated outside of `torch.no_grad` makes such graphs."""
    q, k, v, terms, grid = draw_case(2, 3)
    kept = weakref.ref(v.requires_grad_())
    out = relative_attention(q, k, v, terms, grid, backend=backend)
    del q, k, v, terms
    assert kept() is not None
    del out
    assert kept() is None


@pytest.mark.slow
def test_a_compiled_graph_recomputes_the_augmented_vectors_too():
    attend = attention_of("kv")
    torch._dynamo.reset()
    # This backend has the partitioner of the default compiler, but generates no code.
    compiled = torch.compile(attend, backend="aot_eager_decomp_partition")
    torch.testing.assert_close(compiled(), attend(), rtol=0, atol=1e-5)
    assert measured(compiled)[0] < 3 * ONE_AUGMENTED


@pytest.mark.parametrize(("which", "mask", "dropout_p"), [("k", "none", 0.1), ("kv", "valid", 0.0), ("v", "keys", 0.1)])
def test_gathered_keeps_nothing_and_computes_one_tile_at_a_time(which, mask, dropout_p, monkeypatch):
    monkeypatch.setattr(gathered, "TILE_LOGITS", TILE)
    kept, largest = measured(attention_of(which, mask, backend="gathered", dropout_p=dropout_p))
    output = BATCH * HEADS * TOKENS * DIM
    assert kept < 1.5 * output
    assert largest <= max(TILE, output)


@pytest.mark.parametrize(
    ("which", "mask", "dropout_p"),
    [("", "none", 0.1), ("kv", "none", 0.0), ("kv", "valid", 0.1), ("q", "keys", 0.1), ("b", "none", 0.0)],
)
def test_tiled_keeps_logits_and_marginals_and_computes_one_tile_at_a_time(which, mask, dropout_p, monkeypatch):
    monkeypatch.setattr(tiled, "TILE_LOGITS", TILE // torch.get_num_threads())
    kept, largest = measured(attention_of(which, mask, backend="tiled", dropout_p=dropout_p))
    axes, entries = HEIGHT + WIDTH, 32
    channels = DIM
    # 'tiled' keeps logits (by table entry if there are fewer entries), and a copy of the queries or keys, head by head.
    channels += entries + DIM if "k" in which else 0
    channels += axes + DIM if "q" in which else 0
    channels += entries if "v" in which else 0
    offsets = HEADS * (2 * HEIGHT - 1) * (2 * WIDTH - 1) if "b" in which else 0
    assert kept < 1.02 * BATCH * HEADS * TOKENS * channels + offsets
    assert largest <= max(TILE, ONE_AUGMENTED)


def test_the_measurement_sees_n_by_n_where_it_exists():
    # With dropout, PyTorch's CPU attention makes N x N tensors, as the docstring of `relative_attention` warns.
    assert measured(attention_of("kv", backend="fused", dropout_p=0.1))[1] >= ONE_SQUARE
