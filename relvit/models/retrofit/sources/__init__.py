"""The models that `relvit.retrofit` takes: a file for each family, which is imported when a model of it is given."""

from __future__ import annotations

from pkgutil import resolve_name

from relvit.models.retrofit.source import Retrofitted

# Class of a model -> file and class of what the model becomes. Names need no library that is not installed.
SOURCES = {
    "timm.models.vision_transformer.VisionTransformer": "timm_vit:RetrofittedVisionTransformer",
    "timm.models.deit.VisionTransformerDistilled": "timm_vit:RetrofittedVisionTransformerDistilled",
    "timm.models.eva.Eva": "timm_eva:RetrofittedEva",
    "timm.models.naflexvit.NaFlexVit": "timm_naflex:RetrofittedNaFlexVit",
    "timm.models.vision_transformer_relpos.VisionTransformerRelPos": "timm_bias:RetrofittedRelPos",
    "timm.models.beit.Beit": "timm_bias:RetrofittedBeit",
    "timm.models.vision_transformer_sam.VisionTransformerSAM": "timm_sam:RetrofittedSam",
    "timm.models.swin_transformer.SwinTransformer": "timm_bias:RetrofittedSwin",
    "timm.models.swin_transformer_v2.SwinTransformerV2": "timm_bias:RetrofittedSwinV2",
}


def source_of(model_class: type) -> type[Retrofitted] | None:
    """Return what a model of exactly this class becomes, or None: it cannot be retrofitted."""
    place = SOURCES.get(f"{model_class.__module__}.{model_class.__qualname__}")
    return None if place is None else resolve_name(f"{__name__}.{place}")
