"""Resize or mirror absolute position embeddings for another image size, in forward passes and for loaded weights."""

import torch
from torch import Tensor

from relvit.ops.tracing import larger, without_autocast


# Symbolic tracing (torch.fx) keeps a call of this function as one node, if the caller looks up the function in this
# module: `interpolate.resample_embedding(...)`.
@torch.fx.wrap
def resample_embedding(
    embedding: Tensor,
    old_size: tuple[int, int],
    new_size: tuple[int, int],
    prefix: int = 0,
    cut: tuple[int, int] | None = None,
    mirror: bool = False,
) -> Tensor:
    """Interpolate an embedding per patch, bicubic with antialiasing, as timm's `resample_abs_pos_embed`.

    The backward of PyTorch's bicubic interpolation cannot be compiled for sizes that vary (PyTorch 2.15). Two matrix
    products with weights (new, old), as here, can be compiled.

    Examples:
        >>> resample_embedding(torch.randn(1, 1 + 14 * 14, 192), (14, 14), (20, 30), prefix=1).shape
        torch.Size([1, 601, 192])

    Args:
        embedding: (1, prefix + h w, dim), patches in raster order.
        old_size: rows and columns, h and w, of the embedding's grid.
        new_size: rows and columns, H and W, of the new grid.
        prefix: number of leading tokens, which keep their embedding.
        cut: numbers of rows and columns of the new grid to return, from the top left; None: all.
        mirror: whether the unchanged embedding lies in the centre of the new grid and is mirrored at its edges, instead
            of being interpolated. A smaller grid gets only the centre of the embedding.

    Returns:
        (1, prefix + H W, dim), with H and W from `cut` if it is given; dtype of the embedding, computed in float32 at
        least.
    """
    weights = mirror_weights if mirror else bicubic_weights
    first, patches = embedding[:, :prefix], embedding[:, prefix:]
    precision = torch.promote_types(embedding.dtype, torch.float32)
    rows, cols = (
        weights(old, new, wanted, embedding.device, precision)
        for old, new, wanted in zip(old_size, new_size, cut or new_size, strict=True)
    )
    with without_autocast(embedding.device):
        patches = patches.to(precision).unflatten(1, old_size)
        patches = torch.einsum("Yy,byxd->bYxd", rows, patches)
        patches = torch.einsum("Xx,bYxd->bYXd", cols, patches)
    return torch.cat((first, patches.flatten(1, 2).to(embedding.dtype)), dim=1)


def bicubic_weights(old: int, new: int, wanted: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Compute the weights that resample `old` points to the first `wanted` of `new` points; each row sums to 1.

    The kernel is the cubic kernel of Keys (1981, with a = -1/2). The unit of length is the distance between two old
    points or between two new points, whichever is larger, as in PyTorch with `antialias=True`.
    """
    new_index, old_index = torch.arange(wanted, device=device)[:, None], torch.arange(old, device=device)
    # Compute the numerator in integers, so that the weights are exactly the identity matrix if `new` equals `old`.
    distance = ((2 * old_index + 1) * new - (2 * new_index + 1) * old).abs().to(dtype) / (2 * larger(new, old))
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = ((2.5 - 0.5 * distance) * distance - 4) * distance + 2
    weights = torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))
    return weights / weights.sum(dim=1, keepdim=True)


def mirror_weights(old: int, new: int, wanted: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Compute the weights that lay `old` points in the centre of `new` points and mirror the old points at their edges.

    Each row of the weights has a single 1. The mirror image of an outermost point lies beside the point, as in NumPy's
    padding 'symmetric'.
    """
    # This is (new - old) // 2, written without a negative dividend, because some runtimes of exported programs round
    # quotients towards zero.
    before = (new + old) // 2 - old
    # Take each point as the centre of a cell of length 2. `place` is the distance from the outer edge of the first old
    # cell to the centre of a new cell. `abs` mirrors at this edge, `minimum` mirrors at the outer edge of the last old
    # cell, and the mirrored pattern repeats after twice the length of all old cells, 4 `old`.
    place = (2 * (torch.arange(wanted, device=device) - before) + 1).abs() % (4 * old)
    nearest = torch.minimum(place, 4 * old - place) // 2
    return (nearest[:, None] == torch.arange(old, device=device)).to(dtype)
