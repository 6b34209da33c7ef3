"""What relvit's Vision Transformers have in common: timm's class, whose blocks are told where tokens lie."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import PatchDropoutWithIndices
from timm.models import checkpoint
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from relvit.layers import AnySizePatchEmbed, AxialPositionEmbedding, resample_embedding
from relvit.models.grid_forward import GridForward
from relvit.models.weights.convert import load_jax_archive
from relvit.ops import Grid
from relvit.utils.messages import did_you_mean, listing

# How an axial embedding puts rows and columns together.
AXIAL = {"axial": "concat", "axial-sum": "sum"}
POS_EMBEDS = ("", "learn", *AXIAL)
POOLS = ("", "avg", "avgmax", "max", "token", "map", "prr")
# Arguments of timm's class that are no choice here.
FIXED = {"dynamic_img_size", "block_fn", "attn_layer"}

# Sizes have no value while a graph is traced, and a method of the model is no leaf.
torch.fx.wrap("resample_embedding")


class GridVisionTransformer(GridForward, VisionTransformer):
    """timm's `VisionTransformer` that takes images of every size and hands each block the `Grid` of its tokens.

    Args:
        pos_embed: absolute embedding, learned for `img_size`: '' (none), 'learn' (one vector per patch, interpolated at
            other sizes), 'axial' (half a vector per row, half a vector per column) or 'axial-sum' (one per row plus one
            per column); see `AxialPositionEmbedding`. Prefix tokens have one in 'learn' alone.
        class_token: prepend a class token; it has no place on the grid.
        global_pool: 'avg', 'token' (needs a class token), 'max', 'avgmax', 'map', 'prr' or '' (none).
        patch_drop_rate: share of patches dropped in training; those that stay keep their coordinates.
        block_fn: makes the blocks, `GridBlock`s, as timm's class calls it.
        **kwargs: see `timm.models.vision_transformer.VisionTransformer` (img_size, patch_size, embed_dim, depth ...).

    Raises:
        ValueError: an unknown `pos_embed` or `global_pool`.
    """

    # Arguments that are no choice in a model of this class, and why.
    fixed: ClassVar[dict[str, str]] = {}

    def __init__(
        self,
        *,
        pos_embed: str,
        class_token: bool,
        global_pool: str,
        patch_drop_rate: float,
        block_fn: Any,
        **kwargs: Any,
    ) -> None:
        if pos_embed not in POS_EMBEDS:
            hint = did_you_mean(str(pos_embed), POS_EMBEDS)
            raise ValueError(f"pos_embed must be one of {listing(POS_EMBEDS)}, got {pos_embed!r}{hint}")
        if global_pool not in POOLS:
            hint = did_you_mean(str(global_pool), POOLS)
            raise ValueError(f"global_pool must be one of {listing(POOLS)}, got {global_pool!r}{hint}")
        if global_pool == "token" and not class_token:
            raise ValueError("global_pool 'token' needs class_token=True")
        kwargs.setdefault("embed_layer", AnySizePatchEmbed)
        super().__init__(
            pos_embed="" if pos_embed in AXIAL else pos_embed,
            class_token=class_token,
            global_pool=global_pool,
            dynamic_img_size=True,
            block_fn=block_fn,
            **kwargs,
        )
        # Blocks take more than one argument, which no scripted Sequential hands on.
        self.blocks = nn.ModuleList(self.blocks)
        if patch_drop_rate > 0:
            # timm's own throws away which patches stayed, and with them their places.
            self.patch_drop = PatchDropoutWithIndices(patch_drop_rate, num_prefix_tokens=self.num_prefix_tokens)
        self.axial: AxialPositionEmbedding | None = None
        if pos_embed in AXIAL:
            made_like = {name: kwargs.get(name) for name in ("device", "dtype")}
            self.axial = AxialPositionEmbedding(
                self.embed_dim, self.patch_embed.grid_size, AXIAL[pos_embed], **made_like
            )

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Make absolute embeddings those of another image or patch size; where there are none, any size works as it is.

        Args:
            img_size: height and width; None: as they are.
            patch_size: height and width; None: as they are.
        """
        super().set_input_size(img_size, patch_size)
        if self.axial is not None:
            self.axial.set_grid_size(self.patch_embed.grid_size)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Parameters without weight decay: timm's, and all tables of relative positions."""
        tables = {
            f"{name}.{table}"
            for name, module in self.named_modules()
            if module is not self and hasattr(module, "no_weight_decay")
            for table in module.no_weight_decay()
        }
        return super().no_weight_decay() | tables

    @torch.jit.ignore
    def load_pretrained(self, checkpoint_path: str, prefix: str = "") -> None:
        """Load an original JAX archive, see `relvit.models.weights.convert.load_jax_archive`."""
        load_jax_archive(self, checkpoint_path, prefix)

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns of parameter names by depth, for layer-wise learning rates: timm's, axial tables in the stem."""
        groups = super().group_matcher(coarse)
        return groups if self.axial is None else {**groups, "stem": rf"{groups['stem']}|axial\."}

    def _pos_embed(self, x: Tensor) -> Tensor:
        """Patches (B, rows, columns, dim) -> tokens (B, N, dim), prefix tokens first, absolute embeddings added."""
        height, width = x.shape[1], x.shape[2]
        x = x.flatten(1, 2)
        if self.axial is not None:
            x = x + self.axial(Grid(height, width))
        tokens: list[Tensor] = []
        for token in (self.cls_token, self.reg_token):
            if token is not None:
                tokens.append(token.expand(x.shape[0], -1, -1))
        if self.pos_embed is None:
            tokens.append(x)
            return torch.cat(tokens, dim=1)
        # As timm has it, but for the interpolation.
        embedded = 0 if self.no_embed_class else self.num_prefix_tokens
        embedding = resample_embedding(self.pos_embed, self.patch_embed.grid_size, (height, width), embedded)
        if self.no_embed_class:
            tokens.append(x + embedding)
            x = torch.cat(tokens, dim=1)
        else:
            tokens.append(x)
            x = torch.cat(tokens, dim=1) + embedding
        return self.pos_drop(x)

    def _run_block(self, block: nn.Module, x: Tensor, grid: Grid, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        if self.grad_checkpointing:
            return checkpoint(block, x, grid, attn_mask, is_causal)
        return block(x, grid, attn_mask, is_causal)


def check_arguments(model: type[GridVisionTransformer], given: dict[str, Any]) -> None:
    """Refuse arguments that neither a model's class nor timm's has, and those that are no choice; in place.

    `dynamic_img_size=True` is taken out: it is what these models do, and configurations shared with timm's may say so.
    """
    if given.get("dynamic_img_size") is True:
        del given["dynamic_img_size"]
    fixed = dict.fromkeys(FIXED, "these models take every image size, through blocks of their own") | model.fixed
    allowed: set[str] = set()
    for cls in (model, VisionTransformer):
        allowed |= inspect.signature(cls).parameters.keys()
    allowed -= fixed.keys() | {"kwargs"}
    for name in given:
        if name in fixed:
            raise ValueError(f"{name} cannot be chosen: {fixed[name]}")
        if name not in allowed:
            raise TypeError(f"{model.__name__} has no argument {name!r}{did_you_mean(name, allowed)}")


def model_cfg(**kwargs: Any) -> dict[str, Any]:
    """What timm knows about a model: ImageNet's, but for what is given."""
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "apache-2.0",
        **kwargs,
    }


# Of CIFAR-10's training images; those of CIFAR-100 differ by less than 0.03.
CIFAR = {
    "num_classes": 10,
    "input_size": (3, 32, 32),
    "crop_pct": 1.0,
    "mean": (0.4914, 0.4822, 0.4465),
    "std": (0.2470, 0.2435, 0.2616),
}
