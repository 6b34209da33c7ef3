"""Reach: how a model with relative attention treats images of another size than it was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from torch import nn

from relvit.layers.attention import GridAttention
from relvit.layers.positions.base import is_stretchable, needs_tokens
from relvit.models.segments import SEGMENTERS
from relvit.ops import Grid
from relvit.ops.checks import int_pair
from relvit.utils.messages import check_choice

Reach = Literal["trained", "stretch", "logn", "stretch-logn", "windows", "bands", "mirror", "stretch-mirror"]
"""Rule for images of another size than in training, see `set_reach`."""


def check_reach(reach: Reach, fixed: bool, path: str) -> None:
    """Refuse a reach that needs images of one size, where those of the training had not (`fixed` is false).

    Raises:
        ValueError: the reach does not go with the training of the checkpoint at `path`.
    """
    if not fixed and reach not in ("trained", "logn"):
        raise ValueError(f"reach {reach!r} is for images of one size, and {path} was trained on native shapes")


def set_reach(model: nn.Module, reach: Reach, trained_size: int | Sequence[int] | None = None) -> nn.Module:
    """Choose how relative attention treats images of another size than in training, until chosen again; in place.

    With H x W patches in an image, H0 x W0 in training, and n and n0 tokens likewise, prefix tokens included:

    - 'trained', as models are made: offsets are clipped at max_distance patches, and nothing else changes.
    - 'stretch': vertical offsets are multiplied by H0 / H, horizontal ones by W0 / W, then clipped; the tables are
      interpolated linearly for that, see `relvit.layers.positions.base.stretch`.
    - 'logn': all attention logits, the bias included, are multiplied by log(n) / log(n0), see `relvit.ops.temperature`.
    - 'stretch-logn': both.
    - 'windows': tokens attend to those of their own window of H0 x W0 patches, so time and memory grow in proportion to
      the image; without prefix tokens and rotary embeddings only.
    - 'bands': the image is computed in bands of H0 rows of patches, from the top; tokens attend to those of their own
      band and of the H0 rows above it, so that memory does not grow with the height; see
      `relvit.families.transformer_xl.set_bands`.
    - 'mirror': the learned absolute embedding is not interpolated: that of H0 x W0 lies in the centre of the grid as it
      is, and is mirrored beyond its edges, as the protocol `field` of `relvit.data.eval_transform` continues images.
    - 'stretch-mirror': 'stretch' and 'mirror'.

    At the trained size all of them compute the same. Rotary embeddings are not changed, and absolute ones by 'mirror'
    alone: they have rules of their own for other sizes. Names in the state dict stay, and so do gradients, graphs and
    exports. A position of your own can be stretched if it has an attribute `trained_grid`, None or (rows, columns), and
    follows it in `forward`.

    Args:
        model: a `relvit_*` model with attention, or a timm model after `relvit.retrofit`, but for NaFlexVit.
        reach: one of these.
        trained_size: size of the images in training, in pixels, one number or (height, width); None: `img_size` of the
            model.

    Returns:
        `model` itself.

    Raises:
        ValueError: an unknown `reach`, or one that the model has nothing for; the model is not changed then.
    """
    check_choice("reach", reach, get_args(Reach))
    layers = [part for part in model.modules() if isinstance(part, GridAttention)]
    # Blocks that cut windows cut them of one size in all images, so these have no reach.
    layers = [layer for layer in layers if layer.block_window is None]
    trained_grid = trained_keys = window = segmenter = mirrored_grid = None
    if reach != "trained":
        refused = f"reach {reach!r} is not for {type(model).__name__}"
        if not layers:
            raise ValueError(
                f"{refused}, which has no relative attention to all tokens; relvit_small and others have it, and "
                "relvit.retrofit gives it to timm's Vision Transformers"
            )
        if reach != "stretch" and (why := layers[0].lacks.get("reach")) is not None:
            raise ValueError(f"{refused}: {why}")
        embed = getattr(model, "patch_embed", None)
        if embed is None:
            raise ValueError(f"{refused}, which has no patch_embed, whose size would be that of the training")
        if getattr(model, "own_segmenter", None):
            raise ValueError(
                f"{refused}, which computes in parts already: leave it out (set_bands(model, None) ends that)"
            )
        grid = embed.grid_size
        if trained_size is not None:
            grid = embed.dynamic_feat_size(int_pair("trained_size", trained_size, max(embed.patch_size)))
        if "mirror" in reach:
            if not hasattr(model, "mirrored_grid") or model.pos_embed is None:
                raise ValueError(
                    f"{refused} without a learned absolute embedding that can be mirrored: models of relvit with "
                    "pos_embed='learn' have it, and timm's VisionTransformer, Eva and Beit, retrofitted, with pos_embed"
                )
            mirrored_grid = tuple(grid)
        if "logn" in reach:
            trained_keys = model.num_prefix_tokens + grid[0] * grid[1]
            if trained_keys < 2:
                raise ValueError(f"{refused} trained on a single token")
        if reach == "windows":
            if model.num_prefix_tokens:
                raise ValueError(f"{refused} with a class token or registers, which are in no window")
            if getattr(model, "rope", None) is not None:
                raise ValueError(f"{refused} with a rotary embedding")
            window = tuple(grid)
        if reach in SEGMENTERS:
            segmenter = SEGMENTERS[reach].of(model, grid[0], grid[0])
        if "stretch" in reach:
            trained_grid = tuple(grid)
            for layer in layers:
                _check_position(layer.position, refused)
    if hasattr(model, "segmenter"):
        model.segmenter = segmenter or model.own_segmenter
    if hasattr(model, "mirrored_grid"):
        model.mirrored_grid = mirrored_grid
    for layer in layers:
        layer.trained_keys = trained_keys
        layer.window = window
        if is_stretchable(layer.position):
            layer.position.trained_grid = trained_grid
    return model


def _check_position(position: nn.Module | None, refused: str) -> None:
    """Raise unless there are tables to stretch."""
    tables = position is not None and not needs_tokens(position)
    if position is None or (tables and all(term is None for term in position(Grid(1, 1))[:4])):
        raise ValueError(f"{refused} without relative terms: there are no tables to stretch")
    if not is_stretchable(position):
        raise ValueError(
            f"{refused} with position {type(position).__name__}, which cannot be stretched: it has no attribute "
            "trained_grid, (rows, columns), for its forward to follow"
        )
