"""Parts that retrofitted SAM image encoders of several libraries share: attention, patch embedding, any image size."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from relvit.layers import interpolate
from relvit.layers.attention import GridAttention, attend_with
from relvit.layers.patch_embed import PatchSizes, check_divisible, check_images
from relvit.layers.positions.tables import SamTables
from relvit.models.retrofit.source import Exchange, OwnPositions
from relvit.ops import Grid, from_windows, to_windows
from relvit.ops.tracing import is_compiling, larger
from relvit.ops.windows import exceeds_window


class SamAttention(GridAttention):
    """Mixin before SAM's attention, which keeps its tables: see `SamTables`; its blocks cut windows themselves."""

    table_grid: tuple[int, int]
    trained_grid: tuple[int, int] | None = None

    @property
    def position(self) -> SamTables:
        """The tables as a position."""
        return SamTables(self)

    def no_weight_decay(self) -> set[str]:
        """Return the names of both tables."""
        return {"rel_pos_h", "rel_pos_w"}


class SamRowsAttention(SamAttention):
    """`SamAttention` for libraries whose projections take (B, rows, columns, dim), without norms of queries and keys.

    The projections still get tensors of this shape, because adapters that replace them, such as LoRA, may rely on it.
    """

    def attend_rows(self, x: Tensor, grid: Grid | None = None) -> Tensor:
        """Map (B, rows, columns, dim) tokens to the same shape; `grid` says which of them are padding."""
        grid = Grid(x.shape[1], x.shape[2]) if grid is None else grid
        if exceeds_window(grid, self.window, None, False):
            windows, inner = to_windows(x.flatten(1, 2), grid, self.window)
            windows = self.attend_rows(windows.unflatten(1, inner[:2]), inner).flatten(1, 2)
            return from_windows(windows, grid, self.window).unflatten(1, (grid.height, grid.width))
        qkv = self.qkv(x).flatten(1, 2).unflatten(-1, (3 * self.num_heads, self.head_dim))
        mixed = attend_with(self, x.flatten(1, 2), qkv, grid)
        return self.proj(mixed.unflatten(1, (grid.height, grid.width)))


class SamPatchEmbed(PatchSizes):
    """Mixin before SAM's patch embedding, for images of every size whose sides are multiples of the patch.

    If the images in training have a side that is not a multiple of the patch, SAM leaves out the pixels beyond the last
    whole patch. This module does so, too, but only for images of the size in training.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Embed images (B, in_chans, height, width) as (B, rows, columns, embed_dim)."""
        convolution = getattr(self, self.convolution)
        check_images(x, convolution)
        # A compiled graph must not check that the sides are multiples of the patch, see `GridPatchEmbed`.
        if not is_compiling():
            check_divisible(
                x.shape[-2:], self.patch_size, self.img_size, "as SAM does, pad the image below and to the right"
            )
        return convolution(x).permute(0, 2, 3, 1)


class SamEncoder(OwnPositions):
    """Mixin before a SAM image encoder, for images of sizes that the original encoder refuses, by SAM's own rule.

    SAM resizes the longer side of an image to the side of a square canvas, and pads the image below or to the right. So
    the absolute embedding is resized to the square canvas that holds the image, and cut to the image; if the longer
    side is as long as in training, the embedding is only cut. Windows have as many patches as in training; offsets are
    counted in patches, and offsets beyond a table use the table's outermost entry.
    """

    num_prefix_tokens = 0
    patch_embed_classes: ClassVar[Exchange]

    @property
    def original_size(self) -> tuple[int, int]:
        """Height and width of the images that the original model was built for."""
        return (self.img_size,) * 2

    @classmethod
    def has_positions(cls, model: nn.Module, attn: nn.Module) -> bool:
        return attn.use_rel_pos

    @classmethod
    def check(cls, model: nn.Module) -> None:
        super().check(model)
        becomes = cls.patch_embed_classes[type(model.patch_embed)]
        conv = getattr(model.patch_embed, becomes.convolution)
        if conv.stride != conv.kernel_size or any(conv.padding):
            raise ValueError(
                f"patch_embed.{becomes.convolution} has kernel size {conv.kernel_size}, stride {conv.stride} and "
                f"padding {conv.padding}: relvit.retrofit takes models whose stride is the kernel size, without padding"
            )

    def open_to_all_sizes(self) -> None:
        embed, size = self.patch_embed, self.original_size
        embed.__class__ = self.patch_embed_classes[type(embed)]
        grid = embed.dynamic_feat_size(size)
        if self.pos_embed is not None and self.pos_embed.shape[1:3] != grid:
            # Take the size from the absolute embedding and not from the attributes of the model, because some
            # libraries, such as cellpose, cut the embedding to another size after building the model.
            rows, columns = grid = tuple(self.pos_embed.shape[1:3])
            size = (rows * embed.patch_size[0], columns * embed.patch_size[1])
        embed.img_size = size
        for _, block in self.named_blocks(self):
            window = (block.window_size,) * 2
            block.attn.table_grid = window if block.window_size else grid
            block.attn.block_window = window if block.window_size else None

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay: tables and the absolute embedding."""
        own = ("pos_embed", "rel_pos_h", "rel_pos_w")
        return {name for name, _ in self.named_parameters() if name.endswith(own)}

    def embed(self, images: Tensor) -> Tensor:
        """Embed images (B, in_chans, height, width) as (B, rows, columns, dim), with absolute embeddings if any."""
        x = self.patch_embed(images)
        return x if self.pos_embed is None else x + on_canvas(self.pos_embed, x.shape[1], x.shape[2])


def on_canvas(embedding: Tensor, rows: int, columns: int) -> Tensor:
    """Resize an embedding (1, H, W, dim) to the smallest canvas that holds a grid, and cut it to the grid."""
    height, width = embedding.shape[1], embedding.shape[2]
    canvas = (larger(rows, -(-height * columns // width)), larger(columns, -(-width * rows // height)))
    flat = interpolate.resample_embedding(embedding.flatten(1, 2), (height, width), canvas, cut=(rows, columns))
    return flat.unflatten(1, (rows, columns))
