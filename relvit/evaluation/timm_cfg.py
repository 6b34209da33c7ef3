"""Description of a trained model for timm: which images it takes, and which classes it tells apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from timm.models import filter_pretrained_cfg

# Of the weights that the architecture is usually loaded with, and not of these.
FOREIGN = ("tag", "test_input_size", "test_crop_pct", "test_pool_size", "label_offset", "label_descriptions")


def trained_cfg(
    cfg: dict[str, Any],
    class_names: Sequence[str],
    img_size: tuple[int, int],
    mean: Sequence[float],
    std: Sequence[float],
    crop_pct: float,
) -> dict[str, Any]:
    """Describe a trained model as timm does in `model.pretrained_cfg`.

    `timm.data.resolve_model_data_config` makes the transforms of the training out of it, `timm.models.save_for_hf`
    writes it to config.json.

    Args:
        cfg: what timm knows about the architecture.
        class_names: names of the classes in the order of the labels.
        img_size: height and width of the images in training.
        mean: normalisation of each channel.
        std: likewise.
        crop_pct: share of the side that the centre crop keeps.
    """
    of_architecture = filter_pretrained_cfg(cfg, remove_source=True)
    return {
        **{name: value for name, value in of_architecture.items() if name not in FOREIGN},
        "num_classes": len(class_names),
        "label_names": tuple(class_names),
        "input_size": (len(mean), *img_size),
        "pool_size": None,
        "mean": tuple(mean),
        "std": tuple(std),
        "crop_pct": crop_pct,
        "crop_mode": "center",
        "interpolation": "bicubic",
        "custom_load": False,
    }
