"""The contract of all mixers: gradients, padding, causality, precision, devices, blocks around them, refusals."""

from functools import partial

import pytest
import timm
import torch
from draws import draw
from vits import FAMILIES

from relvit.families.aft import AFTConv2d, AFTFull, AFTLocal, AFTSimple
from relvit.families.reformer import LSHAttention
from relvit.layers import MixerBlock, RelativeAttention, RelativePosition2d
from relvit.layers.mixer import Mixer, count_parameters
from relvit.ops import key_mask, make_grid
from relvit.ops.checks import check_heads


class Mean(Mixer):
    """The mean of all tokens: a mixer without parameters, heads, projections and an order of tokens."""

    def __init__(self, dim, num_heads, *, qkv_bias=False, proj_bias=True, proj_drop=0.0, device=None, dtype=None):
        super().__init__()
        check_heads(dim, num_heads)

    def forward(self, x, grid, attn_mask=None, is_causal=False):
        self.refuse_mask(attn_mask)
        if is_causal:
            raise ValueError("Mean takes no is_causal")
        valid = x.new_ones(1, x.shape[1]) if grid.valid is None else key_mask(grid).to(x.dtype)
        return ((valid / valid.sum(1, keepdim=True))[:, None] @ x).expand_as(x)


DIM, HEADS = 12, 3
FACTORS = {"grid_size": (5, 4), "prefix": 1, "bias_dim": 4}
MIXERS = {
    "attention": partial(RelativeAttention, backend="reference"),
    "AFT-simple": AFTSimple,
    "AFT-full": partial(AFTFull, **FACTORS),
    "AFT-local": partial(AFTLocal, window=(1, 2), **FACTORS),
    "AFT-conv": partial(AFTConv2d, kernel_size=(3, 5)),
    "LSH": partial(LSHAttention, bucket_size=3, rounds=2),
    "mean": Mean,
}
# A mixer that a family has registered, and that needs no arguments of its own here, is added without a row.
KINDS = {type(timm.create_model(name, device="meta", depth=1).blocks[0].attn) for name in FAMILIES}
KINDS -= {getattr(made, "func", made) for made in MIXERS.values()}
MIXERS |= {kind.__name__: kind for kind in sorted(KINDS, key=str)}
GRID = make_grid(5, 4, prefix=1)
X = draw(torch.Generator().manual_seed(1), 2, 21, DIM)
each_mixer = pytest.mark.parametrize("name", MIXERS)


def build(name, **options):
    torch.manual_seed(0)
    mixer = MIXERS[name](DIM, HEADS, qkv_bias=True, **options)
    if hasattr(mixer, "position"):
        mixer.position = RelativePosition2d(DIM // HEADS, HEADS, rel_terms="b", max_distance=2)
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return mixer.double().eval()


def refusal_of_causality(mixer):
    """Return the text of the error of a mixer without an order of tokens; '' if the mixer has one."""
    try:
        mixer(X, GRID, is_causal=True)
    except ValueError as error:
        return str(error)
    return ""


@each_mixer
def test_shapes_gradients_and_names(name):
    mixer, x = build(name), X.clone().requires_grad_()
    out = mixer(x, GRID)
    assert out.shape == X.shape
    grads = torch.autograd.grad(out.square().sum(), [x, *mixer.parameters()])
    assert all(grad.abs().max() > 0 for grad in grads)
    own = {key for key, _ in mixer.named_parameters() if not key.startswith(("qkv", "qk_v", "proj", "position"))}
    assert own == (mixer.no_weight_decay() if hasattr(mixer, "no_weight_decay") else set())
    assert isinstance(mixer, Mixer)
    assert mixer.lacks.keys() <= {"memory", "weights", "native", "sizes"}


@each_mixer
def test_padding_and_dropped_patches_are_as_if_they_were_not_there(name):
    # Removing tokens would change the chunks of LSH attention, so use one bucket for all tokens.
    mixer = build(name, **({"bucket_size": 11} if name == "LSH" else {}))
    keep = torch.tensor([0, 2, 3, 5, 11, 19])
    tokens = torch.cat((torch.tensor([0]), keep + 1))
    dropped = mixer(X[:, tokens], make_grid(5, 4, 1, torch.stack((keep // 4, keep % 4), dim=-1)))
    valid = torch.zeros(20, dtype=torch.bool).index_fill(0, keep, True)
    padded = mixer(X, make_grid(5, 4, 1, valid=valid))
    torch.testing.assert_close(dropped, padded[:, tokens], rtol=0, atol=1e-12)


@each_mixer
def test_causal_tokens_see_earlier_ones_alone_or_is_causal_is_refused(name):
    # Changing later tokens could move earlier ones to other chunks of LSH attention, so use one bucket.
    mixer = build(name, **({"bucket_size": 11} if name == "LSH" else {}))
    changed = torch.cat((X[:, :9], X[:, 9:] + 1), dim=1)
    if said := refusal_of_causality(mixer):
        assert "takes no is_causal" in said
        return
    one, other = (mixer(x, GRID, is_causal=True) for x in (X, changed))
    torch.testing.assert_close(one[:, :9], other[:, :9], rtol=0, atol=1e-12)
    assert (one[:, 9:] - other[:, 9:]).abs().max() > 1e-3


@each_mixer
def test_half_precision_and_devices(name):
    # Rounding could move tokens to other buckets of LSH attention, so use one bucket.
    mixer = build(name, **({"bucket_size": 11} if name == "LSH" else {}))
    expected = mixer(X, GRID).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = mixer.float()(X.float(), GRID)
    # Autocast computes products in half precision; a mixer without parameters may have none.
    assert out.dtype == torch.bfloat16 or not list(mixer.parameters())
    for half in (out, mixer.bfloat16()(X.bfloat16(), GRID)):
        assert (half.double() - expected).norm() < 0.1 * expected.norm()
    with torch.device("meta"):
        empty = MIXERS[name](DIM, HEADS)
    filled = empty.to_empty(device="cpu")
    for module in filled.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert filled(X.float(), GRID).isfinite().all()


@each_mixer
def test_drop_in_for_attention_in_a_block(name):
    torch.manual_seed(0)
    block = MixerBlock(DIM, HEADS, mixer=MIXERS[name], qkv_bias=True, init_values=0.5).double().eval()
    middle = X + 0.5 * block.attn(block.norm1(X), GRID)
    expected = middle + 0.5 * block.mlp(block.norm2(middle))
    torch.testing.assert_close(block(X, GRID), expected, rtol=0, atol=1e-12)
    branches = block(X, GRID, branch="mixer"), block(middle, GRID, branch="mlp")
    torch.testing.assert_close(X + branches[0] + branches[1], expected, rtol=0, atol=1e-12)


@each_mixer
def test_norms_and_dropout_of_attention_given_to_a_block_are_the_mixers_or_refused(name):
    block = partial(MixerBlock, DIM, HEADS, mixer=MIXERS[name], qk_norm=True, scale_attn_norm=True, attn_drop=0.5)
    if not hasattr(build(name), "attn_drop"):
        with pytest.raises(TypeError, match="argument 'attn_drop'"):
            block()
        return
    own = MIXERS[name](DIM, HEADS, qk_norm=True, scale_norm=True, norm_layer=torch.nn.LayerNorm)
    assert block().attn.state_dict().keys() == own.state_dict().keys() > MIXERS[name](DIM, HEADS).state_dict().keys()
    assert block().attn.attn_drop.p == 0.5


@each_mixer
def test_plans_say_what_is_computed(name):
    mixer = build(name)
    plan = mixer.plan("blocks.0.attn", GRID, training=True)
    assert plan.terms == ("b" if hasattr(mixer, "position") else "")
    assert plan.backend == ("reference" if name == "attention" else "")
    assert plan.parameters == count_parameters(getattr(mixer, "position", mixer))
    assert plan.width == (mixer.head_dim,) * 2 if name != "attention" else plan.width[1] > mixer.head_dim
    bias = build(name).learned_bias(GRID)
    expected = {"AFT-full": (21, 21), "AFT-local": (21, 21), "AFT-conv": (3, 3, 5)}.get(name)
    assert (bias if bias is None else tuple(bias.shape)) == expected


@each_mixer
def test_refusals(name):
    with pytest.raises(ValueError, match="num_heads must divide dim 12, got 5"):
        MIXERS[name](12, 5)
    with pytest.raises(TypeError, match="argument 'bucketsize'"):
        MIXERS[name](12, 3, bucketsize=3)
    with pytest.raises(TypeError, match=r"mixer .*got a module"):
        MixerBlock(DIM, HEADS, mixer=build(name))
    if name != "attention":
        with pytest.raises(ValueError, match=r"attn_mask.*valid"):
            build(name)(X, GRID, torch.ones(21, 21))
