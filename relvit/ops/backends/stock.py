"""Stock fused attention and its backward as two calls, for autograd functions; the global switches of its kernels.

`F.scaled_dot_product_attention` keeps its operands for backward. A function that can compute its operands again, as
`lean` does, instead calls the kernel that PyTorch would choose. The function keeps only the kernel's results, and
passes operands and results to the kernel's backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

# This file can call kernels of these kinds of devices.
DEVICES = ("cpu", "cuda")

_aten = torch.ops.aten
# Functions in `torch` are faster to call than functions in `_aten`, but turn numbers among the results into tensors, so
# kernels that return numbers are called in `_aten`. `_OFF` holds the arguments dropout_p and is_causal: no caller uses
# dropout or a causal mask.
_OFF = (0.0, False)


class Kernel(NamedTuple):
    """A fused kernel: `forward(query, key, value, scale)` returns the output first; `backward` takes all results."""

    forward: Callable[..., tuple[Any, ...]]
    backward: Callable[..., tuple[Tensor, ...]]


def _cpu(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Any, ...]:
    return torch._scaled_dot_product_flash_attention_for_cpu(query, key, value, *_OFF, scale=scale)


def _cpu_backward(grad: Tensor, operands: tuple[Tensor, ...], results: tuple[Any, ...], scale: float) -> Any:
    backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return backward(grad, *operands, *results, *_OFF, scale=scale)


def _flash(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Any, ...]:
    results = _aten._scaled_dot_product_flash_attention.default(query, key, value, *_OFF, False, scale=scale)
    return results[:-1]


def _flash_backward(grad: Tensor, operands: tuple[Tensor, ...], results: tuple[Any, ...], scale: float) -> Any:
    backward = _aten._scaled_dot_product_flash_attention_backward.default
    return backward(grad, *operands, *results[:6], *_OFF, *results[6:], scale=scale)


def _efficient(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Any, ...]:
    forward = torch._scaled_dot_product_efficient_attention
    return forward(query, key, value, None, True, *_OFF, scale=scale)


def _efficient_backward(grad: Tensor, operands: tuple[Tensor, ...], results: tuple[Any, ...], scale: float) -> Any:
    backward = _aten._scaled_dot_product_efficient_attention_backward.default
    wanted = [True, True, True, False]
    return backward(grad, *operands, None, *results, 0.0, wanted, False, scale=scale)[:3]


def _cudnn(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Any, ...]:
    forward = _aten._scaled_dot_product_cudnn_attention.default
    return forward(query, key, value, None, True, *_OFF, False, scale=scale)[:-1]


def _cudnn_backward(grad: Tensor, operands: tuple[Tensor, ...], results: tuple[Any, ...], scale: float) -> Any:
    backward = _aten._scaled_dot_product_cudnn_attention_backward.default
    out, logsumexp, *lengths, seed, offset = results
    return backward(grad, *operands, out, logsumexp, seed, offset, None, *lengths, *_OFF, scale=scale)


KERNELS: dict[tuple[str, int], Kernel] = {
    ("cpu", SDPBackend.FLASH_ATTENTION.value): Kernel(_cpu, _cpu_backward),
    ("cuda", SDPBackend.FLASH_ATTENTION.value): Kernel(_flash, _flash_backward),
    ("cuda", SDPBackend.EFFICIENT_ATTENTION.value): Kernel(_efficient, _efficient_backward),
    ("cuda", SDPBackend.CUDNN_ATTENTION.value): Kernel(_cudnn, _cudnn_backward),
}


def stock_kernel(query: Tensor, key: Tensor, value: Tensor) -> Kernel | None:
    """Return the fused kernel that PyTorch would choose for operands (B, heads, N, width); None: there is none.

    PyTorch names no fused kernel for fake tensors (`FakeTensorMode`), so they get the flash kernel of their device.
    """
    # Most subclasses of `Tensor`, such as `Parameter` and torchvision's `TVTensor`, only add metadata, and leave
    # operations to PyTorch. Only subclasses like `FakeTensor` compute in their own `__torch_dispatch__`.
    real = type(query).__torch_dispatch__ is Tensor.__torch_dispatch__
    choice = torch._fused_sdp_choice(query, key, value) if real else SDPBackend.FLASH_ATTENTION.value
    return KERNELS.get((query.device.type, choice))


def switches(query: Tensor) -> Any:
    """Return the settings that stock attention reads: allowed kernels, autocast, and deterministic mode."""
    device, flash = "cpu" if query.is_cpu else query.device.type, torch._C._get_flash_sdp_enabled()
    if device not in DEVICES:
        return flash
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if device == "cpu":
        return flash, autocast
    # In deterministic mode PyTorch does not use cuDNN's kernel, whose gradients vary in the last bits.
    others = torch.backends.cuda.mem_efficient_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled()
    return flash, autocast, *others, torch.get_deterministic_debug_mode()
