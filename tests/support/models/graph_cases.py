"""The models whose graphs must serve all image sizes: relvit's and retrofitted ones of one block, and their images."""

import timm
import torch
from retrofit_cases import OWN, retrofitted
from retrofit_cases import build as build_original
from vits import small

from relvit.models import set_reach

SIZES = [(24, 16), (16, 80), (136, 32), (64, 64)]


def build(reach="trained", **kwargs):
    """Build a retrofitted model for `case`, or else a relvit model with these arguments."""
    if (case := kwargs.get("case")) in OWN:
        return retrofitted(build_original(case, depth=1)).float()
    if case:
        return set_reach(retrofitted(build_original(case, depth=1), "kv", max_distance=2).float(), reach)
    if "name" in kwargs:
        return small(**{"depth": 1, **kwargs}).eval()
    torch.manual_seed(0)
    start = {} if "position" in kwargs else {"rel_init_std": 0.5}
    arguments = {"patch_size": 8, "depth": 1, "class_token": True, **start, **kwargs}
    model = timm.create_model("test_relvit", **arguments).eval()
    return set_reach(model, reach)


def images(height, width):
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))


# The grid of the absolute embedding is smaller than some of SIZES and larger than others, along both axes.
PER_HEAD = {"pos_embed": "learn", "img_size": 32, "rel_terms": "kvb", "shared_heads": False}
FREE = [
    {"name": "test_relvit_aft", "class_token": True, "kernel_size": 3},
    {"name": "test_relvit_aft", "mixer": "local", "img_size": (32, 48)},
]
HALTING = {"name": "test_relvit_universal", "depth": 2, "halting": "act", "class_token": True}
# These models have a bias per pair of offsets; BEiT's prefix tokens have their own bias.
JOINT = [{"case": "beit"}, {"case": "relpos"}]
VARIANTS = [
    PER_HEAD | {"reach": "stretch-logn"},
    {"case": "clip", "reach": "stretch-mirror"},
    {"case": "eva02", "reach": "mirror"},
    {"pos_embed": "axial-sum", "img_size": (32, 48), "layout": "joint", "mlp_chunk": 4},
    {"case": "rope mixed"},
    {"position": "fire", "img_size": 32, "reach": "stretch"},
    {"position": "cpb"},
    {"position": "pape", "img_size": 32, "reach": "stretch"},
    {"position": "low-rank"},
    {"rope": "mixed", "embed_dim": 64, "rel_terms": "v", "prefix_bias": True},
    {"position": "xl", "band_rows": 2, "memory_rows": 3, "class_token": False},
    {"rel_terms": "kb", "bucketing": "piecewise"},
    {"case": "beit"},
    {"case": "relpos mlp"},
    *FREE,
    HALTING,
]
