"""Compare models of timm that bring relative positions with the same after `relvit.retrofit`: memory and time, CPU.

    python tools/retrofit/own_positions.py                              # the table of docs/retrofit.md, five minutes
    python tools/retrofit/own_positions.py --models beit_base_patch16_224

Each model has three blocks, SAM's last one global, and is built by timm for the size; one image, in float32.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import timm
import torch
from torch import nn

import relvit
from relvit.utils.memory import allocations

# Side of the images, and arguments.
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "vit_relpos_small_patch16_224": (512, {"depth": 3}),
    "beit_base_patch16_224": (512, {"depth": 3}),
    "samvit_base_patch16": (1024, {"depth": 3, "global_attn_indexes": (2,)}),
    "swin_tiny_patch4_window7_224": (512, {"depths": (1, 1, 1), "num_heads": (3, 6, 12)}),
    "swinv2_tiny_window8_256": (512, {"depths": (1, 1, 1), "num_heads": (3, 6, 12)}),
}
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="which ones")
    print("| model | pixels | kept for backward, MB: timm, relvit | buffers, MB | seconds of a step |")
    print("|---|---|---|---|---|")
    for name in parser.parse_args().models:
        print(row(name, *MODELS[name]), flush=True)


def row(name: str, size: int, options: dict[str, Any]) -> str:
    """Measure a model and return the row of the table."""
    nets = [timm.create_model(name, img_size=size, **options) for _ in range(2)]
    relvit.retrofit(nets[1])
    images = torch.randn(1, 3, size, size)
    graphs: list[Any] = []  # holds them until all is counted
    kept = [sum(allocations(lambda net=net: graphs.append(net(images).grad_fn))) for net in nets]
    buffers = [sum(buffer.nbytes for buffer in net.buffers()) for net in nets]
    rounds = [[seconds_of_step(net, images) for net in nets] for _ in range(ROUNDS)]
    seconds = [min(of_net) for of_net in zip(*rounds, strict=True)]
    cells = [", ".join(f"{number / 2**20:.0f}" for number in pair) for pair in (kept, buffers)]
    return f"| {name} | {size} | {' | '.join(cells)} | {', '.join(f'{number:.2f}' for number in seconds)} |"


def seconds_of_step(net: nn.Module, images: torch.Tensor) -> float:
    """Time a forward and a backward pass."""
    begin = time.perf_counter()
    net(images).sum().backward()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
