"""Segment-level recurrence of Transformer-XL for images: compute an image band by band, with a memory of earlier bands.

Source: Dai et al. 2019 (arXiv 1901.02860), section 3.2. A segment is a band of rows of patches (or a tile, or a frame
of a video). Every layer keeps its inputs from earlier segments, before its norm and without gradients, as additional
tokens to attend to. If only a limited number of rows is kept, memory use does not grow with the image's height.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from timm.models import checkpoint
from torch import Tensor, nn

from relvit.layers import AnySizePatchEmbed, RelativeBlock
from relvit.layers.attention import GridAttention
from relvit.layers.patch_embed import check_divisible
from relvit.layers.positions.base import needs_extent
from relvit.models.depth import lack
from relvit.models.entry_points import record_arguments
from relvit.ops import Grid, num_tokens, patch_coords
from relvit.ops.checks import check_model, int_pair, integer

# `LACKS` maps what a model cannot do while it computes in bands to the reason; `relvit.models.lack` lists the keys.
LACKS = {
    "weights": "there are no N x N weights in bands: call set_bands(model, None) and set_reach(model, 'trained') first",
    "hooks": "they are computed in bands: call set_bands(model, None) first",
}


class Bands(NamedTuple):
    """Division of images into bands, a model's `recurrence`.

    Attributes:
        rows, memory_rows: See `band_rows` and `memory_rows` of `set_bands`.
    """

    rows: int
    memory_rows: int | None = None

    lacks = LACKS
    undo = "set_bands(model, None)"

    @classmethod
    def of(cls, model: nn.Module, rows: int | None, memory_rows: int | None = None) -> Bands:
        """Return the bands of a model; for errors see `set_bands`."""
        if rows is None:
            raise ValueError(f"memory_rows={memory_rows!r} is for images in bands: give band_rows too")
        memory_rows = None if memory_rows is None else integer("memory_rows", memory_rows, 0)
        bands = cls(integer("band_rows", rows, 1), memory_rows)
        check_bands(model)
        return bands

    def features(self, model: nn.Module, images: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """Compute the normalised tokens (B, N, embed_dim) of images (B, in_chans, height, width)."""
        parts = self._split(model, images, attn_mask, is_causal)
        return torch.cat(list(band_features(model, parts, self.memory_rows)), dim=1)

    def classify(self, model: nn.Module, images: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """Compute the logits (B, num_classes) of images; average pooling is a running sum over the bands."""
        if model.global_pool != "avg":
            return model.forward_head(self.features(model, images, attn_mask, is_causal))
        return classify_bands(model, self._split(model, images, attn_mask, is_causal), self.memory_rows)

    def mask(self, model: nn.Module, images: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """Make the mask (N, N), True where a token may attend to another, that gives one pass the outputs of bands."""
        _check_images(images, attn_mask, is_causal)
        grid = Grid(*model.patch_embed.dynamic_feat_size(images.shape[-2:]))
        row = patch_coords(grid, images.device)[:, 0]
        first = row // self.rows * self.rows
        allowed = row < (first + self.rows)[:, None]
        return allowed if self.memory_rows is None else allowed & (row >= (first - self.memory_rows)[:, None])

    def _split(self, model: nn.Module, images: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Sequence[Tensor]:
        """Divide images into bands."""
        _check_images(images, attn_mask, is_causal)
        embed = model.patch_embed
        if not embed.dynamic_img_pad:
            check_divisible(images.shape[-2:], embed.patch_size)
        return images.split(self.rows * embed.patch_size[0], dim=2)


class Region(NamedTuple):
    """A rectangle of patches: its first row and column, any integers, and its numbers of rows and columns."""

    top: int
    left: int
    rows: int
    columns: int


class Memory(NamedTuple):
    """Memory of earlier segments, a value that `forward_segment` takes and returns.

    Attributes:
        states: For each block, its inputs for the M tokens that are remembered, (B, M, embed_dim), without gradients.
        regions: The places of these M tokens: they are stored region after region, each region in raster order.
    """

    states: tuple[Tensor, ...]
    regions: tuple[Region, ...]


def set_bands(model: nn.Module, band_rows: int | None, memory_rows: int | None = None) -> nn.Module:
    """Choose the bands in which a model computes images from now on, in place; the weights stay.

    In each layer tokens attend to the tokens of their own band, and to the layer's inputs for the `memory_rows` rows
    above the band; no gradients flow through these inputs (truncated backpropagation). The outputs equal the outputs of
    one pass over the whole image with a mask, which hides from a query the rows below its band, and the rows more than
    `memory_rows` above the band. Exported graphs use this mask. Nothing is kept between two calls of the model.

    Examples:
        >>> model = timm.create_model("relvit_xl_small", img_size=64, depth=2).eval()
        >>> set_bands(model, band_rows=2, memory_rows=2)(torch.randn(1, 3, 160, 64)).shape  # 10 rows of patches
        torch.Size([1, 1000])

    Args:
        model: A `relvit_*` model with attention and plain blocks (not universal, reversible or LSH), without class
            token, registers and absolute embedding. Its position must depend on offsets alone: `'fire'` and
            `'low-rank'` also depend on the size of the image.
        band_rows: The number of rows of patches in a band; the last band of an image may have fewer. None: the model
            computes whole images.
        memory_rows: The number of rows of patches above a band that the memory holds. None: all rows, which take more
            of the computer's memory for a higher image.

    Returns:
        `model` itself.

    Raises:
        TypeError, ValueError: A number is not an integer or is out of range, or the model cannot compute in bands (the
            message says why). The model is not changed then.
    """
    bands = None
    if (band_rows, memory_rows) != (None, None):
        bands = Bands.of(model, band_rows, memory_rows)
        _check_reach(model)
    # Set these attributes where the class declares them: a wrapper of a model, such as PEFT's, would not pass them on.
    for part in model.modules():
        if hasattr(type(part), "recurrence"):
            part.recurrence = part.own_recurrence = bands
            record_arguments(part, band_rows=bands and bands.rows, memory_rows=bands and bands.memory_rows)
    return model


def check_bands(model: nn.Module) -> None:
    """Raise a ValueError for a model that cannot compute in bands."""
    check_model(model)
    blocks = getattr(model, "blocks", None)
    reason = None
    if not blocks or not all(isinstance(block, RelativeBlock) for block in blocks):
        reason = "its blocks are not those of relvit_* models with attention, which take a memory"
    elif why := lack(model, "memory"):
        reason = why
    elif model.num_prefix_tokens:
        reason = "its class token or registers are in no band"
    elif model.pos_embed is not None or model.axial is not None:
        reason = "its absolute embedding depends on the height of the image, which a band does not know: pos_embed=''"
    elif any(needs_extent(block.attn) for block in blocks):
        position = type(blocks[0].attn.position).__name__
        reason = f"its {position} depends on the size of the image or the place in it, which a band does not know"
    elif not isinstance(model.patch_drop, nn.Identity):
        reason = "it drops patches: patch_drop_rate=0"
    elif type(model.patch_embed) is not AnySizePatchEmbed:
        reason = f"its patch embedding {type(model.patch_embed).__name__} may look beyond a patch"
    if reason:
        raise ValueError(f"{type(model).__name__} cannot compute in bands: {reason}")


def _check_reach(model: nn.Module) -> None:
    """Raise a ValueError if `relvit.models.set_reach` has made a model depend on the size of the image."""
    for attn in (block.attn for block in model.blocks):
        if isinstance(attn, GridAttention) and (
            attn.trained_keys or attn.window or getattr(attn.position, "trained_grid", None)
        ):
            raise ValueError(
                "bands need reach 'trained', since other reaches depend on the image's size: call "
                "set_reach(model, 'trained') first"
            )


def _check_images(images: object, attn_mask: Tensor | None = None, is_causal: bool = False) -> None:
    if not isinstance(images, Tensor) or images.dim() != 4:
        kind = f"shape {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f"bands are for images (B, in_chans, height, width), got {kind}")
    if attn_mask is not None or is_causal:
        raise ValueError(
            "a model that computes in bands takes no attn_mask and is not causal: leave attn_mask and is_causal out"
        )


def forward_segment(
    model: nn.Module,
    images: Tensor,
    memory: Memory | None = None,
    *,
    memory_rows: int | None = None,
    start: tuple[int, int] | None = None,
) -> tuple[Tensor, Memory]:
    """Compute the features of a segment, which also attends to earlier segments, and the memory for the next one.

    Examples:
        >>> model = timm.create_model("relvit_xl_small", img_size=64, depth=2).eval()
        >>> features, memory = forward_segment(model, torch.randn(1, 3, 32, 64))
        >>> features, memory = forward_segment(model, torch.randn(1, 3, 32, 64), memory)  # the band below
        >>> features.shape, memory.states[0].shape
        (torch.Size([1, 8, 384]), torch.Size([1, 16, 384]))

    Args:
        model: See `set_bands`; bands that were set with `set_bands` are ignored here.
        images: (B, in_chans, height, width), a segment of each of B images: a band, a tile, a frame.
        memory: The memory that the call for the previous segment returned. None: this segment is the first.
        memory_rows: The number of rows of patches that the returned memory holds: the rows of the latest segments,
            wherever these rows are in the image. None: all rows.
        start: Row and column of the segment's first patch, from which the offsets to earlier segments follow; any
            integers, also negative ones, since only differences count. None puts the segment below the previous one.
            Give each tile its own row and column, and all frames of a video (0, 0).

    Returns:
        Tokens (B, N, embed_dim) after the last norm, and the memory for the next segment.

    Raises:
        TypeError: `start` is not a pair of integers, or `memory_rows` is not an integer.
        ValueError: The model cannot compute in bands, or `memory` is not a memory, or comes from another model or from
            another number of images.
    """
    check_bands(model)
    _check_reach(model)
    _check_images(images)
    if memory_rows is not None:
        memory_rows = integer("memory_rows", memory_rows, 0)
    if memory is not None and not isinstance(memory, Memory):
        raise ValueError(f"memory must be the second value that forward_segment returned, got {type(memory).__name__}")
    if start is not None:
        if not isinstance(start, Sequence) or len(start) != 2:
            raise TypeError(f"start must be (row, column) of the segment's first patch, got {start!r}")
        start = int_pair("start", start, None)
    x, own = model.embed(images)
    regions: tuple[Region, ...] = ()
    states: tuple[Tensor | None, ...] = (None,) * len(model.blocks)
    if memory is not None and memory.regions:
        states, regions = memory
        if len(states) != len(model.blocks) or any(state.shape[2] != x.shape[2] for state in states):
            raise ValueError("the memory is of another model: begin with memory=None")
        if len(states[0]) != len(x):
            raise ValueError(
                f"this segment has a batch of {len(x)}, and the segments before it one of {len(states[0])}: all "
                "segments need the same images, and other images start without a memory"
            )
    if start is None:
        start = (regions[-1].top + regions[-1].rows, regions[-1].left) if regions else (0, 0)
    regions = _joined((*regions, Region(*start, own.height, own.width)))
    grid, key_grid = _grids(regions, num_tokens(own), x.device)
    regions, forgotten = _newest(regions, memory_rows)
    new = []
    for block, earlier in zip(model.blocks, states, strict=True):
        seen = x.detach() if earlier is None else torch.cat((earlier, x.detach()), dim=1)
        new.append(seen[:, forgotten:])
        run = partial(checkpoint, block) if model.grad_checkpointing else block
        x = run(x, grid, None, False, "", earlier, key_grid)
    return model.norm(x), Memory(tuple(new), regions)


def _joined(regions: tuple[Region, ...]) -> tuple[Region, ...]:
    """Join the last two regions if one is right below the other, so that all bands of an image are one region."""
    if len(regions) > 1:
        *others, above, last = regions
        if last == Region(above.top + above.rows, above.left, last.rows, above.columns):
            return (*others, above._replace(rows=above.rows + last.rows))
    return regions


def _newest(regions: tuple[Region, ...], memory_rows: int | None) -> tuple[tuple[Region, ...], int]:
    """Return the newest regions, with `memory_rows` rows in all, and the number of tokens before these regions."""
    forgotten, over = 0, 0 if memory_rows is None else sum(region.rows for region in regions) - memory_rows
    while over > 0:
        first, *others = regions
        rows = min(over, first.rows)
        forgotten, over = forgotten + rows * first.columns, over - rows
        rest = first._replace(top=first.top + rows, rows=first.rows - rows)
        regions = (rest, *others) if rest.rows else tuple(others)
    return regions, forgotten


def _grids(regions: tuple[Region, ...], queries: int, device: torch.device) -> tuple[Grid, Grid]:
    """Return the grid of the last `queries` tokens, and the grid of all tokens."""
    top, left = min(region.top for region in regions), min(region.left for region in regions)
    height = max(region.top + region.rows for region in regions) - top
    width = max(region.left + region.columns for region in regions) - left
    key_grid = Grid(height, width)
    if len(regions) == 1 and num_tokens(key_grid) == queries:
        return key_grid, key_grid
    coords = torch.cat(
        [
            patch_coords(Grid(region.rows, region.columns), device)
            + torch.tensor((region.top - top, region.left - left), device=device)
            for region in regions
        ]
    )
    grid = Grid(height, width, coords=coords[-queries:])
    # If the tokens are all patches of one region, give the keys' grid no `coords`: attention is then faster than with
    # `coords` that list all patches.
    return grid, key_grid if len(regions) == 1 else key_grid._replace(coords=coords)


def classify_bands(model: nn.Module, bands: Iterable[Tensor], memory_rows: int | None = None) -> Tensor:
    """Compute the logits (B, num_classes) of images that come band by band, from the top, by average pooling.

    Examples:
        >>> model = timm.create_model("relvit_xl_small", img_size=64, depth=2).eval()
        >>> classify_bands(model, (torch.randn(1, 3, 32, 64) for _ in range(3))).shape
        torch.Size([1, 1000])

    Args:
        model: A model with average pooling, see `forward_segment`.
        bands: Bands (B, in_chans, height, width) of the same width; an iterator may read them one after the other.
        memory_rows: See `set_bands`.

    Raises:
        ValueError: The model's `global_pool` is not 'avg', there is no band, or the model cannot compute in bands.
    """
    if model.global_pool != "avg":
        raise ValueError(
            f"bands are classified with global_pool 'avg' alone, got {model.global_pool!r}: build the model with "
            "global_pool='avg', as relvit_xl_* are by default"
        )
    total, count = None, 0
    for tokens in band_features(model, bands, memory_rows):
        added = tokens.sum(dim=1, keepdim=True, dtype=torch.promote_types(tokens.dtype, torch.float32))
        total, count = added if total is None else total + added, count + tokens.shape[1]
    if total is None:
        raise ValueError("no band is given: give one or more")
    return model.forward_head((total / count).to(tokens.dtype))


def band_features(model: nn.Module, bands: Iterable[Tensor], memory_rows: int | None) -> Iterator[Tensor]:
    """Yield the normalised tokens (B, N, embed_dim) of each band, from the top; for arguments see `classify_bands`."""
    memory = None
    for band in bands:
        tokens, memory = forward_segment(model, band, memory, memory_rows=memory_rows)
        yield tokens
