"""In a native batch each image has the same logits and gradients as alone at its own size."""

import copy
from functools import partial

import pytest
import timm
import torch
from vits import native_batch, small

import relvit
from relvit.layers import FirePosition2d, LowRankPosition2d
from relvit.models.sizes.native import embed_native, pool_native
from relvit.ops import AxisTables, RelativeTerms

PATCH = (8, 4)
# These grids are longer and shorter than the model's grid, have one row, or have one patch.
GRIDS = [(3, 5), (2, 2), (1, 7), (6, 2), (1, 1)]
MODELS = [
    {"rel_terms": "qkvb", "max_distance": 2},
    {"class_token": True, "reg_tokens": 2, "pos_embed": "learn", "global_pool": "avg"},
    {"class_token": True, "pos_embed": "learn", "no_embed_class": True, "global_pool": "token"},
    {"pos_embed": "axial", "global_pool": "avgmax", "layout": "joint"},
    {"pos_embed": "axial-sum", "global_pool": "map", "reg_tokens": 1},
    {"position": "slopes", "global_pool": "max", "backend": "fused", "reversible": True},
    {"rel_terms": "kv", "backend": "gathered", "pre_norm": True},
    {"position": "pape", "rope": "mixed", "embed_dim": 16, "class_token": True, "prefix_bias": True},
    {"position": "low-rank"},
    {"name": "test_relvit_aft", "kernel_size": 3},
    {"name": "test_relvit_aft", "mixer": "simple"},
]


def images(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, PATCH[0] * h, PATCH[1] * w, generator=generator, dtype=dtype) for h, w in GRIDS]


def compare(model, atol=1e-6):
    """Compare logits and gradients of a batch with those of its images one by one."""
    pictures = [picture.float().to(picture) for picture in images()]
    model = model.double()
    alone = torch.cat([model(picture[None]) for picture in pictures])
    wanted = torch.autograd.grad(alone.square().sum(), list(model.parameters()))
    batch = native_batch(pictures, PATCH)
    together = model(batch | {"patches": batch["patches"].double()})
    found = torch.autograd.grad(together.square().sum(), list(model.parameters()))
    torch.testing.assert_close(together, alone, atol=atol, rtol=atol)
    for (name, _), one, other in zip(model.named_parameters(), found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=atol, rtol=atol, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("variant", MODELS, ids=str)
def test_every_image_as_if_alone(variant):
    compare(small(patch_size=PATCH, img_size=(24, 12), depth=2, **variant))


def test_a_retrofitted_model():
    size = {"patch_size": PATCH, "img_size": (24, 12), "embed_dim": 16, "depth": 2, "num_heads": 2}
    model = relvit.retrofit(timm.create_model("vit_tiny_patch16_224", num_classes=5, **size), max_distance=2)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    compare(model)


class Adapted(torch.nn.Module):
    """An adapter of the form of PEFT's: the layer is `base_layer`, and the adapter adds to its output."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer, self.added = layer, copy.deepcopy(layer)

    def forward(self, x):
        return self.base_layer(x) + 3 * self.added(x)


def hooked(layer):
    layer.register_forward_hook(lambda _module, _inputs, out: 2 * out.tanh())
    return layer


@pytest.mark.parametrize("change", [hooked, Adapted])
def test_hooks_and_adapters_of_the_projection_are_run(change):
    model = small(patch_size=PATCH, img_size=(24, 12), depth=1)
    model.patch_embed.proj = change(model.patch_embed.proj)
    compare(model)


@pytest.mark.parametrize("padding", [float("nan"), float("inf"), 7.0])
def test_what_is_in_the_padding_does_not_matter(padding):
    model = small(patch_size=PATCH, img_size=(24, 12), global_pool="avg", reg_tokens=1)
    batch = native_batch(images(torch.float32), PATCH)
    expected = model(batch)
    spoilt = batch | {"patches": batch["patches"].clone()}
    spoilt["patches"][~batch["patch_valid"]] = padding
    spoilt["patches"].requires_grad_()
    torch.testing.assert_close(model(spoilt), expected, rtol=0, atol=0)
    model(spoilt).sum().backward()
    assert spoilt["patches"].grad[~batch["patch_valid"]].eq(0).all()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())


def test_flat_patches_and_known_bounds():
    model = small(patch_size=PATCH, depth=2, pos_embed="learn").eval()
    pictures = images(torch.float32)
    batch = native_batch(pictures, PATCH)
    expected = model(batch)
    torch.testing.assert_close(model(native_batch(pictures, PATCH, flat=True)), expected)
    torch.testing.assert_close(model(batch | {"grid_size": (9, 8)}), expected)
    features = model.forward_features(batch)
    assert features.keys() == {"patches", "patch_valid"}
    torch.testing.assert_close(model.forward_head(**features | {"x": features.pop("patches")}), expected)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(batch).float(), expected, atol=0.1 * float(expected.abs().max()), rtol=0.1)


def test_the_gradient_of_a_bfloat16_embedding_is_summed_without_rounding():
    model = small(patch_size=PATCH, img_size=(16, 8), depth=1, pos_embed="learn", class_token=True).bfloat16()
    batch = native_batch([torch.zeros(3, 16, 8)] * 1000, PATCH)
    # Each token has the gradient 1 in each of 1000 images, and a sum in bfloat16 would end at 256.
    tokens, _ = embed_native(model, batch | {"patches": batch["patches"].bfloat16()})
    assert tokens.dtype == torch.bfloat16
    tokens[:, :5].sum().backward()  # without padding
    expected = torch.full(model.pos_embed.shape, 1000.0)
    torch.testing.assert_close(model.pos_embed.grad.float(), expected, rtol=0.01, atol=0)


def test_sums_of_many_float16_tokens_do_not_overflow():
    model = small(patch_size=PATCH, depth=1).half()
    x = torch.full((1, 600, model.embed_dim), 200.0, dtype=torch.float16)
    pooled = pool_native(model, x, torch.arange(600)[None] < 500)
    assert pooled.dtype == torch.float16
    assert (pooled == 200).all()  # the sum of 500 tokens, 100,000, is beyond float16


def test_dropped_patches_keep_their_places():
    """Patches that are kept have the same coordinates as before, and padding stays padding."""
    model = small(patch_size=PATCH, depth=1, patch_drop_rate=0.5).train()
    batch = native_batch(images(torch.float32), PATCH)
    torch.manual_seed(0)
    tokens, grid = model.embed(batch)
    assert tokens.shape[1] == grid.coords.shape[1] == grid.valid.shape[1] == batch["patch_valid"].shape[1] // 2
    whole, everywhere = model.eval().embed(batch)
    for sample in range(len(GRIDS)):
        real, left = everywhere.valid[sample], grid.valid[sample]
        places = everywhere.coords[sample][real].tolist()
        found = [places.index(place) for place in grid.coords[sample][left].tolist()]
        assert torch.equal(tokens[sample][left], whole[sample][real][found])


def test_intermediate_features_come_with_the_places_of_the_padding():
    model, batch = small(patch_size=PATCH), native_batch(images(torch.float32), PATCH)
    features = model.forward_intermediates(batch, output_fmt="NLC", output_dict=True)
    assert torch.equal(features["patch_valid"], batch["patch_valid"])
    assert features["image_intermediates"][0].shape[:2] == batch["patch_valid"].shape


@pytest.mark.slow
def test_one_graph_serves_all_shapes():
    # PyTorch would also count the graphs of other tests.
    torch._dynamo.reset()
    model = small(patch_size=PATCH, depth=1)
    batch = native_batch(images(torch.float32), PATCH)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        for size in ((6, 7), (8, 9), (9, 7), (7, 8)):
            torch.testing.assert_close(compiled(batch | {"grid_size": size}), model(batch), atol=1e-4, rtol=1e-4)


def naflexvit():
    size = {"embed_dim": 16, "depth": 1, "num_heads": 2, "patch_size": 8}
    return timm.create_model("naflexvit_base_patch16_gap", num_classes=5, img_size=24, **size)


@pytest.mark.parametrize("make", [naflexvit, lambda: relvit.retrofit(naflexvit())])
def test_naflexvit_before_and_after_its_retrofit(make):
    model, generator = make().eval(), torch.Generator().manual_seed(0)
    pictures = [torch.randn(3, 8 * h, 8 * w, generator=generator) for h, w in GRIDS[:3]]
    expected = torch.cat([model(picture[None]) for picture in pictures])
    torch.testing.assert_close(model(native_batch(pictures, 8)), expected, atol=1e-5, rtol=1e-5)


def without_convolution():
    model = small(patch_size=PATCH)
    model.patch_embed.proj = torch.nn.Identity()
    return model


def overlapping_patches():
    model = small(patch_size=PATCH)
    model.patch_embed.proj = torch.nn.Conv2d(3, model.embed_dim, (10, 6), PATCH, (1, 1))
    return model


DISTILLED = {"patch_size": PATCH, "depth": 1}
REFUSED = {
    "its AFTFull has the bias of one grid": lambda: small("test_relvit_aft", mixer="full", patch_size=PATCH),
    "has a distillation token": lambda: relvit.retrofit(
        timm.create_model("deit_tiny_distilled_patch16_224", **DISTILLED)
    ),
    "PatchEmbed has no convolution `proj` of separate patches; give images of one size": without_convolution,
    "has no convolution `proj` of separate patches": overlapping_patches,
    "global_pool 'prr' has no mask for the padding": lambda: small(global_pool="prr", patch_size=PATCH),
}


@pytest.mark.parametrize("message", REFUSED)
def test_models_without_native_batches(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]().eval()(native_batch(images(torch.float32), PATCH))


def test_more_errors():
    model = small(patch_size=PATCH)
    batch = native_batch(images(torch.float32), PATCH)
    with pytest.raises(ValueError, match="64 values each, the model takes 96: cut patches of 8 x 4 px with 3 channels"):
        model(batch | {"patches": torch.zeros(5, batch["patches"].shape[1], 64)})
    for name in ("patches", "patch_coord", "patch_valid"):
        rest = {other: tensor for other, tensor in batch.items() if other != name}
        with pytest.raises(ValueError, match=f"must hold 'patches', 'patch_coord', 'patch_valid'; it has no '{name}'$"):
            model(rest)
    mask = torch.ones(5, 1, 1, batch["patches"].shape[1], dtype=torch.bool)
    with pytest.raises(ValueError, match="must hold no attn_mask: give it to the model as an argument of this name"):
        model(batch | {"attn_mask": mask})
    assert torch.equal(model(batch | {"attn_mask": None}), model(batch, attn_mask=mask))
    with pytest.raises(ValueError, match="rows from -1 to 4, the grid has rows from 0 to 4"):
        model(batch | {"patch_coord": batch["patch_coord"] - torch.tensor([1, 0])})


@pytest.mark.parametrize("pos_embed", ["", "learn", "axial"])
def test_dropout_on_tokens_is_applied_once(pos_embed):
    model = small(patch_size=PATCH, pos_embed=pos_embed, class_token=True, pos_drop_rate=0.3).eval()
    batch = native_batch(images(torch.float32), PATCH)
    torch.manual_seed(0)
    expected = torch.nn.functional.dropout(model.embed(batch)[0], 0.3)
    torch.manual_seed(0)
    assert torch.equal(model.train().embed(batch)[0], expected)


class Farthest(torch.nn.Module):
    """A position without relvit's base class; its bias divides offsets by the image's rows and columns."""

    needs_extent = True

    def __init__(self, head_dim, num_heads, device=None, dtype=None):
        super().__init__()

    def forward(self, grid):
        rows, cols = (torch.arange(1 - size, size).abs() / size for size in (grid.height, grid.width))
        return RelativeTerms(bias=AxisTables(rows, cols))


def inside_of_another(*sizes, **like):
    return torch.nn.Sequential(FirePosition2d(*sizes, **like))


@pytest.mark.parametrize(
    ("position", "message"),
    [
        ("fire", "FirePosition2d depends on the size of the image"),
        (inside_of_another, "Sequential depends on the size of the image"),
        (Farthest, "Farthest depends on the size of the image, .*: give images of one size as a tensor"),
        (
            partial(LowRankPosition2d, grid_size=(5, 9)),
            r"up to 6 x 7 patches, and factors of 5 x 9 patches .* functools.partial\(.*, grid_size=\(6, 9\)\)$",
        ),
    ],
)
def test_positions_that_depend_on_the_size_of_each_image_refuse(position, message):
    with pytest.raises(ValueError, match=message):
        small(patch_size=PATCH, position=position)(native_batch(images(torch.float32), PATCH))


def test_larger_factors_and_a_tensor_serve_images_that_factors_refuse():
    larger = small(patch_size=PATCH, position=partial(LowRankPosition2d, grid_size=(6, 9)))
    assert larger(native_batch(images(torch.float32), PATCH)).shape == (5, 5)
    model = small(patch_size=PATCH, position=partial(LowRankPosition2d, grid_size=(5, 9)))
    assert model(torch.randn(2, 3, 6 * PATCH[0], 7 * PATCH[1])).shape == (2, 5)
