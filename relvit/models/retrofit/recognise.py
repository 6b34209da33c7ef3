"""Look up a model by its class: the class that `relvit.retrofit` gives it, or the reason for a refusal."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pkgutil import resolve_name

from packaging.specifiers import SpecifierSet

from relvit.models.retrofit.source import Retrofitted
from relvit.utils.messages import full_name

# `SOURCES` maps the class of an original model to a file in `sources/` and to the file's class for the retrofitted
# model. Classes are given by name, because their library may not be installed.
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
    "timm.models.mvitv2.MultiScaleVit": "timm_mvit:RetrofittedMultiScaleVit",
    "transformers.models.sam.modeling_sam.SamVisionEncoder": "transformers_sam:RetrofittedSamVisionEncoder",
    "transformers.models.sam_hq.modeling_sam_hq.SamHQVisionEncoder": "transformers_sam:RetrofittedSamHQVisionEncoder",
    "transformers.models.beit.modeling_beit.BeitModel": "transformers_beit:RetrofittedBeitModel",
    "transformers.models.data2vec.modeling_data2vec_vision.Data2VecVisionModel": (
        "transformers_beit:RetrofittedData2VecVisionModel"
    ),
    "segment_anything.modeling.image_encoder.ImageEncoderViT": "segment_anything_sam:RetrofittedImageEncoder",
}
# If a model's class is not known, the error lists these names of classes.
TIMM = [name.rpartition(".")[2] for name in SOURCES if name.startswith("timm.")]
_SWIN = (
    "it is a Swin Transformer, whose windows have few tokens at every image size, so a retrofit would save no time: "
    "leave it as it is, or take timm's Swin, which retrofit accepts"
)
# This table maps folders of plain Vision Transformers in `transformers` to the names of timm's models with the same
# weights.
_PLAIN = {
    "vit": "vit_*",
    "vit_mae": "vit_*.mae",
    "deit": "deit_*",
    "dinov2": "*_dinov2*",
    "dinov2_with_registers": "*_reg4_dinov2*",
    "dinov3_vit": "vit_*_dinov3*",
    "clip": "vit_*_clip_*",
    "siglip": "vit_*_siglip_*",
    "siglip2": "vit_*.v2_webli",
}
# `relvit.retrofit` refuses models of classes whose full names begin with these texts, for these reasons.
REFUSED = {
    "timm.models.swin_transformer_v2_cr.": (
        "it is another implementation of Swin V2, with blocks and attention of its own, which retrofit does not know: "
        "take one of timm's swinv2_*"
    ),
    "timm.models._features.FeatureListNet": (
        "features_only=True has taken the model apart: timm.create_model('retrofitted', model=NAME, "
        "features_only=True) retrofits it first"
    ),
    "timm.models.maxxvit.": "it has further kinds of blocks beside attention, such as convolutions",
    "torchvision.models.video.mvit.MViT": (
        "its tokens are those of videos, with a time axis beside rows and columns, and relvit's positions have none"
    ),
    "torchvision.models.swin_transformer.": _SWIN,
    "transformers.models.swin.": _SWIN,
    "transformers.models.swinv2.": _SWIN,
    "transformers.models.maskformer.modeling_maskformer_swin.": _SWIN,
    "transformers.models.donut.modeling_donut_swin.": _SWIN,
    **{
        f"transformers.models.{folder}.": (
            "retrofit takes Vision Transformers without relative positions only from timm, which has the pretrained "
            f"weights of this family: timm.list_pretrained('{names}') lists them"
        )
        for folder, names in _PLAIN.items()
    },
}
# relvit is tested with these versions of other libraries. The extra 'elsewhere' in pyproject.toml requires the same
# versions of transformers. Some families of models need a newer version than the rest of their library.
VERSIONS = {
    "transformers": ">=5.4,<6",
    "transformers.models.beit": ">=5.10,<6",
    "transformers.models.data2vec": ">=5.10,<6",
    "segment_anything": ">=1.0,<2",
}


def source_of(model_class: type) -> type[Retrofitted] | None:
    """Return the class that a model of exactly this class becomes, or None if such models cannot be retrofitted.

    Raises:
        ValueError: relvit is not tested with the installed version of the model's library.
    """
    place = SOURCES.get(full_name(model_class))
    if place is None:
        return None
    library = model_class.__module__.partition(".")[0]
    try:
        installed = version(library)
    except PackageNotFoundError:
        # A library that is imported from a plain folder, without being installed, has no version, so its version is not
        # checked.
        installed = None
    family = model_class.__module__.rpartition(".")[0]
    allowed = VERSIONS.get(family, VERSIONS.get(library, ""))
    if installed is not None and not SpecifierSet(allowed, prereleases=True).contains(installed):
        raise ValueError(f"{model_class.__name__} is of {library} {installed}: retrofit needs {library}{allowed}")
    return resolve_name(f"relvit.models.retrofit.sources.{place}")


def refusal_of(model_class: type) -> str | None:
    """Return the known reason why a model of this class cannot be retrofitted, or None."""
    return next((why for name, why in REFUSED.items() if full_name(model_class).startswith(name)), None)
