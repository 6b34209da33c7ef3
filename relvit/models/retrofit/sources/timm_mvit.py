"""timm's `MultiScaleVit` (MViTv2) after `relvit.retrofit`: tables per axis, multiplied by pooled queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple
from timm.models.mvitv2 import (
    MultiScaleAttention,
    MultiScaleBlock,
    MultiScaleVit,
    PatchEmbed,
    reshape_post_pool,
    reshape_pre_pool,
)
from torch import Tensor, nn

from relvit.layers.attention import GridAttention, attend_with, has_hooks, relative_terms
from relvit.layers.patch_embed import PatchSizes, base_layer, check_images
from relvit.layers.positions.tables import LayerTables
from relvit.models.retrofit.source import Classes, Exchange, OwnPositions, WholeImages, declare_any_size
from relvit.ops import AxisLogits, Grid, RelativeTerms, num_tokens
from relvit.ops.grid import once_per_raster
from relvit.ops.inputs import AttentionInputs
from relvit.ops.tracing import is_compiling

Size = tuple[int, int]


class Pooling(NamedTuple):
    """Kernel, stride and padding of a pooling, (rows, columns) each; by default there is none."""

    kernel: Size = (1, 1)
    stride: Size = (1, 1)
    padding: Size = (0, 0)

    @classmethod
    def of(cls, module: nn.Module | None) -> Pooling:
        """Return the pooling of a convolution, of `MaxPool2d` or of `AvgPool2d`."""
        if module is None:
            return cls()
        return cls(*(to_2tuple(part) for part in (module.kernel_size, module.stride, module.padding)))

    def size(self, size: Size) -> Size:
        """Return the rows and columns after the pooling."""
        rows, columns = (
            (n + 2 * padding - kernel) // stride + 1 for n, kernel, stride, padding in zip(size, *self, strict=True)
        )
        return rows, columns


@once_per_raster
def whole_steps(
    key_grid: Grid, axis: int, queries: int, built_queries: int, built_keys: int, device: torch.device
) -> Tensor:
    """Compute the index into a table for each pair of rows, or columns, of queries and keys: (queries, keys) int64.

    The size of one step, and the index of the offset 0, depend on `built_queries` and `built_keys`: the numbers of
    rows, or columns, of the queries and keys for which the attention was built. At that size timm's `cal_rel_pos_type`
    computes the same indices. At other sizes an index may be below 0, or beyond the table.
    """
    query_step, key_step = max(built_keys / built_queries, 1.0), max(built_queries / built_keys, 1.0)
    # With Lightning's precision 'bf16-true' the default dtype is bfloat16, which rounds whole numbers above 256.
    here, there = (torch.arange(size, device=device, dtype=torch.float32) for size in (queries, key_grid[axis]))
    offset = here[:, None] * query_step - there * key_step
    offset += (built_keys - 1) * key_step
    return offset.floor().long()


class PooledOffsets(LayerTables):
    """Position of MViTv2's attention after `relvit.retrofit`.

    Queries and keys are pooled with different strides, so their grids differ. Offsets are counted in steps of the finer
    grid, and each table has one vector for each offset. A query and a key look up one vector by the offset between
    their rows, and one by the offset between their columns. Source: Li et al. 2022 (arXiv 2112.01526), section 4.1, eq.
    3 and 4.
    """

    needs_tokens: ClassVar[bool] = True
    layer: MultiScaleRelative

    def terms(self, query: Tensor, grid: Grid, key_grid: Grid) -> RelativeTerms:
        """Compute the logits of pooled queries (B, heads, Nq, head_dim) for each row and column of the pooled keys."""
        # In memory the pooled queries are laid out as (B, Nq, heads, head_dim), so bring their axes into this order.
        query = query.transpose(1, 2)[:, grid.prefix :].unflatten(1, (grid.height, grid.width))
        of_rows, of_cols = (self.vectors(axis, table, grid, key_grid) for axis, table in enumerate(self.parameters()))
        products = torch.einsum("byxhc,ykc->byxhk", query, of_rows), torch.einsum("byxhc,xkc->byxhk", query, of_cols)
        logits = (part.flatten(1, 2).transpose(1, 2) for part in products)
        if grid.prefix:
            logits = (F.pad(part, (0, 0, grid.prefix, 0)) for part in logits)
        return RelativeTerms(axis_logits=AxisLogits(*logits))

    def vectors(self, axis: int, table: Tensor, grid: Grid, key_grid: Grid) -> Tensor:
        """Look up the vectors (queries, keys, head_dim) of all pairs of rows, or columns, divided by the scale."""
        queries, keys = grid[axis], key_grid[axis]
        built_queries, built_keys = (size[axis] for size in self.layer.sizes(self.layer.built_for))
        # Divide by the scale, because `relative_attention` scales these logits. Eq. 3 does so, too, but MViTv2's code
        # does not.
        table, given = table / self.layer.scale, (key_grid, axis, queries, built_queries, built_keys, table.device)
        if (ratio := self.stretch_ratio(axis, (queries, keys), finer=int(built_keys > built_queries))) is None:
            index = whole_steps(*given).clamp(0, len(table) - 1)
            return table.index_select(0, index.flatten()).unflatten(0, (queries, keys))
        zero = (built_keys - 1) * max(built_queries / built_keys, 1.0)
        index = ((whole_steps(*given).float() - zero) * ratio + zero).clamp(0, len(table) - 1)
        below = index.long()
        low, high = (table[(below + further).clamp(max=len(table) - 1)] for further in (0, 1))
        return torch.lerp(low, high, (index - below)[..., None].to(table.dtype))

    def stretch_ratio(self, axis: int, sizes: Size, finer: int) -> float | None:
        """Return the factor for all offsets; None: tables are not stretched.

        `finer` is 0 if the grid of the queries is finer than the grid of the keys, or as fine, and otherwise 1.
        """
        if self.trained_grid is None:
            return None
        trained = self.layer.sizes(self.layer.tokens_of(self.trained_grid))[finer][axis]
        # A compiled or exported graph must work for all sizes, so it always stretches.
        return trained / sizes[finer] if is_compiling() or trained != sizes[finer] else None


class MultiScaleRelative(GridAttention, MultiScaleAttention):
    """timm's `MultiScaleAttention` after a retrofit: pools queries, keys and values as before."""

    lacks: ClassVar[Mapping[str, str]] = {
        "reach": "pools tokens, so that keys have another grid than the patches in training; "
        "take reach 'trained' or 'stretch'",
    }
    trained_grid: Size | None = None
    poolings: tuple[Pooling, ...] = ()  # poolings of the queries, and so of the tokens, in earlier blocks
    built_for: Size  # rows and columns of this layer's tokens at the image size that the model was built for

    @property
    def position(self) -> PooledOffsets:
        """The tables as a position."""
        return PooledOffsets(self)

    def sizes(self, size: Size) -> tuple[Size, Size]:
        """Return rows and columns of pooled queries and of pooled keys, for tokens of this size."""
        return Pooling.of(self.pool_q).size(size), Pooling.of(self.pool_k).size(size)

    def tokens_of(self, patches: Size) -> Size:
        """Return rows and columns of the tokens of this attention, for this number of rows and columns of patches."""
        for pooling in self.poolings:
            patches = pooling.size(patches)
        return patches

    def forward(self, x: Tensor, feat_size: Size) -> tuple[Tensor, list[int]]:
        """Map (B, N, dim) tokens of `feat_size` rows and columns to (B, Nq, dim_out), with the output's size."""
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        query, grid = self.pooled(query, feat_size, self.pool_q, self.norm_q)
        key, key_grid = self.pooled(key, feat_size, self.pool_k, self.norm_k)
        value, _ = self.pooled(value, feat_size, self.pool_v, self.norm_v)
        mixed = attend_with(self, query, (query, key, value), grid, key_grid)
        if self.residual_pooling:
            mixed = mixed + query.transpose(1, 2).flatten(2)
        return self.proj(mixed), [grid.height, grid.width]

    def pooled(self, x: Tensor, size: Size, pool: nn.Module | None, norm: nn.Module | None) -> tuple[Tensor, Grid]:
        """Pool and normalise projected tokens (B, N, dim) of an image of this size: (B, heads, pooled N, head_dim)."""
        prefix, heads = int(self.has_cls_token), self.num_heads
        if type(pool) is nn.Conv2d and not has_hooks(pool) and not has_hooks(norm):
            # timm puts the heads on the batch axis of the convolution, which needs copies before and after the
            # convolution. Here the heads stay channels, and the weights are repeated for each head. So the convolution
            # reads the projection without a copy, in the memory format channels last.
            weight = pool.weight.repeat(heads, 1, 1, 1)
            image = x[:, prefix:].unflatten(1, size).permute(0, 3, 1, 2)
            image = F.conv2d(image, weight, None, pool.stride, pool.padding, groups=len(weight))
            size, patches = tuple(image.shape[2:]), image.permute(0, 2, 3, 1).flatten(1, 2)
            x = torch.cat((x[:, :prefix], patches), dim=1) if prefix else patches
            x = norm(x.unflatten(-1, (heads, -1))).transpose(1, 2)
        else:
            x = x.unflatten(-1, (heads, -1)).transpose(1, 2)
            if pool is not None:
                image, token = reshape_pre_pool(x, size, self.has_cls_token)
                x, size = reshape_post_pool(pool(image), heads, token)
            x = x if norm is None else norm(x)
        return x, Grid(size[0], size[1], prefix)

    def example(self, grid: Grid) -> AttentionInputs:
        weight = self.proj.weight
        grids = [Grid(*size, grid.prefix) for size in self.sizes(self.tokens_of((grid.height, grid.width)))]
        query, key = (
            torch.empty(1, self.num_heads, num_tokens(part), self.head_dim, device=weight.device, dtype=weight.dtype)
            for part in grids
        )
        return AttentionInputs(query, key, key, relative_terms(self, query, *grids), *grids)


class MultiScalePatchEmbed(PatchSizes, PatchEmbed):
    """timm's `PatchEmbed` of MViTv2 after a retrofit: patches overlap, and padding completes patches at the edges."""

    dynamic_img_pad: ClassVar[bool] = True

    @property
    def patch_size(self) -> Size:
        """Pixels from one patch to the next."""
        return base_layer(self.proj).stride

    def dynamic_feat_size(self, img_size: Size) -> Size:
        """Return rows and columns of patches of images of this size."""
        return Pooling.of(base_layer(self.proj)).size(img_size)

    def forward(self, x: Tensor) -> tuple[Tensor, torch.Size]:
        """Embed images (B, in_chans, height, width) as (B, N, embed_dim), and return the rows and columns."""
        check_images(x, self.proj)
        return super().forward(x)


class RetrofittedMultiScaleVit(OwnPositions, WholeImages, MultiScaleVit):
    """timm's `MultiScaleVit` after `relvit.retrofit`, for images of every size; blocks pool as before."""

    block_classes: ClassVar[Classes] = (MultiScaleBlock,)
    attention_classes: ClassVar[Exchange] = {MultiScaleAttention: MultiScaleRelative}
    patch_embed_classes: ClassVar[Classes] = (PatchEmbed,)
    built_with: ClassVar[str] = "rel_pos_type='spatial'"

    @classmethod
    def has_positions(cls, model: nn.Module, attn: nn.Module) -> bool:
        return attn.rel_pos_type == "spatial"

    @classmethod
    def check(cls, model: nn.Module) -> None:
        super().check(model)
        if model.pos_embed is not None:
            raise ValueError(
                "pos_embed: MViTv2 with an absolute embedding, which has no rule for other sizes, cannot be "
                "retrofitted: build the model with use_abs_pos=False, as all registered ones are"
            )
        cls.image_size(model)

    @classmethod
    def image_size(cls, model: nn.Module) -> Size:
        """Find the height and width of the images that an original model was built for, which timm does not store.

        Raises:
            ValueError: timm builds the same model for several sizes, but computes different offsets at these sizes.
        """
        embed, attentions = Pooling.of(model.patch_embed.proj), [attn for _, attn in cls.named_attentions(model)]
        first, sides = attentions[0], []
        for axis, table in enumerate((first.rel_pos_h, first.rel_pos_w)):
            step = min(Pooling.of(pool).stride[axis] for pool in (first.pool_q, first.pool_k)) * embed.stride[axis]
            least = (len(table) + 1) // 2 * step
            # `found` maps each image side for which timm makes tables of this length to the numbers of tokens in each
            # attention, or to None if an offset exceeds a table.
            found = {side: tokens_within_tables(attentions, embed, side, axis) for side in range(least, least + step)}
            different = {tokens: side for side, tokens in reversed(found.items()) if tokens}
            if len(different) > 1:
                raise ValueError(
                    f"MultiScaleVit cannot be retrofitted: timm builds the same model for images of "
                    f"{' and '.join(map(str, sorted(different.values())))} px, and its offsets differ between them; "
                    "choose a patch_padding and strides that fit one size only"
                )
            sides.append(next(iter(different.values()), least))
        return sides[0], sides[1]

    def open_to_all_sizes(self) -> None:
        embed, size = self.patch_embed, self.image_size(self)
        embed.__class__ = MultiScalePatchEmbed
        embed.img_size = size
        poolings: list[Pooling] = []
        for _, block in self.named_blocks(self):
            block.attn.poolings = tuple(poolings)
            block.attn.built_for = block.attn.tokens_of(embed.dynamic_feat_size(size))
            poolings.append(Pooling.of(block.attn.pool_q))
        declare_any_size(self)


def tokens_within_tables(attentions: list[nn.Module], embed: Pooling, side: int, axis: int) -> tuple[Size, ...] | None:
    """Return the numbers of rows (or columns) of the queries and keys of each attention, for an image of this side.

    Return None if timm would raise IndexError, because in some attention the farthest offset has no row in the table.
    """
    tokens, sizes = embed.size((side, side)), []
    for attn in attentions:
        pooled = Pooling.of(attn.pool_q).size(tokens)
        queries, keys = (size[axis] for size in (pooled, Pooling.of(attn.pool_k).size(tokens)))
        finer, coarser = max(queries, keys), min(queries, keys)
        # This number is the farthest row of a table that `whole_steps` returns, for the last query and the first key.
        # If the table lacks this row, timm would raise IndexError.
        if int(2 * finer - 1 - finer / coarser) >= len(attn.rel_pos_w if axis else attn.rel_pos_h):
            return None
        sizes.append((queries, keys))
        tokens = pooled
    return tuple(sizes)
