"""Compare SAM, BEiT, Swin and MViT with themselves after `relvit.retrofit`: numbers, time, memory.

    python tools/retrofit/elsewhere.py  # SAM ViT-B of all libraries, 1,024 px
    python tools/retrofit/elsewhere.py --models timm-sam --sizes 1024 1024x512 --layers 3 --threads 1 2
    python tools/retrofit/elsewhere.py --models timm-mvitv2 --sizes 224 448

For each model and size the tool prints:

- the largest difference of the features, relative to their largest number;
- the time of a forward pass and of a training step as a multiple of the source model's time: medians of the ratios of
  rounds in which source and retrofitted model take turns;
- the peak of resident memory without model and input, each in a fresh process; on a GPU (`--device cuda`) the peak of
  PyTorch's allocator.

Weights are random. Where a source model takes images of one size, the table `MODELS` says how the tool makes the model
take another size. Its features may then differ by the rule of resizing, and only time and memory are comparable.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg
from torch import Tensor, nn

import relvit

ACTIONS = ("forward", "step")
# While other processes use the machine, the processor time of this process says more than the wall time.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Size = tuple[int, int]


class Model(NamedTuple):
    """A model that the tool can compare.

    Attributes:
        library: the package that has the model.
        sizes: the default of `--sizes`.
        layers: number of layers of the whole model.
        source: a function that builds the library's model, with a number of layers, for images of a height and width.
        fit: a function that makes a source model that was not retrofitted take images of a height and width.
    """

    library: str
    sizes: tuple[str, ...]
    layers: int
    source: Callable[[int, Size], nn.Module]
    fit: Callable[[nn.Module, Size], object] = lambda model, size: None


def transformers_sam(layers: int, size: Size) -> nn.Module:
    from transformers import SamVisionConfig, SamVisionModel

    options = {"num_hidden_layers": layers, "global_attn_indexes": every_third(layers)}
    return SamVisionModel(SamVisionConfig(**options, attn_implementation="sdpa")).vision_encoder


def segment_anything_sam(layers: int, size: Size) -> nn.Module:
    from segment_anything.modeling import ImageEncoderViT

    options = {"depth": layers, "global_attn_indexes": every_third(layers)}
    return ImageEncoderViT(**options, use_rel_pos=True, window_size=14)


def timm_sam(layers: int, size: Size) -> nn.Module:
    options = {"depth": layers, "global_attn_indexes": every_third(layers)}
    return timm.create_model("samvit_base_patch16", **options, num_classes=0)


def every_third(layers: int) -> tuple[int, ...]:
    """Return which layers of SAM are global: every third layer, as in the whole model."""
    return tuple(range(2, layers, 3))


def cut_sam(model: nn.Module, size: Size) -> None:
    """Cut the absolute embedding of a SAM whose library takes images of one size; the library interpolates tables."""
    model.patch_embed.image_size = size
    model.pos_embed = nn.Parameter(model.pos_embed[:, : size[0] // 16, : size[1] // 16])


def timm_mvitv2(layers: int, size: Size) -> nn.Module:
    """Build MViTv2-S for images of this size; fewer layers are taken from the third stage, the longest one, first.

    There are at least two layers: timm builds a single layer in the same way for images of several sizes.
    """
    depths = (1, 2, layers - 5, 2) if layers > 5 else (1,) * min(max(layers, 2), 4)
    # timm builds MViTv2's tables for square images.
    return MultiScaleVit(MultiScaleVitCfg(depths=depths), img_size=max(size), num_classes=0)


def timm_beit(layers: int, size: Size) -> nn.Module:
    return timm.create_model("beit_base_patch16_224", depth=layers, img_size=size, num_classes=0)


def transformers_beit(layers: int, size: Size) -> nn.Module:
    from transformers import BeitConfig, BeitModel

    # transformers builds BEiT's tables for square images.
    options = {"num_hidden_layers": layers, "image_size": max(size), "use_relative_position_bias": True}
    return BeitModel(BeitConfig(**options, drop_path_rate=0.0, attn_implementation="sdpa"))


def timm_swin(name: str, layers: int, size: Size) -> nn.Module:
    # The third stage has all layers but six; with few layers there is one stage.
    stages = {"depths": (2, 2, layers - 6, 2)} if layers > 6 else {"depths": (layers,), "num_heads": (3,)}
    model = timm.create_model(name, **stages, img_size=size, num_classes=0, drop_path_rate=0.0)
    for key, parameter in model.named_parameters():
        # Swin v2 initialises the weights of these norms to zero, so its blocks would compute nothing.
        if "norm" in key and key.endswith("weight"):
            nn.init.ones_(parameter)
    return model


MODELS = {
    "transformers-sam": Model("transformers", ("1024",), 12, transformers_sam, cut_sam),
    "segment_anything-sam": Model("segment_anything", ("1024",), 12, segment_anything_sam, cut_sam),
    "timm-sam": Model("timm", ("1024",), 12, timm_sam),
    "timm-mvitv2": Model("timm", ("224", "448"), 16, timm_mvitv2),
    "timm-beit": Model("timm", ("224", "512"), 12, timm_beit),
    "transformers-beit": Model("transformers", ("224", "512"), 12, transformers_beit),
    "timm-swin": Model("timm", ("224", "448"), 12, partial(timm_swin, "swin_tiny_patch4_window7_224")),
    "timm-swin-v2": Model("timm", ("256", "512"), 12, partial(timm_swin, "swinv2_tiny_window8_256")),
}
DEFAULT = [name for name in MODELS if name.endswith("-sam")]


def build(name: str, layers: int, size: Size, retrofitted: bool) -> nn.Module:
    """Build a model of the table for images of this size, as the library has it or retrofitted, with large weights."""
    torch.manual_seed(0)
    model = MODELS[name].source(layers, size)
    for key, parameter in model.named_parameters():
        # Some libraries initialise weights so small that position tables would have no effect.
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2 if "rel_pos" in key or "relative_position" in key else 0.05)
    if retrofitted:
        return relvit.retrofit(model)
    MODELS[name].fit(model, size)
    return model


def features(model: nn.Module, images: Tensor) -> Tensor:
    """Return the features that a head or a mask decoder would get."""
    output = model.forward_features(images) if hasattr(model, "forward_features") else model(images)
    return output if isinstance(output, Tensor) else output.last_hidden_state


def act(model: nn.Module, images: Tensor, action: str) -> None:
    """Run a forward pass without gradients, or a forward and a backward pass."""
    with torch.set_grad_enabled(action == "step"):
        output = features(model, images)
    if action == "step":
        output.square().mean().backward()
        model.zero_grad()


def seconds(call: Callable[[], object], clock: str) -> float:
    # A GPU may still compute when the call returns, so wait for it.
    now, wait = CLOCKS[clock], torch.cuda.synchronize if on_gpu() else lambda: None
    wait()
    start = now()
    call()
    wait()
    return now() - start


def on_gpu() -> bool:
    return torch.get_default_device().type == "cuda"


def compare(name: str, layers: int, size: Size, rounds: int, clock: str) -> dict[str, float]:
    """Return the difference of features, and the ratios of time by action."""
    theirs = build(name, layers, size, retrofitted=False)
    ours = build(name, layers, size, retrofitted=True)
    images, found = torch.randn(1, 3, *size), {}
    with torch.no_grad():
        expected = features(theirs, images)
        found["difference"] = float((features(ours, images) - expected).abs().max() / expected.abs().max())
    for action in ACTIONS:
        pairs = []
        for index in range(rounds):
            # Each of the two models is measured first in half of the rounds.
            order = (ours, theirs) if index % 2 else (theirs, ours)
            times = {id(model): seconds(partial(act, model, images, action), clock) for model in order}
            pairs.append((times[id(ours)], times[id(theirs)]))
        found[f"{action} time"] = statistics.median(our / their for our, their in pairs)
        found[f"{action} seconds of the source"] = statistics.median(their for _, their in pairs)
    return found


def peak(name: str, layers: int, size: Size, retrofitted: bool, action: str) -> float:
    """Return by how many MB the first action raises the memory of this process or of the GPU, at its peak."""
    model, images = build(name, layers, size, retrofitted), torch.randn(1, 3, *size)
    if on_gpu():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        act(model, images, action)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    before = resident("VmRSS")
    # Make Linux forget earlier memory peaks, such as the peak of building the model.
    Path("/proc/self/clear_refs").write_text("5")
    act(model, images, action)
    return resident("VmHWM") - before


def resident(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def settle(threads: int, device: str, dtype: str) -> None:
    """Set the number of threads, the default device and the default dtype of this process."""
    torch.set_num_threads(threads)
    torch.set_default_device(device)
    torch.set_default_dtype(getattr(torch, dtype))


def in_process(place: tuple[int, str, str], function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function in a new process, with this number of threads, device and dtype."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), settle, place) as pool:
        return pool.submit(function, *arguments).result()


def sizes_of(texts: Sequence[str]) -> list[Size]:
    return [(int(text.partition("x")[0]), int(text.rpartition("x")[2])) for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=DEFAULT, choices=MODELS)
    parser.add_argument("--sizes", nargs="+", help="pixels, or height x width as 1024x512; else the model's own")
    parser.add_argument("--layers", type=int, help="layers of the model, if fewer than it has")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", default="wall", choices=CLOCKS, help="cpu: time of all threads of the process")
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--no_peaks", action="store_true", help="leave memory out, which takes four more processes")
    arguments = parser.parse_args()
    head = ["model", "pixels", "threads", "difference", "forward time", "step time"]
    head += [] if arguments.no_peaks else ["forward peak, MB", "step peak, MB"]
    print(f"| {' | '.join(head)} |", "|---" * len(head) + "|", sep="\n")
    for name in arguments.models:
        model = MODELS[name]
        for size in sizes_of(arguments.sizes or model.sizes):
            for threads in arguments.threads:
                place = (threads, arguments.device, arguments.dtype)
                given = (name, arguments.layers or model.layers, size)
                found = in_process(place, compare, *given, arguments.rounds, arguments.clock)
                cells = [name, f"{size[0]} x {size[1]}", str(threads), f"{found['difference']:.0e}"]
                cells += [
                    f"{found[f'{action} time']:.2f} of {found[f'{action} seconds of the source']:.3g} s"
                    for action in ACTIONS
                ]
                for action in () if arguments.no_peaks else ACTIONS:
                    theirs, ours = (in_process(place, peak, *given, after, action) for after in (False, True))
                    cells.append(f"{ours / theirs:.2f}: {ours:,.0f} of {theirs:,.0f}")
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
