"""Apply a universal block to the tokens that still run, which attend to all tokens of the sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from relvit.layers.attention import attend_with, separate
from relvit.layers.block import RelativeBlock
from relvit.ops import Grid


def take_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Select M of the K tokens of each sample: (B, M, ...) of x (B, K, ...), by their indices (B, M)."""
    return x.flatten(0, 1).index_select(0, _flat(x, index)).unflatten(0, index.shape)


def put_tokens(x: Tensor, index: Tensor, tokens: Tensor, add: bool = False) -> Tensor:
    """Put M tokens of each sample, (B, M, ...), at the indices (B, M) of x (B, N, ...), or add them to x.

    Without gradients x itself is changed, because copying all tokens at every step would take as much time as halting
    saves.
    """
    flat, given = x.flatten(0, 1), (0, _flat(x, index), tokens.flatten(0, 1))
    if torch.is_grad_enabled():
        flat = flat.index_add(*given) if add else flat.index_copy(*given)
    else:
        flat = flat.index_add_(*given) if add else flat.index_copy_(*given)
    return flat.unflatten(0, x.shape[:2])


def _flat(x: Tensor, index: Tensor) -> Tensor:
    """Turn indices of M tokens of each sample of x (B, N, ...), (B, M), into indices of all B N tokens, (B M,)."""
    return (index + x.shape[1] * torch.arange(len(x), device=x.device)[:, None]).flatten()


def run_gathered(
    block: RelativeBlock,
    inputs: Tensor,
    index: Tensor,
    chosen: Tensor | None,
    memory: tuple[Tensor, Tensor] | None,
    query_grid: Grid,
    key_grid: Grid,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Apply a block to M chosen tokens out of K given tokens, with keys and values of the whole sequence of N tokens.

    Args:
        block: a block whose attention has neither masks nor windows.
        inputs: (B, K, dim), all tokens whose keys and values have changed since the last call.
        index: (B, K), the indices of these K tokens in the sequence.
        chosen: (B, M), the indices of the chosen tokens in `inputs`; None: all K tokens are chosen.
        memory: keys and values that the last call returned, (B, N, heads, head_dim) each; None: `inputs` holds all N
            tokens.
        query_grid: where the chosen tokens are.
        key_grid: where the N tokens are.

    Returns:
        The chosen tokens after the block, (B, M, dim), and the keys and values of all N tokens.
    """
    attn = block.attn
    normed = block.norm1(inputs)
    query, *own = (part.transpose(1, 2) for part in separate(attn.project(normed)))
    if memory is not None and inputs.shape[1] < memory[0].shape[1]:
        own = [put_tokens(old, index, new) for old, new in zip(memory, own, strict=True)]
    if chosen is not None:
        inputs, normed, query = (take_tokens(part, chosen) for part in (inputs, normed, query))
    projected = tuple(part.transpose(1, 2) for part in (query, *own))
    mixed = attend_with(attn, normed, projected, query_grid, key_grid, rotate=attn.rope)
    x = inputs + block.drop_path1(block.ls1(attn.output(normed, mixed)))
    return x + block.mlp_branch(x), tuple(own)
