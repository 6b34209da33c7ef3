"""Reach: treatment of images of another size than in training, by stretched tables, temperature, windows, bands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from torch import nn

from relvit.layers.attention import GridAttention
from relvit.layers.mixer import lack_of
from relvit.layers.patch_embed import check_divisible
from relvit.layers.positions.base import is_stretchable, needs_tokens
from relvit.models.recurrence import RECURRENCES
from relvit.models.retrofit.api import can_retrofit
from relvit.ops import Grid
from relvit.ops.checks import check_model, int_pair
from relvit.utils.messages import check_choice, part_of

Reach = Literal["trained", "stretch", "logn", "stretch-logn", "windows", "bands", "mirror", "stretch-mirror"]
"""Rule for images of another size than in training, see `set_reach`."""


def set_reach(model: nn.Module, reach: Reach, trained_size: int | Sequence[int] | None = None) -> nn.Module:
    """Choose, in place, how relative attention treats images of another size than in training.

    Let an image have H x W patches and n tokens, prefix tokens included, and in training H0 x W0 patches and n0 tokens:

    - 'trained', the default: offsets are clipped at max_distance patches, and nothing else changes.
    - 'stretch': vertical offsets are multiplied by H0 / H, horizontal offsets by W0 / W, then clipped. For offsets
      between whole numbers the tables are interpolated linearly, see `relvit.layers.positions.base.stretch`.
    - 'logn': all attention logits, the bias included, are multiplied by log(n) / log(n0), see
      `relvit.ops.log_n_scaling`.
    - 'stretch-logn': 'stretch' and 'logn'.
    - 'windows': tokens attend to the tokens of their own window of H0 x W0 patches, so time and memory grow in
      proportion to the image; only for models without prefix tokens, and retrofitted models without rotary embedding.
    - 'bands': the image is computed in bands of H0 rows of patches, from the top; tokens attend to the tokens of their
      own band and of the H0 rows above it, so memory does not grow with the height; see
      `relvit.families.transformer_xl.set_bands`.
    - 'mirror': the learned absolute embedding of H0 x W0 patches is not interpolated. The embedding lies in the centre
      of the grid and is mirrored beyond its edges, as the protocol `field` of `relvit.app.data.eval_transform` mirrors
      images.
    - 'stretch-mirror': 'stretch' and 'mirror'.

    At the trained size all choices give the same outputs. Rotary embeddings follow their own rules at other sizes, and
    so do absolute embeddings unless 'mirror' is chosen. Names in the state dict stay the same. Training and
    compilation work with every choice, and so does export, but with 'windows' for one image size only. Your own
    position can be stretched if its class sets `stretchable = True` and its `forward` reads the attribute
    `trained_grid`, None or (rows, columns).

    Examples:
        >>> model = timm.create_model("relvit_tiny", img_size=64, depth=2).eval()
        >>> set_reach(model, "stretch")(torch.randn(1, 3, 96, 128)).shape
        torch.Size([1, 1000])

    Args:
        model: a `relvit_*` model with attention, or a retrofitted timm model, except NaFlexVit and Swin.
        reach: one of the names above.
        trained_size: size of the images in training, in pixels, one number or (height, width); None: `img_size` of the
            model, which `set_input_size` changes. A later `set_input_size` keeps H0 x W0, except for absolute
            embeddings, and tables of retrofitted models, that it interpolates.

    Returns:
        `model` itself.

    Raises:
        TypeError: `model` is not a module.
        ValueError: `reach` is unknown, or this model cannot have it, or does not take images of `trained_size`. The
            model is not changed then.
    """
    check_model(model)
    check_choice("reach", reach, get_args(Reach))
    # Blocks with a `block_window` cut windows of one size in all images, so their offsets are never larger than in
    # training, and no reach applies to them.
    layers = [part for part in model.modules() if isinstance(part, GridAttention) and part.block_window is None]
    trained_grid = trained_keys = window = recurrence = mirrored_grid = None
    if reach != "trained":
        refused = f"reach {reach!r} is not for {type(model).__name__}"
        if not layers:
            # Advise no retrofit of NaFlexVit, which has no patch_embed, and of Swin, which attends only within windows.
            usable = hasattr(model, "patch_embed") and not hasattr(model, "layers") and can_retrofit(model)
            cure = "call relvit.retrofit(model) first" if usable else "take a model such as relvit_small"
            raise ValueError(f"{refused}, which has no relative attention to all tokens: {cure}")
        if reach != "stretch" and (why := lack_of(layers[0], "reach")):
            raise ValueError(f"{refused}: {why}")
        embed = getattr(model, "patch_embed", None)
        if embed is None:
            inner = next((name for name, part in model.named_modules() if hasattr(part, "patch_embed")), None)
            cure = "take a model that has one" if inner is None else f"set the reach of {part_of(inner)}, which has one"
            raise ValueError(f"{refused}, which has no patch_embed, so the size of its training is not known: {cure}")
        if own := getattr(model, "own_recurrence", None):
            raise ValueError(f"{refused}, which computes in parts already: leave it out ({own.undo} ends that)")
        # With `dynamic_img_pad` compute the grid: timm's `grid_size` leaves out the padded patches at the edges.
        grid = embed.dynamic_feat_size(embed.img_size) if embed.dynamic_img_pad else embed.grid_size
        if trained_size is not None:
            size = int_pair("trained_size", trained_size, 1)
            if not embed.dynamic_img_pad:
                check_divisible(size, embed.patch_size, getattr(embed, "cropped_size", None))
            grid = embed.dynamic_feat_size(size)
        if "mirror" in reach:
            if not hasattr(model, "mirrored_grid") or model.pos_embed is None:
                raise ValueError(
                    f"{refused} without a learned absolute embedding that can be mirrored: take a relvit model with "
                    "pos_embed='learn', or after relvit.retrofit timm's VisionTransformer, Eva or Beit with pos_embed"
                )
            mirrored_grid = tuple(grid)
        if "logn" in reach:
            trained_keys = model.num_prefix_tokens + grid[0] * grid[1]
            if trained_keys < 2:
                raise ValueError(f"{refused} trained on a single token: take reach 'trained'")
        if reach == "windows":
            other = "take another reach, such as 'trained'"
            if model.num_prefix_tokens:
                raise ValueError(f"{refused} with a class token or registers, which belong to no window: {other}")
            if getattr(model, "rope", None) is not None:
                raise ValueError(f"{refused} with a rotary embedding: {other}")
            window = tuple(grid)
        if reach in RECURRENCES:
            recurrence = RECURRENCES[reach].of(model, grid[0], grid[0])
        if "stretch" in reach:
            trained_grid = tuple(grid)
            for layer in layers:
                _check_position(layer.position, refused)
    # A wrapper, such as PEFT's, passes on reading an attribute, but not setting it: so set the attributes of modules
    # whose class declares them.
    for part in model.modules():
        if hasattr(type(part), "recurrence"):
            part.recurrence = recurrence or part.own_recurrence
        if hasattr(type(part), "mirrored_grid"):
            part.mirrored_grid = mirrored_grid
    for layer in layers:
        layer.trained_keys = trained_keys
        layer.window = window
        for position in _positions_in(layer.position):
            position.trained_grid = trained_grid
    return model


def _positions_in(position: object) -> list[Any]:
    """Return the stretchable positions among a module and its parts, as in PEFT's wrapper for `modules_to_save`."""
    parts = position.modules() if isinstance(position, nn.Module) else [position]
    return [part for part in parts if is_stretchable(part)]


def _check_position(position: nn.Module | None, refused: str) -> None:
    """Raise ValueError for a layer without tables to stretch."""
    tables = position is not None and not needs_tokens(position)
    if position is None or (tables and all(term is None for term in position(Grid(1, 1))[:4])):
        raise ValueError(
            f"{refused} without relative terms: there are no tables to stretch, take another reach, such as 'trained'"
        )
    if not is_stretchable(position):
        raise ValueError(
            f"{refused} with position {type(position).__name__}, which cannot be stretched: it does not "
            "declare stretchable = True, with a forward that follows the attribute trained_grid, (rows, columns)"
        )
