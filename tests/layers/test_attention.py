"""`RelativeAttention` and `RelativeBlock` compared with timm's attention under a mask; arguments that they refuse."""

from copy import deepcopy
from functools import partial

import pytest
import timm
import torch
from timm.layers import Attention, LayerNorm
from timm_versions import needs_timm
from torch import nn
from torch.nn.utils import parametrize

from relvit.layers import RelativeAttention, RelativeBlock, RelativePosition2d, SlopePosition2d
from relvit.layers.positions.rope import RotaryEmbedding2d
from relvit.ops import RelativeTerms, make_grid


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"qkv_bias": True, "gated": True}, marks=needs_timm("1.0.28")),
        {"qk_norm": True, "norm_layer": LayerNorm, "proj_bias": False},
        {"scale_norm": True, "norm_layer": LayerNorm, "attn_head_dim": 4, "dim_out": 7},
    ],
    ids=str,
)
def test_options_are_timms(options):
    torch.manual_seed(0)
    head_dim = options.get("attn_head_dim", 6)
    position = RelativePosition2d(head_dim, 2, rel_terms="b", max_distance=(1, 2), init_std=1.0)
    layer = RelativeAttention(12, num_heads=2, position=position, **options).double().eval()
    plain = Attention(12, num_heads=2, **options).double().eval()
    plain.load_state_dict({name: value for name, value in layer.state_dict().items() if "position" not in name})
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    mask = torch.zeros(2, 9, 9, dtype=torch.float64)
    for i in range(8):
        for j in range(8):
            dy, dx = j // 4 - i // 4, max(-2, min(2, j % 4 - i % 4))
            mask[:, 1 + i, 1 + j] = position.bias_rows[:, dy + 1] + position.bias_cols[:, dx + 2]
    torch.testing.assert_close(layer(x, make_grid(2, 4, prefix=1)), plain(x, attn_mask=mask), rtol=0, atol=1e-12)


@pytest.mark.parametrize("position", [RelativePosition2d(4, 2, "kv"), RelativePosition2d(6, 3, "b")], ids=str)
def test_positions_of_other_heads_are_refused_at_once(position):
    message = "position RelativePosition2d is not for 2 heads of width 6: terms"
    with pytest.raises(ValueError, match=message):
        RelativeAttention(12, num_heads=2, position=position)
    with pytest.raises(ValueError, match=message):
        timm.create_model("test_relvit", embed_dim=12, num_heads=2, position=lambda *_, **__: position)


class Biased(nn.Module):
    """A position with a bias of the queries, of any shape, on all grids or only on larger ones."""

    def __init__(self, *shape, late=False):
        super().__init__()
        self.shape, self.late = shape, late

    def forward(self, grid):
        return RelativeTerms(query_bias=None if self.late and grid.height == 1 else torch.ones(self.shape))


@pytest.mark.parametrize("shape", [(6,), (8, 6), (1, 6), (2, 1), (2, 8, 6)])
def test_a_bias_of_the_queries_has_a_row_for_each_head(shape):
    """With 8 tokens and 6 channels, some of these wrong shapes would broadcast to the shape of the queries."""
    message = r"terms.query_bias has shape .*, expected \(2, 6\)"
    with pytest.raises(ValueError, match=f"position Biased is not for 2 heads of width 6: {message}"):
        RelativeAttention(12, num_heads=2, position=Biased(*shape))
    late = RelativeAttention(12, num_heads=2, position=Biased(*shape, late=True))
    with pytest.raises(ValueError, match=message):
        late(torch.randn(2, 8, 12), make_grid(2, 4))
    late.rope = RotaryEmbedding2d(4, 2)
    with pytest.raises(ValueError, match=message):
        late(torch.randn(2, 8, 12), make_grid(2, 4))


def test_position_and_backend_may_be_set_later():
    torch.manual_seed(0)
    layer = RelativeAttention(12, num_heads=2).eval()
    x, grid = torch.randn(2, 8, 12), make_grid(2, 4)
    torch.testing.assert_close(layer(x, grid), Attention.forward(layer, x))
    layer.position = RelativePosition2d(6, 2, init_std=1.0)
    with_tables = layer(x, grid)
    assert (with_tables - Attention.forward(layer, x)).abs().max() > 1e-2
    layer.backend = "reference"
    torch.testing.assert_close(layer(x, grid), with_tables)
    layer.backend = "referenc"
    with pytest.raises(ValueError, match=r"backend is 'referenc'; allowed are .*did you mean 'reference'"):
        layer(x, grid)


def test_backward_hooks_on_parts_without_effect_run():
    called, x = [], torch.randn(2, 8, 12, requires_grad=True)
    layer = RelativeAttention(12, num_heads=2)
    for name in ("q_norm", "k_norm", "proj_drop"):
        layer.get_submodule(name).register_full_backward_hook(lambda *_, name=name: called.append(name))
    layer(x, make_grid(2, 4)).sum().backward()
    assert sorted(called) == ["k_norm", "proj_drop", "q_norm"]


def test_windows_take_no_memory():
    layer = RelativeAttention(12, num_heads=2)
    layer.window = (2, 2)
    x, grid, keys = torch.randn(1, 8, 12), make_grid(2, 4), make_grid(4, 4)
    with pytest.raises(ValueError, match="windows takes no memory: leave memory and key_grid out"):
        layer(x, grid, memory=x, key_grid=keys)
    layer.window = (2, 4)
    assert layer(x, grid, memory=x, key_grid=keys).shape == x.shape


@pytest.mark.parametrize("rotary", [False, True])
def test_memory_needs_the_grid_of_its_tokens(rotary):
    layer, x = RelativeAttention(16, num_heads=2), torch.randn(1, 8, 16)
    layer.rope = RotaryEmbedding2d(8, 2) if rotary else None
    with pytest.raises(ValueError, match="memory needs key_grid, the Grid of the tokens in memory and x"):
        layer(x, make_grid(2, 4), memory=x)


def test_causal_tokens_see_the_memory():
    torch.manual_seed(0)
    layer = RelativeAttention(12, num_heads=2, position=RelativePosition2d(6, 2, "kvb", init_std=1.0)).double()
    # The text has 7 tokens, of which the first 4 are the memory.
    text, x = make_grid(1, 7), torch.randn(2, 7, 12, dtype=torch.float64)
    last = make_grid(1, 7, coords=torch.tensor([[0, 4], [0, 5], [0, 6]]))
    got = layer(x[:, 4:], last, is_causal=True, memory=x[:, :4], key_grid=text)
    torch.testing.assert_close(got, layer(x, text, is_causal=True)[:, 4:], rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="attn_mask and is_causal exclude each other"):
        layer(x[:, 4:], last, torch.ones(3, 7, dtype=torch.bool), True, x[:, :4], text)


def test_errors():
    with pytest.raises(ValueError, match=r"backend is 'tield'; allowed are .*did you mean 'til"):
        RelativeAttention(12, 2, backend="tield")
    with pytest.raises(ValueError, match="num_heads must divide dim 12, got 5"):
        RelativeAttention(12, 5)
    with pytest.raises(TypeError, match=r"a module from Grid to RelativeTerms.* got the class RelativePosition2d"):
        RelativeAttention(12, 2, position=RelativePosition2d)
    for position, message in (
        (SlopePosition2d(6, 2), "a module of its own for every block.*give a class .*, got a module SlopePosition2d"),
        ("tables", "give a class such as .*, got 'tables'"),
        (
            lambda *_, **__: 6,
            r"position\(6, 2\) returned 6: it must return a module .* RelativePosition2d\(head_dim, num_heads\)",
        ),
    ):
        with pytest.raises(TypeError, match=message):
            RelativeBlock(12, 2, position=position)
    RelativeBlock(12, 2, position=lambda head_dim, num_heads, **_: RelativePosition2d(head_dim, num_heads))


def test_blocks_make_positions_of_their_own():
    block = RelativeBlock(12, 2, position=partial(RelativePosition2d, max_distance=3), dtype=torch.float64)
    assert block.attn.position.key_rows.shape == (7, 6)
    assert block.attn.position.key_rows.dtype == torch.float64


def _with_larger_tables(layer):
    layer.position.key_rows = nn.Parameter(torch.randn(7, 8))
    return layer


def _with_other_data(layer):
    layer.position.key_rows.data = torch.randn(7, 8)
    return layer


def _with_parametrized_tables(layer):
    parametrize.register_parametrization(layer.position, "key_rows", nn.Tanh())
    return layer


@pytest.mark.parametrize(
    "change",
    [
        _with_larger_tables,
        _with_other_data,
        _with_parametrized_tables,
        deepcopy,
        lambda layer: layer.double(),
    ],
)
def test_what_an_earlier_call_has_decided_is_dropped_when_the_layer_changes(change):
    torch.manual_seed(0)
    layer, grid = RelativeAttention(16, 2, position=RelativePosition2d(8, 2, "kv", max_distance=2)), make_grid(2, 3)
    layer(torch.randn(2, 6, 16), grid)
    layer = change(layer)
    x = torch.randn(2, 6, 16, dtype=layer.qkv.weight.dtype)
    found = layer(x, grid)
    found.sum().backward()
    layer.backend = "reference"
    torch.testing.assert_close(found, layer(x, grid), rtol=1e-4, atol=1e-5)
    assert layer.position.value_rows.grad.shape == (5, 8)
