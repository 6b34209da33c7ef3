"""Vision Transformers with relative positions, registered with timm as `relvit_*`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import PatchDropoutWithIndices
from timm.models import build_model_with_cfg, checkpoint, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from relvit.layers import (
    AnySizePatchEmbed,
    AxialPositionEmbedding,
    RelativeAttention,
    RelativeBlock,
    RelativePosition2d,
    SlopePosition2d,
    resample_embedding,
)
from relvit.layers.block import check_position_factory
from relvit.models.grid_forward import GridForward
from relvit.models.weights import checkpoint_filter_fn, load_jax_archive
from relvit.names import did_you_mean, listing
from relvit.ops import Grid
from relvit.ops.attention import BACKENDS
from relvit.ops.checks import check_backend

POSITIONS = {"tables": RelativePosition2d, "slopes": SlopePosition2d}
# How an axial embedding puts rows and columns together.
AXIAL = {"axial": "concat", "axial-sum": "sum"}
POS_EMBEDS = ("", "learn", *AXIAL)
POOLS = ("", "avg", "avgmax", "max", "token", "map", "prr")
# Arguments of timm's class that are no choice here.
FIXED = {"dynamic_img_size", "block_fn", "attn_layer"}

# Sizes have no value while a graph is traced, and a method of the model is no leaf.
torch.fx.wrap("resample_embedding")


class RelVisionTransformer(GridForward, VisionTransformer):
    """timm's `VisionTransformer` whose blocks see where patches lie relative to each other in 2D.

    Everything that timm's class offers is inherited; blocks are `RelativeBlock`s, to which the `Grid` of the patches is
    handed. Since positions are offsets, images of any size whose sides are multiples of the patch work in `forward`,
    without `set_input_size` and without interpolation. By default: no absolute embedding, no class token, average
    pooling.

    Args:
        position: 'tables' (learned, `RelativePosition2d`), 'slopes' (ALiBi's, without parameters, `SlopePosition2d`),
            or what makes the position module of a block, called as `position(head_dim, num_heads, device=, dtype=)`: a
            class of your own or a `functools.partial` of one.
        max_distance: clip distance in patches, one for both axes or (rows, columns); None: the default of the position,
            7 for tables, none for slopes, which reach over the whole grid. Not for a position of your own.
        rel_terms: relative terms by letter: 'q', 'k', 'v' (vectors on queries, keys, values), 'b' (bias); see
            `RelativePosition2d`. This and the next four are for tables alone.
        shared_heads: one set of tables for all heads of a block, or one per head.
        layout: a table per axis ('separate') or one over both ('joint').
        bucketing: which row of a table an offset uses: 'clip' or iRPE's 'piecewise'.
        rel_init_std: standard deviation of the tables at the start; 0 starts as plain attention.
        pos_embed: absolute embedding besides, learned for `img_size`: '' (none), 'learn' (one vector per patch,
            interpolated at other sizes), 'axial' (half a vector per row, half a vector per column) or 'axial-sum' (one
            per row plus one per column); see `AxialPositionEmbedding`. Prefix tokens have one in 'learn' alone.
        class_token: prepend a class token; it has no place on the grid.
        global_pool: 'avg', 'token' (needs a class token), 'max', 'avgmax', 'map', 'prr' or '' (none).
        patch_drop_rate: share of patches dropped in training; those that stay keep their coordinates.
        backend: see `relvit.ops.relative_attention`; 'gathered' for second derivatives.
        **kwargs: see `timm.models.vision_transformer.VisionTransformer` (img_size, patch_size, embed_dim, depth ...).

    Raises:
        ValueError: an unknown `position`, `pos_embed` or `global_pool`, an argument that is no choice here or not for
            this position, or in `forward` an image whose sides are no multiples of the patch.
        TypeError: an argument that there is not, a `position` that makes no modules.
    """

    def __init__(
        self,
        *,
        position: str | Callable[..., nn.Module] = "tables",
        max_distance: int | Sequence[int] | None = None,
        rel_terms: str = "kv",
        shared_heads: bool = True,
        layout: str = "separate",
        bucketing: str = "clip",
        rel_init_std: float = 0.02,
        pos_embed: str = "",
        class_token: bool = False,
        global_pool: str = "avg",
        patch_drop_rate: float = 0.0,
        backend: str = "auto",
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
        check_backend(backend, tuple(BACKENDS))
        # It is what these models do; configurations that are shared with timm's may say so.
        if kwargs.get("dynamic_img_size") is True:
            del kwargs["dynamic_img_size"]
        check_arguments(type(self).__name__, kwargs)
        make_position = position_factory(
            position,
            max_distance,
            rel_terms=rel_terms,
            shared_heads=shared_heads,
            layout=layout,
            bucketing=bucketing,
            rel_init_std=rel_init_std,
        )
        kwargs.setdefault("embed_layer", AnySizePatchEmbed)
        super().__init__(
            pos_embed="" if pos_embed in AXIAL else pos_embed,
            class_token=class_token,
            global_pool=global_pool,
            dynamic_img_size=True,
            block_fn=partial(RelativeBlock, position=make_position),
            attn_layer=RelativeAttention,
            **kwargs,
        )
        # Blocks take more than one argument, which no scripted Sequential hands on.
        self.blocks = nn.ModuleList(self.blocks)
        for block in self.blocks:
            block.attn.backend = backend
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
        """Load an original JAX archive, see `relvit.models.weights.load_jax_archive`."""
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


def check_arguments(model: str, given: dict[str, Any]) -> None:
    """Refuse arguments that neither `RelVisionTransformer` nor timm's class has, and those that are no choice here."""
    own = inspect.signature(RelVisionTransformer).parameters
    allowed = (own.keys() | inspect.signature(VisionTransformer).parameters.keys()) - FIXED - {"kwargs"}
    for name in given:
        if name in FIXED:
            raise ValueError(
                f"{name} cannot be chosen: these models take every image size, through blocks of their own"
            )
        if name not in allowed:
            raise TypeError(f"{model} has no argument {name!r}{did_you_mean(name, allowed)}")


def position_factory(
    position: str | Callable[..., nn.Module], max_distance: int | Sequence[int] | None, **tables: Any
) -> Callable[..., nn.Module]:
    """What makes the position module of a block; `tables` are the model's arguments that are for tables alone."""
    if not isinstance(position, str):
        check_position_factory(position)
    elif position not in POSITIONS:
        hint = did_you_mean(position, POSITIONS)
        raise ValueError(f"position must be one of {listing(tuple(POSITIONS))}, got {position!r}{hint}")
    own = {} if max_distance is None else {"max_distance": max_distance}
    if position == "tables":
        init_std = tables.pop("rel_init_std")
        return partial(RelativePosition2d, init_std=init_std, **own, **tables)
    defaults = inspect.signature(RelVisionTransformer).parameters
    for name, given in tables.items():
        if given != defaults[name].default:
            raise ValueError(f"{name} is for position 'tables', got {name}={given!r} with position {position!r}")
    if isinstance(position, str):
        return partial(POSITIONS[position], **own)
    if own:
        raise ValueError(
            f"max_distance={max_distance!r} is for positions known by name; give it to your own one: "
            "position=functools.partial(YourPosition, max_distance=...)"
        )
    return position


def _cfg(**kwargs: Any) -> dict[str, Any]:
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

default_cfgs = generate_default_cfgs(
    {
        "relvit_tiny.untrained": _cfg(),
        "relvit_small.untrained": _cfg(),
        "relvit_base.untrained": _cfg(),
        "relvit_large.untrained": _cfg(),
        "relvit_small_reg4_gap.untrained": _cfg(),
        "relvit_base_reg4_gap.untrained": _cfg(),
        "relvit_tiny_patch4_32.untrained": _cfg(**CIFAR),
        "relvit_small_patch4_32.untrained": _cfg(**CIFAR),
        "test_relvit.untrained": _cfg(input_size=(3, 160, 160), crop_pct=0.95),
    }
)

TINY = {"embed_dim": 192, "depth": 12, "num_heads": 3}
SMALL = {"embed_dim": 384, "depth": 12, "num_heads": 6}
BASE = {"embed_dim": 768, "depth": 12, "num_heads": 12}
LARGE = {"embed_dim": 1024, "depth": 24, "num_heads": 16}
PATCH4_32 = {"patch_size": 4, "img_size": 32}
REG4_GAP = {"reg_tokens": 4, "global_pool": "avg", "class_token": False}


def _create(variant: str, pretrained: bool, defaults: dict[str, Any], kwargs: dict[str, Any]) -> RelVisionTransformer:
    kwargs = {**defaults, **kwargs}
    out_indices = kwargs.pop("out_indices", 3)
    return build_model_with_cfg(
        RelVisionTransformer,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **kwargs,
    )


@register_model
def relvit_tiny(pretrained: bool = False, **kwargs: Any) -> RelVisionTransformer:
    """Width 192, 12 blocks, 3 heads, patch 16; arguments of `RelVisionTransformer`."""
    return _create("relvit_tiny", pretrained, TINY, kwargs)


@register_model
def relvit_small(pretrained: bool = False, **kwargs: Any) -> RelVisionTransformer:
    """Width 384, 12 blocks, 6 heads, patch 16; arguments of `RelVisionTransformer`."""
    return _create("relvit_small", pretrained, SMALL, kwargs)


@register_model
def relvit_base(pretrained: bool = False, **kwargs: Any) -> RelVisionTransformer:
    """Width 768, 12 blocks, 12 heads, patch 16; arguments of `RelVisionTransformer`."""
    return _create("relvit_base", pretrained, BASE, kwargs)


@register_model
def relvit_large(pretrained: bool = False, **kwargs: Any) -> RelVisionTransformer:
    """Width 1024, 24 blocks, 16 heads, patch 16; arguments of `RelVisionTransformer`."""
    return _create("relvit_large", pretrained, LARGE, kwargs)


@register_model
def relvit_small_reg4_gap(pretrained: bool = False, **kwargs: Any) -> RelVisionTransformer:
    """`relvit_small` with four registers (Darcet et al. 2024, arXiv 2309.16588), which pooling leaves out.

    Arguments of `RelVisionTransformer`.
    """
    return _create("relvit_small_reg4_gap", pretrained, SMALL | REG4_GAP, kwargs)


@register_model
def relvit_base_reg4_gap(pretrained: bool = False, **kwargs: Any) -> RelVisionTransformer:
    """`relvit_base` with four registers (Darcet et al. 2024, arXiv 2309.16588), which pooling leaves out.

    Arguments of `RelVisionTransformer`.
    """
    return _create("relvit_base_reg4_gap", pretrained, BASE | REG4_GAP, kwargs)


@register_model
def relvit_tiny_patch4_32(pretrained: bool = False, **kwargs: Any) -> RelVisionTransformer:
    """`relvit_tiny` for images of 32 px such as CIFAR's: patch 4; arguments of `RelVisionTransformer`."""
    return _create("relvit_tiny_patch4_32", pretrained, TINY | PATCH4_32, kwargs)


@register_model
def relvit_small_patch4_32(pretrained: bool = False, **kwargs: Any) -> RelVisionTransformer:
    """`relvit_small` for images of 32 px such as CIFAR's: patch 4; arguments of `RelVisionTransformer`."""
    return _create("relvit_small_patch4_32", pretrained, SMALL | PATCH4_32, kwargs)


@register_model
def test_relvit(pretrained: bool = False, **kwargs: Any) -> RelVisionTransformer:
    """Width 64, 6 blocks, 2 heads, patch 16 at 160: for tests; arguments of `RelVisionTransformer`."""
    defaults = {"img_size": 160, "embed_dim": 64, "depth": 6, "num_heads": 2, "mlp_ratio": 3}
    return _create("test_relvit", pretrained, defaults, kwargs)
