"""Resize absolute position embeddings to another image size: in forward passes and where weights are loaded."""

import torch
from torch import Tensor

from relvit.ops.tracing import without_autocast


# Symbolic tracing (torch.fx) keeps a call as one node where the function is called as an attribute of this module.
@torch.fx.wrap
def resample_embedding(
    embedding: Tensor,
    old_size: tuple[int, int],
    new_size: tuple[int, int],
    prefix: int = 0,
    cut: tuple[int, int] | None = None,
) -> Tensor:
    """Interpolate an embedding per patch, bicubic with antialiasing, as timm's `resample_abs_pos_embed`.

    `torch.nn.functional.interpolate` cannot be compiled for sizes that vary (PyTorch 2.15: its bicubic backward). Two
    products with weights (new, old) can.

    Args:
        embedding: (1, prefix + h w, dim), patches in raster order.
        old_size: rows and columns, h and w, of the embedding's grid.
        new_size: rows and columns, H and W, of the wanted grid.
        prefix: number of leading tokens, which keep their embedding.
        cut: how many rows and columns of the new grid are wanted, from the top left; None: all.

    Returns:
        (1, prefix + H W, dim), with H and W of `cut` if it is given, dtype of the embedding; computed in float32 at
        least, autocast or not.
    """
    first, patches = embedding[:, :prefix], embedding[:, prefix:]
    precision = torch.promote_types(embedding.dtype, torch.float32)
    rows, cols = (
        bicubic_weights(old, new, embedding.device, precision, wanted)
        for old, new, wanted in zip(old_size, new_size, cut or new_size, strict=True)
    )
    with without_autocast(embedding.device):
        patches = patches.to(precision).unflatten(1, old_size)
        patches = torch.einsum("Yy,byxd->bYxd", rows, patches)
        patches = torch.einsum("Xx,bYxd->bYXd", cols, patches)
    return torch.cat((first, patches.flatten(1, 2).to(embedding.dtype)), dim=1)


def bicubic_weights(old: int, new: int, device: torch.device, dtype: torch.dtype, wanted: int | None = None) -> Tensor:
    """Compute what each of `old` points contributes to the first `wanted` of `new` ones; each row adds up to 1.

    Keys' cubic kernel (1981, with a = -1/2), as wide as the larger distance between points, as in PyTorch with
    `antialias=True`.
    """
    count = new if wanted is None else wanted
    ours, theirs = torch.arange(count, device=device)[:, None], torch.arange(old, device=device)
    # The numerator is an integer, so that at the old size the weights are exactly those of the identity.
    distance = ((2 * theirs + 1) * new - (2 * ours + 1) * old).abs().to(dtype) / (2 * torch.sym_max(new, old))
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = ((2.5 - 0.5 * distance) * distance - 4) * distance + 2
    weights = torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))
    return weights / weights.sum(dim=1, keepdim=True)
