"""Measure on a GPU what CI cannot measure, within a time limit: `python tools/gpu/hour.py --minutes 13`.

relvit need not be installed, but torch, triton, timm, einops and matplotlib must be. If you have a machine with a GPU
for a quarter of an hour, in commands of ten minutes at most, run these from the root of the repository:

    PYTHONPATH=. PYTHONUNBUFFERED=1 OUT=gpu_hour python3 tools/gpu/hour.py --minutes 9.5 --commit NAME
    PYTHONPATH=. PYTHONUNBUFFERED=1 OUT=gpu_hour python3 tools/gpu/hour.py --minutes 2 --steps tune

The machine may have an older timm than relvit needs; install a newer one into a separate folder:

    python3 -m pip install --no-deps --target packages "timm>=1.0.26"    # then PYTHONPATH=.:packages

Steps that have never been measured come first. Each step is a process of its own with a part of the time; the last step
gets all the time that is left. A step that fails or takes too long does not stop the others. Figures are written as
soon as they exist. The folder `--output`, by default the variable OUT or `gpu_hour`, gets at most seven files:
`log.txt` of all steps, `speed.jsonl`, `retrofit.jsonl` and `tune.jsonl` of figures, and `summary.json`, `summary.md`
and `speed.md`.

    checks    what a GPU computes against float64: backends, kernels, joint tables (gpu_check.py --short)
    models    at 224 px, batch 64, bfloat16, eager: relvit by each backend, timm's (../benchmark.py)
    compiled  plain and relvit after torch.compile; the step `rope` timm's others, as far as time is left
    layers    at 32 x 32 and 64 x 64 patches, by each backend
    retrofit  BEiT-B at 512 px and SAM-B at 1,024 px before and after, and FlexAttention (retrofit_times.py)
    tune      the kernels by block sizes, warps and stages: the table of `launch.py` (tune.py)

`--toy` runs all steps on a CPU at toy sizes in about a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

TOOLS = Path(__file__).resolve().parents[1]
# The folder above contains the modules that are imported next.
sys.path.insert(0, str(TOOLS))

import benchmark_report  # noqa: E402
from benchmark import FAST_BACKENDS  # noqa: E402

# 'tiled' and 'gathered' are for CPUs and for arguments that no kernel takes, so the GPU does not measure them.
WAYS = [backend for backend in FAST_BACKENDS if backend not in ("tiled", "gathered")]
PEERS = ("relpos", "rope", "rope_mixed")
MODELS = ("plain", "control", "relvit_small", *(f"relvit_small_{way}" for way in WAYS), *PEERS)
# A model takes half a minute to compile, and longer with its backward pass, so one step compiles few models.
COMPILED = {"compiled": ("plain", "relvit_small"), "rope": ("plain", "relpos", "rope", "rope_mixed")}
LAYERS = ("plain", "control", "relvit_auto", *(f"relvit_{way}" for way in WAYS), "sam")
# The seconds that a step has to stop by itself before it is killed, and the least time with which a step begins.
GRACE, LEAST = 15.0, 20.0


class Step(NamedTuple):
    """A process: its name, its command, its part of all the time, and why it is left out here, or ''.

    The command gets its part of the time as `--minutes`, and is killed a little later.
    """

    name: str
    command: list[str]
    part: float
    left_out: str = ""


def tool(path: str, *arguments: object) -> list[str]:
    """Return the command of a tool."""
    return [sys.executable, str(TOOLS / path), *map(str, arguments)]


def steps(folder: Path, toy: bool, commit: str | None = None) -> list[Step]:
    """Return all steps in order; at toy sizes on the CPU."""
    speed = ("benchmark.py", "--output", folder / "speed.jsonl", "--device", "cpu" if toy else "cuda")
    speed += ("--dtype", "float32" if toy else "bfloat16", "--rounds", 2 if toy else 15)
    speed += ("--commit", commit) if commit else ()
    names = {"models": MODELS, "layers": LAYERS, **COMPILED}
    if toy:
        # On the CPU, Triton's interpreter would take minutes for a model.
        names = {key: [name for name in each if not name.endswith("_triton")] for key, each in names.items()}
        models, layers = ("--size", 32, "--batch", 1), ("--level", "layer", "--size", 64, "--batch", 1)
        # Compilation takes most of the time, so compile only a few models, with a backward pass.
        names |= {"compiled": ["plain", "relvit_fused"], "rope": ["plain"]}
        compiled = (*layers, "--mode", "train")
    else:
        models = compiled = ("--size", 224, "--batch", 64)
        layers = ("--level", "layer", "--size", 512, 1024, "--batch", 4)
    checks = ("--short", "--processes", max(1, (os.cpu_count() or 1) // 2))
    checks += ("--device", "cpu", "--quick") if toy else ()
    short, retrofit = (("--toy",), ("--toy", "--rounds", 2)) if toy else ((), ())
    compiler = "" if not toy or shutil.which("g++") else "there is no compiler g++"
    triton = "" if importlib.util.find_spec("triton") else "there is no package triton"
    return [
        Step("checks", tool("gpu/gpu_check.py", *checks), 0.14),
        Step("models", tool(*speed, *models, "--names", *names["models"]), 0.14),
        Step("compiled", tool(*speed, *compiled, "--compile", "--names", *names["compiled"]), 0.27, compiler),
        Step("layers", tool(*speed, *layers, "--names", *names["layers"]), 0.1),
        Step("retrofit", tool("gpu/retrofit_times.py", *retrofit, "--output", folder / "retrofit.jsonl"), 0.12),
        Step("rope", tool(*speed, *compiled, "--compile", "--names", *names["rope"]), 0.12, compiler),
        Step("tune", tool("gpu/tune.py", *short, "--output", folder / "tune.jsonl"), 1.0, triton),
    ]


def run(step: Step, folder: Path, seconds: float) -> dict[str, Any]:
    """Run a step for at most these seconds, its output at the end of the log; return its result."""
    log, begin = folder / "log.txt", time.monotonic()
    if step.left_out or seconds < LEAST:
        return {"status": "left out", "remark": step.left_out or "no time was left", "seconds": 0}
    command = [*step.command, "--minutes", f"{(seconds - GRACE) / 60:.3f}"]
    with log.open("a") as file:
        print(f"## {step.name}", *command, file=file, flush=True)
        start = file.tell()
        # The checked-out commit is measured, even if another version of relvit is installed.
        path = os.pathsep.join(filter(None, (str(TOOLS.parent), os.environ.get("PYTHONPATH"))))
        given = {"stdout": file, "stderr": subprocess.STDOUT, "env": {**os.environ, "PYTHONPATH": path}}
        # The step gets a new session, so that compilers and other processes that it has started end with it.
        process = subprocess.Popen(command, start_new_session=True, **given)
        try:
            code = process.wait(timeout=seconds)
            remark = "" if code == 0 else f"exit status {code}"
        except subprocess.TimeoutExpired:
            remark = f"stopped after {seconds:.0f} seconds"
        finally:
            # If the user interrupts this tool, the step must end, too: it would disturb the next measurement.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line for line in log.read_bytes()[start:].decode(errors="replace").splitlines() if line.strip()]
    if not remark and any(line.startswith("FAIL ") for line in lines):
        # The exit status of the checks leaves out processes that had no time to end.
        remark = "a check failed"
    # The last line of a failed step is its error; the last line of the checks counts their results.
    last = lines[-1] if lines and (remark or step.name == "checks") else ""
    status = "FAILED" if remark else "passed"
    return {"status": status, "remark": ": ".join(filter(None, (remark, last))), "seconds": since(begin)}


def since(begin: float) -> float:
    return round(time.monotonic() - begin, 1)


def of_speed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each competitor of each run: time, multiples of plain's time and memory.

    A run is left out if later runs of the same setting have measured all its competitors again.
    """
    keys, lines = ("level", "size", "mode", "compiled"), []
    runs = benchmark_report.grouped(rows, (*keys, "run"))
    for number, run in enumerate(runs):
        times, memory, first = benchmark_report.ratios(run), benchmark_report.ratios(run, memory=True), run[0]
        later = [row for other in runs[number + 1 :] for row in other if all(row[key] == first[key] for key in keys)]
        if {row["name"] for row in run} <= {row["name"] for row in later}:
            continue
        kind = f"{first['level']}, {first['size']} px{', compiled' * first['compiled']}, {first['mode']}"
        for row in run:
            cells = [kind, row["name"], row["status"], "–", "–"]
            if row["seconds"]:
                cells[2] = f"{1000 * median(row['seconds']):.2f}"
                cells[3:] = [f"{of[row['name']]:.2f}" if row["name"] in of else "–" for of in (times, memory)]
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return lines


def write_summary(folder: Path, results: dict[str, dict[str, Any]]) -> str:
    """Write `summary.json`, `summary.md` and `speed.md` of the results so far; return the summary."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no card"
    facts = {"card": card, "torch": torch.__version__, "cuda": torch.version.cuda}
    (folder / "summary.json").write_text(json.dumps({**facts, "steps": results}, indent=1) + "\n")
    lines = [f"# Measured on {card}", "", f"torch {torch.__version__}, CUDA {torch.version.cuda}.", ""]
    lines += ["| step | result | seconds | |", "|---|---|---|---|"]
    for name, result in results.items():
        cells = (name, result["status"], str(result["seconds"]), result["remark"].replace("|", "/"))
        lines.append(f"| {' | '.join(cells)} |")
    if (folder / "speed.jsonl").exists():
        rows = benchmark_report.read(folder / "speed.jsonl")
        (folder / "speed.md").write_text(benchmark_report.render(rows, "speed.jsonl"))
        lines += ["", "| setting | | ms | of plain's time | memory |", "|---|---|---|---|---|", *of_speed(rows)]
    log = (folder / "log.txt").read_text(errors="replace") if (folder / "log.txt").exists() else ""
    for name, begins in (("checks", "FAIL "), ("retrofit", "timm-"), ("tune", ("|", "BLOCKS", "    (", "}"))):
        # If a step ran twice, its last output counts.
        output = log.rpartition(f"## {name} ")[2].partition("\n## ")[0] if name in results else ""
        found = [line for line in output.splitlines() if line.startswith(begins)]
        lines += ["", f"## {name}", "", *found] if found else []
    text = "\n".join(lines) + "\n"
    (folder / "summary.md").write_text(text)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps, write the summary after each, and print it at the end; return 1 where one failed.

    Raises:
        ValueError: there is no GPU, and `--toy` was not given.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = Path(os.environ.get("OUT", "gpu_hour"))
    parser.add_argument("--output", type=Path, default=folder, help="the folder that is written")
    parser.add_argument("--minutes", type=float, default=13.0, help="for all steps together")
    names = [step.name for step in steps(Path(), toy=True)]
    parser.add_argument("--steps", nargs="+", choices=names, default=names, help="by default all")
    parser.add_argument("--toy", action="store_true", help="toy sizes, on the CPU")
    parser.add_argument("--commit", help="what is measured, where the tree is a copy without git")
    given = parser.parse_args(arguments)
    if not given.toy and not torch.cuda.is_available():
        raise ValueError("torch sees no GPU: install PyTorch's build for CUDA, or try the tool on the CPU with --toy")
    end, folder = time.monotonic() + 60 * given.minutes, given.output
    folder.mkdir(parents=True, exist_ok=True)
    earlier = folder / "summary.json"
    results = json.loads(earlier.read_text())["steps"] if earlier.exists() else {}
    summary = ""
    for step in steps(folder, given.toy, given.commit):
        if step.name in given.steps:
            print(f"{step.name} ...", end=" ", flush=True)
            left = end - time.monotonic()
            results[step.name] = run(step, folder, min(left, 60 * given.minutes * step.part))
            print(results[step.name]["status"], results[step.name]["remark"], flush=True)
            summary = write_summary(folder, results)
    print(summary)
    return int(any(results[name]["status"] == "FAILED" for name in given.steps))


if __name__ == "__main__":
    sys.exit(main())
