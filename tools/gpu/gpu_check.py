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
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import gpu_aft
import timm
import torch
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
from relvit.ops.backends import gathered, tiled, triton
from relvit.ops.inputs import AttentionInputs, checked

# The CPU has no kernels but in Triton's interpreter, which the test suite runs.
BACKENDS = tuple(name for name in MODULES if name not in ("reference", "triton"))
SHORT_DTYPES = (torch.float32, torch.bfloat16)
EXACT = {torch.float64: 1e-10, torch.float32: 1e-5}
HALVES = (torch.bfloat16, torch.float16)
ALL = (*EXACT, *HALVES)
# How many times the error of stock attention on the same contents is allowed in half precision: the logits of terms
# are rounded once more, as channels of the augmented vectors.
TIMES_STOCK = 3
FUSED_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
Limits = dict[str, float] | float


class Measured(NamedTuple):
    """A relative error, what is allowed, and a remark."""

    error: float
    limit: float
    remark: str = ""


class Log:
    """Prints a line per check, and counts them by status."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def check(self, name: str, measure: Callable[[], Measured]) -> None:
        """Compare what `measure` returns; an exception is a failure."""
        try:
            error, limit, remark = measure()
        except Exception as raised:
            error, limit = math.inf, 0.0
            remark = f"{type(raised).__name__}: {str(raised).partition(chr(10))[0][:200]}"
        # NaN is no better than any limit.
        self.print("ok" if error <= limit else "FAIL", name, f"{error:.1e} {limit:.1e} {remark}")

    def print(self, status: str, name: str, remark: str) -> None:
        """Print a line and count its status; status `note` cannot fail."""
        self.counts[status] += 1
        print(f"{status:4} {name} {remark}".rstrip(), flush=True)


def has_dtype(device: str, dtype: torch.dtype) -> bool:
    """Return whether a device computes in a dtype."""
    return device != "mps" or dtype != torch.float64


def short(dtype: torch.dtype) -> str:
    """Return the name of a dtype."""
    return str(dtype).removeprefix("torch.")


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the RMS of the difference over that of the wanted; where zeros are wanted, nothing else will do."""
    difference, size = (float(t.norm()) for t in (got.detach().cpu().double() - want, want))
    if not math.isfinite(difference):
        return math.inf
    return difference / size if size else (0.0 if difference == 0 else math.inf)


def error_of(name: str, got: Tensor, want: Tensor) -> float:
    """Return the relative error; that of the worst sample, lest a sample of zeros be lost among others."""
    if name in ("result", "query", "key", "value"):
        return max(map(relative_error, got, want))
    return relative_error(got, want)


def stock_limits(got: dict[str, Tensor], exact: dict[str, Tensor], times: float = TIMES_STOCK) -> Limits:
    """Return errors allowed in half precision: of the result, and of gradients, by the worst of the stock ones."""
    errors = {name: times * error_of(name, got[name], exact[name]) for name in got}
    return {"result": errors.pop("result"), "gradient": max(errors.values())}


def worst(got: dict[str, Tensor], want: dict[str, Tensor], limits: Limits) -> Measured:
    """Return the error nearest to its limit, or furthest beyond."""
    measured = []
    for name, tensor in got.items():
        limit = limits if isinstance(limits, float) else limits["result" if name == "result" else "gradient"]
        if not isinstance(limits, float) and name.removeprefix("position.").startswith("bias"):
            # In the gradient of a scalar per offset, large terms of either sign cancel.
            limit *= 2
        measured.append(Measured(error_of(name, tensor, want[name]), limit, name))
    return max(measured, key=lambda one: one.error / one.limit)


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
        # PyTorch's kernels for such wide vectors round more; `choose` avoids them.
        of_fused = limits | {dtype: stock_limits(got, exact_stock, 2 * TIMES_STOCK) for dtype, got in stock.items()}
    backends = (*BACKENDS, "auto", *(("triton",) if device == "cuda" else ()))
    cases = [(letters, AxisTables, backends) for letters in scene.letters]
    # Of joint tables a bias alone is what most models have, and may get a backend of its own.
    joint = {letters: ("gathered", "auto") if letters == "b" else ("gathered",) for letters in scene.letters}
    cases += [(letters, JointTable, names) for letters, names in joint.items() if len(letters) > 1 or letters == "b"]
    for letters, layout, backends in cases:
        terms = draw_terms(scene, letters, layout)
        want = outcome(scene, terms, "cpu", torch.float64, "reference")

        def measure(backend: str, dtype: torch.dtype, terms: RelativeTerms, want: dict[str, Tensor]) -> Measured:
            with several_tiles(), spied() as spies:
                allowed = (of_fused if backend == "fused" else limits)[dtype]
                measured = worst(outcome(scene, terms, device, dtype, backend), want, allowed)
            if backend != "auto":
                return measured
            chosen = choose(*arguments_of(scene, terms, device, dtype)).backend
            ran = [name for name, spy in spies.items() if spy.called]
            if ran != [chosen]:
                return Measured(math.inf, 0.0, f"chosen {chosen}, ran {', '.join(ran)}")
            return measured._replace(remark=f"{chosen}, {measured.remark}")

        for backend, dtype in product(backends, limits):
            name = f"{scene.name}, {layout.__name__} {letters or '-'}, {backend}, {short(dtype)}"
            if backend == "triton" and (reason := refusal(scene, terms, device, dtype)):
                log.print("skip", name, reason)
                continue
            log.check(name, partial(measure, backend, dtype, terms, want))


def refusal(scene: Scene, terms: RelativeTerms, device: str, dtype: torch.dtype) -> str | None:
    """Return why the backend 'triton' does not take a scene; None where it does."""
    arguments = arguments_of(scene, terms, device, dtype)
    return triton.refusal(checked(AttentionInputs(*arguments, **moved(scene.options, device))))


def check_kernels(log: Log, scenes: Sequence[Scene], device: str) -> None:
    """Check that a fused kernel computes what `choose` leaves to `fused`; others of stock attention keep N x N."""
    if device != "cuda":
        log.print("skip", "kernels", "needs a GPU")
        return
    # The vectors are just as wide as `choose` allows; with padding one more channel comes, which it does not count.
    edge = draw_scene("width 256", make_grid(2, 190), dim=64, distance=(5, 7))
    grid = edge.grid._replace(valid=torch.arange(380) < torch.tensor([[300], [380]]))
    padded = edge._replace(name="width 256 and padding", grid=grid, key_grid=grid)

    def measure(scene: Scene, dtype: torch.dtype, terms: RelativeTerms) -> Measured:
        # PyTorch raises an error where no fused kernel can compute it.
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
    position = RelativePosition2d(dim // HEADS, HEADS, "qkvb", (5, 4), init_std=0.3)
    ours = RelativeAttention(dim, HEADS, position=position, qkv_bias=True)
    stock = Attention(dim, HEADS, qkv_bias=True)
    stock.load_state_dict(ours.state_dict(), strict=False)
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
    ours.backend = "reference"
    want, limits = run(ours, grid, *exact), stock_limits(run(stock, (), *half), run(stock, (), *exact))
    # torch advises against a backward inside, but stock attention can do it.
    for inside, backend in product((False, True), (*BACKENDS, "auto")):
        ours.backend = backend
        name = f"autocast, backward {'inside' if inside else 'outside'}, {backend}"
        log.check(name, lambda inside=inside: worst(run(ours, grid, *half, inside), want, limits))


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
        # The first of two steps also allocates gradients and the cached indices of rasters.
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
                    # One key outweighs all others, so the gradients are nothing but rounding.
                    got = {"result": got["result"]}
                return worst(got, want, gpu_aft.LIMITS[dtype])

            log.check(f"{name}, keys {spread:g}, {short(dtype)}", measure)
    for name, layer, square in gpu_aft.layers() if device == "cuda" else ():
        eager, fast = (gpu_aft.compiled_outcome(layer, square, device, compiled) for compiled in (False, True))
        exact = {key: tensor.cpu().double() for key, tensor in eager.items()}
        log.check(f"compiled: {name}", partial(worst, fast, exact, 1e-4))


def report_determinism(log: Log, scene: Scene, device: str) -> None:
    """Report whether a second run gives the same bits."""
    backends = (*BACKENDS, *(("triton",) if device == "cuda" else ()))
    for backend, dtype in product(backends, (torch.float32, torch.bfloat16)):
        letters = "kv" if backend == "triton" else "qkvb"
        terms = draw_terms(scene, letters, AxisTables)
        once, twice = (outcome(scene, terms, device, dtype, backend) for _ in range(2))
        others = [name for name in once if not torch.equal(once[name], twice[name])]
        remark = f"not bit-equal: {', '.join(others)}" if others else "bit-equal"
        log.print("note", f"two runs: {scene.name}, {letters}, {backend}, {short(dtype)}", remark)


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
    add("--minutes", type=float, default=math.inf, help="after them no other part begins")
    given = parser.parse_args(arguments)
    device: str = given.device
    if device != "cpu" and not getattr(torch, device).is_available():
        raise ValueError(f"device {device!r} needs a GPU, torch sees none: use --device cpu")
    # TF32 has 10 bits, float32 is checked to 1e-5.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False

    begin, log = time.perf_counter(), Log()
    short = list(draw_short_scenes())[: 1 if given.quick else None]
    scenes, dtypes = (short, SHORT_DTYPES) if given.short else (list(draw_scenes(given.quick)), ALL)
    parts: list[Callable[[], None]] = [partial(check_scene, log, scene, device, dtypes) for scene in scenes]
    parts += (
        []
        if given.short
        else [
            partial(check_autocast, log, device, given.quick),
            partial(check_kernels, log, scenes, device),
            partial(check_memory, log, device),
            partial(check_compiled, log, device),
            partial(check_attention_free, log, device, given.quick),
        ]
    )
    parts.append(partial(report_determinism, log, scenes[0], device))
    for number, run in enumerate(parts):
        if time.perf_counter() - begin > 60 * given.minutes:
            log.print("skip", f"{len(parts) - number} parts of {len(parts)}", "no time left")
            break
        run()

    machine = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    counts = ", ".join(f"{count} {status}" for status, count in log.counts.items())
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, timm {timm.__version__}"
    print(f"{counts} in {time.perf_counter() - begin:.1f} s on {machine}, {versions}, relvit {relvit.__version__}")
    return int(log.counts["FAIL"] > 0)


if __name__ == "__main__":
    sys.exit(main())
