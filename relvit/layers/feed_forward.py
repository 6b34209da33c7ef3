"""Chunked feed-forward: the MLP of a block some tokens at a time, with the same numbers in bounded memory."""

from __future__ import annotations

from functools import partial

import torch
from timm.layers import GatedMlp, GluMlp, Mlp, SwiGLU
from torch import Tensor, nn

from relvit.ops.recompute import recomputed
from relvit.ops.tracing import is_exporting

# What these compute of a token depends on no other token; GatedMlp as long as it has no gate.
PER_TOKEN = (Mlp, GluMlp, SwiGLU, GatedMlp)


def check_chunk(mlp_chunk: int | None, mlp: nn.Module) -> None:
    """Refuse a number of tokens, or an MLP that mixes tokens.

    Raises:
        ValueError: an `mlp_chunk` below 1, or an MLP that is not known to work on each token alone.
        TypeError: an `mlp_chunk` that is no integer.
    """
    if mlp_chunk is None:
        return
    if isinstance(mlp_chunk, bool) or not isinstance(mlp_chunk, int):
        raise TypeError(f"mlp_chunk must be a number of tokens or None, got {mlp_chunk!r}")
    if mlp_chunk < 1:
        raise ValueError(f"mlp_chunk must be at least 1 token, got {mlp_chunk}")
    if not isinstance(mlp, PER_TOKEN) or not isinstance(getattr(mlp, "gate", None), nn.Identity | None):
        raise ValueError(
            f"mlp_chunk needs an MLP that works on each token alone; {type(mlp).__name__} is not known to: take a "
            f"subclass of {', '.join(cls.__name__ for cls in PER_TOKEN)} as mlp_layer, or leave mlp_chunk out"
        )


def chunked_mlp(norm: nn.Module, mlp: nn.Module, x: Tensor, mlp_chunk: int) -> Tensor:
    """Compute `mlp(norm(x))` for (B, N, dim) tokens, `mlp_chunk` tokens of all samples at a time.

    Where gradients are computed, backward recomputes one chunk after the other, with the same random numbers: it keeps
    `x` alone. Source: Kitaev et al. 2020, Reformer (arXiv 2001.04451), section 3, "Chunking".

    Args:
        norm, mlp: modules that work on each token alone, see `check_chunk`.
        x: tokens.
        mlp_chunk: tokens of one chunk, the last one may have fewer.

    Returns:
        (B, N, dim); equal to `mlp(norm(x))` but for rounding in the matrix products, and but for which random numbers
        dropout takes.
    """
    if is_exporting() or isinstance(x, torch.fx.Proxy):
        # One graph serves all numbers of tokens.
        return mlp(norm(x))
    chunk = partial(_mlp_of, norm, mlp)
    if torch.is_grad_enabled():
        # The state of the generator is larger than a small chunk.
        random = mlp.training and any(isinstance(part, nn.Dropout) and part.p > 0 for part in mlp.modules())
        chunk = partial(recomputed, chunk, preserve_rng_state=random)
    return torch.cat([chunk(tokens) for tokens in x.flatten(0, 1).split(mlp_chunk)]).unflatten(0, x.shape[:2])


def _mlp_of(norm: nn.Module, mlp: nn.Module, x: Tensor) -> Tensor:
    return mlp(norm(x))
