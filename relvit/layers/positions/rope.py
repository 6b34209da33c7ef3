"""Rotary embeddings (RoPE) at any image size: relvit's own, and timm's in retrofitted models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.layers import (
    RotaryEmbeddingCat,
    RotaryEmbeddingDinoV3,
    apply_rot_embed_cat,
    freq_bands,
)
from timm.layers.pos_embed_sincos import init_random_2d_freqs
from torch import Tensor, nn

from relvit.ops import Grid, tracing
from relvit.ops.grid import batched_coords
from relvit.utils.constants import KeepConstants
from relvit.utils.messages import check_choice

# Heo et al. use these temperatures for the two kinds of rotary embedding, see `RotaryEmbedding2d`.
TEMPERATURES = {"axial": 100.0, "mixed": 10.0}


class RotaryEmbedding2d(KeepConstants):
    """Rotary embedding of queries and keys by row and column (Heo et al. 2024, arXiv 2403.13298, section 3).

    Neighbouring channels 2t and 2t + 1 of a patch at row y and column x are rotated by the angle y f_t + x g_t, with
    frequencies f_t and g_t. So the product of a query and a key depends on the offset between them, not on their
    places. Prefix tokens are not rotated.

    - 'axial': the first half of the channels is rotated by y, the second half by x, at frequencies temperature^(-4 t /
      d), for t = 0 ... d / 4 - 1, the same in all heads: timm's `RotaryEmbeddingCat` with `in_pixels=False`.
    - 'mixed': f and g are learned for each head, and start as the frequencies of 'axial', turned by a random angle of
      each head: timm's `RotaryEmbeddingMixed`.

    Rows and columns are counted in patches, at every image size.

    Examples:
        >>> rope, grid = RotaryEmbedding2d(head_dim=64, num_heads=12, kind="mixed"), make_grid(4, 6, prefix=1)
        >>> query, key = torch.randn(2, 2, 12, 25, 64).unbind()
        >>> rope(query, grid).shape, rope(key, grid).shape
        (torch.Size([2, 12, 25, 64]), torch.Size([2, 12, 25, 64]))

    Args:
        head_dim: d, a multiple of 4.
        num_heads: number of heads.
        kind: 'axial' or 'mixed'.
        temperature: number whose powers are the frequencies of 'axial' (other libraries call it base or theta); None:
            the paper's, 100 for 'axial' and 10 for 'mixed'.

    Attributes:
        frequencies: (2, 1 or num_heads, d / 2), f and then g: for 'mixed' a parameter; for 'axial' a constant in
            float32, or in float64 after `double()`; half precision leaves it in float32.

    Raises:
        ValueError: `kind` is unknown, `head_dim` is not a multiple of 4, or `temperature` is not positive.
    """

    frequencies: nn.Parameter

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        kind: str = "axial",
        temperature: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice("kind", kind, tuple(TEMPERATURES))
        if head_dim % 4:
            raise ValueError(f"a rotary embedding needs a head_dim that is a multiple of 4, got {head_dim}")
        self.kind: str = kind
        self.temperature: float = TEMPERATURES[kind] if temperature is None else temperature
        if self.temperature <= 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        if kind == "mixed":
            self.frequencies = nn.Parameter(torch.empty(2, num_heads, head_dim // 2, device=device, dtype=dtype))
        else:
            frequencies = torch.empty(2, 1, head_dim // 2, device=device, dtype=torch.float32)
            self.register_buffer("frequencies", frequencies, persistent=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Set the frequencies, parameters of 'mixed' and constants of 'axial'."""
        _, heads, half = self.frequencies.shape
        options = {"temperature": self.temperature, "device": self.frequencies.device}
        with torch.no_grad():
            if self.kind == "mixed":
                # timm puts the frequencies of x before the frequencies of y, so exchange them.
                self.frequencies.copy_(init_random_2d_freqs(2 * half, 1, heads, **options)[:, 0].flip(0))
            else:
                bands = freq_bands(half // 2, step=1, **options)
                self.frequencies.copy_(torch.block_diag(bands, bands)[:, None])

    def init_non_persistent_buffers(self) -> None:
        """Set the frequencies of 'axial'."""
        if self.kind == "axial":
            self.init_weights()

    def no_weight_decay(self) -> set[str]:
        """Return the name of the learned frequencies."""
        return {"frequencies"} if self.kind == "mixed" else set()

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Rotate queries or keys (B, heads, N, head_dim) of `grid`; computed in float32 at least, dtype of `x`."""
        frequencies = self.frequencies
        if frequencies.dtype != torch.float64:
            frequencies = frequencies.float()
        y, x_coord = F.pad(batched_coords(grid, x.device).to(frequencies.dtype), (0, 0, grid.prefix, 0)).unbind(-1)
        # `angles` is (1 or B, 1 or heads, N, head_dim / 2), zero for prefix tokens. Multiply elementwise, because
        # autocast would compute a matrix product in half precision.
        angles = y[:, None, :, None] * frequencies[0][:, None] + x_coord[:, None, :, None] * frequencies[1][:, None]
        angles = angles.repeat_interleave(2, dim=-1)
        return apply_rot_embed_cat(x, torch.cat((angles.sin(), angles.cos()), dim=-1)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}, temperature={self.temperature}"


class AnySizeRope:
    """Mixin before one of timm's rotary embeddings that computes the embedding at sizes other than the stored one.

    timm's classes either ignore the requested size, or compute the embedding again even at the stored size; in
    precisions other than float32 the result then differs from the stored embedding.
    """

    def get_embed(self, shape: Sequence[int] | None = None, **dtype: torch.dtype | None) -> Tensor:
        """Return sines and cosines (rows * columns, 2 head_dim) for (rows, columns), or the stored ones for None."""
        if shape is None or self.feat_shape is None:
            return super().get_embed(shape, **dtype)
        # A traced or exported graph must work for all sizes, and not only for the size of the stored embedding, so it
        # always computes the embedding.
        traced = tracing.is_exporting() or any(isinstance(size, torch.fx.Proxy) for size in shape)
        if not traced and tuple(shape) == tuple(self.feat_shape):
            return super().get_embed(None, **dtype)
        return self._make_embed(shape, **dtype)


class AnySizeRopeCat(AnySizeRope, RotaryEmbeddingCat):
    """timm's `RotaryEmbeddingCat` for every size, see `AnySizeRope`."""

    def _make_embed(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        # In timm before 1.0.31 `_get_pos_embed_values` makes the embedding, and there may be no `bands`, so call that
        # method.
        if not hasattr(self, "_build_embed_cat"):
            return self._get_pos_embed_values(shape, self.pos_embed.device, self.pos_embed.dtype)
        return self._build_embed_cat(shape, self.bands, dtype=dtype, augment=self.training and self.aug_active)


class AnySizeRopeDinoV3(AnySizeRope, RotaryEmbeddingDinoV3):
    """timm's `RotaryEmbeddingDinoV3` for every size, see `AnySizeRope`."""

    def _make_embed(self, shape: Sequence[int], **dtype: torch.dtype | None) -> Tensor:
        return RotaryEmbeddingDinoV3.get_embed(self, shape, **dtype)


# `ANY_SIZE_ROPES` maps classes of timm to the classes that `relvit.retrofit` gives to their modules. All other rotary
# embeddings of timm take every size.
ANY_SIZE_ROPES: dict[type[nn.Module], type[nn.Module]] = {
    RotaryEmbeddingCat: AnySizeRopeCat,
    RotaryEmbeddingDinoV3: AnySizeRopeDinoV3,
}
