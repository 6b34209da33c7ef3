"""Chunked feed-forward of Reformer: the MLP of a block for some tokens at a time, in bounded memory."""

from __future__ import annotations

from functools import partial

import torch
from timm.layers import GatedMlp, GluMlp, Mlp, SwiGLU
from torch import Tensor, nn

from relvit.ops.checks import integer
from relvit.ops.recompute import recomputed
from relvit.ops.tracing import is_exporting

# These classes of timm compute each token without the other tokens; `GatedMlp` does so only without a `gate_layer`.
PER_TOKEN = (Mlp, GluMlp, SwiGLU, GatedMlp)


def check_chunk(mlp_chunk: int | None, mlp: nn.Module) -> int | None:
    """Return `mlp_chunk`, None or a number of tokens, if the MLP is known to work on each token alone; else raise."""
    if mlp_chunk is None:
        return None
    mlp_chunk = integer("mlp_chunk", mlp_chunk, 1)
    if not isinstance(mlp, PER_TOKEN) or not isinstance(getattr(mlp, "gate", None), nn.Identity | None):
        known = ", ".join(cls.__name__ for cls in PER_TOKEN)
        raise ValueError(
            f"mlp_chunk splits the tokens, and {type(mlp).__name__} may mix them: as mlp_layer take {known} without a "
            "gate_layer, or a subclass, or leave out mlp_chunk"
        )
    return mlp_chunk


def chunked_mlp(norm: nn.Module, mlp: nn.Module, x: Tensor, mlp_chunk: int) -> Tensor:
    """Compute `mlp(norm(x))` for (B, N, dim) tokens, `mlp_chunk` of all B N tokens at a time, see `check_chunk`.

    Training keeps only `x`: backward recomputes one chunk after the other, with the same random numbers. Source: Kitaev
    et al. 2020, Reformer (arXiv 2001.04451), section 3, "Chunking".

    Returns:
        (B, N, dim), equal to `mlp(norm(x))` up to rounding in the matrix products and the random numbers of dropout.
    """

    def compute(tokens: Tensor, *_parameters: Tensor) -> Tensor:
        return mlp(norm(tokens))

    if is_exporting() or isinstance(x, torch.fx.Proxy):
        # An exported or traced graph must work for any number of tokens, so it computes all tokens at once.
        return compute(x)
    chunk, parameters = compute, ()
    if torch.is_grad_enabled():
        # Backward reads the parameters again. `recomputed` notices only changes of its arguments, so the parameters are
        # arguments, too.
        parameters = (*norm.parameters(), *mlp.parameters())
        # Save the state of the random number generator only if there is dropout, because the state takes more memory
        # than a small chunk.
        random = mlp.training and any(isinstance(part, nn.Dropout) and part.p > 0 for part in mlp.modules())
        chunk = partial(recomputed, compute, preserve_rng_state=random)
    chunks = [chunk(tokens, *parameters) for tokens in x.flatten(0, 1).split(mlp_chunk)]
    return torch.cat(chunks).unflatten(0, x.shape[:2])
