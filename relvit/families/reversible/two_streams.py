"""`ReversibleDepth`: two streams of tokens without parameters; raise the limit of recompilations by `torch.compile`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from relvit.families.reversible.blocks import reversible_blocks
from relvit.models.depth import Depth
from relvit.ops import Grid


class ReversibleDepth(Depth):
    """Run tokens by `reversible_blocks`, of which training keeps only the two streams after the last block."""

    lacks: ClassVar[Mapping[str, str]] = {
        "memory": "it is reversible, and a memory would be kept for backward",
        "rollout": "its reversible blocks have two streams",
        "hooks": "they are means of two streams, and no module of the model outputs these means",
        "checkpointing": "a reversible model recomputes its blocks in backward already, and keeps less than gradient "
        "checkpointing: leave it out, or build the model with reversible=False",
    }

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
        """Return the mean of both streams after block `last` and after each block in `take`."""
        return reversible_blocks(model.blocks[: last + 1], x, grid, attn_mask, is_causal, take)

    def compile(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Compile each block, since recomputation is in no graph of the whole model."""
        # PyTorch limits the number of graphs per function. All blocks share one function, and each block needs several
        # graphs: for two branches, with and without gradients, at several sizes. So raise the limit: if it were reached
        # between forward and recomputation, the uncompiled recomputation would draw other random numbers than the
        # compiled forward.
        config, most = torch._dynamo.config, 64 * len(model.blocks)
        config.recompile_limit = max(config.recompile_limit, most)
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, most)
        for block in model.blocks:
            block.compile(*args, **kwargs)
