"""Retrofitted attention of timm's BEiT, Swin and relpos ViTs, which have tables; plain ViTs: `timm_attention.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.nn.functional as F
from timm.models.beit import Attention as BeitAttention
from timm.models.swin_transformer import WindowAttention
from timm.models.swin_transformer_v2 import WindowAttention as WindowAttentionV2
from timm.models.vision_transformer_relpos import RelPosAttention
from torch import Tensor, nn

from relvit.models.retrofit.bias import set_window
from relvit.models.retrofit.timm_attention import GridArgument, TimmRelativeAttention
from relvit.ops import Grid
from relvit.ops.checks import int_pair
from relvit.ops.inputs import Projected, separate


class TimmOwnRelative(TimmRelativeAttention):
    """`TimmRelativeAttention` for timm's classes with relative positions."""

    def bias_of_prefix(self) -> nn.Module | None:
        """Return the layer's `prefix_bias`, which is a plain attribute where layers share it."""
        return super().bias_of_prefix() or getattr(self, "prefix_bias", None)


class TimmRelativeRelPos(TimmOwnRelative, RelPosAttention):
    """timm's `RelPosAttention` (`vit_relpos_*`) after a retrofit, see `TimmRelativeAttention`."""

    def forward(self, x: Tensor, shared_rel_pos: GridArgument) -> Tensor:
        """Map (B, N, dim) tokens to (B, N, dim); timm's blocks pass on the grid in place of the shared bias."""
        return super().forward(x, attn_mask=shared_rel_pos)


class TimmRelativeBeit(TimmOwnRelative, BeitAttention):
    """timm's `Attention` of BEiT after a retrofit, see `TimmRelativeAttention`."""

    def forward(self, x: Tensor, shared_rel_pos_bias: GridArgument) -> Tensor:
        """Map (B, N, dim) tokens to (B, N, dim); timm's blocks pass on the grid in place of the shared bias."""
        return super().forward(x, attn_mask=shared_rel_pos_bias)


class TimmRelativeWindows(TimmOwnRelative):
    """Mixin before Swin's attention, whose blocks cut, shift and mask windows and pass all windows in one call."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B n, rows columns, dim) tokens of n windows to the same shape; `mask` (n, N, N) is added to logits."""
        if mask is not None:
            mask = mask.repeat(x.shape[0] // mask.shape[0], 1, 1)[:, None]
        return super().forward(x, attn_mask=GridArgument(Grid(*self.window_size), mask))

    def set_window_size(self, window_size: int | Sequence[int]) -> None:
        """Change the size of the windows as timm does.

        The position changes, too, unless `pretrained_window_size` fixes the size by which timm scales offsets.
        """
        new = int_pair("window_size", window_size, 1)
        if not any(getattr(self, "pretrained_window_size", ())):
            set_window(self.position, self.window_size, new)
        self.window_size: tuple[int, int] = new
        self.block_window: tuple[int, int] | None = new

    def _init_buffers(self) -> None:
        """Set the bias of keys, which timm does not train, to zero."""
        if getattr(self, "k_bias", None) is not None:
            self.k_bias.zero_()


class TimmRelativeSwin(TimmRelativeWindows, WindowAttention):
    """timm's `WindowAttention` of Swin after a retrofit, see `TimmRelativeAttention`."""

    def reset_parameters(self) -> None:
        """Do nothing: timm's method initialises the table, which the position module has taken over."""


class TimmRelativeSwinV2(TimmRelativeWindows, WindowAttentionV2):
    """timm's `WindowAttention` of Swin V2 after a retrofit: logits are cosines, with a learned scale per head."""

    scale: float = 1.0

    def heads(self, projected: Projected) -> Projected:
        """Normalise queries and keys, and multiply the queries by the learned scale, 100 at most."""
        query, key, value = separate(projected)
        factor = self.logit_scale.clamp(max=math.log(100)).exp()
        return F.normalize(query, dim=-1) * factor, F.normalize(key, dim=-1), value
