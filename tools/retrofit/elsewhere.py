"""Compare SAM's image encoders of several libraries with themselves after `relvit.retrofit`: numbers, time, memory.

    python tools/retrofit/elsewhere.py                                            # ViT-B, all libraries, 1,024 px
    python tools/retrofit/elsewhere.py --libraries timm --sizes 1024 1024x512 --layers 3 --threads 1 2

For each library and size it prints the largest difference of the features, relative to their largest number; with the
source as 1.00 the time of a forward pass and of a training step, as medians of the ratios of rounds in which source and
retrofitted model take turns; and the peak of resident memory minus that of model and input, each in a fresh process.
Weights are random. A source that takes images of one size gets its embedding cut to the grid, and interpolates its
tables itself, so that at other sizes the features differ by the rule, and only time and memory are comparable.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import relvit

LIBRARIES = ("transformers", "segment_anything", "timm")
TRAINED = 1024
ACTIONS = ("forward", "step")
# On a machine that other processes use, the processor's time of this one says more than the time of the wall.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def source(library: str, layers: int, size: tuple[int, int]) -> nn.Module:
    """Build the encoder of SAM ViT-B with large random weights; with fewer layers, each third is global as in 12."""
    every_third = tuple(range(2, layers, 3))
    torch.manual_seed(0)
    if library == "transformers":
        from transformers import SamVisionConfig, SamVisionModel

        config = SamVisionConfig(num_hidden_layers=layers, global_attn_indexes=every_third, attn_implementation="sdpa")
        model = SamVisionModel(config).vision_encoder
        model.patch_embed.image_size = size
    elif library == "segment_anything":
        from segment_anything.modeling import ImageEncoderViT

        model = ImageEncoderViT(depth=layers, use_rel_pos=True, window_size=14, global_attn_indexes=every_third)
    else:
        import timm

        model = timm.create_model("samvit_base_patch16", depth=layers, global_attn_indexes=every_third, num_classes=0)
    for name, parameter in model.named_parameters():
        # transformers draws weights so small that tables would change nothing.
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2 if "rel_pos" in name else 0.05)
    return model


def build(library: str, layers: int, size: tuple[int, int], retrofitted: bool) -> nn.Module:
    """Build the encoder for images of this size, as the library has it or retrofitted."""
    model = source(library, layers, size)
    if retrofitted:
        return relvit.retrofit(model)
    if library != "timm" and size != (TRAINED, TRAINED):
        model.pos_embed = nn.Parameter(model.pos_embed[:, : size[0] // 16, : size[1] // 16])
    return model


def features(model: nn.Module, images: Tensor) -> Tensor:
    """Return the features that a mask decoder gets."""
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
    now = CLOCKS[clock]
    start = now()
    call()
    return now() - start


def compare(library: str, layers: int, size: tuple[int, int], rounds: int, clock: str) -> dict[str, float]:
    """Return the difference of features, and the ratios of time by action."""
    theirs = build(library, layers, size, retrofitted=False)
    ours = build(library, layers, size, retrofitted=True)
    images, found = torch.randn(1, 3, *size), {}
    with torch.no_grad():
        expected = features(theirs, images)
        found["difference"] = float((features(ours, images) - expected).abs().max() / expected.abs().max())
    for action in ACTIONS:
        pairs = []
        for index in range(rounds):
            # Each is first as often as second.
            order = (ours, theirs) if index % 2 else (theirs, ours)
            times = {id(model): seconds(partial(act, model, images, action), clock) for model in order}
            pairs.append((times[id(ours)], times[id(theirs)]))
        found[f"{action} time"] = statistics.median(our / their for our, their in pairs)
        found[f"{action} seconds of the source"] = statistics.median(their for _, their in pairs)
    return found


def peak(library: str, layers: int, size: tuple[int, int], retrofitted: bool, action: str) -> float:
    """Return by how many MB the first action raises the resident memory of this process, at its peak."""
    model, images = build(library, layers, size, retrofitted), torch.randn(1, 3, *size)
    before = resident("VmRSS")
    # Linux forgets earlier peaks, such as that of building the model.
    Path("/proc/self/clear_refs").write_text("5")
    act(model, images, action)
    return resident("VmHWM") - before


def resident(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def in_process(threads: int, function: str, *arguments: object) -> object:
    """Call a function of this file in a process of its own."""
    command = [sys.executable, __file__, "--call", json.dumps([threads, function, *arguments])]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def sizes_of(texts: Sequence[str]) -> list[tuple[int, int]]:
    return [(int(text.partition("x")[0]), int(text.rpartition("x")[2])) for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", nargs="+", default=LIBRARIES, choices=LIBRARIES)
    parser.add_argument("--sizes", nargs="+", default=["1024"], help="height and width in pixels, as 1024x512")
    parser.add_argument("--layers", type=int, default=12, help="layers of the encoder, two of three with windows")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", default="wall", choices=CLOCKS, help="cpu: time of all threads of the process")
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--call", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.call:
        threads, function, library, layers, size, *others = json.loads(arguments.call)
        torch.set_num_threads(threads)
        print(json.dumps(globals()[function](library, layers, tuple(size), *others)))
        return
    print("| library | pixels | threads | difference | forward time | step time | forward peak, MB | step peak, MB |")
    print("|---|---|---|---|---|---|---|---|")
    for library in arguments.libraries:
        for size in sizes_of(arguments.sizes):
            for threads in arguments.threads:
                given = (library, arguments.layers, size)
                found = in_process(threads, "compare", *given, arguments.rounds, arguments.clock)
                cells = [library, f"{size[0]} x {size[1]}", str(threads), f"{found['difference']:.0e}"]
                cells += [
                    f"{found[f'{action} time']:.2f} of {found[f'{action} seconds of the source']:.1f} s"
                    for action in ACTIONS
                ]
                for action in ACTIONS:
                    theirs, ours = (in_process(threads, "peak", *given, kind, action) for kind in (False, True))
                    cells.append(f"{ours / theirs:.2f}: {ours:,.0f} of {theirs:,.0f}")
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
