"""Spoil valid images, configurations and checkpoints at random, and see that each is accepted or properly refused:

    python tools/fuzz.py --images 100000 --configs 5000 --checkpoints 2000

A case is refused properly where the error is an UnreadableImageError, another ValueError, or the parser's one line;
any other exception counts as a traceback, the death of the process as a crash, and what takes more processor time than
the limit, or 20 times as long by the clock, as a hang. The exit status is 1 if there is one of these. Everything
follows from the seed: `--seed 0 --case images:4711` does one case again, here, and shows what happens.

Cases are done in processes of their own, whose memory is limited, on one thread each.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from fuzzing import KINDS, SPOIL, configs, images

OUTCOMES = ("not done", "accepted", "refused", "traceback", "crash", "hang")
NOT_DONE, ACCEPTED, REFUSED, TRACEBACK, CRASH, HANG = range(6)
# GiB beyond what the libraries take; the largest image that Pillow's limit lets through takes 2.
MEMORY = 6


class ImproperError(Exception):
    """A refusal that is not one line."""


def make_checkpoint(folder: Path) -> bytes:
    """The checkpoint of a real training, of one step, of a small model."""
    from relvit.cli import main

    flags = ["--data=DigitsData", "--data.num_workers=0", "--data.batch_size=64", "--model.model=test_relvit"]
    flags += [f"--model.model_kwargs.{name}" for name in ("patch_size=4", "embed_dim=8", "depth=1", "num_heads=2")]
    flags += [f"--trainer.{name}" for name in ("max_epochs=1", "limit_train_batches=1", "limit_val_batches=1")]
    flags += ["--trainer.limit_test_batches=1", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    with contextlib.redirect_stdout(io.StringIO()):
        status = main(["fit", *flags, f"--runs={folder / 'runs'}"])
    if status:
        raise RuntimeError("the training that the checkpoint is to come from has failed")
    return next((folder / "runs").glob("*/checkpoints/last.ckpt")).read_bytes()


def sources(kind: str, folder: Path) -> list[bytes]:
    """The valid files of a kind; a checkpoint lies ready in the folder."""
    if kind == "checkpoints":
        return [(folder / "valid.ckpt").read_bytes()]
    return images() if kind == "images" else configs()


def targets(kind: str) -> Callable[[Path], Any]:
    """What is done with a file of a kind."""
    if kind == "images":
        from relvit.data import eval_transform, load_rgb

        transform = eval_transform(16, (0.5,) * 3, (0.5,) * 3)
        return lambda path: transform(load_rgb(path))
    if kind == "configs":
        from relvit.cli.fit.trainer import RelvitCLI

        class ParserAlone(RelvitCLI):
            def instantiate_classes(self) -> None:
                """Nothing is built."""

            def _run_subcommand(self, subcommand: str) -> None:
                """And nothing is done."""

        cli = ParserAlone("fit", ["--data=DigitsData"], contextlib.ExitStack())
        return lambda path: cli.parser.parse_args(["fit", "--config", str(path)])

    import torch

    import relvit

    def use(path: Path) -> None:
        classifier = relvit.load(path)
        classifier.predict(torch.zeros(len(classifier.mean), 8, 8))

    return use


def attempt(target: Callable[[Path], Any], path: Path) -> tuple[int, str]:
    """What came out, and the traceback of what should not have."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            target(path)
    except (ValueError, FileNotFoundError) as error:
        if len(str(error).strip().splitlines()) == 1:
            return REFUSED, ""
        return TRACEBACK, "".join(traceback.format_exception(ImproperError(str(error))))
    except BaseException:
        return TRACEBACK, traceback.format_exc()
    return ACCEPTED, ""


def spoilt(kind: str, seed: int, index: int, valid: list[bytes]) -> bytes:
    """Case `index`: the same at every call."""
    draw = random.Random(f"{seed} {kind} {index}")
    return SPOIL[kind](draw.choice(valid), draw, valid)


def work(kind: str, seed: int, first: int, step: int, folder: Path, outcomes: Any, now: Any, slot: int) -> None:
    """Do every `step`-th case from `first` on; say in `now` which one, and since when (clock, processor time)."""
    # Libraries complain on the file descriptor.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    valid, target = sources(kind, folder), targets(kind)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY * 2**30,) * 2)
    path = folder / f"case{slot}.{ {'images': 'jpg', 'configs': 'yaml', 'checkpoints': 'ckpt'}[kind] }"
    for index in range(first, len(outcomes), step):
        path.write_bytes(spoilt(kind, seed, index, valid))
        now[3 * slot : 3 * slot + 3] = index, time.monotonic(), time.process_time()
        outcomes[index], text = attempt(target, path)
        now[3 * slot + 1] = 0
        if text:
            with open(folder / f"tracebacks{slot}.txt", "a", errors="backslashreplace") as file:
                file.write(f"--case {kind}:{index}\n{text}\n")


def fuzz(
    kind: str,
    count: int,
    seed: int,
    processes: int,
    limit: float,
    folder: Path,
    worker: Callable[..., None] = work,
) -> Counter[int]:
    """Do so many cases, in processes that run `worker`; how many had which outcome."""
    context = multiprocessing.get_context("spawn")
    outcomes = context.RawArray("b", count)
    now = context.RawArray("d", 3 * processes)

    def start(slot: int, first: int) -> multiprocessing.Process:
        now[3 * slot : 3 * slot + 3] = -1, 0, 0
        process = context.Process(target=worker, args=(kind, seed, first, processes, folder, outcomes, now, slot))
        process.start()
        return process

    running = {slot: start(slot, slot) for slot in range(min(processes, count))}
    while running:
        time.sleep(0.1)
        for slot, process in list(running.items()):
            index, clock, used = now[3 * slot : 3 * slot + 3]
            index = int(index)
            hangs = bool(clock) and _hangs(process.pid, time.monotonic() - clock, used, limit)
            if hangs:
                os.kill(process.pid, signal.SIGKILL)
                process.join()
            if process.is_alive():
                continue
            del running[slot]
            if process.exitcode:
                if index < 0:
                    raise RuntimeError(f"a process ended with {process.exitcode} before its first case")
                outcomes[index] = HANG if hangs else CRASH
                print(f"{OUTCOMES[outcomes[index]]}: --case {kind}:{index}", flush=True)
                if index + processes < count:
                    running[slot] = start(slot, index + processes)
    return Counter(outcomes)


def _hangs(pid: int, seconds: float, used_before: float, limit: float) -> bool:
    """Whether a process has been too long at its case; on a busy machine the clock alone does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return False
    used = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return used - used_before > limit or seconds > 20 * limit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for kind, default in zip(KINDS, (1000, 100, 100), strict=True):
        parser.add_argument(f"--{kind}", type=int, default=default, help=f"number of cases, {default} by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=30, help="seconds of processor time for a case, 30 by default")
    parser.add_argument("--case", help="do one case alone, such as images:4711, and show its traceback")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.checkpoints or (options.case or "").startswith("checkpoints"):
            (folder / "valid.ckpt").write_bytes(make_checkpoint(folder))
        if options.case:
            kind, index = re.fullmatch(rf"({'|'.join(KINDS)}):(\d+)", options.case).groups()
            path = folder / "case"
            path.write_bytes(spoilt(kind, options.seed, int(index), sources(kind, folder)))
            targets(kind)(path)
            return 0
        print(f"seed {options.seed}, {options.limit:g} s a case, {options.processes} processes", flush=True)
        print(f"{'':12}" + "".join(f"{title:>11}" for title in ("tried", *OUTCOMES[1:], "seconds")), flush=True)
        failures = 0
        for kind in KINDS:
            if count := getattr(options, kind):
                start = time.monotonic()
                found = fuzz(kind, count, options.seed, options.processes, options.limit, folder)
                numbers = [count - found[NOT_DONE], *(found[outcome] for outcome in range(1, len(OUTCOMES)))]
                failures += sum(numbers[TRACEBACK:]) + found[NOT_DONE]
                seconds = time.monotonic() - start
                print(f"{kind:12}" + "".join(f"{n:>11,}" for n in numbers) + f"{seconds:>11.0f}", flush=True)
        for file in sorted(folder.glob("tracebacks*.txt")):
            print(file.read_text())
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
