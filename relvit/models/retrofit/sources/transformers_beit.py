"""BEiT and Data2Vec's vision model of Hugging Face `transformers` after `relvit.retrofit`.

Tables stay in their modules, so their names in the state dict, their values and the optimiser's state stay the same.
The modules that computed a bias of N x N now return the grid in place of the bias, and attention reads the tables. At
other sizes than in training, offsets beyond a table use the table's outermost entry, while transformers interpolates
its tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.beit import modeling_beit as beit
from transformers.models.data2vec import modeling_data2vec_vision as data2vec

from relvit.layers.attention import GridAttention
from relvit.layers.patch_embed import PatchSizes
from relvit.layers.positions.base import is_stretched, stretch
from relvit.layers.positions.tables import LayerTables
from relvit.layers.prefix_bias import prefix_channels
from relvit.models.retrofit.source import Classes, Exchange, check_part
from relvit.models.retrofit.sources.hugging_face import TransformersModel, attend_and_show
from relvit.ops import Channels, Grid, JointTable, RelativeTerms
from relvit.utils.messages import check_choice
from relvit.utils.old_torch import compiled_replace

TABLE = "relative_position_bias_table"


class BeitTables(LayerTables):
    """Position of BEiT's attention: it reads the layer's table, the table that all layers share, or the sum of both."""

    needs_tokens = False
    layer: TransformersBeitAttention

    def parameters(self) -> Iterator[Tensor]:
        """Yield the tables, (entries, heads), the last three entries for the class token."""
        return (getattr(module, TABLE) for module in self.layer.bias_modules)

    def table(self) -> Tensor:
        """Return the sum of the tables."""
        return reduce(torch.add, self.parameters())

    def __call__(self, grid: Grid) -> RelativeTerms:
        """Return the bias between patches: the same table for every grid, unless `trained_grid` stretches it."""
        rows, columns = (2 * size - 1 for size in self.layer.bias_modules[0].window_size)
        # In transformers an offset is query minus key, in relvit key minus query, so reverse the table.
        table = self.table()[:-3].flip(0).T.unflatten(1, (rows, columns))
        if is_stretched(grid, self.trained_grid):
            for axis in (-2, -1):
                table = stretch(table, axis, grid[axis + 2], self.trained_grid[axis + 2], "clip")
        return RelativeTerms(bias=JointTable(table))


class ClassTokenBias(NamedTuple):
    """The last three entries of a table, which replace `relvit.layers.PrefixBias`."""

    weight: Tensor

    def __call__(self, grid: Grid, key_grid: Grid) -> Channels:
        """Compute the channels of queries and keys, as `PrefixBias`."""
        return prefix_channels(self.weight, grid, key_grid)


@compiled_replace
class GridBias(NamedTuple):
    """The grid and a mask, which layers pass on in place of a bias of N x N.

    transformers adds the mask to the sum of the shared bias and a block's own bias. `GridBias` objects replace both
    biases, so `GridBias` defines addition.
    """

    grid: Grid
    mask: Tensor | None = None

    def __add__(self, other: Tensor | GridBias) -> GridBias:
        return other if isinstance(other, GridBias) else self._replace(mask=other)


class MakesGrid:
    """Mixin before modules of transformers that hold a table."""

    def forward(self, window_size: tuple[int, int], *_args: object, **_options: object) -> GridBias:
        """Return the grid of an image with these numbers of rows and columns of patches."""
        return GridBias(Grid(*window_size, prefix=1))


class RetrofittedBeitBias(MakesGrid, beit.BeitRelativePositionBias):
    """`BeitRelativePositionBias` after a retrofit."""


class RetrofittedData2VecBias(MakesGrid, data2vec.Data2VecVisionRelativePositionBias):
    """`Data2VecVisionRelativePositionBias` after a retrofit."""


class TransformersBeitAttention(GridAttention):
    """Mixin before `transformers`' attention of BEiT and Data2Vec."""

    bias_modules: tuple[nn.Module, ...]  # modules of the model that hold the tables
    projections: ClassVar[tuple[str, str, str]]  # names of the projections to queries, keys and values
    trained_grid: tuple[int, int] | None = None

    @property
    def position(self) -> BeitTables:
        """The tables as a position."""
        return BeitTables(self)

    def bias_of_prefix(self) -> ClassTokenBias:
        """Return the bias of the class token."""
        return ClassTokenBias(self.position.table()[-3:])

    @property
    def num_heads(self) -> int:
        """Number of heads."""
        return self.num_attention_heads

    @property
    def scale(self) -> float:
        """Factor on the products of queries and keys."""
        return self.head_dim**-0.5

    @property
    def proj(self) -> nn.Linear:
        """The projection of queries, of which `GridAttention` reads only the width, that of the tokens."""
        return getattr(self, self.projections[0])

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values (B, heads, N, head_dim) of (B, N, dim) tokens."""
        parts = (getattr(self, name)(x).unflatten(-1, (-1, self.head_dim)) for name in self.projections)
        query, key, value = (part.transpose(1, 2) for part in parts)
        return query, key, value

    def output(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Return the attention's result (B, N, dim) unchanged, because the surrounding module projects it."""
        return mixed


class RetrofittedBeitAttention(TransformersBeitAttention, beit.BeitAttention):
    """`BeitAttention` after a retrofit."""

    projections: ClassVar[tuple[str, str, str]] = ("q_proj", "k_proj", "v_proj")

    def forward(
        self, hidden_states: Tensor, attention_mask: GridBias | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Map (B, N, dim) tokens to the same shape; layers pass on the grid in place of a bias."""
        wanted = kwargs.get("output_attentions", getattr(self.config, "output_attentions", False))
        shows = wanted and self.config._attn_implementation == "eager"
        return attend_and_show(self, hidden_states, *attention_mask, shows)

    def output(self, x: Tensor, mixed: Tensor) -> Tensor:
        return self.o_proj(super().output(x, mixed))


class Data2VecAttention(TransformersBeitAttention):
    """Mixin before the attention of Data2Vec, whose tokens are projected by the module around it."""

    projections: ClassVar[tuple[str, str, str]] = ("query", "key", "value")
    shows_weights: ClassVar[bool] = False

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.attention_head_size

    def forward(
        self,
        hidden_states: Tensor,
        output_attentions: bool = False,
        relative_position_bias: GridBias | None = None,
        interpolate_pos_encoding: bool = False,
        resolution: tuple[int, int] | None = None,
    ) -> tuple[Tensor, Tensor | None] | tuple[Tensor]:
        """Map (B, N, dim) tokens of images of `resolution` pixels to the same shape."""
        patch = self.config.patch_size
        grid = Grid(resolution[0] // patch, resolution[1] // patch, prefix=1)
        outputs = attend_and_show(self, hidden_states, grid, None, output_attentions and self.shows_weights)
        return outputs if output_attentions or not self.shows_weights else outputs[:1]


class RetrofittedData2VecEagerAttention(Data2VecAttention, data2vec.Data2VecVisionSelfAttention):
    """`Data2VecVisionSelfAttention` after a retrofit."""

    shows_weights: ClassVar[bool] = True


class RetrofittedData2VecSdpaAttention(Data2VecAttention, data2vec.Data2VecVisionSdpaSelfAttention):
    """`Data2VecVisionSdpaSelfAttention` after a retrofit."""


class RetrofittedBeitPatches(PatchSizes, beit.BeitPatchEmbeddings):
    """`BeitPatchEmbeddings` after a retrofit."""


class RetrofittedData2VecPatches(PatchSizes, data2vec.Data2VecVisionPatchEmbeddings):
    """`Data2VecVisionPatchEmbeddings` after a retrofit."""


class TransformersBeit(TransformersModel):
    """Mixin before `transformers`' vision models with the joint tables of BEiT."""

    num_prefix_tokens = 1
    absolute: ClassVar[tuple[str, ...]] = ("embeddings.position_embeddings",)
    bias_classes: ClassVar[Exchange]  # classes of the modules that hold tables
    patch_embed_classes: ClassVar[Exchange]

    @property
    def patch_embed(self) -> nn.Module:
        """The patch embedding, under timm's name."""
        return self.embeddings.patch_embeddings

    @classmethod
    def has_positions(cls, model: nn.Module, attn: nn.Module) -> bool:
        return bool(cls.bias_modules(model))

    @classmethod
    def bias_modules(cls, model: nn.Module) -> dict[str, nn.Module]:
        """Return the modules with tables by name: of blocks, and a module that blocks share."""
        return {name: part for name, part in model.named_modules() if type(part) in cls.bias_classes}

    @classmethod
    def check(cls, model: nn.Module) -> None:
        super().check(model)
        check_part("embeddings.patch_embeddings", model.embeddings.patch_embeddings, tuple(cls.patch_embed_classes))
        for name, part in cls.bias_modules(model).items():
            rows, columns = part.window_size
            if rows != columns:
                raise ValueError(
                    f"{name} has a table for {rows} x {columns} patches, which {type(model).__name__} reads with rows "
                    "and columns exchanged: only models made for square images can be retrofitted"
                )
        check_choice("attn_implementation", model.config._attn_implementation, ("eager", "sdpa"))

    @classmethod
    def dropout(cls, attn: nn.Module) -> float:
        return attn.config.attention_probs_dropout_prob

    def open_to_all_sizes(self) -> None:
        tables = self.bias_modules(self)
        shared = [key for key in tables if f".{self.container}." not in f".{key}"]
        for name, block in self.named_blocks(self):
            own = (part for key, part in tables.items() if key.startswith(f"{name}.") or key in shared)
            block.get_submodule(self.in_block).bias_modules = tuple(own)
        for part in tables.values():
            part.__class__ = self.bias_classes[type(part)]
        embed = self.embeddings.patch_embeddings
        embed.img_size = tuple(embed.image_size)
        embed.__class__ = self.patch_embed_classes[type(embed)]

    def no_weight_decay(self) -> set[str]:
        """Return the names of tables and of the absolute embedding."""
        return {name for name, _ in self.named_parameters() if name.endswith((TABLE, *self.absolute))}


class RetrofittedBeitModel(TransformersBeit, beit.BeitModel):
    """`BeitModel` of `transformers` after `relvit.retrofit`."""

    block_classes: ClassVar[Classes] = (beit.BeitLayer,)
    container: ClassVar[str] = "layers"
    in_block: ClassVar[str] = "attention"
    attention_classes: ClassVar[Exchange] = {beit.BeitAttention: RetrofittedBeitAttention}
    bias_classes: ClassVar[Exchange] = {beit.BeitRelativePositionBias: RetrofittedBeitBias}
    patch_embed_classes: ClassVar[Exchange] = {beit.BeitPatchEmbeddings: RetrofittedBeitPatches}


class RetrofittedData2VecVisionModel(TransformersBeit, data2vec.Data2VecVisionModel):
    """`Data2VecVisionModel` of `transformers` after `relvit.retrofit`."""

    block_classes: ClassVar[Classes] = (data2vec.Data2VecVisionLayer,)
    container: ClassVar[str] = "layer"
    in_block: ClassVar[str] = "attention.attention"
    attention_classes: ClassVar[Exchange] = {
        data2vec.Data2VecVisionSelfAttention: RetrofittedData2VecEagerAttention,
        data2vec.Data2VecVisionSdpaSelfAttention: RetrofittedData2VecSdpaAttention,
    }
    bias_classes: ClassVar[Exchange] = {data2vec.Data2VecVisionRelativePositionBias: RetrofittedData2VecBias}
    patch_embed_classes: ClassVar[Exchange] = {data2vec.Data2VecVisionPatchEmbeddings: RetrofittedData2VecPatches}
