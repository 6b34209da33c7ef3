"""Small timm models of every kind that `relvit.retrofit` accepts, with large random weights."""

import copy

import torch
from timm.models.beit import Beit
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.vision_transformer import ResPostBlock, VisionTransformer
from timm.models.vision_transformer_relpos import ResPostRelPosBlock, VisionTransformerRelPos
from timm.models.vision_transformer_sam import VisionTransformerSAM
from timm_versions import since

import relvit

SMALL = {"img_size": (24, 16), "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 5}
ROPE = {"use_rot_pos_emb": True}
DINOV3 = {**ROPE, "rope_type": "dinov3", "rope_rotate_half": True, "use_abs_pos_emb": False}
GROUPED = {"num_heads": 3, "num_kv_heads": 1, "attn_type": "rope", "qkv_fused": False}

# Each name has a class and its arguments.
VITS = {
    "dinov2": (VisionTransformer, {"reg_tokens": 4, "no_embed_class": True, "init_values": 0.5}),
    "deit distilled": (VisionTransformerDistilled, {}),
    "clip": (VisionTransformer, {"pre_norm": True}),
    "siglip": (VisionTransformer, {"class_token": False, "global_pool": "map"}),
    "qk_norm": (VisionTransformer, {"qk_norm": True, "scale_attn_norm": True, "qkv_bias": False}),
    "post-norm": (VisionTransformer, {"block_fn": ResPostBlock, "init_values": 0.5}),
}
EVAS = {
    "eva": (Eva, {"qkv_fused": True}),
    "eva post-norm": (Eva, {"use_post_norm": True}),
    "eva02": (
        Eva,
        {
            **ROPE,
            "qkv_fused": False,
            "swiglu_mlp": True,
            "scale_mlp": True,
            "scale_attn_inner": True,
            "ref_feat_shape": (4, 4),
        },
    ),
    "rope axial": (Eva, {**ROPE, "attn_type": "rope", "use_abs_pos_emb": False, "rope_grid_indexing": "xy"}),
    "rope mixed": (Eva, {**ROPE, "attn_type": "rope", "rope_type": "mixed", "rope_grid_indexing": "xy"}),
    "dinov3": (Eva, {**DINOV3, "num_reg_tokens": 4}),
    "grouped": (Eva, {**DINOV3, **GROUPED, "qk_norm": True}),
    "mrope": (Eva, {**ROPE, "rope_type": "mrope", "rope_mrope_section": (2, 2, 2)}),
}
NAFLEX = {
    "naflex": (NaFlexVit, {"class_token": True, "reg_tokens": 1}),
    "naflex axial": (NaFlexVit, {"rope_type": "axial", "pos_embed": "none", "reg_tokens": 2, "attn_gated": True}),
    "naflex mixed": (NaFlexVit, {"rope_type": "mixed", "pos_embed": "factorized", "use_key_only_attn_mask": True}),
}
CASES = {**VITS, **EVAS, **NAFLEX}
# These models have each class, each way to call blocks, and each attention.
EACH = ("dinov2", "deit distilled", "siglip", "eva", "eva02", "rope mixed", "grouped", "naflex", "naflex mixed")

SHARED = {"shared_rel_pos": True}
SAM = {"img_size": (40, 56), "use_rel_pos": True, "window_size": 3, "global_attn_indexes": (1,), "neck_chans": 8}
STAGES = {"depths": (2, 2), "num_heads": (1, 2), "embed_dim": 8}
SWIN = {"img_size": (24, 40), "patch_size": 2, "window_size": (3, 4), "num_classes": 5, **STAGES}
# These models have their own relative positions.
OWN = {
    "relpos": (VisionTransformerRelPos, {**SMALL, "rel_pos_type": "bias"}),
    "relpos norm": (VisionTransformerRelPos, {**SMALL, "rel_pos_type": "bias", "block_fn": ResPostRelPosBlock}),
    "srelpos": (VisionTransformerRelPos, {**SMALL, "rel_pos_type": "bias", "class_token": True, **SHARED}),
    "relpos mlp": (VisionTransformerRelPos, {**SMALL, "rel_pos_type": "mlp", "class_token": True, "qk_norm": True}),
    "srelpos mlp": (VisionTransformerRelPos, {**SMALL, "rel_pos_type": "mlp-swin", **SHARED}),
    "beit": (Beit, {**SMALL, "use_rel_pos_bias": True, "use_abs_pos_emb": False, "init_values": 0.5}),
    "beit both": (Beit, {**SMALL, "use_rel_pos_bias": True, "use_shared_rel_pos_bias": True}),
    "sam": (VisionTransformerSAM, {**SMALL, **SAM, "use_abs_pos": False}),
    "sam absolute": (VisionTransformerSAM, {**SMALL, **SAM, "qk_norm": True}),
    "swin": (SwinTransformer, SWIN),
    "swinv2": (SwinTransformerV2, SWIN),
}


# These models have arguments, or windows that are not square, which older versions of timm than 1.0.31 may lack.
NEW = ("grouped", "mrope", "naflex axial", "naflex mixed", "swinv2")


def build(case, **kwargs):
    """Build an original model in double precision, with weights so large that mistakes are visible."""
    if case in NEW:
        since("1.0.31")
    torch.manual_seed(0)
    cls, own = (CASES | OWN)[case]
    arguments = {**(SMALL if case in CASES else {}), **own, **kwargs}
    if cls is NaFlexVit:
        outside = {name: arguments.pop(name) for name in ("num_classes", "img_size")}
        model = cls(NaFlexVitCfg(**{**arguments, "pos_embed_grid_size": (3, 2)}), **outside)
    else:
        model = cls(**arguments)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return with_exact_offsets(model.double().eval())


def with_exact_offsets(model):
    """Recompute in double precision the logarithms of offsets that timm's networks get in single precision."""
    for module in model.modules():
        for name in ("rel_coords_log", "relative_coords_table"):
            if getattr(module, name, None) is None:
                continue
            axes = (torch.arange(1 - size, size, dtype=torch.float64) for size in module.window_size)
            offsets = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
            if getattr(module, "mode", "swin") == "cr":
                scaled = offsets.sign() * torch.log(1 + offsets.abs())
            else:
                given = module.pretrained_window_size
                window = torch.tensor(given if given[0] else module.window_size, dtype=torch.float64)
                offsets = 8 * offsets / (window - 1)
                scaled = offsets.sign() * torch.log2(1 + offsets.abs()) / 3
            getattr(module, name).copy_(scaled.view_as(getattr(module, name)))
    return model


def retrofitted(original, *args, trained=True, **kwargs):
    """Return a retrofitted copy; `trained` fills the tables with random numbers."""
    model = relvit.retrofit(copy.deepcopy(original), *args, **kwargs)
    generator = torch.Generator().manual_seed(2)
    for name, table in model.named_parameters():
        if trained and ".position." in name:
            torch.nn.init.normal_(table, std=0.5, generator=generator)
    return model


def images(height=24, width=16, batch=2):
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def naflex_batch():
    """Return two images of 3 x 2 and 2 x 4 patches of 8 x 8 pixels, padded to 9 patches."""
    generator = torch.Generator().manual_seed(3)
    patches = torch.randn(2, 9, 8 * 8 * 3, generator=generator, dtype=torch.float64)
    coords = torch.zeros(2, 9, 2, dtype=torch.int64)
    valid = torch.zeros(2, 9, dtype=torch.bool)
    for sample, (rows, cols) in enumerate(((3, 2), (2, 4))):
        coords[sample, : rows * cols] = torch.cartesian_prod(torch.arange(rows), torch.arange(cols))
        valid[sample, : rows * cols] = True
    return {"patches": patches, "patch_coord": coords, "patch_valid": valid}


def fingerprint(model):
    """Return what must not change in a model that is refused."""
    return [(name, type(module), sorted(module.__dict__)) for name, module in model.named_modules()]


def tables(model):
    return {name: parameter for name, parameter in model.named_parameters() if ".position." in name}
