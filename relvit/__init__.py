"""relvit: Vision Transformers that see where things are relative to each other in two dimensions.

Importing it registers the models with timm: `timm.create_model('relvit_small')`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from relvit import families, layers, models, ops
from relvit.models import Reach, RelVisionTransformer, attention_maps, restore, retrofit
from relvit.version import __version__

if TYPE_CHECKING:
    from torch import nn

    from relvit.evaluation import Predictor
    from relvit.evaluation.explain import LayerPlan

__all__ = [
    "__version__",
    "RelVisionTransformer",
    "retrofit",
    "restore",
    "attention_maps",
    "explain",
    "load",
    "families",
    "layers",
    "models",
    "ops",
]


def load(
    ckpt_path: str | os.PathLike[str], img_size: int | Sequence[int] | None = None, reach: Reach = "trained"
) -> Predictor:
    """The classifier of a checkpoint of `relvit fit`, for `predict` and `embed`; see `relvit.evaluation.Predictor`.

    Args:
        ckpt_path: the checkpoint, such as runs/RUN/checkpoints/best.ckpt.
        img_size: size of the images given to the model, one number or (height, width); None: as in training.
        reach: 'trained', 'stretch', 'logn', 'stretch-logn', 'windows', 'bands', 'mirror' or 'stretch-mirror', see
            `relvit.models.set_reach`.

    Raises:
        FileNotFoundError, ValueError: no checkpoint of `relvit fit`, or no such size or reach.
        TypeError: no path.
    """
    if not isinstance(ckpt_path, str | os.PathLike):
        raise TypeError(f"ckpt_path must be the path of a checkpoint, got {type(ckpt_path).__name__}")
    # Imported here, since Lightning takes a second that models alone do not need.
    from relvit.evaluation import Predictor

    return Predictor(ckpt_path, img_size, reach)


def explain(
    model: nn.Module, img_size: int | Sequence[int] | None = None, device: str | None = None
) -> list[LayerPlan]:
    """List what each attention layer of a model computes at an image size, by which backend and why.

    Args:
        model: a model of relvit, or of timm after `relvit.retrofit`.
        img_size: of the images, one number or (height, width) in pixels; None: that of the model.
        device: 'cpu' or 'cuda', for whose backend is asked, whether there is a card or not; None: where the parameters
            are.

    Raises:
        ValueError: a size that the model does not take, a model without such layers, another name of a device.
    """
    from relvit.evaluation.explain import explain as explain_layers

    return explain_layers(model, img_size, device=device)
