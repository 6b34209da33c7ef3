"""Count the multiply-accumulates of a forward pass, and measure its peak memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from relvit.utils.memory import peak_bytes


def _product_flops(total: Sequence[int], left: Sequence[int], right: Sequence[int], **_: Any) -> int:
    return 2 * math.prod(left) * right[-1]


# `FlopCounterMode` by itself counts these matrix products only in their out-of-place forms, so give it their in-place
# forms, too.
IN_PLACE = {torch.ops.aten.addmm_: _product_flops, torch.ops.aten.baddbmm_: _product_flops}


@torch.no_grad()
def count_macs(net: nn.Module, img_size: Sequence[int], in_chans: int = 3) -> int:
    """Count the multiply-accumulates of all matrix products and convolutions for one image: half the FLOPs.

    The model runs on PyTorch's device 'meta', where tensors have shapes but no data, so the number is the same on every
    device. With relative positions, fused attention multiplies longer queries, keys and values. All these products are
    counted, a few per cent more than relative positions need. `tools/model_table.py` counts only the products that they
    need.

    Args:
        net: a model of timm or relvit; not changed.
        img_size: (height, width).
        in_chans: channels of the image.
    """
    # `FlopCounterMode` cannot follow views of parameters that require gradients, so the copy requires none.
    twin = copy.deepcopy(net).to("meta").requires_grad_(False).eval()
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        twin(torch.empty(1, in_chans, *img_size, device="meta", dtype=next(twin.parameters()).dtype))
    return counter.get_total_flops() // 2


def peak_memory(net: nn.Module, images: Tensor) -> int | None:
    """Measure the bytes of weights, images and everything else that is allocated at the peak of a forward pass.

    On CUDA the result is the peak of PyTorch's allocator. On the CPU the result is the size of weights, buffers and
    images, plus the peak of what the pass allocates. Other devices do not count bytes, so there the result is None.
    """
    if images.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(images.device)
        net(images)
        return torch.cuda.max_memory_allocated(images.device)
    if images.device.type != "cpu":
        return None
    there = sum(tensor.nbytes for tensor in (*net.parameters(), *net.buffers(), images))
    # Do not measure the first pass at an image size: this pass also computes indices of position tables, which later
    # passes reuse.
    net(images)
    return there + peak_bytes(lambda: net(images))
