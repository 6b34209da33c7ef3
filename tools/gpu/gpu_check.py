"""Check on a GPU, which CI lacks, what the test suite checks on the CPU: `python tools/gpu/gpu_check.py`.

On a Mac use `--device mps`, which leaves out float64 and the checks that need CUDA. `--short` leaves out all but
backends and kernels on a few grids, with tables per axis and per offset, in float32 and bfloat16: about a minute.

The tool compares every backend in every dtype with `backend='reference'` in float64 on the CPU, forward and backward.
Then it checks what only a GPU can show: which kernels run, how much memory a training step takes, compiled code. It
prints a line per check, `ok|FAIL name error limit`; the exit status is 1 if any check failed. Lines with `note` report,
lines with `skip` name a check that this device cannot make.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import platform
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import gpu_aft
import timm
import torch
from gpu_log import TIMES_STOCK, Limits, Log, Measured, short, stock_limits, worst
from gpu_scenes import (
    BATCH,
    HEADS,
    Scene,
    arguments_of,
    draw_scene,
    draw_scenes,
    draw_short_scenes,
    draw_terms,
    leaf,
    moved,
    outcome,
    stock_outcome,
    with_gradients,
)
from timm.layers import Attention
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

import relvit
from relvit.layers import RelativeAttention, RelativePosition2d
from relvit.ops import AxisTables, JointTable, RelativeTerms, choose, make_grid, relative_attention
from relvit.ops.attention import BACKENDS as MODULES
from relvit.ops.backends import gathered, tiled
from relvit.ops.inputs import AttentionInputs, checked

BACKENDS = tuple(name for name in MODULES if name != "reference")
# The `refusal` of these backends says which arguments they do not take, such as query terms.
LIMITED = tuple(name for name in BACKENDS if hasattr(MODULES[name], "refusal"))
SHORT_DTYPES = (torch.float32, torch.bfloat16)
EXACT = {torch.float64: 1e-10, torch.float32: 1e-5}
HALVES = (torch.bfloat16, torch.float16)
ALL = (*EXACT, *HALVES)
Part = partial[None]
FUSED_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


def has_dtype(device: str, dtype: torch.dtype) -> bool:
    """Return whether a device computes in a dtype."""
    return device != "mps" or dtype != torch.float64


@contextmanager
def several_tiles() -> Iterator[None]:
    """Divide even small cases into several tiles, the last one smaller."""
    with ExitStack() as stack:
        for module in (tiled, gathered):
            stack.enter_context(mock.patch.multiple(module, TILE_LOGITS=1, LEAST_QUERIES=16))
        yield


@contextmanager
def spied() -> Iterator[dict[str, mock.Mock]]:
    """Record which backends run."""
    with ExitStack() as stack:
        patches = {
            name: mock.patch.object(module, "relative_attention", wraps=module.relative_attention)
            for name, module in MODULES.items()
        }
        yield {name: stack.enter_context(patch) for name, patch in patches.items()}


def check_scene(log: Log, scene: Scene, device: str, dtypes: Collection[torch.dtype] = ALL) -> None:
    """Check each backend in each of the dtypes, forward and backward; joint tables where the backend takes them."""
    exact_stock = stock_outcome(scene, "cpu", torch.float64)
    stock = {dtype: stock_outcome(scene, device, dtype) for dtype in HALVES}
    limits: dict[torch.dtype, Limits] = dict(EXACT)
    limits |= {dtype: stock_limits(got, exact_stock) for dtype, got in stock.items()}
    limits = {dtype: limit for dtype, limit in limits.items() if dtype in dtypes and has_dtype(device, dtype)}
    of_fused = limits
    if scene.contents[0].shape[-1] + scene.key_grid.height + scene.key_grid.width > 256:
        # PyTorch's kernels round more with such wide vectors, so `choose` avoids them.
        of_fused = limits | {dtype: stock_limits(got, exact_stock, 2 * TIMES_STOCK) for dtype, got in stock.items()}
    backends = (*present(device), "auto")
    cases = [(letters, AxisTables, backends) for letters in scene.letters]
    # The most frequent joint table is a bias alone, for which `auto` may choose another backend.
    joint = {letters: ("gathered", "auto") if letters == "b" else ("gathered",) for letters in scene.letters}
    cases += [(letters, JointTable, names) for letters, names in joint.items() if len(letters) > 1 or letters == "b"]
    for letters, layout, backends in cases:
        terms = draw_terms(scene, letters, layout)
        want = outcome(scene, terms, "cpu", torch.float64, "reference")

        def measure(backend: str, dtype: torch.dtype, terms: RelativeTerms, want: dict[str, Tensor]) -> Measured:
            with several_tiles(), spied() as spies:
                allowed = (of_fused if backend == "fused" else limits)[dtype]
                measured = worst(outcome(scene, terms, device, dtype, backend), want, allowed)
            # `choose` gets no mask, so its choice is checked only in scenes without options.
            if backend != "auto" or scene.options:
                return measured
            chosen = choose(*arguments_of(scene, terms, device, dtype)).backend
            ran = [name for name, spy in spies.items() if spy.called]
            if ran != [chosen]:
                return Measured(math.inf, 0.0, f"chosen {chosen}, ran {', '.join(ran)}")
            return measured._replace(remark=f"{chosen}, {measured.remark}")

        for backend, dtype in product(backends, limits):
            name = f"{scene.name}, {layout.__name__} {letters or '-'}, {backend}, {short(dtype)}"
            if backend in LIMITED and (reason := refusal(scene, terms, device, dtype, backend)):
                log.print("skip", name, reason)
                continue
            log.check(name, partial(measure, backend, dtype, terms, want))


def present(device: str) -> tuple[str, ...]:
    """Return the backends of a device; the CPU has no kernels but in Triton's interpreter, for the test suite."""
    return tuple(name for name in BACKENDS if device == "cuda" or name != "triton")


def refusal(scene: Scene, terms: RelativeTerms, device: str, dtype: torch.dtype, backend: str) -> str | None:
    """Return the reason why a backend does not take a scene, or None if it takes the scene."""
    arguments = arguments_of(scene, terms, device, dtype)
    return MODULES[backend].refusal(checked(AttentionInputs(*arguments, **moved(scene.options, device))))


def check_kernels(log: Log, scenes: Sequence[Scene], device: str) -> None:
    """Check that PyTorch has a fused kernel for inputs that `choose` gives to `fused`; without one, N x N is kept."""
    if device != "cuda":
        log.print("skip", "kernels", "needs a GPU")
        return
    # The vectors are as wide as `choose` allows; padding adds a channel, which `choose` does not count.
    edge = draw_scene("width 256", make_grid(2, 190), dim=64, distance=(5, 7))
    grid = edge.grid._replace(valid=torch.arange(380) < torch.tensor([[300], [380]]))
    padded = edge._replace(name="width 256 and padding", grid=grid, key_grid=grid)

    def measure(scene: Scene, dtype: torch.dtype, terms: RelativeTerms) -> Measured:
        # PyTorch raises an error if no fused kernel can compute the attention.
        with sdpa_kernel(FUSED_KERNELS):
            outcome(scene, terms, device, dtype, "fused")
        return Measured(0.0, 0.0)

    for scene, dtype, letters in product((*scenes, edge, padded), (torch.float32, *HALVES), ("kv", "qkvb")):
        terms = draw_terms(scene, letters, AxisTables)
        if choose(*arguments_of(scene, terms, device, dtype)).backend == "fused":
            log.check(f"fused kernel: {scene.name}, {letters}, {short(dtype)}", partial(measure, scene, dtype, terms))


def check_autocast(log: Log, device: str, quick: bool) -> None:
    """Check the layer under autocast, beside timm's with the same projections; tiles are as large as for users."""
    height, width, dim = (10, 7, 64) if quick else (14, 10, 128)
    torch.manual_seed(0)
    noise = torch.randn(2, BATCH, height * width, dim)
    grid = (make_grid(height, width),)

    def run(layer: nn.Module, others: tuple[Any, ...], place: str, dtype: torch.dtype, inside: bool = False) -> Any:
        layer, cotangent, x = deepcopy(layer).to(place, dtype), noise[1].to(place, dtype), leaf(noise[0], place, dtype)
        half = partial(torch.autocast, place, torch.bfloat16)
        with half(enabled=dtype == torch.float32):
            out = layer(x, *others)
        with half(enabled=inside):
            return with_gradients(out, {"x": x, **dict(layer.named_parameters())}, cotangent)

    exact, half = ("cpu", torch.float64), (device, torch.float32)
    limited = tuple(name for name in present(device) if name in LIMITED)
    others = tuple(name for name in present(device) if name not in LIMITED)
    for letters, backends in {"qkvb": others, "kvb": limited}.items():
        position = RelativePosition2d(dim // HEADS, HEADS, letters, (5, 4), init_std=0.3)
        ours = RelativeAttention(dim, HEADS, position=position, qkv_bias=True)
        stock = Attention(dim, HEADS, qkv_bias=True)
        stock.load_state_dict(ours.state_dict(), strict=False)
        ours.backend = "reference"
        want, limits = run(ours, grid, *exact), stock_limits(run(stock, (), *half), run(stock, (), *exact))
        # torch advises against a backward pass inside autocast, but stock attention supports it.
        for inside, backend in product((False, True), (*backends, "auto")):
            ours.backend = backend
            name = f"autocast {letters}, backward {'inside' if inside else 'outside'}, {backend}"
            log.check(
                name,
                lambda ours=ours, inside=inside, want=want, limits=limits: worst(
                    run(ours, grid, *half, inside), want, limits
                ),
            )


def check_memory(log: Log, device: str) -> None:
    """Check what a training step at 64 x 64 patches adds to the memory in use, in N x N tensors of all heads."""
    if device != "cuda":
        log.print("skip", "memory", "needs a GPU")
        return
    side, heads, dim = 64, 6, 64
    new = partial(torch.randn, device=device)
    contents = [new(BATCH, heads, side * side, dim, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    pairs = [AxisTables(*(new(15, dim, requires_grad=True) for _ in range(2))) for _ in range(2)]
    terms, grid = RelativeTerms(key=pairs[0], value=pairs[1]), make_grid(side, side)

    def measure(backend: str) -> Measured:
        # The first of two steps also allocates gradients and cached indices of raster grids.
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            relative_attention(*contents, terms, grid, backend=backend).sum().backward()
        added = torch.cuda.max_memory_allocated() - before
        square = BATCH * heads * side**4 * contents[0].element_size()
        if backend == "auto":
            backend = choose(*contents, terms, grid).backend
        return Measured(added / square, 0.8, f"{added / 2**20:.0f} MiB in {backend}, N x N {square / 2**20:.0f} MiB")

    for backend in ("auto", "triton"):
        log.check(f"memory of a step at {side}x{side}, bfloat16, {backend}", partial(measure, backend))


def check_compiled(log: Log, device: str) -> None:
    """Check a compiled model beside the eager one: results and gradients at three sizes, one graph."""
    if device != "cuda":
        log.print("skip", "compiled", "needs a GPU")
        return
    torch.manual_seed(0)
    model = timm.create_model("test_relvit", patch_size=8, depth=2, class_token=True, rel_init_std=0.5).to(device)
    torch._dynamo.reset()
    counters.clear()
    fast = torch.compile(model, fullgraph=True, dynamic=True)

    def step(net: nn.Module, images: Tensor) -> dict[str, Tensor]:
        out = net(images)
        return with_gradients(out, dict(model.named_parameters()), 2 * out.detach())

    def measure(images: Tensor) -> Measured:
        eager = {name: tensor.cpu().double() for name, tensor in step(model, images).items()}
        return worst(step(fast, images), eager, EXACT[torch.float32])

    for height, width in ((24, 16), (16, 80), (136, 32)):
        images = torch.randn(BATCH, 3, height, width, device=device)
        log.check(f"compiled: {height}x{width}", partial(measure, images))
    graphs = counters["stats"]["unique_graphs"]
    log.check("compiled: one graph", lambda: Measured(abs(graphs - 1.0), 0.0, f"{graphs} graphs"))


def check_attention_free(log: Log, device: str, quick: bool) -> None:
    """Check operations without attention in every dtype, with keys of ordinary and of extreme size; layers compiled."""
    grid = make_grid(5, 7, prefix=1)
    dtypes = [dtype for dtype in gpu_aft.LIMITS if has_dtype(device, dtype)]
    for spread, dtype in product((2.0,) if quick else (2.0, 3e3), dtypes):
        drawn = {name: tensor.to(dtype).double() for name, tensor in gpu_aft.contents(grid, spread).items()}
        for name, inputs, fast, slow in gpu_aft.operations(grid):

            def measure(inputs=inputs, fast=fast, slow=slow, drawn=drawn, dtype=dtype, spread=spread) -> Measured:
                got = gpu_aft.outcome(fast, drawn, inputs, device, dtype)
                want = gpu_aft.outcome(slow, drawn, inputs, "cpu", torch.float64)
                if spread > 2:
                    # One key outweighs all other keys, so the gradients consist of rounding errors.
                    got = {"result": got["result"]}
                return worst(got, want, gpu_aft.LIMITS[dtype])

            log.check(f"{name}, keys {spread:g}, {short(dtype)}", measure)
    for name, layer, square in gpu_aft.layers() if device == "cuda" else ():

        def measure(layer=layer, square=square) -> Measured:
            eager, fast = (gpu_aft.compiled_outcome(layer, square, device, compiled) for compiled in (False, True))
            return worst(fast, {key: tensor.cpu().double() for key, tensor in eager.items()}, 1e-4)

        log.check(f"compiled: {name}", measure)


def report_determinism(log: Log, scene: Scene, device: str) -> None:
    """Report whether a second run gives the same bits."""
    for backend, dtype in product(present(device), (torch.float32, torch.bfloat16)):
        letters = "kv" if backend in LIMITED else "qkvb"
        terms = draw_terms(scene, letters, AxisTables)
        once, twice = (outcome(scene, terms, device, dtype, backend) for _ in range(2))
        others = [name for name in once if not torch.equal(once[name], twice[name])]
        remark = f"not bit-equal: {', '.join(others)}" if others else "bit-equal"
        log.print("note", f"two runs: {scene.name}, {letters}, {backend}, {short(dtype)}", remark)


def check_parts(log: Log, parts: Sequence[Part], processes: int, end: float) -> None:
    """Check one part after the other, or in several processes, until a time: kernels are compiled beside each other."""
    done = 0
    if processes > 1:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            workers = [pool.submit(counted, part) for part in parts]
            for worker in wait(workers, timeout=end - time.perf_counter() if end < math.inf else None).done:
                log.counts += worker.result()
                done += 1
            for process in list(pool._processes.values()) if done < len(parts) else ():
                process.terminate()
    else:
        for part in parts:
            if time.perf_counter() > end:
                break
            check_part(log, part)
            done += 1
    if done < len(parts):
        log.print("skip", f"{len(parts) - done} parts of {len(parts)}", "no time left")


def check_part(log: Log, part: Part) -> None:
    """Check one part; an error outside its checks is a failure of this part alone."""
    try:
        part(log)
    except Exception as raised:
        log.print("FAIL", part.func.__name__, f"{type(raised).__name__}: {str(raised).partition(chr(10))[0][:200]}")


def counted(part: Part) -> Counter[str]:
    """Check in a process of a pool; return the counts of lines."""
    settle()
    # Each process has its own threads: more threads than cores would wait for each other.
    torch.set_num_threads(1)
    log = Log()
    check_part(log, part)
    return log.counts


def settle() -> None:
    """Keep float32 exact: TF32 has 10 bits, float32 is checked to 1e-5."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Check and print; return the exit status.

    Raises:
        ValueError: there is no such device.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    add = parser.add_argument
    add("--device", choices=("cuda", "mps", "cpu"), default="cuda")
    add("--quick", action="store_true", help="few and tiny cases")
    add("--short", action="store_true", help="backends and kernels alone, on a few grids, in two dtypes")
    add("--processes", type=int, default=1, help="which compile kernels beside each other")
    add("--minutes", type=float, default=math.inf, help="after them no other part begins")
    given = parser.parse_args(arguments)
    device: str = given.device
    if device != "cpu" and not getattr(torch, device).is_available():
        raise ValueError(f"device {device!r} needs a GPU, torch sees none: use --device cpu")
    settle()
    begin, log = time.perf_counter(), Log()
    scenes, together = list(draw_scenes(given.quick)), [ALL]
    if given.short:
        few = list(draw_short_scenes())[: 1 if given.quick else None]
        # Compilation takes most of the time, so every part has kernels of its own, and processes share the kernels of a
        # scene.
        scenes = [scene._replace(letters=(letters,)) for scene in few for letters in scene.letters]
        together = [(dtype,) for dtype in SHORT_DTYPES]
    every = product(scenes, together)
    parts: list[Part] = [partial(check_scene, scene=scene, device=device, dtypes=dtypes) for scene, dtypes in every]
    parts += (
        []
        if given.short
        else [
            partial(check_autocast, device=device, quick=given.quick),
            partial(check_kernels, scenes=scenes, device=device),
            partial(check_memory, device=device),
            partial(check_compiled, device=device),
            partial(check_attention_free, device=device, quick=given.quick),
        ]
    )
    parts.append(partial(report_determinism, scene=scenes[0], device=device))
    check_parts(log, parts, given.processes, begin + 60 * given.minutes)

    machine = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    counts = ", ".join(f"{count} {status}" for status, count in log.counts.items())
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, timm {timm.__version__}"
    print(f"{counts} in {time.perf_counter() - begin:.1f} s on {machine}, {versions}, relvit {relvit.__version__}")
    return int(log.counts["FAIL"] > 0)


if __name__ == "__main__":
    sys.exit(main())
