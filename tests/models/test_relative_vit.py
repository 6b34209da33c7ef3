"""Models with relative attention: outputs compared with brute force, absolute embeddings, sizes, registered models."""

import functools

import pytest
import timm
import torch
from draws import brute_force
from torch import nn
from vits import NAMES, groups_of, images, small

from relvit.families.reversible import ReversibleDepth
from relvit.families.transformer_xl import TransformerXLPosition2d
from relvit.layers import AnySizePatchEmbed, Mixer, RelativeAttention, RelativePosition2d, SlopePosition2d
from relvit.models import explain
from relvit.ops import Grid

AXIAL = ["axial", "axial-sum"]


def build(**kwargs):
    return small(**{"depth": 2, **kwargs}).double().eval()


def doubles(*size):
    return images(*size, dtype=torch.float64)


@pytest.mark.parametrize(
    ("prefix", "size", "rel_terms", "layout"),
    [
        ({}, (24, 16), "kv", "separate"),
        ({"class_token": True, "reg_tokens": 2}, (8, 40), "qkvb", "separate"),
        ({"class_token": True}, (24, 16), "kvb", "joint"),
    ],
)
def test_features_equal_brute_force_attention_in_every_block(prefix, size, rel_terms, layout):
    model = build(max_distance=(1, 2), rel_terms=rel_terms, layout=layout, **prefix)
    x = doubles(*size)
    height, width = size[0] // 8, size[1] // 8
    tokens = model.patch_embed.proj(x).flatten(2).transpose(1, 2)
    first = [t.expand(2, -1, -1) for t in (model.cls_token, model.reg_token) if t is not None]
    tokens = torch.cat([*first, tokens], dim=1)
    grid = Grid(height, width, model.num_prefix_tokens)
    for block in model.blocks:
        attn = block.attn
        q, k, v = (
            part.unflatten(-1, (2, 6)).transpose(1, 2) for part in attn.qkv(block.norm1(tokens)).chunk(3, dim=-1)
        )
        mixed = brute_force(q, k, v, attn.position(grid), grid)
        tokens = tokens + attn.proj(mixed.transpose(1, 2).flatten(2))
        tokens = tokens + block.mlp(block.norm2(tokens))
    torch.testing.assert_close(model.forward_features(x), model.norm(tokens), rtol=0, atol=1e-10)


def test_padding_to_whole_patches_is_an_option_and_otherwise_an_error():
    model = build(dynamic_img_pad=True)
    x = doubles(20, 13)
    torch.testing.assert_close(model(x), model(torch.nn.functional.pad(x, (0, 3, 0, 4))))
    with pytest.raises(ValueError, match="image height 20 is not a multiple of the patch size 8: use 16 or 24"):
        build()(x)


def test_a_patch_embedding_without_a_size_gets_another_patch():
    embed = AnySizePatchEmbed(img_size=None, patch_size=8, embed_dim=4)
    embed.set_input_size(patch_size=4)
    assert (embed.img_size, embed.patch_size) == (None, (4, 4))


def test_autocast_with_normalised_queries():
    model = small(qk_norm=True).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = model(images())
    assert half.dtype == torch.bfloat16
    assert (half.float() - model(images())).abs().max() < 0.1 * model(images()).abs().max()


def test_second_derivatives_of_a_model():
    model = build(backend="gathered")
    x = doubles().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    direction = torch.randn_like(x)
    (got,) = torch.autograd.grad((slope * direction).sum(), x)
    step = 1e-5
    ends = [
        torch.autograd.grad(model(moved).square().sum(), moved)[0]
        for moved in ((x + sign * step * direction).detach().requires_grad_() for sign in (1, -1))
    ]
    torch.testing.assert_close(got, (ends[0] - ends[1]) / (2 * step), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("kwargs", "kind", "distance"),
    [
        ({}, RelativePosition2d, (7, 7)),
        ({"max_distance": [2, 3]}, RelativePosition2d, (2, 3)),
        ({"position": "slopes"}, SlopePosition2d, None),
        ({"position": "slopes", "max_distance": (2, 3)}, SlopePosition2d, (2, 3)),
        ({"position": "xl"}, TransformerXLPosition2d, None),
    ],
)
def test_each_position_has_its_own_default_distance(kwargs, kind, distance):
    position = build(**kwargs).blocks[1].attn.position
    assert (type(position), position.max_distance) == (kind, distance)


class Doubled(RelativeAttention):
    """Attention whose output is twice the output of relvit's attention."""

    def forward(self, *args, **kwargs):
        return 2 * super().forward(*args, **kwargs)


def test_a_mixer_of_the_users_takes_the_place_of_attention_with_the_model_around_it():
    options = {"position": "slopes", "qk_norm": True, "scale_attn_norm": True}
    own, doubled = build(**options), build(mixer=Doubled, **options)
    doubled.load_state_dict(own.state_dict())
    x = doubles(24, 16)
    assert not torch.allclose(own(x), doubled(x))
    for block in own.blocks:
        block.attn.register_forward_hook(lambda _module, _inputs, out: 2 * out)
    torch.testing.assert_close(doubled(x), own(x))


class Mean(nn.Module):
    """A minimal mixer: no base class, no position, no heads, no projection."""

    def __init__(self, dim, num_heads, *, qkv_bias, proj_bias, proj_drop, device, dtype):
        super().__init__()

    def forward(self, x, grid, attn_mask=None, is_causal=False):
        return x.mean(dim=1, keepdim=True).expand_as(x)


class MeanWithPosition(Mean, Mixer):
    """A mixer with a position, without a projection, and with another number of heads than the model."""

    head_dim = 8

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.position = None


@pytest.mark.parametrize("name", ["relvit_tiny", "relvit_universal_tiny"])
def test_a_mixer_needs_no_attributes_of_attention(name):
    plain = small(name, mixer=Mean).eval()
    assert not any(".position." in key for key in plain.state_dict())
    assert plain(images()).shape == (2, 5)
    with pytest.raises(ValueError, match=r"no layers of relvit: take a relvit_. model"):
        explain(plain)
    mixed = small(name, mixer=MeanWithPosition, dtype=torch.float64)
    table = mixed.blocks[0].attn.position.key_rows
    assert (table.shape[1], table.dtype) == (8, torch.float64)
    assert explain(mixed)[0].width == (8, 8)
    assert explain(small(name, mixer=type("Headless", (Mean, Mixer), {})))[0].width == (0, 0)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"position": "slope"}, r"is 'slope'; allowed are 'tables', .* \(did you mean 'slopes'\?\)"),
        ({"position": "slopes", "rel_terms": "k"}, "rel_terms is for position 'tables', got rel_terms='k' with"),
        (
            {"position": "slopes", "rel_init_std": 0.5},
            "rel_init_std is for position 'tables', .* got rel_init_std=0.5 .*: leave rel_init_std out",
        ),
        ({"rel_init_std": -1}, "rel_init_std must not be negative, got -1"),
        ({"position": "xl", "layout": "joint"}, "layout is for position 'tables', got .* with position 'xl'"),
        ({"position": "fire", "max_distance": 3}, "max_distance is for position 'tables', .*'xl', got max_distance=3"),
        (
            {"position": SlopePosition2d, "max_distance": 3, "rel_init_std": 0.3},
            r"max_distance=3, rel_init_std=0.3 are for positions known by name; leave them out \(on the command line: "
            r"null\), .*functools.partial\(YourPosition, max_distance=\.\.\., init_std=\.\.\.\)",
        ),
        ({"position": SlopePosition2d, "rel_init_std": 0}, "rel_init_std=0 is for positions known by name; leave it"),
        ({"position": "my_file.Mine"}, "'my_file.Mine': a text cannot stand for your own class: .*own_position.md"),
        ({"mixer": Mean, "position": "slopes"}, "position must be 'tables', the default, with mixer Mean, .*'slopes'"),
        ({"mixer": Mean, "max_distance": 2}, r"max_distance must be None, .* got 2: leave it out, .*relvit_learn_\*"),
        ({"mixer": Mean, "rel_terms": "q"}, "rel_terms must be None, the default, with mixer Mean, .* got 'q'"),
        ({"mixer": Mean, "rope": "axial"}, "rope and prefix_bias are for RelativeAttention, not for Mean"),
        ({"mixer": Doubled, "backend": "fused"}, "backend='fused' is an option of relvit's own attention, and mixer="),
        ({"backend": "fuse"}, r"backend is 'fuse'; allowed are .*did you mean 'fused'"),
        ({"pos_embed": "axia"}, r"allowed are '', 'learn', 'axial', 'axial-sum' \(did you mean 'axial'\?\)"),
    ],
)
def test_errors(kwargs, message):
    with pytest.raises(ValueError, match=message):
        build(**kwargs)


def test_the_path_of_a_mixer_is_refused():
    with pytest.raises(TypeError, match=r"mixer must make .*, got 'my_file\.Mine'; a text cannot stand for"):
        build(mixer="my_file.Mine")


def test_an_unknown_argument_of_a_position_is_named():
    with pytest.raises(TypeError, match=r"SlopePosition2d.* unexpected keyword argument 'distanse'"):
        build(position=functools.partial(SlopePosition2d, distanse=2))


@pytest.mark.parametrize("pos_embed", AXIAL)
@pytest.mark.parametrize("extra", [{}, {"class_token": True, "reg_tokens": 2, "global_pool": "token"}], ids=str)
def test_axial_model_is_the_plain_one_with_the_embedding_added(pos_embed, extra):
    model, plain = build(pos_embed=pos_embed, **extra), build(**extra)
    plain.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if "axial" not in name})
    plain.patch_embed.register_forward_hook(
        lambda _module, _inputs, x: x + model.axial(Grid(*x.shape[1:3])).unflatten(0, x.shape[1:3])
    )
    # These sizes are the tables' own size, one side smaller and one larger, and both sides larger.
    for size in ((24, 16), (8, 40), (40, 72)):
        torch.testing.assert_close(model(doubles(*size)), plain(doubles(*size)), rtol=0, atol=1e-12)


def test_axial_tables_belong_to_the_stem_and_take_no_weight_decay():
    model = build(pos_embed="axial", class_token=True)
    groups = groups_of(model)
    # The embedding belongs to the stem, followed by two blocks and the head.
    assert groups["axial.rows"] == groups["axial.cols"] == groups["cls_token"] == (0.5**3, 0.0)


def test_dropout_on_tokens_is_applied_once():
    for pos_embed in ("", "learn", "axial"):
        model = build(pos_embed=pos_embed, pos_drop_rate=0.5, class_token=True).train()
        assert 0.4 < (model.embed(doubles(80, 80))[0] == 0).double().mean() < 0.6


# Each name has width, blocks, heads, patch, image, registers and classes.
FAMILY = {
    "relvit_tiny": (192, 12, 3, 16, 224, 0, 1000),
    "relvit_small": (384, 12, 6, 16, 224, 0, 1000),
    "relvit_base": (768, 12, 12, 16, 224, 0, 1000),
    "relvit_large": (1024, 24, 16, 16, 224, 0, 1000),
    "relvit_learn_tiny": (192, 12, 3, 16, 224, 0, 1000),
    "relvit_learn_small": (384, 12, 6, 16, 224, 0, 1000),
    "relvit_learn_base": (768, 12, 12, 16, 224, 0, 1000),
    "relvit_rev_small": (384, 12, 6, 16, 224, 0, 1000),
    "relvit_rev_base": (768, 12, 12, 16, 224, 0, 1000),
    "relvit_rev_large": (1024, 24, 16, 16, 224, 0, 1000),
    "relvit_xl_small": (384, 12, 6, 16, 224, 0, 1000),
    "relvit_small_reg4_gap": (384, 12, 6, 16, 224, 4, 1000),
    "relvit_base_reg4_gap": (768, 12, 12, 16, 224, 4, 1000),
    "relvit_tiny_patch4_32": (192, 12, 3, 4, 32, 0, 10),
    "relvit_small_patch4_32": (384, 12, 6, 4, 32, 0, 10),
    "test_relvit": (64, 6, 2, 16, 160, 0, 1000),
    "test_relvit_rev": (64, 6, 2, 16, 160, 0, 1000),
}
# These are numbers of elements of absolute embeddings, for a grid of side x side patches.
EMBEDDINGS = {
    "": lambda side, registers, width: 0,
    "learn": lambda side, registers, width: (registers + side * side) * width,
    "axial": lambda side, registers, width: side * width,
    "axial-sum": lambda side, registers, width: 2 * side * width,
}


def test_a_clip_distance_of_a_name_is_not_for_another_position():
    model = timm.create_model("relvit_learn_tiny", position="fire", depth=1, device="meta")
    assert not hasattr(model.blocks[0].attn.position, "max_distance")
    slopes = timm.create_model("relvit_learn_tiny", position="slopes", depth=1, device="meta").blocks[0].attn.position
    assert slopes.max_distance is None
    tables = timm.create_model("relvit_learn_tiny", position="tables", depth=1, device="meta").blocks[0].attn.position
    assert tables.max_distance == (2, 2)
    both = timm.create_model("relvit_learn_tiny", position="lookhere+tables", num_heads=4, depth=1, device="meta")
    assert both.blocks[0].attn.position.tables.max_distance == (2, 2)
    both = timm.create_model("relvit_learn_tiny", position="slopes+tables", depth=1, device="meta")
    assert both.blocks[0].attn.position.slopes.max_distance is None


def test_all_registered_models_are_in_the_list():
    assert set(NAMES) == set(FAMILY)


@pytest.mark.parametrize(
    ("name", "pos_embed"), [*((name, "") for name in FAMILY), *(("test_relvit", form) for form in EMBEDDINGS if form)]
)
def test_registered_models_have_the_parameters_counted_by_hand(name, pos_embed):
    options = {"rel_terms": "k", "max_distance": (2, 3), "layout": "joint", "shared_heads": False} if pos_embed else {}
    options |= {"pos_embed": pos_embed} if pos_embed else {}
    model = timm.create_model(name, weight_init="skip", device="meta", **options)
    width, depth, heads, patch, image, registers, classes = FAMILY[name]
    hidden = width * (3 if name.startswith("test_relvit") else 4)
    tables = (heads * 5 * 7 if options else 2 * 2 * 15) * (width // heads)
    if name.startswith("relvit_learn_"):
        tables, pos_embed = 2 * 2 * 5 * (width // heads), "learn"
    if name == "relvit_xl_small":
        # Each block has W_R for the sinusoids of both axes, u and v.
        tables = width * width + 2 * width
    block = 4 * width * width + 4 * width + 2 * width * hidden + hidden + width + 4 * width + tables
    stem = (3 * patch * patch + 1 + registers) * width + EMBEDDINGS[pos_embed](image // patch, registers, width)
    expected = stem + depth * block + 2 * width + (width + 1) * classes
    assert sum(p.numel() for p in model.parameters()) == expected
    assert model.patch_embed.grid_size == (image // patch,) * 2
    assert (model.num_prefix_tokens, model.global_pool) == (registers, "avg")
    assert isinstance(model.depth_plan, ReversibleDepth) == ("_rev" in name)
