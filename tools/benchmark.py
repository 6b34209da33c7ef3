"""Measure time and memory of relvit's and of other models: `python tools/benchmark.py --level model --size 224`.

Each cell (one competitor at one size in one mode) adds a line of JSON to `--output`. In every round all competitors of
a size and mode run once, in a freshly shuffled order: what slows the machine for a while slows all of them, and sample
i of one cell pairs with sample i of another. `tools/benchmark_report.py` makes tables and a figure of the file.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import peers
import timm
import torch
import torch.nn.functional as F
from timm.layers import Attention
from timm.models.vision_transformer_sam import Attention as SamAttention
from torch import Tensor, nn

import relvit
from relvit.families.aft import AFTConv2d, AFTFull, AFTLocal, AFTSimple
from relvit.families.reformer import LSHAttention
from relvit.layers import RelativeAttention, RelativePosition2d
from relvit.ops import make_grid
from relvit.ops.attention import BACKENDS
from relvit.utils.memory import allocations, peak_bytes
from relvit.utils.messages import check_choice

OUTPUT = Path(__file__).parent.parent / "docs" / "benchmarks" / "results.jsonl"
PATCH, DIM, HEADS, CLASSES = 16, 384, 6, 1000
FAILED, LEAST_ROUNDS = "failed:", 5
# The cost of one image must not depend on extras: relvit's models pool averages, have no class token and no layer
# scale, but a bias of queries, keys and values. Other models are built alike; timm's relpos has no class token anyway.
POOLED = {"class_token": False, "global_pool": "avg"}
# The backend 'reference', the paper's own algorithm, is measured for single layers only.
FAST_BACKENDS = [backend for backend in BACKENDS if backend != "reference"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("vit_small_patch16_224", POOLED),
    "control": ("vit_small_patch16_224", POOLED),
    "relvit_small": ("relvit_small", {}),
    **{f"relvit_small_{backend}": ("relvit_small", {"backend": backend}) for backend in FAST_BACKENDS},
    "relvit_xl": ("relvit_xl_small", {}),
    "relpos": ("vit_relpos_small_patch16_224", {"init_values": 0, "qkv_bias": True}),
    "rope": ("vit_small_patch16_rope_224", POOLED),
    "rope_mixed": ("vit_small_patch16_rope_mixed_224", POOLED),
    "universal": ("relvit_universal_small", {}),
    "reversible": ("relvit_rev_small", {}),
    "lsh": ("relvit_lsh_small", {}),
    "aft_conv": ("relvit_aft_conv_small", {}),
    "aft_conv_h16": ("relvit_aft_conv_small_k11_h16", {}),
    "aft_full": ("relvit_aft_full_small", POOLED | {"pos_embed": ""}),
}
# The keys are the names of layers. Each value builds the layer for a number of patches on a side.
PLAIN: dict[str, Callable[[int], nn.Module]] = dict.fromkeys(
    ("plain", "control"), lambda side: Attention(DIM, HEADS, qkv_bias=True)
)
LAYERS = PLAIN | {
    **{
        f"relvit_{backend}": lambda side, backend=backend: relative_attention(backend)
        for backend in ("auto", *BACKENDS)
    },
    "sam": lambda side: SamAttention(DIM, HEADS, use_rel_pos=True, rope=None, input_size=(side, side)),
    **{name: lambda side, layer=layer: layer(DIM, HEADS) for name, layer in peers.CLASSES.items()},
}
# This is the attention-free layer of the paper's best small model, with a window per channel, computed in several ways.
AFTS = PLAIN | {
    "aft_conv": lambda side: aft_conv(AFTConv2d),
    "aft_conv_convolution": lambda side: aft_conv(AFTConv2d, backend="convolution"),
    "aft_conv_difference": lambda side: aft_conv(AFTConv2d, backend="difference"),
    "aft_conv_depthwise": lambda side: aft_conv(DepthwiseAFT),
    "aft_conv_k31": lambda side: aft_conv(AFTConv2d, kernel_size=31),
    "aft_conv_depthwise_k31": lambda side: aft_conv(DepthwiseAFT, kernel_size=31),
    "aft_conv_h16": lambda side: aft_conv(AFTConv2d, heads=16, kernel_size=11),
    "aft_full": lambda side: AFTFull(DIM, grid_size=side),
    "aft_local": lambda side: AFTLocal(DIM, grid_size=side, window=4),
    "aft_simple": lambda side: AFTSimple(DIM),
}
# LSH attention with 1, 2 and 4 rounds of hashing is compared with attention to all tokens with the same bias.
LSH = PLAIN | {
    "relvit_bias": lambda side: relative_attention("auto", "b"),
    **{f"lsh_{rounds}": lambda side, rounds=rounds: lsh_attention(rounds) for rounds in (1, 2, 4)},
}
COMPETITORS: dict[str, dict[str, Any]] = {"model": MODELS, "layer": LAYERS, "aft": AFTS, "lsh": LSH}


class DepthwiseAFT(AFTConv2d):
    """The paper's own way (section 3.2): exp(w) - 1 convolved depthwise, channels first, plus the sum over all."""

    def mix(self, query: Tensor, key: Tensor, value: Tensor, grid: relvit.ops.Grid, is_causal: bool) -> Tensor:
        """Average values and gate them, (B, heads, N, head_dim)."""
        weights = (key - key.amax(dim=2, keepdim=True)).exp()
        kernel = self.learned_bias(grid).exp() - 1
        sums = []
        for part in (weights * value, weights):
            image = part.transpose(2, 3).flatten(1, 2).unflatten(2, (grid.height, grid.width))
            window = kernel.repeat_interleave(part.shape[3], 0)[:, None]
            near = F.conv2d(image, window, padding=[size // 2 for size in self.kernel_size], groups=window.shape[0])
            sums.append(near.flatten(2).unflatten(1, (self.num_heads, -1)).transpose(2, 3) + part.sum(2, keepdim=True))
        return query.sigmoid() * sums[0] / sums[1]


def aft_conv(kind: type[AFTConv2d], heads: int = DIM, kernel_size: int = 15, **options: Any) -> AFTConv2d:
    """Build a layer of AFT-conv with filters of gain 1: with the initial gain 0, all entries of a filter are equal."""
    layer = kind(DIM, heads, kernel_size=kernel_size, **options)
    nn.init.ones_(layer.gamma)
    return layer


def relative_attention(backend: str, rel_terms: str = "kv") -> RelativeAttention:
    """Build relvit's layer with one backend."""
    layer = RelativeAttention(DIM, HEADS, position=RelativePosition2d(DIM // HEADS, HEADS, rel_terms), qkv_bias=True)
    layer.backend = backend
    return layer


def lsh_attention(rounds: int) -> LSHAttention:
    """Build LSH attention with a bias per offset."""
    return LSHAttention(DIM, HEADS, RelativePosition2d(DIM // HEADS, HEADS, "b"), rounds=rounds, qkv_bias=True)


def build_model(name: str, size: int, **changes: Any) -> nn.Module:
    """Build a model of `MODELS` for images of this size, with some of its arguments changed."""
    timm_name, options = MODELS[name]
    model = timm.create_model(timm_name, img_size=size, **{"num_classes": CLASSES, **options, **changes})
    for block in model.blocks:
        # In timm, `init_values=None` does not replace the rope models' own value, so remove their layer scale.
        block.gamma_1 = block.gamma_2 = None
    return model


def competitor(level: str, name: str, size: int) -> tuple[nn.Module, tuple[int, ...], tuple[Any, ...]]:
    """Build a module; return it, the shape of its input for one image, and its other arguments."""
    side = size // PATCH
    if level == "model":
        return build_model(name, size), (3, size, size), ()
    layer = COMPETITORS[level][name](side)
    if name == "sam":
        return layer, (side, side, DIM), ()
    return layer, (side * side, DIM), () if name in (*PLAIN, *peers.CLASSES) else (make_grid(side, side),)


@dataclass(frozen=True)
class Setting:
    """Options that the cells of one measurement share."""

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
    """One competitor in one setting, and its figures."""

    name: str
    setting: Setting
    module: nn.Module | None = None
    inputs: tuple[Any, ...] = ()
    status: str = "ok"
    memory: int | None = None
    seconds: list[float] = field(default_factory=list)

    def build(self) -> None:
        """Build the module, and noise as its input."""
        setting = self.setting
        torch.manual_seed(setting.seed)
        self.module, shape, others = competitor(setting.level, self.name, setting.size)
        self.module.to(setting.device).train(setting.mode == "train")
        if setting.compiled:
            # Without `dynamic=False`, only the first size would get kernels of its own.
            self.module = torch.compile(self.module, dynamic=False)
        x = torch.randn(setting.batch, *shape, device=setting.device)
        # Inside a network, a layer passes the gradient on to the layer below, but images need no gradient.
        x.requires_grad_(setting.level != "model" and setting.mode == "train")
        self.inputs = (x, *others)

    def forward(self) -> Tensor:
        """Compute the output, under autocast for bfloat16."""
        with torch.autocast(self.setting.device, torch.bfloat16, enabled=self.setting.dtype == "bfloat16"):
            return self.module(*self.inputs)

    def step(self) -> None:
        """Run the step whose time is measured."""
        with torch.set_grad_enabled(self.setting.mode == "train"):
            out = self.forward()
        if self.setting.mode == "train":
            out.sum().backward()

    def seconds_of_step(self) -> float:
        """Time one step, from an idle device to an idle device, gradients cleared before."""
        wait = torch.cuda.synchronize if self.setting.device == "cuda" else lambda: None
        self.clear()
        wait()
        begin = time.perf_counter()
        self.step()
        wait()
        return time.perf_counter() - begin

    def bytes_of_step(self) -> int:
        """Count peak bytes of a step on CUDA; on the CPU bytes that autograd keeps (mode 'forward': the peak)."""
        self.clear()
        if self.setting.device != "cuda":
            return kept_bytes(self.forward) if self.setting.mode == "train" else peak_bytes(self.step)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step()
        return torch.cuda.max_memory_allocated() - before

    def clear(self) -> None:
        """Set all gradients to None."""
        for tensor in (*self.module.parameters(), self.inputs[0]):
            tensor.grad = None

    def attempt(self, action: Callable[[], Any]) -> Any:
        """Return the action's result, or None if the cell is given up or fails now, with the reason as its status.

        A failure stops no other competitor; `main` raises an error when all others have been measured and written.
        """
        if self.status != "ok":
            return None
        try:
            return action()
        except Exception as error:
            words = ("out of memory", "not enough memory", "can't allocate memory")
            memory = isinstance(error, MemoryError) or any(word in str(error).lower() for word in words)
            first = str(error).partition("\n")[0][:300]
            reason = "out of memory" if memory else f"{FAILED} {type(error).__name__}: {first}"
        # This call is after the handler, because the error keeps the tensors of all frames that it went through alive.
        self.give_up(reason)
        return None

    def give_up(self, status: str) -> None:
        """Free the module and keep the reason why there is no figure."""
        self.status, self.memory, self.seconds, self.module, self.inputs = status, None, [], None, ()
        if self.setting.device == "cuda":
            torch.cuda.empty_cache()

    def prepare(self) -> None:
        """Build (and compile) the module; run three steps: the first must not exceed `cap`, the second gives memory."""
        self.attempt(self.build)
        # The first step of a compiled module compiles it, which says nothing about the time of later steps.
        *_, first = (self.attempt(self.seconds_of_step) for _ in range(1 + self.setting.compiled))
        if first is not None and first > self.setting.cap:
            self.give_up(f"over the cap of {self.setting.cap:g} s")
        self.memory = self.attempt(self.bytes_of_step)
        self.attempt(self.seconds_of_step)

    def row(self) -> dict[str, Any]:
        """Return the cell as a row of the output."""
        figures = {"status": self.status, "memory_bytes": self.memory, "seconds": self.seconds}
        return {"name": self.name, **asdict(self.setting), **figures}


def kept_bytes(forward: Callable[[], Tensor]) -> int:
    """Count bytes that a forward pass on the CPU allocates and autograd then holds; neither input nor parameters."""
    graph: list[Any] = []  # This list keeps the graph alive until all bytes are counted.
    return sum(allocations(lambda: graph.append(forward().grad_fn)))


def measure(setting: Setting, names: Sequence[str], end: float = math.inf) -> list[Cell]:
    """Measure all named competitors in one setting, interleaved; after the time `end` few rounds begin."""
    torch._dynamo.reset()
    # Competitors share this limit per function. Beyond the limit, torch would silently continue without compilation.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        cells, longest = [Cell(name, setting) for name in names], 0.0
        for cell in cells:
            begin = time.monotonic()
            # A cell that does not end in time may be killed with this process, and all figures would be lost.
            if begin + longest < end:
                cell.prepare()
                longest = max(longest, time.monotonic() - begin)
            else:
                cell.give_up("no time left")
        shuffle = random.Random(setting.seed)
        for number in range(setting.rounds):
            if number >= LEAST_ROUNDS and time.monotonic() >= end:
                break
            for cell in shuffle.sample(cells, len(cells)):
                seconds = cell.attempt(cell.seconds_of_step)
                if seconds is not None:
                    cell.seconds.append(round(seconds, 6))
    return cells


def surroundings(device: str) -> dict[str, Any]:
    """Describe the commit of the imported relvit ('+dirty' with changes), the versions and the machine."""
    questions = ("rev-parse HEAD", "status --porcelain -- . :!docs/benchmarks")
    root = Path(relvit.__file__).parents[1]
    ask = partial(subprocess.run, cwd=root, capture_output=True, text=True)
    # A machine with a GPU may have a copy of the files without git.
    head, changes = (ask(["git", *words.split()]).stdout.strip() if shutil.which("git") else "" for words in questions)
    info = Path("/proc/cpuinfo")
    processors = re.findall(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.exists() else []
    machine = {"processor": (processors or [platform.processor()])[0], "cores": os.cpu_count()}
    machine |= {"threads": torch.get_num_threads(), "gpu": torch.cuda.get_device_name() if device == "cuda" else None}
    versions = {library.__name__: str(library.__version__) for library in (torch, timm, relvit)}
    commit = head + ("+dirty" if changes else "") if head else "unknown"
    return {"commit": commit, "versions": versions | {"python": platform.python_version()}, "machine": machine}


def limit_memory() -> None:
    """Let an allocation beyond the free memory fail on Linux without a GPU, where the kernel would kill the process."""
    if Path("/proc/meminfo").exists() and not torch.cuda.is_available():
        import resource  # The module `resource` does not exist on every system.

        from relvit.app.utils.devices import available_memory  # A machine with a GPU may have only the core's packages.

        resource.setrlimit(resource.RLIMIT_DATA, (available_memory(), resource.getrlimit(resource.RLIMIT_DATA)[1]))


def keep_memory() -> bool:
    """Let the C library of Linux keep released memory, for all competitors alike; return whether it does.

    Otherwise some calls of a model return memory to the system, and other calls wait until the system gives memory page
    by page. Which calls do so depends on the history of the process, not on the model.
    """
    if sys.platform != "linux" or not hasattr(library := ctypes.CDLL(None), "mallopt"):
        return False
    trim_threshold, mmap_threshold = -1, -3  # These are constants of the C header malloc.h.
    return all(library.mallopt(option, 2**31 - 1) for option in (trim_threshold, mmap_threshold))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and append.

    Raises:
        ValueError: a name that the level does not have, a size that is no multiple of the patch, no GPU.
        RuntimeError: a competitor failed; all others have been measured.
    """
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
    add("--cap", type=float, default=60.0, help="seconds that a cell's first call may take, after compilation")
    add("--minutes", type=float, default=math.inf, help="no cell begins that may end later; then rounds end after five")
    add("--seed", type=int, default=0)
    add("--commit", help="what was measured, where the tree is a copy without git")
    add("--output", type=Path, default=OUTPUT)
    given = parser.parse_args(arguments)
    end, failed = time.monotonic() + 60 * given.minutes, []
    if given.device == "auto":
        given.device = "cuda" if torch.cuda.is_available() else "cpu"
    known = COMPETITORS[given.level]
    # Triton's kernels and PaPE's need a GPU.
    every = [name for name in known if given.device == "cuda" or not name.endswith(("_triton", "pape"))]
    every = [name for name in every if name not in peers.CLASSES or peers.installed(name)]
    names = list(dict.fromkeys(given.names or every))
    for name in names:
        check_choice(given.level, name, tuple(known))
    if wrong := [size for size in given.size if size < PATCH or size % PATCH]:
        raise ValueError(f"size must be a positive multiple of {PATCH}, got {wrong[0]}")
    if given.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' needs a GPU, torch sees none: use 'cpu'")
    run = {"run": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "keeps_memory": keep_memory()}
    shared = surroundings(given.device) | ({"commit": given.commit} if given.commit else {})
    options = (given.batch, given.device, given.dtype, given.compile, given.rounds, given.cap, given.seed)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    for size, mode in itertools.product(given.size, given.mode):
        cells = measure(Setting(given.level, size, mode, *options), names, end)
        # The cells of each setting are written at once, so that a later failure does not lose them.
        with given.output.open("a") as file:
            file.writelines(json.dumps(run | cell.row() | shared) + "\n" for cell in cells)
        print(given.level, size, mode, *(f"{cell.name}: {cell.status}" for cell in cells), sep=", ", flush=True)
        failed += [f"{cell.name}, {size} px, {mode}: {cell.status}" for cell in cells if cell.status.startswith(FAILED)]
    if failed:
        raise RuntimeError("\n".join(failed))


if __name__ == "__main__":
    limit_memory()
    main()
