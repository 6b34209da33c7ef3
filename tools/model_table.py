"""Print a table of the parameters and MACs of all relvit models: `python tools/model_table.py`.

With `--write` the tool writes the table into docs/models.md.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import timm
import torch
from benchmark_report import replaced
from torch import nn

from relvit.app.evaluation import count_macs
from relvit.families.aft import AFTConv2d, AFTFull, AFTSimple, AFTVisionTransformer
from relvit.families.reformer import LSHAttention
from relvit.families.transformer_xl import TransformerXLPosition2d
from relvit.families.universal import UniversalVisionTransformer
from relvit.layers import RelativeAttention

ROOT = Path(__file__).parent.parent
BEGIN = "<!-- written by tools/model_table.py -->"
HEAD = [
    "model",
    "image",
    "parameters, M",
    "GMACs",
    "relative parameters, k",
    "relative MACs, M",
    "relative part of MACs",
]


class Cost(NamedTuple):
    """Parameters and multiply-accumulates of a model, in total, and of its relative positions or AFT's biases."""

    parameters: int
    macs: int
    relative_parameters: int
    relative_macs: int


def cost(model: nn.Module) -> Cost:
    """Count a relvit model as registered, for one image of its default size.

    MACs are multiply-accumulates, half the FLOPs, of all matrix products: the patch embedding, the linear layers, the
    mixers, the head; a universal model counts the products of all its steps. The method needs these products; a backend
    may compute more. Lookups, sums, products by element, norms and softmax do not count. Models with a mixer that has
    no function here are counted as PyTorch computes them, and the tensors that their mixers exempt from weight decay
    count as relative parameters.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    mixers = [block.attn for block in model.blocks]
    if not all(isinstance(mixer, RelativeAttention | AFTSimple | LSHAttention) for mixer in mixers):
        exempt = [name for name in model.no_weight_decay() if ".attn." in name]
        own = sum(model.get_parameter(name).numel() for name in exempt)
        return Cost(parameters, count_macs(model, model.patch_embed.img_size), own, 0)
    patches = model.patch_embed.num_patches
    tokens = patches + model.num_prefix_tokens
    macs = patches * model.patch_embed.proj.weight.numel() + model.head.weight.numel()
    relative_parameters = relative_macs = 0
    # A universal model applies its block several times.
    times = model.steps if isinstance(model, UniversalVisionTransformer) else 1
    for block in model.blocks:
        weights = sum(module.weight.numel() for module in block.modules() if isinstance(module, nn.Linear))
        kinds = {AFTSimple: attention_free, LSHAttention: hashed_attention}
        count = next((count for kind, count in kinds.items() if isinstance(block.attn, kind)), attention)
        if isinstance(getattr(block.attn, "position", None), TransformerXLPosition2d):
            count = partial(transformer_xl, grid=model.patch_embed.grid_size)
        mixed, learned, relative = count(block.attn, tokens, patches)
        macs += times * (tokens * weights + mixed + relative)
        relative_parameters += learned
        relative_macs += times * relative
    return Cost(parameters, macs, relative_parameters, relative_macs)


def attention(mixer: RelativeAttention, tokens: int, patches: int) -> tuple[int, int, int]:
    """Count MACs of the two products of attention; parameters and MACs of relative positions (separate tables).

    The relative MACs are the product of each patch in each head with every row of each table of vectors: 2 (2k + 1)
    rows per term, head_dim long, times the query or the key (logits) or the attention's marginals (values). Biases are
    lookups and cost no MACs.
    """
    parameters = macs = 0
    for name, table in mixer.position.named_parameters():
        parameters += table.numel()
        if not name.startswith("bias"):
            rows, head_dim = table.shape[-2:]
            macs += patches * mixer.num_heads * rows * head_dim
    return 2 * tokens**2 * mixer.attn_dim, parameters, macs


def hashed_attention(mixer: LSHAttention, tokens: int, patches: int) -> tuple[int, int, int]:
    """Count MACs of LSH attention: the hashes, and both products of each chunk with itself and the chunk before it."""
    rounds, head_dim, most = mixer.rotations.shape
    pairs = min(tokens // (2 * mixer.bucket_size), most)
    chunk = min(tokens, 2 * -(-tokens // max(1, 2 * pairs)))
    hashes = tokens * mixer.num_heads * head_dim * pairs
    products = 2 * -(-tokens // chunk) * chunk * 2 * chunk * mixer.num_heads * head_dim
    return rounds * (hashes + products), sum(table.numel() for table in mixer.position.parameters()), 0


def transformer_xl(mixer: RelativeAttention, tokens: int, patches: int, grid: tuple[int, int]) -> tuple[int, int, int]:
    """Count like `attention`, and 2 H - 1 and 2 W - 1 sinusoids times W_R, and each patch times their rows per head."""
    rows, parameters = sum(2 * size - 1 for size in grid), sum(part.numel() for part in mixer.position.parameters())
    projected = rows * mixer.position.row_weight.numel()
    return 2 * tokens**2 * mixer.attn_dim, parameters, projected + patches * rows * mixer.attn_dim


def attention_free(mixer: AFTSimple, tokens: int, patches: int) -> tuple[int, int, int]:
    """Count MACs of the sums over all tokens; parameters and MACs of the bias w.

    A full or local bias w = u v^T is one product, and the sums of exp(k) v and of exp(k) are two products with exp(w).
    The window of AFT-conv is a product with each patch's exp(k) v and exp(k), as the paper convolves; the sums over the
    tokens outside the window are the same for all tokens, as in AFT-simple.
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
    """Return the Markdown table of all models, sorted by mixer, image size and parameters; equal models share a row."""
    names = defaultdict(list)
    for name in timm.list_models("relvit_*"):
        with torch.device("meta"):
            model = timm.create_model(name)
        names[isinstance(model, AFTVisionTransformer), model.patch_embed.img_size, cost(model)].append(f"`{name}`")
    cells = [
        [
            *(", ".join(of_row), " x ".join(map(str, size))),
            *(f"{taken.parameters / 1e6:.3f}", f"{taken.macs / 1e9:.2f}"),
            *(f"{taken.relative_parameters / 1e3:.1f}", f"{taken.relative_macs / 1e6:.1f}"),
            f"{taken.relative_macs / taken.macs:.1%}",
        ]
        for (_, size, taken), of_row in sorted(names.items())
    ]
    lines = [f"| {' | '.join(row)} |" for row in (HEAD, *cells)]
    return "\n".join((lines[0], "|---" * len(HEAD) + "|", *lines[1:]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of all models, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--write", action="store_true", help="into docs/models.md, between its markers")
    path = ROOT / "docs" / "models.md"
    if parser.parse_args(arguments).write:
        path.write_text(replaced(path.read_text(), table(), BEGIN))
    else:
        print(table())


if __name__ == "__main__":
    main()
