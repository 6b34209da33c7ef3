"""`Depth`: how a model applies its blocks, one after the other or in another way; `lack`: what a model cannot do."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from relvit.layers.mixer import lack_of
from relvit.ops import Grid


class Depth:
    """Application of a model's blocks, one after the other; subclasses apply blocks in other ways, without parameters.

    Attributes:
        lacks: maps what a model with this `depth_plan` cannot do to the reason; `lack` lists the keys.
    """

    lacks: ClassVar[Mapping[str, str]] = {}

    def count(self, model: nn.Module) -> int:
        """Return the number of states of the tokens, which timm's features and intermediate layers count."""
        return len(model.blocks)

    def run(
        self,
        model: nn.Module,
        x: Tensor,
        grid: Grid,
        attn_mask: Tensor | None,
        is_causal: bool,
        take: Collection[int],
        last: int,
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute the tokens (B, N, dim) after block `last` and after each block in `take`, counted from 0.

        Call a block by `model._run_block(block, x, grid, attn_mask, is_causal)`, which applies gradient checkpointing.
        """
        taken = []
        for index, block in enumerate(model.blocks[: last + 1]):
            x = model._run_block(block, x, grid, attn_mask, is_causal)
            if index in take:
                taken.append(x)
        return x, taken

    def compile(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Compile the parts that a graph of the whole model cannot contain: here there are none."""


class OwnDepth(Depth):
    """Depth of a model whose class overrides `_run_steps`, which may call blocks in any order."""

    lacks: ClassVar[Mapping[str, str]] = {
        "memory": "its own _run_steps takes no memory",
        "rollout": "its own _run_steps may call blocks in another order",
        "hooks": "its own _run_steps may call a block several times",
    }


# `DEPTHS` maps the name of a boolean argument of models, such as 'reversible', to the `depth_plan` of models in which
# it is True. Packages in `relvit.families` add entries.
DEPTHS: dict[str, Depth] = {}


def lack(model: nn.Module, need: str) -> str | None:
    """Return the reason why a model cannot do something, or None if it can.

    The model's `depth_plan` (a `Depth`), its `recurrence` and each block's mixer have a mapping `lacks`. The reason
    comes from the first of these mappings, in this order, that has the key `need`.

    Examples:
        >>> lack(timm.create_model("relvit_tiny", img_size=64, depth=1), "weights") is None
        True
        >>> lack(timm.create_model("relvit_aft_conv_tiny", img_size=64, depth=1), "weights")
        'its AFTConv2d is attention-free'

    Args:
        model: any model.
        need: what the model should do: 'memory' (attend to further tokens besides its input), 'weights' (return the N x
            N attention weights), 'rollout' (multiply the attention weights of all blocks), 'hooks' (call each block
            once for the whole image, so that a hook sees all tokens), 'checkpointing' (gradient checkpointing),
            'native' (take batches of images of any shapes), 'reach' (accept a call of `set_reach`, which changes how
            the model treats sizes other than the trained one), 'sizes' (be exported as one graph for all sizes).
    """
    for part in (getattr(model, "depth_plan", None), getattr(model, "recurrence", None)):
        if part is not None and need in part.lacks:
            return part.lacks[need]
    mixers = (getattr(block, "attn", None) for block in getattr(model, "blocks", None) or ())
    for mixer in mixers:
        if reason := lack_of(mixer, need):
            return reason
    return None
