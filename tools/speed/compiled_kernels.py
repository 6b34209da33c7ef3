"""Count the kernels that Inductor makes for a layer, beyond plain's: `python tools/speed/compiled_kernels.py`.

A kernel here is a loop nest that Inductor generates for the CPU; operations are the nodes of Inductor's graph before
fusion. Both figures are the difference between a model of two layers and a model of one layer, so parts that all layers
share do not count. Loops are scalar: with vectors, whose width depends on the processor, Inductor fuses fewer loops. So
the figures depend on PyTorch's version alone. No C++ compiler runs, so the models compute nothing. With `--write` the
table in `docs/benchmarks/README.md` gets a row for this version.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

# The folder above contains the modules that are imported next.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import timm
import torch
from benchmark import build_model
from recorded import Tool
from torch import nn
from torch._inductor import config, metrics
from torch._inductor.async_compile import AsyncCompile

import relvit

SIZE, TINY = 224, {"embed_dim": 32, "num_heads": 2, "num_classes": 10}
MODES, COUNTS = ("forward", "step"), ("kernels", "operations")
# The models whose figures are compared with another baseline than plain.
BASELINES = {"sam retrofitted": "sam", "relpos retrofitted": "relpos"}


def sam(layers: int) -> nn.Module:
    """Build SAM's encoder of layers with windows of 7 x 7 patches, which divide the image."""
    reach = {"window_size": 7, "global_attn_indexes": ()}
    return timm.create_model("samvit_base_patch16", img_size=SIZE, depth=layers, **reach, **TINY)


def build(name: str, layers: int) -> nn.Module:
    """Build a model of `KNOWN`."""
    torch.manual_seed(0)
    source, _, retrofitted = name.partition(" ")
    model = sam(layers) if source == "sam" else build_model(source, SIZE, depth=layers, **TINY)
    if not retrofitted:
        return model
    return relvit.retrofit(model) if name in BASELINES else relvit.retrofit(model, rel_terms="kv")


KNOWN = (
    "plain", "relvit_small", "plain retrofitted", "sam", "sam retrofitted",
    "relpos", "relpos retrofitted", "rope", "rope_mixed",
)  # fmt: skip


def count(name: str, layers: int, mode: str) -> dict[str, int]:
    """Compile a model of some layers for one size; return the number of kernels and of operations."""
    torch.compiler.reset()
    metrics.reset()
    model = build(name, layers).train(mode == "step")
    # Without a compiler, kernels do nothing, and their results stay as they are in memory.
    without_compiler: Callable[..., Any] = lambda *_arguments: lambda *_pointers: None  # noqa: E731
    with (
        patch.object(AsyncCompile, "cpp_pybinding", without_compiler),
        config.patch({"force_disable_caches": True, "cpp.simdlen": 1}),
        torch.set_grad_enabled(mode == "step"),
    ):
        out = torch.compile(model, fullgraph=True)(torch.randn(2, 3, SIZE, SIZE))
        if mode == "step":
            out.sum().backward()
    return dict(zip(COUNTS, (metrics.generated_kernel_count, metrics.ir_nodes_pre_fusion), strict=True))


def count_layer(name: str, mode: str) -> dict[str, int]:
    """Count the kernels and operations that a second layer adds."""
    one, two = (count(name, layers, mode) for layers in (1, 2))
    return {key: two[key] - one[key] for key in COUNTS}


def figures(names: Sequence[str]) -> dict[str, dict[str, dict[str, int]]]:
    """Return the counts of a layer by name and mode, baselines first."""
    every = dict.fromkeys(part for name in names for part in (BASELINES.get(name, "plain"), name))
    return {name: {mode: count_layer(name, mode) for mode in MODES} for name in every}


def beyond(rows: dict[str, Any], name: str, mode: str) -> dict[str, int]:
    """Return the kernels and operations that a layer has in addition to the baseline's layer."""
    baseline = BASELINES.get(name, "plain")
    return {key: rows[name][mode][key] - rows[baseline][mode][key] for key in COUNTS}


def table(rows: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    lines = ["| model | kernels forward, step | operations | beyond | kernels forward, step | operations |"]
    lines.append("|---" * 6 + "|")
    for name in rows:
        own, more = ([pick(rows, name, mode) for mode in MODES] for pick in (lambda r, n, m: r[n][m], beyond))
        pairs = [", ".join(form.format(part[key]) for part in parts)
                 for parts, form in ((own, "{}"), (more, "{:+}")) for key in COUNTS]  # fmt: skip
        lines.append(f"| {name} | {pairs[0]} | {pairs[1]} | {BASELINES.get(name, 'plain')} | {pairs[2]} | {pairs[3]} |")
    return "\n".join(lines)


def table_of_versions(runs: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of recorded runs, a row for each."""
    shown = [name for name in KNOWN if name not in ("plain", "sam")]
    lines = [f"| version, commit, PyTorch | plain | {' | '.join(shown)} |", "|---" * (len(shown) + 2) + "|"]
    for run in runs:
        rows = run["models"]
        plain = ", ".join(str(rows["plain"][mode]["kernels"]) for mode in MODES)
        cells = [
            ", ".join(f"{beyond(rows, name, mode)['kernels']:+}" for mode in MODES) if name in rows else "–"
            for name in shown
        ]
        versions = run["versions"]
        head = f"{versions['relvit']}, {run['commit'][:8]}, {versions['torch']}"
        lines.append(f"| {head} | {plain} | {' | '.join(cells)} |")
    return "\n".join(lines)


TOOL = Tool("compiled_kernels", KNOWN, KNOWN, figures, table, table_of_versions)


def main(arguments: Sequence[str] | None = None) -> None:
    """Count and print; with `--write` also write, see `Tool.main`."""
    TOOL.main(__doc__, arguments)


if __name__ == "__main__":
    main()
