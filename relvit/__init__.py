"""relvit: Vision Transformers that see where things are relative to each other in two dimensions.

Importing `relvit` registers the models with timm: `timm.create_model('relvit_small')`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from relvit.version import __version__, check_versions

# Check versions before the other imports, which therefore are not at the top (E402): with an old PyTorch or timm these
# imports, or models later on, would fail with errors that say nothing about versions.
check_versions()

from relvit import families, layers, models, ops  # noqa: E402
from relvit.models import Reach, RelVisionTransformer, attention_maps, explain, restore, retrofit  # noqa: E402

if TYPE_CHECKING:
    from relvit.app.evaluation import Predictor

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
    """The classifier of a checkpoint or exported file, for `predict` and more; see `relvit.app.evaluation.Predictor`.

    Args:
        ckpt_path: the checkpoint, such as runs/RUN/checkpoints/best.ckpt, or an .onnx or .pt2 file of `relvit export`,
            which can only predict. Load a .pt2 file only if you trust it, because PyTorch may run code in it.
        img_size: size of the images given to the model, one number or (height, width); None: as in training.
        reach: 'trained', 'stretch', 'logn', 'stretch-logn', 'windows', 'bands', 'mirror' or 'stretch-mirror', see
            `relvit.models.set_reach`.

    Raises:
        FileNotFoundError: there is no such file, or it is a folder.
        ValueError: the file is not a checkpoint of `relvit fit`, or the model cannot have this size or reach.
        TypeError: `ckpt_path` is not a path.
        ModuleNotFoundError: the packages of `pip install "relvit[train]"` are missing.
    """
    if not isinstance(ckpt_path, str | os.PathLike):
        raise TypeError(f"ckpt_path must be the path of a checkpoint, got {type(ckpt_path).__name__}")
    # Lightning takes a second to load, and only `load` needs it, so import it here.
    from relvit.app.evaluation import Predictor

    return Predictor(ckpt_path, img_size, reach)
