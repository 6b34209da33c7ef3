"""Sizes and costs of all relvit models, a Markdown table: `python tools/model_table.py`, `--write`: into README.md."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import timm
import torch
from torch import nn

from relvit.layers import AFTConv2d, AFTFull, AFTSimple, RelativeAttention
from relvit.models import AFTVisionTransformer
from relvit.models.base import GridVisionTransformer

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- written by tools/model_table.py -->", "<!-- end -->"
HEAD = (
    "| model | image | parameters, M | GMACs | relative parameters, k | relative MACs, M | share of MACs |",
    "|---|---|---|---|---|---|---|",
)


class Cost(NamedTuple):
    """What a model takes; relative: what of it its relative positions or, without attention, biases take."""

    parameters: int
    macs: int
    relative_parameters: int
    relative_macs: int


def cost(model: GridVisionTransformer) -> Cost:
    """Count a model as registered, for one image of the size it was made for.

    MACs are multiply-accumulates, half the FLOPs, of all matrix products: the patch embedding, the linear layers, the
    mixers, the head. That is what the methods need, whatever a backend does besides; choosing among these products,
    adding them up, and products by element are none, nor are norms and softmax.
    """
    patches = model.patch_embed.num_patches
    tokens = patches + model.num_prefix_tokens
    macs = patches * model.patch_embed.proj.weight.numel() + model.head.weight.numel()
    relative_parameters = relative_macs = 0
    for block in model.blocks:
        weights = sum(module.weight.numel() for module in block.modules() if isinstance(module, nn.Linear))
        mixer = block.attn
        mixed, parameters, relative = (
            attention_free(mixer, tokens, patches)
            if isinstance(mixer, AFTSimple)
            else attention(mixer, tokens, patches)
        )
        macs += tokens * weights + mixed + relative
        relative_parameters += parameters
        relative_macs += relative
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Cost(parameters, macs, relative_parameters, relative_macs)


def attention(mixer: RelativeAttention, tokens: int, patches: int) -> tuple[int, int, int]:
    """MACs of the two products of attention; parameters and MACs of relative positions (separate tables).

    The latter are the product of each patch in each head with every row of each table of vectors: 2 (2k + 1) rows per
    term, head_dim long, with the query or the key (logits) or the attention's marginals (values). Biases are no
    products.
    """
    parameters = macs = 0
    for name, table in mixer.position.named_parameters():
        parameters += table.numel()
        if not name.startswith("bias"):
            rows, head_dim = table.shape[-2:]
            macs += patches * mixer.num_heads * rows * head_dim
    return 2 * tokens**2 * mixer.attn_dim, parameters, macs


def attention_free(mixer: AFTSimple, tokens: int, patches: int) -> tuple[int, int, int]:
    """MACs of the sums over all tokens; parameters and MACs of the bias w.

    A full or local bias w = u v^T is one product, and the sums of exp(k) v and of exp(k) are two with exp(w). The
    window of AFT-conv is a product with each patch's exp(k) v and exp(k), as the paper convolves; the sums over
    everything else are the same for all tokens, as those of AFT-simple.
    """
    if isinstance(mixer, AFTFull):
        factors = mixer.u.numel() + mixer.v.numel()
        return 2 * tokens**2 * mixer.proj.in_features, factors, tokens**2 * mixer.u.shape[1]
    if isinstance(mixer, AFTConv2d):
        window = mixer.kernel[0].numel()
        parameters = mixer.kernel.numel() + mixer.gamma.numel() + mixer.beta.numel()
        return 0, parameters, patches * window * mixer.num_heads * (mixer.head_dim + mixer.keys)
    return 0, 0, 0


def table() -> str:
    """The Markdown table of all registered models but those for tests: by mixer, image size and parameters."""
    rows = []
    for name in timm.list_models("relvit_*"):
        with torch.device("meta"):
            model = timm.create_model(name)
        height, width = model.patch_embed.img_size
        free = isinstance(model, AFTVisionTransformer)
        rows.append((free, height * width, cost(model), f"`{name}`", f"{height} x {width}"))
    lines = [
        f"| {name} | {image} | {taken.parameters / 1e6:.3f} | {taken.macs / 1e9:.2f} "
        f"| {taken.relative_parameters / 1e3:.1f} | {taken.relative_macs / 1e6:.1f} "
        f"| {taken.relative_macs / taken.macs:.1%} |"
        for _, _, taken, name, image in sorted(rows)
    ]
    return "\n".join((*HEAD, *lines))


def written(text: str) -> str:
    """The text with the table between its markers.

    Raises:
        ValueError: not exactly one pair of markers.
    """
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"expected one table between the lines {BEGIN!r} and {END!r}")
    return pattern.sub(lambda _: f"{BEGIN}\n\n{table()}\n\n{END}", text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--write", action="store_true", help="into README.md, between its markers")
    if parser.parse_args(arguments).write:
        README.write_text(written(README.read_text()))
    else:
        print(table())


if __name__ == "__main__":
    main()
