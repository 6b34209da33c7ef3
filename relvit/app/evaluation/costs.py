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


# PyTorch's counter knows the out-of-place forms of these products only.
IN_PLACE = {torch.ops.aten.addmm_: _product_flops, torch.ops.aten.baddbmm_: _product_flops}


@torch.no_grad()
def count_macs(net: nn.Module, img_size: Sequence[int], in_chans: int = 3) -> int:
    """Count the multiply-accumulates of all matrix products and convolutions for one image: half the FLOPs.

    The pass has no data (PyTorch's device 'meta'), so the number is the same on every device. With relative positions
    the products of augmented queries, keys and values count, as GPUs compute them: a few percent more than the method
    needs. `tools/model_table.py` counts only the products that the method needs.

    Args:
        net: a model of timm or relvit; not changed.
        img_size: (height, width).
        in_chans: channels of the image.
    """
    # The counter cannot follow views of parameters with gradients.
    twin = copy.deepcopy(net).to("meta").requires_grad_(False).eval()
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        twin(torch.empty(1, in_chans, *img_size, device="meta"))
    return counter.get_total_flops() // 2


def peak_memory(net: nn.Module, images: Tensor) -> int | None:
    """Measure the bytes of weights, images and everything else that is allocated at the peak of a forward pass.

    On CUDA this is the peak of PyTorch's allocator, on the CPU the peak of the pass in addition to weights and images.
    Other devices do not count bytes, so the result is None.
    """
    if images.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(images.device)
        net(images)
        return torch.cuda.max_memory_allocated(images.device)
    if images.device.type != "cpu":
        return None
    there = sum(tensor.nbytes for tensor in (*net.parameters(), *net.buffers(), images))
    # Do not measure the first pass at a size: it also computes indices of position tables and keeps them for later
    # passes.
    net(images)
    return there + peak_bytes(lambda: net(images))
