"""relvit models as timm models: numbers against brute force and against timm's own VisionTransformer."""

import subprocess
import sys

import pytest
import timm
import torch
from oracles import relative_attention as oracle
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_weight_decay

import relvit
from relvit.ops import RelativeTerms

SMALL = {"img_size": (24, 16), "patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 2, "num_classes": 5}


def build(**kwargs):
    torch.manual_seed(0)
    model = timm.create_model("test_relvit", **{**SMALL, "rel_init_std": 0.5, **kwargs})
    # Biases start at zero and layers at 0.02: larger numbers make wrong ones visible.
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def images(height=24, width=16, batch=2, dtype=torch.float32):
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(1), dtype=dtype)


@pytest.mark.parametrize("prefix", [{}, {"class_token": True, "reg_tokens": 2}])
@pytest.mark.parametrize("size", [(24, 16), (8, 40)])
@pytest.mark.parametrize(("rel_terms", "layout"), [("kv", "separate"), ("qkvb", "separate"), ("kvb", "joint")])
def test_features_equal_brute_force_attention_in_every_block(prefix, size, rel_terms, layout):
    model = build(max_distance=(1, 2), rel_terms=rel_terms, layout=layout, **prefix).double().eval()
    x = images(*size, dtype=torch.float64)
    height, width = size[0] // 8, size[1] // 8
    tokens = model.patch_embed.proj(x).flatten(2).transpose(1, 2)
    first = [t.expand(2, -1, -1) for t in (model.cls_token, model.reg_token) if t is not None]
    tokens = torch.cat([*first, tokens], dim=1)
    count = model.num_prefix_tokens
    places = [[oracle.place(i, count, None, height, width) for i in range(tokens.shape[1])]] * 2
    for block in model.blocks:
        attn = block.attn
        q, k, v = (
            part.unflatten(-1, (2, 6)).transpose(1, 2) for part in attn.qkv(block.norm1(tokens)).chunk(3, dim=-1)
        )
        table = attn.position
        parts = ("rows", "cols") if layout == "separate" else ("table",)
        pairs = {name: [getattr(table, f"{name}_{part}") for part in parts] for name in RelativeTerms._fields[:4]}
        terms = RelativeTerms(**{name: pair if pair[0] is not None else None for name, pair in pairs.items()})
        mixed = oracle.attention(q, k, v, terms, places)
        tokens = tokens + attn.proj(mixed.transpose(1, 2).flatten(2))
        tokens = tokens + block.mlp(block.norm2(tokens))
    expected = model.norm(tokens)
    torch.testing.assert_close(model.forward_features(x), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "kwargs", [{"rel_terms": ""}, {"rel_init_std": 0.0, "rel_terms": "kv"}], ids=["no-terms", "zero-tables"]
)
@pytest.mark.parametrize("extra", [{}, {"class_token": True, "global_pool": "token", "pos_embed": "learn"}])
def test_without_terms_it_is_timms_vision_transformer(kwargs, extra):
    model = build(**kwargs, **extra).double().eval()
    for name, table in model.named_parameters():
        if ".position." in name:
            assert kwargs["rel_terms"] == "kv"
            torch.nn.init.zeros_(table)
    options = {"class_token": False, "global_pool": "avg", "pos_embed": "", "mlp_ratio": 3, **SMALL, **extra}
    plain = VisionTransformer(**options).double().eval()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if ".position." not in k})
    x = images(dtype=torch.float64)
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [(8, 8), (40, 24), (16, 72)])
def test_any_size_equals_a_model_built_for_that_size(size):
    model = build(max_distance=2).double().eval()
    other = build(max_distance=2, img_size=size).double().eval()
    other.load_state_dict(model.state_dict())
    x = images(*size, dtype=torch.float64)
    torch.testing.assert_close(model(x), other(x), rtol=0, atol=0)
    before = model(x)
    model.set_input_size(size)
    torch.testing.assert_close(model(x), before, rtol=0, atol=0)


def test_learned_absolute_embedding_is_interpolated_at_other_sizes():
    model = build(pos_embed="learn").eval()
    x = images(16, 40)
    tokens, grid = model.embed(x)
    assert (grid.height, grid.width) == (2, 5)
    expected = model.patch_embed.proj(x).flatten(2).transpose(1, 2) + resample_abs_pos_embed(
        model.pos_embed, new_size=(2, 5), old_size=(3, 2), num_prefix_tokens=0
    )
    torch.testing.assert_close(tokens, expected)


def test_dropped_patches_keep_their_coordinates():
    model = build(patch_drop_rate=0.5, class_token=True, max_distance=2).double().train()
    x = images(32, 24, dtype=torch.float64)
    torch.manual_seed(3)
    tokens, grid = model.embed(x)
    assert tokens.shape[1] == 1 + 6
    for block in model.blocks:
        tokens = block(tokens, grid)
    kept = grid.coords[..., 0] * 3 + grid.coords[..., 1] + 1
    kept = torch.cat((torch.zeros(2, 1, dtype=torch.long), kept), dim=1)
    # The same patches kept by a mask instead: attention to all others forbidden.
    mask = torch.zeros(2, 1, 1, 13, dtype=torch.bool).scatter(-1, kept[:, None, None, :], True)
    masked = model.eval().forward_intermediates(x, attn_mask=mask, output_fmt="NLC", return_prefix_tokens=True)[1][-1]
    full = torch.cat((masked[1], masked[0]), dim=1)
    torch.testing.assert_close(tokens, full.gather(1, kept[..., None].expand(-1, -1, 12)), rtol=0, atol=1e-10)


def test_padding_to_whole_patches_is_an_option_and_otherwise_an_error():
    model = build(dynamic_img_pad=True).eval()
    x = images(20, 13)
    torch.testing.assert_close(model(x), model(torch.nn.functional.pad(x, (0, 3, 0, 4))))
    with pytest.raises(ValueError, match="image height 20 is not a multiple of the patch size 8: use 16 or 24"):
        build()(x)


def test_tables_take_no_weight_decay():
    model = build()
    skip = model.no_weight_decay()
    free, decayed = (
        {id(p) for p in group["params"]} for group in param_groups_weight_decay(model, no_weight_decay_list=skip)
    )
    tables = [p for name, p in model.named_parameters() if ".position." in name]
    assert len(tables) == 8
    assert all(id(p) in free and id(p) not in decayed for p in tables)
    assert id(model.head.weight) in decayed


def test_checkpointing_changes_neither_outputs_nor_gradients():
    model = build(class_token=True, rel_terms="qkvb").double().train()
    x = images(dtype=torch.float64)
    plain = model(x)
    grads = torch.autograd.grad(plain.square().sum(), list(model.parameters()))
    assert all(grad.abs().sum() > 0 for grad in grads)
    model.set_grad_checkpointing()
    again = model(x)
    torch.testing.assert_close(again, plain, rtol=0, atol=0)
    for grad, expected in zip(torch.autograd.grad(again.square().sum(), list(model.parameters())), grads, strict=True):
        torch.testing.assert_close(grad, expected, rtol=0, atol=1e-12)


def test_intermediates_are_the_features():
    model = build(class_token=True).eval()
    x = images(16, 40)
    final, (first, last) = model.forward_intermediates(x, norm=True, return_prefix_tokens=True)
    features = model.forward_features(x)
    torch.testing.assert_close(final, features)
    torch.testing.assert_close(last[0].flatten(2).transpose(1, 2), features[:, 1:])
    torch.testing.assert_close(last[1], features[:, :1])
    assert last[0].shape == (2, 12, 2, 5)
    as_dict = model.forward_intermediates(x, [0], norm=True, output_fmt="NLC", output_dict=True, stop_early=True)
    torch.testing.assert_close(as_dict["image_intermediates"][0], first[0].flatten(2).transpose(1, 2))
    pyramid = timm.create_model("test_relvit", features_only=True, out_indices=(0, 1), **SMALL).eval()
    pyramid.model.load_state_dict(build().state_dict(), strict=False)
    torch.testing.assert_close(pyramid(x)[1], pyramid.model.forward_intermediates(x, [1], intermediates_only=True)[0])


# Width, blocks, heads, patch, image, registers, classes.
FAMILY = {
    "relvit_tiny": (192, 12, 3, 16, 224, 0, 1000),
    "relvit_small": (384, 12, 6, 16, 224, 0, 1000),
    "relvit_base": (768, 12, 12, 16, 224, 0, 1000),
    "relvit_large": (1024, 24, 16, 16, 224, 0, 1000),
    "relvit_small_reg4_gap": (384, 12, 6, 16, 224, 4, 1000),
    "relvit_base_reg4_gap": (768, 12, 12, 16, 224, 4, 1000),
    "relvit_tiny_patch4_32": (192, 12, 3, 4, 32, 0, 10),
    "relvit_small_patch4_32": (384, 12, 6, 4, 32, 0, 10),
    "test_relvit": (64, 6, 2, 16, 160, 0, 1000),
}
OPTIONS = {"rel_terms": "k", "max_distance": (2, 3), "layout": "joint", "shared_heads": False}
# Numbers of absolute embeddings for a grid of side x side patches.
EMBEDDINGS = {
    "": lambda side, registers, width: 0,
    "learn": lambda side, registers, width: (registers + side * side) * width,
    "axial": lambda side, registers, width: side * width,
    "axial-sum": lambda side, registers, width: 2 * side * width,
}


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("pos_embed", EMBEDDINGS)
def test_registered_models_are_what_they_say(name, pos_embed):
    options = OPTIONS if pos_embed else {}
    with torch.device("meta"):
        model = timm.create_model(name, pos_embed=pos_embed, **options)
    width, depth, heads, patch, image, registers, classes = FAMILY[name]
    hidden = width * (3 if name == "test_relvit" else 4)
    tables = (heads * 5 * 7 if options else 2 * 2 * 15) * (width // heads)
    block = 4 * width * width + 4 * width + 2 * width * hidden + hidden + width + 4 * width + tables
    stem = (3 * patch * patch + 1 + registers) * width + EMBEDDINGS[pos_embed](image // patch, registers, width)
    expected = stem + depth * block + 2 * width + (width + 1) * classes
    assert sum(p.numel() for p in model.parameters()) == expected
    cfg = model.pretrained_cfg
    assert cfg["license"] == "apache-2.0"
    assert cfg["input_size"] == (3, image, image)
    assert cfg["num_classes"] == model.num_classes == classes
    assert {f"{cfg[key]}.weight" for key in ("first_conv", "classifier")} <= set(dict(model.named_parameters()))
    assert model.patch_embed.grid_size == (image // patch,) * 2
    assert (model.num_prefix_tokens, model.global_pool) == (registers, "avg")


def test_all_registered_models_are_in_the_list():
    assert set(timm.list_models("*relvit*", exclude_filters="*_aft*")) == set(FAMILY)


def test_autocast_with_normalised_queries():
    model = build(qk_norm=True).eval()
    x = images()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = model(x)
    assert half.dtype == torch.bfloat16
    assert (half.float() - model(x)).abs().max() < 0.1 * model(x).abs().max()


def test_dropout_on_tokens_is_not_ignored_without_an_absolute_embedding():
    model = build(pos_drop_rate=0.5).train()
    assert 0.3 < (model.embed(images())[0] == 0).float().mean() < 0.7


def test_errors():
    with pytest.raises(ValueError, match="dynamic_img_size cannot be chosen"):
        build(dynamic_img_size=False)
    with pytest.raises(ValueError, match="each at most once, got 'kz'"):
        build(rel_terms="kz")


def test_import_brings_neither_lightning_nor_matplotlib():
    code = (
        "import sys, relvit; print([m for m in ('lightning', 'pytorch_lightning', 'matplotlib') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    assert relvit.__version__


def test_second_derivatives_of_a_model():
    model = build(backend="gathered").double()
    x = images(dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    direction = torch.randn_like(x)
    (got,) = torch.autograd.grad((slope * direction).sum(), x)
    step = 1e-5
    ends = [
        torch.autograd.grad(model(moved).square().sum(), moved)[0]
        for moved in ((x + sign * step * direction).detach().requires_grad_() for sign in (1, -1))
    ]
    torch.testing.assert_close(got, (ends[0] - ends[1]) / (2 * step), rtol=1e-4, atol=1e-6)
