"""Run every check and measurement that needs a GPU: `python tools/gpu/hour.py`, on a machine with a card.

It needs `pip install -e ".[test]"`. The folder `gpu_hour`, or `--output`, gets a log per step, tables, a figure, and
`summary.md`, which says what passed and by which rule `relvit.ops.choose` should take the backend 'triton' by itself.
Each step is a process of its own: a step that fails or takes too long does not stop the others, and `--steps` runs some
of them again.

    checks    every backend and dtype against the references in float64, the kernels among them (gpu_check.py)
    kernels   registers and shared memory of the kernels as compiled by this Triton (kernels.py)
    layers    time and memory beside stock attention, timm's SAM, iRPE's and PaPE's code (../benchmark.py, ../peers.py)
    models    the same of whole models beside timm's; `compiled` after torch.compile
    report    tables and a figure of layers and models
    sam       SAM's encoders of three libraries before and after `relvit.retrofit` (../retrofit/elsewhere.py)
    recipe    `relvit fit --config cifar10` to its end; downloads 170 MB where `--root` does not hold them

The tool takes about an hour on an A100, by estimate; on an H200 the checks and some of the layers have run. `--toy`
runs it on a CPU at toy sizes in a minute.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# The folder above has the next modules.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import benchmark_report
import peers
import torch
from benchmark import DIM, HEADS, PATCH
from matplotlib.figure import Figure

TOOLS = Path(__file__).resolve().parents[1]
LAYERS = ("plain", "control", "relvit_fused", "relvit_tiled", "relvit_triton", "sam")
MODELS = ("plain", "control", "relvit_small_fused", "relvit_small_triton", "relpos", "rope", "rope_mixed")
# Options of `relvit fit` for a training of a second on the CPU.
TOY_RECIPE = """
--data DigitsData --data.mean [0.3] --data.std [0.4] --data.num_workers 0 --data.batch_size 256 --model test_relvit
--model.model_kwargs.patch_size 8 --model.model_kwargs.depth 1 --model.warmup_epochs 0 --epochs 1 --accelerator cpu
--precision 32-true
"""
# Inductor makes graphs of `fused` alone.
COMPILED = ("plain", "control", "relvit_small_fused", "relpos", "rope", "rope_mixed")


class Step(NamedTuple):
    """A process: its name, its command, after how many minutes it is stopped, and why it is left out here, or ''."""

    name: str
    command: list[str]
    minutes: float
    left_out: str = ""


def tool(path: str, *arguments: object) -> list[str]:
    """Return the command of a tool."""
    return [sys.executable, str(TOOLS / path), *map(str, arguments)]


def steps(folder: Path, root: Path, toy: bool) -> list[Step]:
    """Return all steps in order; at toy sizes on the CPU."""
    rows, place = folder / "speed.jsonl", ("--device", "cpu" if toy else "cuda")
    present = [name for name in peers.CLASSES if peers.installed(name)]
    speed = ("benchmark.py", *place, "--output", rows, "--dtype", "float32" if toy else "bfloat16")
    small = ("--rounds", 2, "--batch", 1) if toy else ()
    fit = [sys.executable, "-m", "relvit", "fit", "--config", "cifar10", "--runs", str(folder / "runs")]
    if toy:
        layers = tool(*speed, *small, "--level", "layer", "--size", 64, "--names", *LAYERS[:4])
        models = tool(*speed, *small, "--size", 32, "--mode", "forward", "--names", "plain", "relvit_small_fused")
        sam = ("--models", "timm-sam", "--sizes", "32x48", "--layers", 1, "--rounds", 1, "--no_peaks")
        fit += TOY_RECIPE.split()
    else:
        layers = tool(*speed, "--level", "layer", "--size", 224, 384, 512, 768, 1024, "--names", *LAYERS, *present)
        models = tool(*speed, "--batch", 32, "--size", 224, 384, 512, "--names", *MODELS)
        sam = ("--sizes", "1024", "1024x512", *place, "--dtype", "bfloat16")
        fit += ["--root", str(root)]
    compiled = tool(*speed, "--batch", 32, "--size", 224, 384, "--compile", "--names", *COMPILED)
    missing = "" if importlib.util.find_spec("triton") else "there is no package triton"
    return [
        Step("checks", tool("gpu/gpu_check.py", *place, *(["--quick"] if toy else [])), 20),
        Step("kernels", tool("gpu/kernels.py"), 10, "it takes minutes" if toy else missing),
        Step("layers", layers, 15),
        Step("models", models, 15),
        Step("compiled", compiled, 15, "it takes a compiler, and minutes" if toy else ""),
        Step("report", tool("benchmark_report.py", rows), 2),
        Step("sam", tool("retrofit/elsewhere.py", *sam), 20),
        Step("recipe", fit, 60),
    ]


def run(step: Step, folder: Path) -> dict[str, Any]:
    """Run a step with its output in a log; return its result."""
    log, begin = folder / f"{step.name}.log", time.monotonic()
    if step.left_out:
        return {"status": "left out", "remark": step.left_out}
    with log.open("w") as file:
        print(*step.command, file=file, flush=True)
        # The commit that is checked out here is measured, whatever else is installed.
        path = os.pathsep.join(filter(None, (str(TOOLS.parent), os.environ.get("PYTHONPATH"))))
        given = {"stdout": file, "stderr": subprocess.STDOUT, "env": {**os.environ, "PYTHONPATH": path}}
        try:
            code = subprocess.run(step.command, timeout=60 * step.minutes, **given).returncode
            remark = "" if code == 0 else f"exit status {code}"
        except subprocess.TimeoutExpired:
            remark = f"stopped after {step.minutes:g} minutes"
    remark = remark or {"checks": checked, "recipe": trained}.get(step.name, lambda _: "")(folder)
    passed = not remark.startswith(("exit", "stopped"))
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    # The last line of a failure is its error.
    result = {"status": "passed" if passed else "FAILED", "remark": remark if passed else f"{remark}: {lines[-1]}"}
    return result | {"seconds": round(time.monotonic() - begin, 1), "log": log.name}


def checked(folder: Path) -> str:
    """Count the checks, and those of the kernels among them."""
    lines = (folder / "checks.log").read_text().splitlines()
    ok = [line for line in lines if line.startswith("ok ")]
    return f"{len(ok)} checks, of the kernels {sum(', triton' in line for line in ok)}"


def trained(folder: Path) -> str:
    """Return the test accuracy of the last training."""
    summaries = sorted((folder / "runs").glob("*/summary.json"), key=lambda path: path.stat().st_mtime)
    results = json.loads(summaries[-1].read_text()) if summaries else {}
    return f"test accuracy {results['test/acc1']:.4f}" if "test/acc1" in results else "without a test"


def times(rows: Sequence[dict[str, Any]]) -> dict[tuple[int, str], dict[str, float]]:
    """Return the time of each layer in the last run as a multiple of stock attention's, by size and mode."""
    layers = [row for row in rows if row["level"] == "layer"]
    groups = benchmark_report.grouped(layers, benchmark_report.GROUP)
    return {(group[0]["size"], group[0]["mode"]): benchmark_report.ratios(group) for group in groups}


def rule(found: dict[tuple[int, str], dict[str, float]], checks: dict[str, Any]) -> str:
    """Say from which width of augmented vectors on 'triton' was at least as fast as the others, and what follows.

    The width is what `fused` makes of a head: its own, and a channel for each row and column of patches.
    """
    if not any("relvit_triton" in ratios for ratios in found.values()):
        return "No rule: 'triton' was not measured, which takes a card."
    if checks.get("status") != "passed":
        return "Keep 'triton' by name only: the step `checks` has not passed."
    slower, sizes = {0}, sorted({size for size, _ in found})
    for (size, _), ratios in found.items():
        others = [ratios[name] for name in ("relvit_fused", "relvit_tiled") if name in ratios]
        if ratios.get("relvit_triton", float("inf")) > min(others, default=float("inf")):
            slower.add(size)
    faster = [size for size in sizes if size > max(slower)]
    if not faster:
        return f"Keep 'triton' by name only: at {sizes[-1]} px it was slower than 'fused' or 'tiled'."
    width = DIM // HEADS + 2 * faster[0] // PATCH
    return (
        "In `_choose` of relvit/ops/attention.py take 'triton' where `triton.refusal(inputs) is None` and the width is "
        f"{width} or more: from {faster[0]} px on, forward and in training, no backend was faster on this card."
    )


def draw(found: dict[tuple[int, str], dict[str, float]]) -> Figure:
    """Draw the time of all layers as multiples of stock attention's, over the number of patches."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    modes = sorted({mode for _, mode in found})
    for place, mode in enumerate(modes, start=1):
        axes = figure.add_subplot(1, len(modes), place, title=mode, xlabel="patches", ylabel="time, multiple of stock")
        sizes = sorted(size for size, other in found if other == mode)
        for name in dict.fromkeys(name for size in sizes for name in found[size, mode]):
            line = {(size // PATCH) ** 2: found[size, mode][name] for size in sizes if name in found[size, mode]}
            axes.plot(line.keys(), line.values(), "o-", label=name)
        axes.set(xscale="log", yscale="log")
        axes.legend(frameon=False)
    return figure


def write_summary(folder: Path, results: dict[str, dict[str, Any]]) -> None:
    """Write `summary.json`, `summary.md` and the figure of the results so far."""
    rows = folder / "speed.jsonl"
    found = times(benchmark_report.read(rows)) if rows.exists() else {}
    if found:
        draw(found).savefig(folder / "layers.png", dpi=100)
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no card"
    absent = [name for name in peers.CLASSES if not peers.installed(name)]
    verdict = rule(found, results.get("checks", {}))
    facts = {"card": card, "torch": torch.__version__, "cuda": torch.version.cuda, "not installed": absent}
    (folder / "summary.json").write_text(json.dumps({**facts, "steps": results, "rule": verdict}, indent=1) + "\n")
    lines = ["# The hour on a card", "", f"{card}, torch {torch.__version__}, CUDA {torch.version.cuda}."]
    lines += [f"Not installed, so not measured: {', '.join(absent)} (see tools/peers.py)."] if absent else []
    lines += ["", "| step | result | seconds | log | |", "|---|---|---|---|---|"]
    for name, result in results.items():
        cells = (name, result["status"], result.get("seconds", "–"), result.get("log", "–"), result["remark"])
        lines.append(f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |")
    lines += ["", "## The rule for `triton`", "", verdict, ""]
    lines += [f"![layers]({name})" for name in ("layers.png",) if (folder / name).exists()]
    sam = folder / "sam.log"
    tables = [line for line in sam.read_text().splitlines() if line.startswith("|")] if sam.exists() else []
    lines += ["", "## SAM before and after", "", *tables, ""] if tables else [""]
    lines += [(folder / "speed.md").read_text()] if (folder / "speed.md").exists() else []
    (folder / "summary.md").write_text("\n".join(lines))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps and write the summary after each; return 1 where one failed.

    Raises:
        ValueError: there is no card, and the sizes are not toy ones.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu_hour"), help="the folder that is written")
    parser.add_argument("--root", type=Path, default=Path("data"), help="folder of CIFAR-10's archive")
    names = [step.name for step in steps(Path(), Path(), toy=True)]
    parser.add_argument("--steps", nargs="+", choices=names, default=names, help="by default all")
    parser.add_argument("--toy", action="store_true", help="toy sizes, on the CPU")
    given = parser.parse_args(arguments)
    if not given.toy and not torch.cuda.is_available():
        raise ValueError("torch sees no GPU: install PyTorch's build for CUDA, or try the tool on the CPU with --toy")
    folder = given.output
    folder.mkdir(parents=True, exist_ok=True)
    earlier = folder / "summary.json"
    results = json.loads(earlier.read_text())["steps"] if earlier.exists() else {}
    for step in steps(folder, given.root, given.toy):
        if step.name in given.steps:
            print(f"{step.name} ...", end=" ", flush=True)
            results[step.name] = run(step, folder)
            print(results[step.name]["status"], results[step.name]["remark"], flush=True)
            write_summary(folder, results)
    print(f"summary: {folder / 'summary.md'}")
    return int(any(results[name]["status"] == "FAILED" for name in given.steps))


if __name__ == "__main__":
    sys.exit(main())
