"""Measure the processor time of each layer beside its computation: `python tools/speed/host_time.py`.

On a GPU the time of small images goes into the processor, which launches operations more slowly than the GPU computes
them. Tiny tensors on one thread of a CPU show the same: 12 layers of width 32 with 2 heads, one image of 32 px, 4
patches. The tool prints, per layer, the processor time of a forward pass without gradients and of a training step, both
as multiples of the baseline's, and the number of operations that launch work in a step. It names models as
`tools/benchmark.py` does, and appends "retrofitted" to what `relvit.retrofit` has changed.

In each round all models run once, in a freshly shuffled order. Multiples are medians of the ratios within a round, and
times are medians. With `--write` the table in `docs/benchmarks/README.md` gets a row for this version.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

# The folder above contains the modules that are imported next.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import timm
import torch
from benchmark import MODELS, build_model
from recorded import Tool
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import relvit

SIZE, TINY = 32, {"embed_dim": 32, "num_heads": 2, "num_classes": 10}
MODES = ("forward", "step")
# PyTorch implements these operations, such as `reshape`, by other operations.
COMPOSITE = frozenset(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))


def of_benchmark(name: str, layers: int) -> nn.Module:
    return build_model(name, SIZE, depth=layers, **TINY)


def sam(layers: int) -> nn.Module:
    """Build SAM's encoder with a global layer after every two layers with windows."""
    reach = {"window_size": 2, "global_attn_indexes": tuple(range(2, layers, 3))}
    return timm.create_model("samvit_base_patch16", img_size=2 * SIZE, depth=layers, **reach, **TINY)


def beit(layers: int) -> nn.Module:
    return timm.create_model("beit_base_patch16_224", img_size=SIZE, depth=layers, **TINY)


def swin(layers: int) -> nn.Module:
    """Build one stage of Swin, with shifted windows of 2 x 2 patches in every second layer.

    There is no stochastic depth, which timm's class has by default: it would add the same operations to both models.
    """
    stage = {"depths": (layers,), "num_heads": (TINY["num_heads"],), "embed_dim": TINY["embed_dim"]}
    stage["drop_path_rate"] = 0.0
    return SwinTransformer(SIZE, patch_size=8, window_size=2, num_classes=TINY["num_classes"], **stage)


class Model(NamedTuple):
    """A way to build a model with a number of layers, and the name of the model that it is compared with."""

    build: Callable[[int], nn.Module]
    baseline: str


def retrofitted(build: Callable[[int], nn.Module], **options: Any) -> Callable[[int], nn.Module]:
    return lambda layers: relvit.retrofit(build(layers), **options)


def models() -> dict[str, Model]:
    """Return all models by name; models of `tools/benchmark.py` are compared with its plain ViT."""
    found = {name: Model(lambda layers, name=name: of_benchmark(name, layers), "plain") for name in MODELS}
    found["plain retrofitted"] = Model(retrofitted(found["plain"].build, rel_terms="kv"), "plain")
    sources = {"relpos": found["relpos"].build, "sam": sam, "beit": beit, "swin": swin}
    for name, build in sources.items():
        found.setdefault(name, Model(build, name))
        found[f"{name} retrofitted"] = Model(retrofitted(build), name)
    return found


KNOWN = models()
# These models have other layers than attention to all tokens, or use kernels that a CPU lacks.
OTHERS = ("universal", "reversible", "lsh", "aft_conv", "aft_conv_h16", "aft_full", "relvit_xl", "relvit_small_triton")
DEFAULT = [name for name in KNOWN if name not in OTHERS]


@dataclass
class Measured:
    """A model, its image and its samples, in seconds of processor time by mode."""

    module: nn.Module
    image: Tensor
    samples: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})

    def prepare(self, mode: str) -> None:
        """Set the mode of the modules, and all gradients to None."""
        self.module.train(mode == "step").zero_grad()

    def act(self, mode: str) -> None:
        """Run a forward pass without gradients, or a forward and a backward pass."""
        with torch.set_grad_enabled(mode == "step"):
            out = self.module(self.image)
        if mode == "step":
            out.sum().backward()

    def sample(self, mode: str) -> float:
        """Measure the processor time of this process."""
        self.prepare(mode)
        begin = time.process_time()
        self.act(mode)
        return time.process_time() - begin


def measured(name: str, layers: int) -> Measured:
    """Build a model, and warm it up."""
    torch.manual_seed(0)
    module = KNOWN[name].build(layers)
    found = Measured(module, torch.randn(1, 3, *(2 * [2 * SIZE if name.startswith("sam") else SIZE])))
    for mode in 2 * MODES:
        found.sample(mode)
    return found


def computes(name: str) -> bool:
    """Return whether an event of the profiler is an operation that computes something, not a view or an allocation."""
    library, _, operation = name.partition("::")
    if library != "aten" or operation.startswith(("empty", "new_empty", "resize", "detach", "_unsafe_view")):
        return False
    packet = getattr(torch.ops.aten, operation)
    first = getattr(packet, packet.overloads()[0])
    return not first.is_view and first.name() not in COMPOSITE


def operations(name: str, layers: int, mode: str) -> int:
    """Count operations that launch work; operations that such an operation calls itself do not count."""
    model = measured(name, layers)
    model.prepare(mode)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model.act(mode)

    def inside(event: Any) -> bool:
        parent = event.cpu_parent
        return parent is not None and (computes(parent.name) or inside(parent))

    return sum(computes(event.name) and not inside(event) for event in profiler.events())


def operations_of_layer(name: str, layers: int, mode: str) -> float:
    """Count the operations of a layer: what the second half of the layers adds to the first."""
    half = max(1, layers // 2)
    return (operations(name, 2 * half, mode) - operations(name, half, mode)) / half


def measure(names: Sequence[str], layers: int, rounds: int) -> dict[str, Measured]:
    """Measure all named models and their baselines, interleaved."""
    # A baseline may have another baseline, which is measured, too.
    given = [part for name in names for part in (KNOWN[name].baseline, name)]
    every = dict.fromkeys(part for name in given for part in (KNOWN[name].baseline, name))
    found = {name: measured(name, layers) for name in every}
    shuffle = random.Random(0)
    gc.collect()
    # A garbage collection would add its time to one sample or another.
    gc.disable()
    for _ in range(rounds):
        for mode in MODES:
            for name in shuffle.sample(list(found), len(found)):
                found[name].samples[mode].append(found[name].sample(mode))
    gc.enable()
    return found


def ratio(ours: Measured, theirs: Measured, mode: str) -> float:
    return median(one / other for one, other in zip(ours.samples[mode], theirs.samples[mode], strict=True))


def figures(names: Sequence[str], layers: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Return by name: microseconds per layer, multiples of the baseline's and operations per layer, by mode."""
    torch.set_num_threads(1)
    found, rows = measure(names, layers, rounds), {}
    for name, model in found.items():
        baseline = KNOWN[name].baseline
        rows[name] = {"over": baseline}
        for mode in MODES:
            rows[name][mode] = {
                "microseconds": round(1e6 * median(model.samples[mode]) / layers, 1),
                "ratio": round(ratio(model, found[baseline], mode), 3),
                "operations": round(operations_of_layer(name, layers, mode), 1),
            }
    return rows


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return the figures as Markdown."""
    head = ("model", "forward, us", "step, us", "over", "forward", "step", "operations forward", "in a step", "beyond")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, row in rows.items():
        of_mode = {key: [row[mode][key] for mode in MODES] for key in ("microseconds", "ratio", "operations")}
        beyond = row["step"]["operations"] - rows[row["over"]]["step"]["operations"]
        cells = [name, *(f"{number:.0f}" for number in of_mode["microseconds"]), row["over"]]
        cells += [*(f"{number:.2f}" for number in of_mode["ratio"]), *(f"{n:g}" for n in of_mode["operations"])]
        lines.append(f"| {' | '.join([*cells, f'{beyond:+.4g}'])} |")
    return "\n".join(lines)


# The table of versions shows these models, each relative to its baseline, in a forward pass and in a step.
SHOWN = ("relvit_small", "plain retrofitted", "relpos", "rope", "rope_mixed")
SHOWN += tuple(f"{name} retrofitted" for name in ("relpos", "sam", "beit", "swin"))


def table_of_versions(runs: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of recorded runs, a row for each."""
    lines = [f"| version, commit | {' | '.join(SHOWN)} |", "|---" * (len(SHOWN) + 1) + "|"]
    for run in runs:
        rows = [run["models"].get(name) for name in SHOWN]
        cells = ["–" if row is None else ", ".join(f"{row[mode]['ratio']:.2f}" for mode in MODES) for row in rows]
        lines.append(f"| {run['versions']['relvit']}, {run['commit'][:8]} | {' | '.join(cells)} |")
    return "\n".join(lines)


TOOL = Tool("host_time", tuple(KNOWN), DEFAULT, figures, table, table_of_versions)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print; with `--write` also write, see `Tool.main`."""
    TOOL.main(__doc__, arguments, layers=12, rounds=40)


if __name__ == "__main__":
    main()
