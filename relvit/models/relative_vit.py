"""Vision Transformers with relative attention, registered with timm as `relvit_*`; options: `RelVisionTransformer`."""

# This module has no `from __future__ import annotations`, which turns annotations into strings: torch.fx writes the
# annotations of `forward` into the code that it generates, and would make up names such as `_Tensor_` for strings.
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from timm.models import DefaultCfg
from torch import Tensor, nn

from relvit.layers import RelativeAttention, RelativeBlock
from relvit.layers.positions import POSITIONS
from relvit.layers.positions.by_name import accepts, numbered, position_factory
from relvit.layers.positions.rope import TEMPERATURES, RotaryEmbedding2d
from relvit.models.base import GridVisionTransformer
from relvit.models.entry_points import check_arguments, default_cfgs_of, entry_point
from relvit.models.recurrence import RECURRENCES, Recurrence
from relvit.models.weights.convert import checkpoint_filter_fn
from relvit.ops.tracing import is_exporting
from relvit.utils.messages import check_choice

# If the user gives no `depth`, timm's `VisionTransformer` has this number of blocks.
DEPTH = 12
ROPES = ("", *TEMPERATURES)


class RelVisionTransformer(GridVisionTransformer):
    """timm's `VisionTransformer` whose attention has relative positions in 2D.

    Everything that timm's class offers is inherited; blocks are `RelativeBlock`s. `forward` takes images of any size
    whose sides are multiples of the patch, without `set_input_size`: relative positions are computed for the grid of
    the images, and an absolute embedding, if there is one, is interpolated. By default the model has no absolute
    embedding and no class token, and uses average pooling.

    Examples:
        >>> model = RelVisionTransformer(img_size=64, patch_size=8, embed_dim=96, depth=2, num_heads=3, num_classes=10)
        >>> model(torch.randn(2, 3, 64, 96)).shape  # any size whose sides are multiples of the patch
        torch.Size([2, 10])

    Args:
        position: a name in `relvit.layers.positions.POSITIONS`, such as 'tables' (learned, `RelativePosition2d`) or
            'slopes' (ALiBi's, without parameters); several names, as 'lookhere+tables' (`CombinedPosition2d`); or your
            own class or a `functools.partial` of it, called as `position(head_dim, num_heads, device=, dtype=)` for
            each block. If your class has an argument `layer`, it also gets `layer=(index, depth)`.
        rope: additional rotary embedding of queries and keys: '' (none), 'axial' or 'mixed' (learned frequencies), see
            `RotaryEmbedding2d`. With `rel_terms=''` the rotary embedding is the only position.
        prefix_bias: whether to learn biases of the pairs that contain a prefix token, see `PrefixBias`.
        max_distance: clip distance in patches, one number for both axes or (rows, columns); only for the positions
            'tables', 'slopes', 'slopes-euclidean' and 'xl'. None: the default of the position: 7 for 'tables', and no
            clipping for the others.
        rel_terms, shared_heads, layout, bucketing: only for tables, see `RelativePosition2d`; None: its defaults.
        rel_init_std: standard deviation that initialises a learned position; with 0 a layer starts as plain attention;
            None: the default of the position, such as 0.1 for 'tables'.
        mixer: your own attention or other mixer, see `RelativeBlock`; None: `RelativeAttention`. The arguments about
            positions need a mixer with an attribute `position`.
        backend: see `relvit.ops.relative_attention`; for second derivatives choose 'gathered'.
        band_rows: number of rows of patches in a band. The model then computes an image band by band, each band with a
            memory of earlier bands; see `relvit.families.transformer_xl.set_bands`. None: images are computed whole.
        memory_rows: number of rows of patches above a band that the memory holds. None: all rows.
        **kwargs: see `GridVisionTransformer` (pos_embed, class_token, global_pool, patch_drop_rate, reversible,
            mlp_chunk) and `timm.models.vision_transformer.VisionTransformer` (img_size, patch_size, embed_dim ...).

    Raises:
        ValueError: `position`, `rope`, `pos_embed` or `global_pool` is unknown, or a number is out of its range.
        ValueError: an argument is given that this class sets itself, that the position lacks, or that is for positions
            while the mixer has no attribute `position`.
        ValueError: `backend` is given with a `mixer`, or `prefix_bias` is given, and there is neither a class token nor
            a register.
        ValueError: in `forward`, a side of an image is not a multiple of the patch.
        TypeError: an argument is unknown, or `position` returns something other than a module.
    """

    recurrence: Recurrence | None
    own_recurrence: Recurrence | None

    def __init__(
        self,
        *,
        position: str | Callable[..., nn.Module] = "tables",
        rope: str = "",
        prefix_bias: bool = False,
        max_distance: int | Sequence[int] | None = None,
        rel_terms: str | None = None,
        shared_heads: bool | None = None,
        layout: str | None = None,
        bucketing: str | None = None,
        rel_init_std: float | None = None,
        mixer: Callable[..., nn.Module] | None = None,
        backend: str = "auto",
        band_rows: int | None = None,
        memory_rows: int | None = None,
        **kwargs: Any,
    ) -> None:
        if mixer is not None and backend != "auto":
            raise ValueError(
                f"backend={backend!r} is an option of relvit's own attention, and mixer={mixer!r} takes its place: "
                "leave out backend or mixer"
            )
        check_arguments(type(self), kwargs)
        for name, given in (("position", position), ("pos_embed", kwargs.get("pos_embed"))):
            if isinstance(given, str) and given.startswith(("rope", "rotary")):
                raise ValueError(
                    f"{name} is {given!r}: rotary embeddings have an argument of their own: rope='axial' or 'mixed'"
                )
        of_position = {
            "max_distance": max_distance,
            "rel_terms": rel_terms,
            "shared_heads": shared_heads,
            "layout": layout,
            "bucketing": bucketing,
            "rel_init_std": rel_init_std,
        }
        make_position = position_factory(position, **of_position)
        check_choice("rope", rope, ROPES)
        if prefix_bias and not (kwargs.get("class_token") or kwargs.get("reg_tokens")):
            raise ValueError(
                "prefix_bias=True needs prefix tokens, and this model has none: set class_token=True or reg_tokens, or "
                "leave out prefix_bias"
            )
        super().__init__(
            block_fn=partial(
                RelativeBlock,
                position=numbered(make_position, kwargs.get("depth", DEPTH)),
                rope=partial(RotaryEmbedding2d, kind=rope) if rope else None,
                prefix_bias=prefix_bias,
                mixer=partial(RelativeAttention, backend=backend) if mixer is None else mixer,
            ),
            **kwargs,
        )
        if not hasattr(attn := self.blocks[0].attn, "position"):
            _refuse_position(attn, {"position": position, **of_position})
        if band_rows is not None or memory_rows is not None:
            self.recurrence = self.own_recurrence = RECURRENCES["bands"].of(self, band_rows, memory_rows)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Classify images (B, in_chans, height, width), or a native batch."""
        if self.recurrence is not None and not is_exporting():
            return self.recurrence.classify(self, x, attn_mask, is_causal)
        return self.forward_head(self.forward_features(x, attn_mask, is_causal))


def _refuse_position(mixer: nn.Module, given: dict[str, Any]) -> None:
    """Raise ValueError for arguments of positions that are not the defaults, with a mixer that takes no position."""
    for name, value in given.items():
        default = "tables" if name == "position" else None
        if value != default:
            raise ValueError(
                f"{name} must be {default!r}, the default, with mixer {type(mixer).__name__}, which has no attribute "
                f"`position`, got {value!r}: leave it out, and take no model whose name sets it (relvit_learn_*, "
                "relvit_xl_*)"
            )


TINY = {"embed_dim": 192, "depth": 12, "num_heads": 3}
SMALL = {"embed_dim": 384, "depth": 12, "num_heads": 6}
BASE = {"embed_dim": 768, "depth": 12, "num_heads": 12}
LARGE = {"embed_dim": 1024, "depth": 24, "num_heads": 16}
PATCH4_32 = {"patch_size": 4, "img_size": 32}
TEST = {"img_size": 160, "embed_dim": 64, "depth": 6, "num_heads": 2, "mlp_ratio": 3}
# These models have four register tokens (Darcet et al. 2024, arXiv 2309.16588), which average pooling leaves out.
REG4_GAP: dict[str, Any] = {"reg_tokens": 4, "global_pool": "avg", "class_token": False}
# The most accurate models in docs/study have a learned absolute embedding, and a clip distance of an eighth to a
# quarter of the grid's side. At 224 px the side is 14 patches, so the clip distance here is 2.
LEARN: dict[str, Any] = {"max_distance": 2, "pos_embed": "learn"}

# `VARIANTS` maps the name of each model to its arguments of `RelVisionTransformer`; without `patch_size` a patch has 16
# px.
VARIANTS: dict[str, dict[str, Any]] = {
    "relvit_tiny": TINY,
    "relvit_small": SMALL,
    "relvit_base": BASE,
    "relvit_large": LARGE,
    "relvit_learn_tiny": TINY | LEARN,
    "relvit_learn_small": SMALL | LEARN,
    "relvit_learn_base": BASE | LEARN,
    "relvit_xl_small": SMALL | {"position": "xl"},
    "relvit_small_reg4_gap": SMALL | REG4_GAP,
    "relvit_base_reg4_gap": BASE | REG4_GAP,
    # The next two models are for images of 32 px such as CIFAR's.
    "relvit_tiny_patch4_32": TINY | PATCH4_32,
    "relvit_small_patch4_32": SMALL | PATCH4_32,
    "test_relvit": TEST,
}
default_cfgs: dict[str, DefaultCfg] = default_cfgs_of(VARIANTS)


def complete_arguments(own: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, completed with the arguments of the model of this name.

    If the call chooses another position, the named model's `max_distance` is left out, because the chosen position has
    its own default, or no such argument. A combination such as 'lookhere+tables' keeps `max_distance` for the tables,
    unless it would also clip another position of the combination, such as 'slopes'.
    """
    default = own.get("position", "tables")
    chosen = given.get("position", default)
    names = chosen.split("+") if isinstance(chosen, str) else []
    if [name for name in names if name in POSITIONS and accepts(name, "max_distance")] != [default]:
        own = {name: value for name, value in own.items() if name != "max_distance"}
    return own | given


for _name, _own in VARIANTS.items():
    globals()[_name] = entry_point(_name, RelVisionTransformer, checkpoint_filter_fn, partial(complete_arguments, _own))
