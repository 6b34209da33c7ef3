"""Absolute embeddings besides the relative positions."""

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_layer_decay, param_groups_weight_decay

import relvit  # noqa: F401 (registers the models)

SMALL = {"img_size": (24, 40), "patch_size": 8, "embed_dim": 18, "depth": 2, "num_heads": 2, "num_classes": 5}
AXIAL = ["axial", "axial-sum"]
# The tables' own size, smaller, larger, both.
SIZES = [(24, 40), (16, 24), (40, 72), (8, 80)]


def build(**kwargs):
    torch.manual_seed(0)
    model = timm.create_model("test_relvit", **{**SMALL, **kwargs}).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def images(height, width):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, height, width, generator=generator, dtype=torch.float64)


def line_by_hand(table, line, size):
    """The vector of one row or column."""
    if size <= len(table):
        return table[line]
    place = min(max((line + 0.5) * len(table) / size - 0.5, 0), len(table) - 1)
    before = min(int(place), len(table) - 2)
    return (1 - (place - before)) * table[before] + (place - before) * table[before + 1]


def added_by_hand(model, x):
    """Patches (B, rows, columns, dim) with the embedding of each added."""
    rows, cols = model.axial.rows, model.axial.cols
    x = x.clone()
    for r in range(x.shape[1]):
        for c in range(x.shape[2]):
            row, col = line_by_hand(rows, r, x.shape[1]), line_by_hand(cols, c, x.shape[2])
            x[:, r, c] += torch.cat((row, col)) if model.axial.combine == "concat" else row + col
    return x


@pytest.mark.parametrize("pos_embed", AXIAL)
@pytest.mark.parametrize("extra", [{}, {"class_token": True, "reg_tokens": 2, "global_pool": "token"}], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_axial_model_is_the_plain_one_with_the_embedding_added_by_hand(pos_embed, extra, size):
    model, plain = build(pos_embed=pos_embed, **extra), build(**extra)
    state = model.state_dict()
    tables = {name: state.pop(name).shape for name in ("axial.rows", "axial.cols")}
    widths = (9, 9) if pos_embed == "axial" else (18, 18)
    assert tables == {"axial.rows": (3, widths[0]), "axial.cols": (5, widths[1])}
    plain.load_state_dict(state)
    plain.patch_embed.register_forward_hook(lambda _module, _inputs, x: added_by_hand(model, x))
    x = images(*size)
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("extra", [{}, {"class_token": True, "reg_tokens": 2}], ids=str)
@pytest.mark.parametrize("no_embed_class", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_learned_embedding_is_timms(extra, no_embed_class, size):
    model = build(pos_embed="learn", no_embed_class=no_embed_class, **extra)
    patches = model.patch_embed(images(*size))
    expected = VisionTransformer._pos_embed(model, patches)
    # timm's interpolation goes through float32.
    torch.testing.assert_close(model._pos_embed(patches), expected, rtol=0, atol=0 if size == (24, 40) else 1e-6)


@pytest.mark.parametrize("pos_embed", AXIAL)
def test_dropped_patches_take_their_embedding_along(pos_embed):
    model = build(pos_embed=pos_embed, class_token=True, patch_drop_rate=0.5)
    x = images(40, 24)
    full, _ = model.embed(x)
    torch.manual_seed(3)
    tokens, grid = model.train().embed(x)
    assert tokens.shape[1] == 1 + 7
    kept = 1 + 3 * grid.coords[..., 0] + grid.coords[..., 1]
    expected = full.gather(1, kept[..., None].expand(-1, -1, 18))
    torch.testing.assert_close(tokens[:, 1:], expected, rtol=0, atol=0)
    # The same from the coordinates: none of it depends on all patches being there.
    patches = model.patch_embed(x).flatten(1, 2).gather(1, (kept - 1)[..., None].expand(-1, -1, 18))
    torch.testing.assert_close(patches + model.axial(grid), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("pos_embed", ["", "learn", *AXIAL])
@pytest.mark.parametrize(
    "new", [{"img_size": (40, 24)}, {"img_size": (16, 16)}, {"img_size": (32, 56), "patch_size": 4}]
)
def test_set_input_size_changes_nothing_at_that_size_and_makes_a_model_of_that_size(pos_embed, new):
    model = build(pos_embed=pos_embed, class_token=True)
    x = images(*new["img_size"])
    before = model(x)
    model.set_input_size(**new)
    if "patch_size" not in new:
        torch.testing.assert_close(model(x), before, rtol=0, atol=1e-5 if pos_embed == "learn" else 1e-14)
    other = build(pos_embed=pos_embed, class_token=True, **new)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("pos_embed", AXIAL)
def test_optimiser_groups(pos_embed):
    model = build(pos_embed=pos_embed, class_token=True)
    tables = {id(parameter) for parameter in model.axial.parameters()}
    assert {"axial.rows", "axial.cols", "pos_embed"} <= model.no_weight_decay()
    free, _ = param_groups_weight_decay(model, no_weight_decay_list=model.no_weight_decay())
    assert tables <= {id(parameter) for parameter in free["params"]}
    groups = param_groups_layer_decay(model, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.5)
    scale = {id(parameter): group["lr_scale"] for group in groups for parameter in group["params"]}
    # Stem, two blocks, head.
    assert {scale[table] for table in tables} == {scale[id(model.cls_token)]} == {0.5**3}
    assert scale[id(model.blocks[0].attn.position.key_rows)] == 0.5**2
    assert scale[id(model.head.weight)] == 1


@pytest.mark.parametrize("pos_embed", AXIAL)
def test_checkpointing_changes_neither_outputs_nor_gradients(pos_embed):
    model = build(pos_embed=pos_embed).train()
    parameters = list(model.parameters())
    x = images(40, 24)
    plain = model(x)
    grads = torch.autograd.grad(plain.square().sum(), parameters)
    assert all(grad.abs().sum() > 0 for grad in grads)
    model.set_grad_checkpointing()
    again = model(x)
    torch.testing.assert_close(again, plain, rtol=0, atol=0)
    for grad, expected in zip(torch.autograd.grad(again.square().sum(), parameters), grads, strict=True):
        torch.testing.assert_close(grad, expected, rtol=0, atol=1e-12)


def test_device_dtype_and_fresh_weights():
    model = timm.create_model("test_relvit", pos_embed="axial", device="meta", dtype=torch.bfloat16, **SMALL)
    assert {(table.device.type, table.dtype) for table in model.axial.parameters()} == {("meta", torch.bfloat16)}
    model = model.to_empty(device="cpu").float()
    torch.nn.init.constant_(model.axial.rows, torch.nan)
    torch.manual_seed(0)
    model.init_weights()
    assert 0.01 < model.axial.rows.std() < 0.03


def test_dropout_on_tokens_is_applied_once():
    for pos_embed in ("learn", "axial"):
        model = build(pos_embed=pos_embed, pos_drop_rate=0.5, class_token=True).train()
        assert 0.4 < (model.embed(images(80, 80))[0] == 0).double().mean() < 0.6


def test_errors():
    names = "'', 'learn', 'axial', 'axial-sum'"
    with pytest.raises(ValueError, match=rf"pos_embed must be one of {names}, got 'axia' \(did you mean 'axial'\?\)"):
        build(pos_embed="axia")
