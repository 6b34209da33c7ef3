"""timm's rotary embeddings (RoPE) at any image size, in models that `relvit.retrofit` changes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from timm.layers import RotaryEmbeddingCat, RotaryEmbeddingDinoV3, is_exporting
from torch import Tensor, nn


class AnySizeRope:
    """Mixin before one of timm's rotary embeddings: its stored embedding at the size it has, a computed one at others.

    timm's own either ignore the size that they are asked for, or compute the embedding at every size, which in other
    precisions than float32 differs from the stored one.
    """

    def get_embed(self, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return sines and cosines (rows * columns, 2 head_dim) for `shape`, (rows, columns); None: the stored ones."""
        if shape is None or self.feat_shape is None:
            return super().get_embed(shape, dtype)
        # A graph must not be one for the stored size alone.
        traced = is_exporting() or any(isinstance(size, torch.fx.Proxy) for size in shape)
        if not traced and tuple(shape) == tuple(self.feat_shape):
            return super().get_embed(None, dtype)
        return self._make_embed(shape, dtype)


class AnySizeRopeCat(AnySizeRope, RotaryEmbeddingCat):
    """timm's `RotaryEmbeddingCat` for every size, see `AnySizeRope`."""

    def _make_embed(self, shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
        return self._build_embed_cat(shape, self.bands, dtype=dtype, augment=self.training and self.aug_active)


class AnySizeRopeDinoV3(AnySizeRope, RotaryEmbeddingDinoV3):
    """timm's `RotaryEmbeddingDinoV3` for every size, see `AnySizeRope`."""

    def _make_embed(self, shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
        return RotaryEmbeddingDinoV3.get_embed(self, shape, dtype)


# timm's class -> the one that a module of it becomes. timm's others take every size as they are.
ANY_SIZE_ROPES: dict[type[nn.Module], type[nn.Module]] = {
    RotaryEmbeddingCat: AnySizeRopeCat,
    RotaryEmbeddingDinoV3: AnySizeRopeDinoV3,
}
