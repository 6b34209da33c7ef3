"""Buffers that stay in float32 when a model is cast to half precision, such as frequencies and slopes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class KeepConstants(nn.Module):
    """Mixin of modules whose non-persistent buffers are constants: kept in float32 at least, on its device.

    `module.bfloat16()` would round them, and a cast back to float32, with float32 weights, would leave them rounded.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # All casts and moves of a module go through this method.
        before = {name: self._buffers[name] for name in self._non_persistent_buffers_set}
        super()._apply(fn, recurse)
        for name, constant in before.items():
            if constant is None:
                continue
            after = self._buffers[name]
            precision = torch.promote_types(after.dtype, torch.float32)
            if after.dtype != precision:
                self._buffers[name] = constant.to(after.device, precision)
        return self
