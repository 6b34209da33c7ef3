"""Time BEiT and SAM before and after `relvit.retrofit` on a GPU: `python tools/gpu/retrofit_times.py`.

The models are BEiT-B at 512 px and timm's SAM ViT-B at 1,024 px, in bfloat16, from `tools/retrofit/elsewhere.py`. BEiT
is also timed with FlexAttention, which keeps no bias of N x N either: its score function looks each pair up in BEiT's
table, and the gradient of the table is summed with atomics. Each variant takes turns with the source model; each action
adds a line of JSON to `--output`: seconds and peak memory of both models, and how much their features differ. An error
becomes the status of its model and stops no other model.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

# These folders contain the modules that are imported next.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "retrofit"))

import elsewhere
import torch
from benchmark import surroundings
from timm.models.beit import Attention as BeitAttention
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

# Name in `elsewhere.MODELS`, the variant that is compared with the source, side in pixels, images in a batch: with one
# image, BEiT-B would only time launches. FlexAttention, which takes long to compile, comes last.
CASES = (("timm-sam", "retrofitted", 1024, 1), ("timm-beit", "retrofitted", 512, 8), ("timm-beit", "flex", 512, 8))
TOY_CASES = (("timm-sam", "retrofitted", 48, 1), ("timm-beit", "retrofitted", 48, 2), ("timm-beit", "flex", 48, 2))


class FlexBeitAttention(BeitAttention):
    """timm's `Attention` of BEiT with FlexAttention, whose score function looks the bias up in a captured table."""

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        """Map (B, N, dim) tokens to the same shape; the first one is the class token."""
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        packed = nn.functional.linear(x, self.qkv.weight, bias)
        query, key, value = packed.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        out = flex(x.device.type)(query, key, value, self.relative_position_bias_table, *self.window_size)
        return self.proj(out.transpose(1, 2).flatten(2))


def flex_beit(query: Tensor, key: Tensor, value: Tensor, table: Tensor, height: int, width: int) -> Tensor:
    """Attend with BEiT's bias, (entries, heads), for a class token and `height` x `width` patches."""
    last = table.shape[0]

    def score(logit: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        down = (i - 1) // width - (j - 1) // width + height - 1
        right = (i - 1) % width - (j - 1) % width + width - 1
        # The table's last three entries are for pairs from the class token, to it, and of the class token with itself.
        entry = torch.where(i == 0, torch.where(j == 0, last - 1, last - 3), torch.where(j == 0, last - 2, 0))
        entry = torch.where((i > 0) & (j > 0), down * (2 * width - 1) + right, entry)
        return logit + table[entry, head]

    return flex_attention(query, key, value, score_mod=score)


@cache
def flex(device: str) -> Callable[..., Tensor]:
    """Return `flex_beit`, on a GPU compiled: otherwise it would make the N x N scores."""
    # All layers share one compiled function, because the tables are inputs of the function.
    return torch.compile(flex_beit, dynamic=False) if device == "cuda" else flex_beit


def build(name: str, layers: int, side: int, variant: str) -> nn.Module:
    """Build a model on the CPU as the library has it ('source'), retrofitted, or with FlexAttention ('flex')."""
    model = elsewhere.build(name, layers, (side, side), variant == "retrofitted")
    if variant == "flex":
        for module in model.modules():
            if type(module) is BeitAttention:
                module.__class__ = FlexBeitAttention
    return model


def seconds(call: Callable[[], object], images: Tensor) -> float:
    wait = torch.cuda.synchronize if images.is_cuda else lambda: None
    wait()
    begin = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - begin


def peak(model: nn.Module, images: Tensor, action: str) -> int | None:
    """Return by how many bytes an action raises the memory of PyTorch's allocator on the GPU; None on the CPU."""
    if not images.is_cuda:
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    elsewhere.act(model, images, action)
    return torch.cuda.max_memory_allocated() - before


def compare(name: str, other: str, layers: int, images: Tensor, rounds: int, end: float) -> Iterator[dict[str, Any]]:
    """Yield the figures of the source and of another variant for each action; one that fails has only a status."""
    batch, _, _, side = images.shape
    models = {variant: build(name, layers, side, variant).to(images) for variant in ("source", other)}
    features: dict[str, Tensor] = {}
    for action in elsewhere.ACTIONS:
        found: dict[str, dict[str, Any]] = {variant: {"status": "ok", "seconds": []} for variant in models}
        for variant, model in models.items():
            try:
                with torch.no_grad():
                    features[variant] = elsewhere.features(model, images).float()
                elsewhere.act(model, images, action)
                found[variant]["peak_bytes"] = peak(model, images, action)
            except Exception as error:
                reason = str(error).partition("\n")[0][:200]
                found[variant] = {"status": f"failed: {type(error).__name__}: {reason}"}
                continue
            if "source" in features:
                difference = (features[variant] - features["source"]).abs().max() / features["source"].abs().max()
                # JSON has no NaN and no infinity.
                found[variant]["difference"] = float(difference) if difference.isfinite() else None
        running = [variant for variant in models if found[variant]["status"] == "ok"]
        for number in range(rounds if running else 0):
            for variant in running[number % len(running) :] + running[: number % len(running)]:
                took = seconds(partial(elsewhere.act, models[variant], images, action), images)
                found[variant]["seconds"].append(round(took, 6))
            if time.monotonic() >= end:
                break
        yield {"model": name, "side": side, "batch": batch, "action": action, "variants": found}


def line(row: dict[str, Any]) -> str:
    """Return the figures of a row in words: milliseconds, multiples of the source's time and peak."""
    parts, source = [], row["variants"]["source"]
    for variant, found in row["variants"].items():
        if found["status"] != "ok":
            parts.append(f"{variant} {found['status']}")
            continue
        text = f"{variant} {1000 * median(found['seconds']):.1f} ms"
        if source["status"] == "ok":
            pairs = zip(found["seconds"], source["seconds"], strict=True)
            text += f", {median(a / b for a, b in pairs):.2f}"
            if found["peak_bytes"] and source["peak_bytes"]:
                text += f", {found['peak_bytes'] / 2**20:.0f} MiB, {found['peak_bytes'] / source['peak_bytes']:.2f}"
            difference = found["difference"]
            text += ", difference not finite" if difference is None else f", difference {difference:.0e}"
        parts.append(text)
    return f"{row['model']}, {row['side']} px, batch {row['batch']}, {row['action']}: {'; '.join(parts)}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and append."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after them no model begins")
    parser.add_argument("--output", type=Path, help="JSON lines are appended to this file")
    parser.add_argument("--toy", action="store_true", help="one layer and small images, in float32 on the CPU")
    given = parser.parse_args(arguments)
    end = time.monotonic() + 60 * given.minutes
    device, dtype = ("cpu", torch.float32) if given.toy else ("cuda", torch.bfloat16)
    shared = surroundings(device) | {"dtype": str(dtype).removeprefix("torch.")}
    for name, other, side, batch in TOY_CASES if given.toy else CASES:
        if time.monotonic() >= end:
            print(f"{name}, {other}: no time left", flush=True)
            continue
        layers = 1 if given.toy else elsewhere.MODELS[name].layers
        images = torch.randn(batch, 3, side, side).to(device, dtype)
        for row in compare(name, other, layers, images, given.rounds, end):
            print(line(row), flush=True)
            if given.output:
                with given.output.open("a") as file:
                    file.write(json.dumps(row | shared) + "\n")


if __name__ == "__main__":
    main()
