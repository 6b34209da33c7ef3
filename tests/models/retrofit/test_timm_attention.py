"""timm's attention modules after a retrofit compared with the formula, pair by pair in float64."""

import pytest
import torch
from draws import all_places
from oracles import relative_attention as oracle
from timm.layers import Attention, AttentionRope, LayerNorm, RotaryEmbeddingCat
from timm.models.eva import EvaAttention
from timm_versions import since
from torch import nn

from relvit.layers import RelativePosition2d
from relvit.models.retrofit.timm_attention import TIMM_ATTENTIONS, GridArgument
from relvit.ops import make_grid

HEIGHT, WIDTH, PREFIX, DIM, HEADS, HEAD_DIM = 2, 3, 2, 16, 2, 8
NORMS = {"qk_norm": True, "scale_norm": True, "norm_layer": LayerNorm}
ROPE = {"num_prefix_tokens": PREFIX}
# Each kind has its class, its arguments, and whether the rotation pairs the halves of a vector (None: no rotation).
KINDS = {
    "plain": (Attention, {"qkv_bias": True}, None),
    "plain, norms, gate": (Attention, {**NORMS, "gated": True}, None),
    "plain, other head width": (Attention, {"attn_head_dim": 12}, None),
    "rope": (AttentionRope, ROPE, False),
    "rope, halves, norms, gate": (AttentionRope, {**ROPE, **NORMS, "rotate_half": True, "gated": True}, True),
    "rope, no rotation": (AttentionRope, ROPE, None),
    "rope, shared keys": (
        AttentionRope,
        {**ROPE, **NORMS, "num_heads": 4, "num_kv_heads": 2, "qkv_fused": False},
        False,
    ),
    "eva": (EvaAttention, {**ROPE, **NORMS}, False),
    "eva, biases apart": (EvaAttention, {**ROPE, "scale_norm": False, "qkv_bias_separate": True}, False),
    "eva, projections apart": (EvaAttention, {**ROPE, "scale_norm": False, "qkv_fused": False}, True),
    "eva, no bias": (EvaAttention, {**ROPE, "scale_norm": False, "qkv_bias": False, "rotate_half": True}, True),
}


def build(kind, **kwargs):
    torch.manual_seed(0)
    cls, arguments, half = KINDS[kind]
    if half is not None or {"gated", "num_kv_heads"} & arguments.keys():
        since("1.0.31")
    if cls is EvaAttention and half:
        arguments = {**arguments, "rotate_half": True}
    attn = cls(DIM, **{"num_heads": HEADS, **arguments})
    attn.__class__ = TIMM_ATTENTIONS[cls]
    attn.position = RelativePosition2d(attn.head_dim, attn.num_heads, max_distance=(1, 2), **kwargs)
    attn.backend = "auto"
    for parameter in attn.parameters():
        nn.init.normal_(parameter, std=0.5)
    return attn.double(), half


def rotation(head_dim, rows, cols, half):
    rope = RotaryEmbeddingCat(head_dim, in_pixels=False, temperature=10.0, rotate_half=half, feat_shape=None).double()
    return rope.get_embed((rows, cols), dtype=torch.float64)


def projected(attn, x, rope=None, half=False):
    """Compute queries, keys and values by their formula, and the rotated queries and keys."""
    weights, biases = [], []
    for index, letter in enumerate("qkv"):
        projection = getattr(attn, f"{letter}_proj", None)
        if projection is None:
            weights.append(attn.qkv.weight.chunk(3)[index])
            bias = None if attn.qkv.bias is None else attn.qkv.bias.chunk(3)[index]
            biases.append(getattr(attn, f"{letter}_bias", None) if bias is None else bias)
        else:
            weights.append(projection.weight)
            biases.append(projection.bias)
    parts = []
    for weight, bias in zip(weights, biases, strict=True):
        part = x @ weight.T if bias is None else x @ weight.T + bias
        heads = part.unflatten(-1, (-1, attn.head_dim)).transpose(1, 2)
        # The query heads h and h + 1 share the keys of head h // 2.
        group = attn.num_heads // heads.shape[1]
        parts.append(torch.stack([heads[:, h // group] for h in range(attn.num_heads)], dim=1))
    q, k, v = attn.q_norm(parts[0]), attn.k_norm(parts[1]), parts[2]
    contents = (q, k) if rope is None else tuple(oracle.rotate(part, rope, PREFIX, half) for part in (q, k))
    return q, k, v, contents


def expected(attn, x, terms, places, rope=None, half=False, mask=None):
    """Compute the projections by their formula, and attention by the oracle."""
    q, k, v, contents = projected(attn, x, rope, half)
    out = oracle.attention(*contents, v, terms, places, position_query=q, position_key=k, mask=mask)
    out = attn.norm(out.transpose(1, 2).flatten(2))
    if getattr(attn, "gate", None) is not None:
        out = out * torch.sigmoid(attn.gate(x))
    return attn.proj(out)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_shown_weights_equal_brute_force(kind):
    attn, half = build(kind, rel_terms="qkvb", shared_heads="gate" in kind)
    grid = make_grid(HEIGHT, WIDTH, PREFIX)
    x = torch.randn(2, PREFIX + HEIGHT * WIDTH, DIM, dtype=torch.float64)
    rope = None if half is None else rotation(attn.head_dim, HEIGHT, WIDTH, half)
    places, terms = all_places(grid, 2), attn.position(grid)
    want = expected(attn, x, terms, places, rope, half)
    # The grid may be the value of either argument.
    arguments = {} if rope is None else {"rope": rope}
    out = attn(x, **arguments, attn_mask=GridArgument(grid, None))
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    if not isinstance(attn, Attention):
        torch.testing.assert_close(attn(x, rope=GridArgument(grid, rope)), want, rtol=0, atol=1e-12)
    if kind != "rope, shared keys":
        return
    shown = []
    handle = attn.attn_drop.register_forward_hook(lambda _module, given, _out: shown.append(given[0]))
    assert torch.equal(attn(x, **arguments, attn_mask=GridArgument(grid, None)), out)
    handle.remove()
    # The average of unit vectors is the vector of the weights.
    q, k, _, contents = projected(attn, x, rope, half)
    units = torch.eye(x.shape[1], dtype=torch.float64).expand(2, attn.num_heads, -1, -1)
    without = terms._replace(value=None)
    want = oracle.attention(*contents, units, without, places, position_query=q, position_key=k)
    torch.testing.assert_close(shown[0], want, rtol=0, atol=1e-12)


def test_masks_add_to_the_logits_and_causal_tokens_see_earlier_ones():
    attn, half = build("rope, halves, norms, gate", rel_terms="qkvb")
    grid = make_grid(HEIGHT, WIDTH, PREFIX)
    count = PREFIX + HEIGHT * WIDTH
    x = torch.randn(2, count, DIM, dtype=torch.float64)
    rope = rotation(attn.head_dim, HEIGHT, WIDTH, half)
    places, terms = all_places(grid, 2), attn.position(grid)
    mask = torch.randn(2, HEADS, count, count, dtype=torch.float64)
    want = expected(attn, x, terms, places, rope, half, mask)
    for arguments in (
        {"rope": GridArgument(grid, rope), "attn_mask": mask},
        {"rope": rope, "attn_mask": GridArgument(grid, mask)},
    ):
        torch.testing.assert_close(attn(x, **arguments), want, rtol=0, atol=1e-12)
    earlier = torch.full((count, count), -torch.inf, dtype=torch.float64).triu(1).expand(2, HEADS, -1, -1)
    want = expected(attn, x, terms, places, rope, half, earlier)
    torch.testing.assert_close(attn(x, rope=GridArgument(grid, rope), is_causal=True), want, rtol=0, atol=1e-12)


def test_under_autocast_all_stays_in_half_precision():
    attn, half = build("rope, halves, norms, gate")
    attn = attn.float()
    x = torch.randn(2, PREFIX + HEIGHT * WIDTH, DIM)
    argument = GridArgument(make_grid(HEIGHT, WIDTH, PREFIX), rotation(attn.head_dim, HEIGHT, WIDTH, half).float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = attn(x, rope=argument)
    assert low.dtype == torch.bfloat16
    full = attn(x, rope=argument)
    assert (low.float() - full).norm() < 0.05 * full.norm()


def test_without_a_grid_it_says_so():
    attn, _ = build("plain")
    with pytest.raises(TypeError, match=r"needs the grid, .* forward_features .* rope of type NoneType and .* Tensor"):
        attn(torch.zeros(1, 8, DIM, dtype=torch.float64), attn_mask=torch.zeros(8, 8))
