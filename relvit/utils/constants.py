"""Buffers that no state dict holds, such as frequencies and slopes: casts and `load_state_dict(assign=True)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class FillConstants:
    """Mixin before a module that computes constants when `load_state_dict(assign=True)` takes it off the meta device.

    A state dict does not contain non-persistent buffers, so after loading they would still be on the meta device. This
    class computes the buffers for the module and its parts, on the device of the loaded weights (without weights, on
    PyTorch's default device).
    """

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Tensor], prefix: str, local_metadata: Mapping[str, Any], *arguments: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *arguments)
        if local_metadata.get("assign_to_params_buffers"):
            device = next((value.device for value in state_dict.values()), torch.get_default_device())
            for part in self.modules():
                _fill(part, device)


def _fill(module: nn.Module, device: torch.device) -> None:
    """Move non-persistent buffers from the meta device to another one, and let the module compute them."""
    gone = {name: module._buffers[name] for name in module._non_persistent_buffers_set}
    gone = {name: buffer for name, buffer in gone.items() if buffer is not None and buffer.is_meta}
    # PyTorch loads a module's own weights before the weights of its parts. A part may compute its buffers from its
    # weights, so leave a part out until its weights are loaded.
    waits = any(parameter.is_meta for parameter in module.parameters(recurse=False))
    # Look for the method instead of the class `KeepConstants`, because timm's own layers have this method, too.
    if gone and not waits and hasattr(module, "init_non_persistent_buffers"):
        for name, buffer in gone.items():
            module._buffers[name] = torch.empty_like(buffer, device=device)
        module.init_non_persistent_buffers()


class KeepConstants(FillConstants, nn.Module):
    """Base of modules that initialise themselves, whose non-persistent buffers are constants: in float32 at least.

    `module.bfloat16()` would round the constants, and `module.float()` afterwards would not restore their digits.
    """

    def init_non_persistent_buffers(self) -> None:
        """Compute the constants; timm calls this method for buffers that no state dict holds."""

    def init_weights(self) -> None:
        """Initialise the parameters, and compute the constants; timm calls this method when it initialises a model."""
        self.init_non_persistent_buffers()

    def reset_parameters(self) -> None:
        """Call `init_weights`; PyTorch and timm call this method for modules made on the meta device."""
        self.init_weights()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # PyTorch calls `_apply` for every cast and every move of a module, so undo casts of the constants here.
        before = {name: self._buffers[name] for name in self._non_persistent_buffers_set}
        super()._apply(fn, recurse)
        for name, constant in before.items():
            if constant is None:
                continue
            after = self._buffers[name]
            if constant.is_meta and not after.is_meta:
                # `Module.to_empty` has left the buffers without numbers, and no state dict contains them: compute them.
                self.init_non_persistent_buffers()
                break
            precision = torch.promote_types(after.dtype, torch.float32)
            if after.dtype != precision:
                self._buffers[name] = constant.to(after.device, precision)
        return self
