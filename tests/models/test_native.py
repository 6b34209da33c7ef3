"""Native batches: the logits and gradients of every image alone, at its own size and through the ordinary path."""

import pytest
import timm
import torch
from timm.data.naflex_dataset import NaFlexCollator
from timm.data.naflex_transforms import Patchify
from vits import small

import relvit
from relvit.models.native import check_native

PATCH = (8, 4)
# Rows and columns of patches: longer and shorter than the grid of the model, one row, one patch.
GRIDS = [(3, 5), (2, 2), (1, 7), (6, 2), (1, 1)]
MODELS = [
    {"rel_terms": "qkvb", "max_distance": 2},
    {"class_token": True, "reg_tokens": 2, "pos_embed": "learn", "global_pool": "avg"},
    {"class_token": True, "pos_embed": "learn", "no_embed_class": True, "global_pool": "token"},
    {"pos_embed": "axial", "global_pool": "avgmax", "layout": "joint"},
    {"pos_embed": "axial-sum", "global_pool": "map", "reg_tokens": 1},
    {"position": "slopes", "global_pool": "max", "backend": "fused"},
    {"rel_terms": "kv", "backend": "gathered", "pre_norm": True},
]


def images(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, PATCH[0] * h, PATCH[1] * w, generator=generator, dtype=dtype) for h, w in GRIDS]


def native_batch(pictures, flat=False):
    """By timm's own patches and collation, longer than necessary."""
    items = [(Patchify(PATCH, flatten_patches=flat)(picture), 0) for picture in pictures]
    batch = NaFlexCollator(max(h * w for h, w in GRIDS) + 1)(items)[0]
    return batch | {"patches": batch["patches"].to(pictures[0])}


def compare(model, atol=1e-6):
    """Logits and gradients of a batch, and of images one by one. (timm's collation rounds to float32.)"""
    pictures = [picture.float().to(picture) for picture in images()]
    model = model.double()
    alone = torch.cat([model(picture[None]) for picture in pictures])
    wanted = torch.autograd.grad(alone.square().sum(), list(model.parameters()))
    together = model(native_batch(pictures))
    found = torch.autograd.grad(together.square().sum(), list(model.parameters()))
    torch.testing.assert_close(together, alone, atol=atol, rtol=atol)
    for (name, _), one, other in zip(model.named_parameters(), found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=atol, rtol=atol, msg=lambda text, name=name: f"{name}: {text}")


def lively(model):
    """Give parameters that start at zero or one other values, so that nothing is hidden."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("variant", MODELS, ids=str)
def test_every_image_as_if_alone(variant):
    compare(lively(small(patch_size=PATCH, img_size=(24, 12), depth=2, **variant)))


@pytest.mark.parametrize("mixer", [{"mixer": "conv", "kernel_size": 3}, {"mixer": "simple"}], ids=str)
def test_attention_free_models(mixer):
    size = {"patch_size": PATCH, "img_size": (24, 12), "embed_dim": 16, "depth": 2, "num_heads": 2}
    compare(lively(timm.create_model("test_relvit_aft", num_classes=5, **size, **mixer)))


def test_a_retrofitted_model():
    size = {"patch_size": PATCH, "img_size": (24, 12), "embed_dim": 16, "depth": 2, "num_heads": 2}
    compare(lively(relvit.retrofit(timm.create_model("vit_tiny_patch16_224", num_classes=5, **size), max_distance=2)))
