"""Measure what reversible blocks keep and cost, beside plain ones and gradient checkpointing, on the CPU.

    python tools/depth/reversible.py                       # memory per image over depth, small and large
    python tools/depth/reversible.py --what time           # a training step: ratios of processor time
    python tools/depth/reversible.py --what chunk          # peak of a large image over mlp_chunk

Memory comes from the allocator. 'kept' is what a forward pass leaves for backward, per image; 'peak' is by how much the
highest amount in a training step grows with one more image (so neither parameters nor their gradients count). Times are
of processor time, all ways by turns in every round: what slows the machine slows all of them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import timm
import torch
from torch import Tensor, nn

import relvit  # noqa: F401 (registers the models)
from relvit.utils.memory import allocations, peak_bytes

WAYS = ("plain", "checkpointing", "reversible")


def build(size: str, way: str, **options: Any) -> nn.Module:
    """Build a model for 224 px in training mode; every parameter has a gradient, to which steps add."""
    torch.manual_seed(0)
    model = timm.create_model(f"relvit_{size}", reversible=way == "reversible", **options).train()
    model.set_grad_checkpointing(way == "checkpointing")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def step(model: nn.Module, images: Tensor) -> None:
    """Compute gradients."""
    model(images).sum().backward()


def kept(model: nn.Module, batch: int, side: int = 224) -> float:
    """Count bytes per image that a forward pass leaves for backward."""
    images, graph = torch.randn(batch, 3, side, side), []
    model(images)
    return sum(allocations(lambda: graph.append(model(images).grad_fn))) / batch


def peak(model: nn.Module, batch: int, side: int = 224) -> float:
    """Count the bytes by which the peak of a step grows with one more image."""
    peaks = []
    for number in (batch, 2 * batch):
        images = torch.randn(number, 3, side, side)
        step(model, images)
        peaks.append(peak_bytes(lambda images=images: step(model, images)))
    return (peaks[1] - peaks[0]) / batch


def memory(sizes: Sequence[str], depths: Sequence[int], batch: int) -> None:
    """Print a table of memory per image, of all ways and depths."""
    print("| model | depth | " + " | ".join(f"{way}: kept, peak (MB)" for way in WAYS) + " | plain : reversible |")
    print("|---|---|" + "---|" * (len(WAYS) + 1))
    for size in sizes:
        for depth in depths:
            found = {}
            for way in WAYS:
                model = build(size, way, depth=depth)
                found[way] = (kept(model, batch) / 1e6, peak(model, batch) / 1e6)
            cells = " | ".join(f"{held:.1f}, {most:.1f}" for held, most in found.values())
            ratios = ", ".join(f"{a / b:.1f}" for a, b in zip(found["plain"], found["reversible"], strict=True))
            print(f"| `relvit_{size}` | {depth} | {cells} | {ratios} |", flush=True)


def times(sizes: Sequence[str], batch: int, rounds: int) -> None:
    """Print the medians, and their quartiles, of the ratios of a step's processor time within rounds."""
    print("| model | batch | plain (s) | checkpointing / plain | reversible / plain | reversible / checkpointing |")
    print("|---|---|---|---|---|---|")
    shuffle = random.Random(0)
    for size in sizes:
        models = {way: build(size, way) for way in WAYS}
        images = torch.randn(batch, 3, 224, 224)
        taken: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(rounds + 1):
            for way in shuffle.sample(WAYS, len(WAYS)):
                for parameter in models[way].parameters():
                    parameter.grad = None
                start = time.process_time()
                step(models[way], images)
                if number:  # the first round warms up
                    taken[way].append(time.process_time() - start)
        plain, checkpointing, reversible = taken.values()
        cells = []
        for over, under in ((checkpointing, plain), (reversible, plain), (reversible, checkpointing)):
            low, middle, high = statistics.quantiles([a / b for a, b in zip(over, under, strict=True)], n=4)
            cells.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
        line = f"| `relvit_{size}` | {batch} | {statistics.median(plain):.3f} | {' | '.join(cells)} |"
        print(line, flush=True)


def chunks(size: str, side: int) -> None:
    """Print the peak of inference and of training on one large image over the tokens of a chunk."""
    print(f"`relvit_{size}`, depth 2, one image of {side} px, {(side // 16) ** 2} tokens\n")
    print("| mlp_chunk | inference, peak (MB) | training, kept (MB) | training, peak (MB) |")
    print("|---|---|---|---|")
    for mlp_chunk in (None, 4096, 1024, 256):
        model, images = build(size, "plain", depth=2, mlp_chunk=mlp_chunk), torch.randn(1, 3, side, side)
        with torch.no_grad():
            inference = peak_bytes(lambda model=model, images=images: model(images))
        figures = (inference, kept(model, 1, side), peak_bytes(lambda model=model, images=images: step(model, images)))
        print(f"| {mlp_chunk} | " + " | ".join(f"{figure / 1e6:.1f}" for figure in figures) + " |", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--what", choices=("memory", "time", "chunk"), default="memory")
    parser.add_argument("--sizes", nargs="+", default=["small", "large"])
    parser.add_argument("--depths", type=int, nargs="+", default=[12, 24, 48])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--side", type=int, default=1024, help="of the image of 'chunk', in pixels")
    given = parser.parse_args(arguments)
    if given.what == "memory":
        memory(given.sizes, given.depths, given.batch)
    elif given.what == "time":
        times(given.sizes, given.batch, given.rounds)
    else:
        for size in given.sizes:
            chunks(size, given.side)


if __name__ == "__main__":
    main()
