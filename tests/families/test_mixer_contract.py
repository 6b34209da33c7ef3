"""The contract of all mixers: gradients, padding, causality, precision, devices, blocks around them, refusals."""

from functools import partial

import pytest
import torch
from draws import draw

from relvit.families.aft import AFTConv2d, AFTFull, AFTLocal, AFTSimple
from relvit.families.reformer import LSHAttention
from relvit.layers import MixerBlock, RelativeAttention, RelativePosition2d
from relvit.layers.mixer import Mixer
from relvit.ops import make_grid

DIM, HEADS = 12, 3
FACTORS = {"grid_size": (5, 4), "prefix": 1, "bias_dim": 4}
MIXERS = {
    "attention": partial(RelativeAttention, backend="reference"),
    "AFT-simple": AFTSimple,
    "AFT-full": partial(AFTFull, **FACTORS),
    "AFT-local": partial(AFTLocal, window=(1, 2), **FACTORS),
    "AFT-conv": partial(AFTConv2d, kernel_size=(3, 5)),
    "LSH": partial(LSHAttention, bucket_size=3, rounds=2),
}
GRID = make_grid(5, 4, prefix=1)
X = draw(torch.Generator().manual_seed(1), 2, 21, DIM)
each_mixer = pytest.mark.parametrize("name", MIXERS)


def build(name, **options):
    torch.manual_seed(0)
    mixer = MIXERS[name](DIM, HEADS, qkv_bias=True, **options)
    if name in ("attention", "LSH"):
        mixer.position = RelativePosition2d(DIM // HEADS, HEADS, rel_terms="b", max_distance=2)
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return mixer.double().eval()


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
def test_causal_tokens_see_earlier_ones_alone(name):
    # Changing later tokens could move earlier ones to other chunks of LSH attention, so use one bucket.
    mixer = build(name, **({"bucket_size": 11} if name == "LSH" else {}))
    changed = torch.cat((X[:, :9], X[:, 9:] + 1), dim=1)
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
    assert out.dtype == torch.bfloat16
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
    if name.startswith("AFT"):
        with pytest.raises(TypeError, match="argument 'attn_drop'"):
            block()
        return
    own = MIXERS[name](DIM, HEADS, qk_norm=True, scale_norm=True, norm_layer=torch.nn.LayerNorm)
    assert block().attn.state_dict().keys() == own.state_dict().keys() > MIXERS[name](DIM, HEADS).state_dict().keys()
    assert block().attn.attn_drop.p == 0.5


@each_mixer
def test_plans_say_what_is_computed(name):
    plan = build(name).plan("blocks.0.attn", GRID, training=True)
    attention = name in ("attention", "LSH")
    assert plan.terms == ("b" if attention else "")
    assert plan.backend == ("reference" if name == "attention" else "")
    assert plan.parameters > 0
    assert plan.width == (4, 4) if name != "attention" else plan.width[1] > 4
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
