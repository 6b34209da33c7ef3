"""Compare images in bands with one pass: largest difference, and time and peak memory by height, as tables in Markdown.

    python tools/depth/band_memory.py                                     # relvit_tiny, up to 16,384 x 512 pixels
    python tools/depth/band_memory.py --model relvit_xl_small --heights 4096 --cap 600
    python tools/depth/band_memory.py --ckpt_path CKPT                    # `relvit predict` on JPEG files instead

Each cell of the second table runs in a process of its own, on one image, after a pass over a smaller one. Memory is the
peak of the process, Python and PyTorch included, as the system counts it. In the columns 'bands' 14 rows of patches are
computed at a time: 'read one by one', they come from a generator that converts them from bytes, and no more of the
image is in memory; else the model gets the whole image in single precision, which alone takes 12 bytes per pixel. So do
those of `relvit predict`, whose workers decode; its figures are those of the main process.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import timm
import torch
from PIL import Image
from torch import Tensor, nn

import relvit  # noqa: F401  registers the models
from relvit.families.transformer_xl import classify_bands, set_bands

sys.path.append(str(Path(__file__).parents[1]))

from large_images import in_process

ROWS, PATCH = 14, 16
# Name -> rows that are remembered; None: all. The last has no bands.
COLUMNS = {
    "bands read one by one, memory of 14 rows": 14,
    "bands of an image, memory of 14 rows": 14,
    "bands of an image, memory of all rows": None,
    "one pass": None,
}


def read_bands(height: int, width: int) -> Iterator[Tensor]:
    """Yield bands as they may come from a file: bytes, converted one after the other."""
    for top in range(0, height, ROWS * PATCH):
        rows = min(ROWS * PATCH, height - top)
        yield torch.randint(0, 256, (1, 3, rows, width), dtype=torch.uint8).float().div_(127.5).sub_(1)


def compute(net: nn.Module, column: str, height: int, width: int) -> None:
    """Classify one image."""
    if "one by one" in column:
        classify_bands(net, read_bands(height, width), COLUMNS[column])
    else:
        set_bands(net, None if column == "one pass" else ROWS, COLUMNS[column])
        net(torch.cat(list(read_bands(height, width)), dim=2))


def measure(model: str, column: str, height: int, width: int, results: Connection) -> None:
    """Send seconds and the peak in bytes."""
    net = timm.create_model(model, num_classes=10).eval()
    with torch.inference_mode():
        compute(net, column, 2 * ROWS * PATCH, width)
        begin = time.perf_counter()
        compute(net, column, height, width)
        results.send((time.perf_counter() - begin, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))


def cell(model: str, column: str, height: int, width: int, cap: float) -> str:
    """Measure in a process; name what takes longer than `cap` seconds."""
    text = "{:.1f} s, {:,.0f} MiB".format
    arguments = (model, column, height, width)
    return in_process(measure, arguments, cap, lambda seconds, memory: text(seconds, memory / 2**20))


def predict(ckpt_path: str, height: int, width: int) -> str:
    """Measure `relvit predict --reach bands` on a JPEG file of noise."""
    with TemporaryDirectory() as folder:
        pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(f"{folder}/image.jpg")
        options = [f"--img_size=[{height},{width}]", "--reach=bands", f"--runs={folder}", "--accelerator=cpu"]
        command = [sys.executable, "-m", "relvit", "predict", ckpt_path, f"{folder}/image.jpg", *options]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"relvit predict has failed with status {os.waitstatus_to_exitcode(status)}")
    return f"{used.ru_utime + used.ru_stime:.1f} s, {used.ru_maxrss / 1024:,.0f} MiB"


def difference(depth: int, position: str, memory_rows: int | None) -> str:
    """Compute the largest difference of logits from one pass under the mask, relative to the largest logit."""
    torch.manual_seed(0)
    net = timm.create_model("relvit_tiny", num_classes=10, depth=depth, position=position, rel_init_std=0.3).eval()
    image, rows = torch.randn(1, 3, 1024, 256), torch.arange(64 * 16) // 16
    first = rows // ROWS * ROWS
    mask = rows < (first + ROWS)[:, None]
    if memory_rows is not None:
        mask &= rows >= (first - memory_rows)[:, None]
    with torch.inference_mode():
        expected = net(image, attn_mask=mask)
        error = (set_bands(net, ROWS, memory_rows)(image) - expected).abs().max() / expected.abs().max()
    return f"{float(error):.1e}"


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="relvit_tiny")
    add("--heights", type=int, nargs="*", default=[1024, 2048, 4096, 8192, 16384])
    add("--width", type=int, default=512)
    add("--cap", type=float, default=240.0, help="seconds that a cell may take")
    add("--ckpt_path", help="a checkpoint of relvit fit that can compute in bands")
    given = parser.parse_args()
    if given.ckpt_path:
        print("| height | `relvit predict`: time of the processor, peak memory |\n|---|---|")
        for height in given.heights:
            print(f"| {height:,} | {predict(given.ckpt_path, height, given.width)} |", flush=True)
        return
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("relvit_tiny, 1024 x 256 px, bands of 14 rows, float32: largest difference from the masked pass\n")
    print("| depth | position | memory of all rows | memory of 14 rows |\n|---|---|---|---|")
    for depth, position in ((1, "xl"), (4, "xl"), (12, "xl"), (12, "tables")):
        cells = (difference(depth, position, memory) for memory in (None, 14))
        print(f"| {depth} | {position} | {' | '.join(cells)} |", flush=True)
    print(f"\n{given.model}, {given.width} px wide\n")
    print(f"| height | {' | '.join(COLUMNS)} |\n|---{'|---' * len(COLUMNS)}|")
    for height in given.heights:
        cells = (cell(given.model, column, height, given.width, given.cap) for column in COLUMNS)
        print(f"| {height:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
