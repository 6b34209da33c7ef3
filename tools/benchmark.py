"""Time and memory of relvit beside others, measured interleaved: `python tools/benchmark.py --level model --size 224`.

Each cell (one competitor at one size in one mode) adds a line of JSON to `--output`. In every round all competitors of
a size and mode are called once, in a freshly shuffled order: what slows the machine for a while slows all of them, and
sample i of one cell pairs with sample i of another. `tools/benchmark_report.py` makes tables and a figure of the file.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import os
import platform
import random
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.layers import Attention
from timm.models.vision_transformer_sam import Attention as SamAttention
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import relvit
from relvit.layers import AFTConv2d, AFTFull, AFTLocal, AFTSimple, RelativeAttention, RelativePosition2d
from relvit.ops import Grid, make_grid
from relvit.ops.aft.api import WINDOW_FORMS
from relvit.ops.attention import BACKENDS
from relvit.utils.messages import did_you_mean, listing

ROOT = Path(__file__).parent.parent
PATCH, DIM, HEADS, CLASSES = 16, 384, 6, 1000
# What one sample costs must not depend on extras: relvit's models pool averages, have no class token and no layer
# scale, so the others are built without them as well. timm's relpos has no class token to begin with.
POOLED = {"class_token": False, "global_pool": "avg"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("vit_small_patch16_224", POOLED),
    "control": ("vit_small_patch16_224", POOLED),
    "relvit_small": ("relvit_small", {}),
    "relvit_small_fused": ("relvit_small", {"backend": "fused"}),
    "relvit_small_tiled": ("relvit_small", {"backend": "tiled"}),
    "relpos": ("vit_relpos_small_patch16_224", {"init_values": 0}),
    "rope": ("vit_small_patch16_rope_224", POOLED),
    "rope_mixed": ("vit_small_patch16_rope_mixed_224", POOLED),
    "aft_conv": ("relvit_aft_conv_small", {}),
    "aft_conv_h16": ("relvit_aft_conv_small_k11_h16", {}),
    "aft_full": ("relvit_aft_full_small", POOLED | {"pos_embed": ""}),
}
# Ways to compute the attention-free layer of the paper's best small model, with a window per channel.
AFT_CONV = {"aft_conv": "auto"} | {f"aft_conv_{name}": name for name in WINDOW_FORMS}


class DepthwiseAFT(AFTConv2d):
    """The paper's own way (section 3.2): exp(w) - 1 convolved depthwise, channels first, plus the sum over all."""

    def mix(self, query: Tensor, key: Tensor, value: Tensor, grid: Grid, is_causal: bool) -> Tensor:
        weights = (key - key.amax(dim=2, keepdim=True)).exp()
        kernel = self.weight().exp() - 1
        sums = []
        for part in (weights * value, weights):
            image = part.transpose(2, 3).flatten(1, 2).unflatten(2, (grid.height, grid.width))
            window = kernel.repeat_interleave(part.shape[3], 0)[:, None]
            padding = [size // 2 for size in self.kernel_size]
            near = F.conv2d(image, window, padding=padding, groups=window.shape[0])
            sums.append(near.flatten(2).unflatten(1, (self.num_heads, -1)).transpose(2, 3) + part.sum(2, keepdim=True))
        return query.sigmoid() * sums[0] / sums[1]


COMPETITORS = {
    "model": tuple(MODELS),
    "layer": ("plain", "control", *(f"relvit_{name}" for name in BACKENDS), "sam"),
    "aft": (
        *("plain", "control", *AFT_CONV, "aft_conv_depthwise", "aft_conv_k31", "aft_conv_depthwise_k31"),
        *("aft_conv_h16", "aft_full", "aft_local", "aft_simple"),
    ),
}


@dataclass(frozen=True)
class Setting:
    """What all cells that are measured together have in common."""

    level: str
    size: int
    mode: str
    batch: int
    device: str
    dtype: str
    compiled: bool
    rounds: int
    cap: float
    seed: int


@dataclass
class Cell:
    """One competitor in one setting, and what was measured of it."""

    name: str
    setting: Setting
    module: nn.Module | None = None
    inputs: tuple[Any, ...] = ()
    status: str = "ok"
    memory: int | None = None
    seconds: list[float] = field(default_factory=list)

    def build(self) -> None:
        """Make the module and its input, noise."""
        setting = self.setting
        torch.manual_seed(setting.seed)
        self.module, shape, others = competitor(setting.level, self.name, setting.size)
        self.module.to(setting.device).train(setting.mode == "train")
        if setting.compiled:
            # Without `dynamic=False` a second size would get kernels for all sizes, the first one its own.
            self.module = torch.compile(self.module, dynamic=False)
        x = torch.randn(setting.batch, *shape, device=setting.device)
        # Inside a network the gradient goes on to the layer below; images need none.
        x.requires_grad_(setting.level == "layer" and setting.mode == "train")
        self.inputs = (x, *others)

    def forward(self) -> Tensor:
        """The output, under autocast for bfloat16."""
        with torch.autocast(self.setting.device, torch.bfloat16, enabled=self.setting.dtype == "bfloat16"):
            return self.module(*self.inputs)

    def step(self) -> None:
        """What is timed."""
        if self.setting.mode == "train":
            self.forward().sum().backward()
        else:
            with torch.no_grad():
                self.forward()

    def clear(self) -> None:
        """Set all gradients to None."""
        for tensor in (*self.module.parameters(), self.inputs[0]):
            tensor.grad = None

    def give_up(self, status: str) -> None:
        """Keep nothing but the reason why there is no figure."""
        self.status, self.memory, self.seconds = status, None, []
        self.module, self.inputs = None, ()
        if self.setting.device == "cuda":
            torch.cuda.empty_cache()

    def row(self) -> dict[str, Any]:
        """What is written of it."""
        result = {"status": self.status, "memory_bytes": self.memory, "seconds": self.seconds}
        return {"name": self.name, **asdict(self.setting), **result}


def competitor(level: str, name: str, size: int) -> tuple[nn.Module, tuple[int, ...], tuple[Any, ...]]:
    """A module, the shape of its input for one image, and its other arguments."""
    if level == "model":
        timm_name, options = MODELS[name]
        model = timm.create_model(timm_name, num_classes=CLASSES, img_size=size, **options)
        for block in model.blocks:
            # The layer scale of the rope models; timm takes no `init_values=None` over their own value.
            block.gamma_1 = block.gamma_2 = None
        return model, (3, size, size), ()
    side = size // PATCH
    if name == "sam":
        return SamAttention(DIM, HEADS, use_rel_pos=True, rope=None, input_size=(side, side)), (side, side, DIM), ()
    if name in ("plain", "control"):
        return Attention(DIM, HEADS, qkv_bias=True), (side * side, DIM), ()
    if level == "aft":
        return attention_free(name, side), (side * side, DIM), (make_grid(side, side),)
    ours = RelativeAttention(DIM, HEADS, position=RelativePosition2d(DIM // HEADS, HEADS), qkv_bias=True)
    ours.backend = name.removeprefix("relvit_")
    return ours, (side * side, DIM), (make_grid(side, side),)


def attention_free(name: str, side: int) -> nn.Module:
    """A layer of the paper's small models; filters have a gain of 1, as learned ones may, not 0 as at the start."""
    if name == "aft_simple":
        return AFTSimple(DIM)
    if name in ("aft_full", "aft_local"):
        kind, own = (AFTFull, {}) if name == "aft_full" else (AFTLocal, {"window": 4})
        return kind(DIM, grid_size=side, **own)
    kind, _, window = name.partition("_k")
    size = int(window or 15)
    if kind in AFT_CONV:
        layer = AFTConv2d(DIM, DIM, kernel_size=size, backend=AFT_CONV[kind])
    elif kind == "aft_conv_depthwise":
        layer = DepthwiseAFT(DIM, DIM, kernel_size=size)
    else:
        layer = AFTConv2d(DIM, 16, kernel_size=11)
    nn.init.ones_(layer.gamma)
    return layer


def timed(cell: Cell) -> float:
    """Seconds of one step, from an idle device to an idle device, gradients cleared before."""
    wait = torch.cuda.synchronize if cell.setting.device == "cuda" else lambda: None
    cell.clear()
    wait()
    begin = time.perf_counter()
    cell.step()
    wait()
    return time.perf_counter() - begin


def kept_bytes(forward: Callable[[], Tensor]) -> int:
    """Bytes that a forward pass on the CPU allocates and autograd holds after it; neither input nor parameters."""
    graph: list[Any] = []  # holds it until all is counted
    return sum(allocations(lambda: graph.append(forward().grad_fn)))


def peak_bytes(action: Callable[[], Any]) -> int:
    """The most bytes that an action on the CPU has allocated at a time."""
    return max(itertools.accumulate(allocations(action), initial=0))


def allocations(action: Callable[[], Any]) -> list[int]:
    """Bytes allocated on the CPU by an action, and, as negative numbers, released, one after the other."""
    # From the allocator: saved-tensor hooks see nothing of what is kept under other hooks or in closures, and compiled
    # code passes by dispatch modes. First, lest old garbage is released meanwhile:
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        action()
    events = (event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]")
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def memory_bytes(cell: Cell) -> int:
    """CUDA: the peak that a step adds to what was allocated. CPU: what autograd keeps; in mode 'forward' the peak."""
    cell.clear()
    if cell.setting.device != "cuda":
        return kept_bytes(cell.forward) if cell.setting.mode == "train" else peak_bytes(cell.step)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cell.step()
    return torch.cuda.max_memory_allocated() - before


def attempt(cell: Cell, action: Callable[[], Any]) -> Any:
    """The action's result; None for a cell given up, and one that now runs out of memory. Other failures propagate."""
    if cell.status != "ok":
        return None
    try:
        return action()
    except (RuntimeError, MemoryError) as error:
        words = ("out of memory", "not enough memory", "can't allocate memory")
        if not isinstance(error, MemoryError) and not any(word in str(error).lower() for word in words):
            raise
    # Not in the handler above: the error holds on to the tensors of the frames it went through.
    cell.give_up("out of memory")
    return None


def prepare(cell: Cell) -> None:
    """Build, then call three times: against the cap (compilation included), for memory, and as in the rounds."""
    attempt(cell, cell.build)
    first = attempt(cell, partial(timed, cell))
    if first is not None and first > cell.setting.cap:
        cell.give_up(f"over the cap of {cell.setting.cap:g} s")
    cell.memory = attempt(cell, partial(memory_bytes, cell))
    attempt(cell, partial(timed, cell))


def measure(setting: Setting, names: Sequence[str]) -> list[Cell]:
    """All named competitors in one setting, interleaved."""
    torch._dynamo.reset()
    # The limit is per function, which competitors share; past it torch would silently go on without compilation.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        cells = [Cell(name, setting) for name in names]
        for cell in cells:
            prepare(cell)
        shuffle = random.Random(setting.seed)
        for _ in range(setting.rounds):
            for cell in shuffle.sample(cells, len(cells)):
                seconds = attempt(cell, partial(timed, cell))
                if seconds is not None:
                    cell.seconds.append(round(seconds, 6))
    return cells


def git_commit() -> str:
    """HEAD, '+dirty' if files differ from it (results aside), 'unknown' without git."""
    questions = ("rev-parse HEAD", "status --porcelain -- . :!docs/benchmarks")
    runs = [subprocess.run(["git", *q.split()], cwd=ROOT, capture_output=True, text=True) for q in questions]
    head, changes = (run.stdout.strip() for run in runs)
    return head + ("+dirty" if changes else "") if head else "unknown"


def surroundings(device: str) -> dict[str, dict[str, Any]]:
    """Versions and machine."""
    info = Path("/proc/cpuinfo")
    processors = re.findall(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.exists() else []
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    machine = {"processor": (processors or [platform.processor()])[0], "cores": os.cpu_count()}
    versions = {library.__name__: str(library.__version__) for library in (torch, timm, relvit)}
    versions["python"] = platform.python_version()
    return {"versions": versions, "machine": {**machine, "threads": torch.get_num_threads(), "gpu": gpu}}


def limit_memory() -> None:
    """Linux without GPU: let an allocation beyond what is free fail, where the kernel would kill the process."""
    if Path("/proc/meminfo").exists() and not torch.cuda.is_available():
        resource = importlib.import_module("resource")  # not on every system
        free = int(re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())[1]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (free, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def check(level: str, names: Sequence[str], sizes: Sequence[int], device: str) -> None:
    """Raise ValueError for names unknown at this level, for sizes that are no whole patches, for a missing GPU."""
    allowed = COMPETITORS[level]
    for name in (name for name in names if name not in allowed):
        raise ValueError(f"unknown {level} {name!r}{did_you_mean(name, allowed)}, allowed: {listing(allowed)}")
    for size in (size for size in sizes if size < PATCH or size % PATCH):
        raise ValueError(f"size must be a positive multiple of {PATCH}, got {size}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' needs a GPU, torch sees none: use 'cpu' or 'auto'")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and append; raises ValueError as `check` does."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    add = parser.add_argument
    add("--level", choices=tuple(COMPETITORS), default="model")
    add("--size", type=int, nargs="+", default=[224], help="image sides; a layer gets (size / 16)^2 tokens")
    add("--mode", choices=("forward", "train"), nargs="+", default=["forward", "train"])
    add("--names", nargs="+", help="competitors, by default all of the level; ratios need 'plain'")
    add("--batch", type=int, default=4)
    add("--rounds", type=int, default=25)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16: autocast")
    add("--compile", action="store_true")
    add("--cap", type=float, default=60.0, help="seconds that a cell's first call may take")
    add("--seed", type=int, default=0)
    add("--commit", help="what was measured, where the tree is a copy without git")
    add("--output", type=Path, default=ROOT / "docs" / "benchmarks" / "results.jsonl")
    given = parser.parse_args(arguments)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if given.device == "auto" else given.device
    names = list(dict.fromkeys(given.names or COMPETITORS[given.level]))
    check(given.level, names, given.size, device)
    run = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    shared = {"commit": given.commit or git_commit(), **surroundings(device)}
    what = (given.batch, device, given.dtype, given.compile, given.rounds, given.cap, given.seed)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    for size, mode in itertools.product(given.size, given.mode):
        cells = measure(Setting(given.level, size, mode, *what), names)
        # After each setting, so that what was measured outlives a later failure.
        with given.output.open("a") as file:
            file.writelines(json.dumps({"run": run, **cell.row(), **shared}) + "\n" for cell in cells)
        print(given.level, size, mode, *(f"{cell.name}: {cell.status}" for cell in cells), sep=", ", flush=True)


if __name__ == "__main__":
    limit_memory()
    main()
