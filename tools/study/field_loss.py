"""Find why a model loses accuracy where the field of view grows: embedding, average over tokens, or tables.

    python tools/study/field_loss.py CKPT --root IMAGES --size 64

Each row changes one part of the same model, which sees the same test images by the protocol `field`. CKPT is a model of
relvit with a learned embedding, average pooling and no class token. The rows are:

- as it is: the learned embedding is interpolated over the larger grid;
- embedding: the learned embedding is left out; or it lies in the centre at its own scale, continued by zeros, by its
  mean, by the vectors at its edge, or mirrored as the image is;
- average: the average is taken over the tokens of the trained grid in the centre alone;
- reach: attention is restricted to windows of the trained size, or sharpened over the additional tokens (`logn`), or
  the tables are stretched;
- 'offsets too': the tables get the mirrored places as well. Each copy of a patch is then where the patch is, and little
  but the mirrored contents of the copies can differ from the image at its trained size.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from relvit.app.evaluation.evaluate_sizes import evaluate_size
from relvit.app.training import Checkpoint, classifier_of
from relvit.layers import RelativeAttention
from relvit.models import set_reach
from relvit.ops import Grid, make_grid

Change = Callable[[nn.Module], object]


def continued(how: str, learned: Tensor, size: tuple[int, int]) -> Tensor:
    """Lay (h, w, dim) vectors in the centre of a larger grid, (H, W, dim), and continue them.

    Args:
        how: 'zero' or 'mean' beyond the edge; 'edge' repeats the outermost vectors; 'reflect' mirrors them with the
            outermost one twice, as an image is mirrored at the middle of its outermost pixels; 'nothing' is zero
            everywhere.
        learned: the vectors of the trained grid.
        size: rows and columns of the larger grid.
    """
    if how == "nothing":
        return learned.new_zeros(*size, learned.shape[-1])
    inside = torch.ones(1, 1, 1, dtype=torch.bool)
    grid = learned
    for axis, (length, many) in enumerate(zip(learned.shape, size, strict=False)):
        index = torch.arange(many) - (many - length) // 2
        grid = grid.index_select(axis, mirrored(length, many) if how == "reflect" else index.clamp(0, length - 1))
        inside = inside & ((index >= 0) & (index < length)).view(-1, *[1] * (2 - axis))
    outside = learned.mean((0, 1)) if how == "mean" else learned.new_zeros(())
    return torch.where(inside, grid, outside) if how in ("zero", "mean") else grid


def mirrored(length: int, many: int) -> Tensor:
    """Return which of the `length` places in the centre each of `many` places shows: (many,) int64."""
    turned = (torch.arange(many) - (many - length) // 2) % (2 * length)
    return torch.where(turned < length, turned, 2 * length - 1 - turned)


def embedding(how: str, size: int) -> Change:
    """Return a change of the learned embedding for images of `size` px."""

    def change(net: nn.Module) -> None:
        grid = net.patch_embed.dynamic_feat_size((size, size))
        learned = net.pos_embed.detach()[0].unflatten(0, net.patch_embed.grid_size)
        net.pos_embed = nn.Parameter(continued(how, learned, grid).flatten(0, 1)[None])
        net.patch_embed.grid_size = grid

    return change


def offsets(size: int) -> Change:
    """Return a change that gives tables the mirrored places of the trained grid in images of `size` px."""

    def change(net: nn.Module) -> None:
        grid, trained = net.patch_embed.dynamic_feat_size((size, size)), net.patch_embed.grid_size
        places = [mirrored(length, many) for length, many in zip(trained, grid, strict=True)]
        folded = make_grid(*trained, coords=torch.cartesian_prod(*places))

        def fold(module: nn.Module, given: tuple[Tensor, Grid]) -> tuple[Tensor, Grid]:
            return given[0], folded

        for module in net.modules():
            if isinstance(module, RelativeAttention):
                module.register_forward_pre_hook(fold)

    return change


def centre(size: int) -> Change:
    """Return a change that averages over tokens in the centre only, as many as the trained grid has."""

    def change(net: nn.Module) -> None:
        grid, (rows, columns) = net.patch_embed.dynamic_feat_size((size, size)), net.patch_embed.grid_size
        top, left = (grid[0] - rows) // 2, (grid[1] - columns) // 2

        def cut(module: nn.Module, given: object, tokens: Tensor) -> Tensor:
            return tokens.unflatten(1, grid)[:, top : top + rows, left : left + columns].flatten(1, 2)

        net.norm.register_forward_hook(cut)

    return change


def changes(size: int, trained: int) -> dict[str, tuple[Change, ...]]:
    """List the changes of the model by name, for images of `size` px."""
    laid = {
        f"embedding in the centre, then {how}": (embedding(how, size),) for how in ("zero", "mean", "edge", "reflect")
    }
    reach = {name: (lambda net, name=name: set_reach(net, name, trained),) for name in ("windows", "logn", "stretch")}
    return {
        "as it is": (),
        "no embedding": (embedding("nothing", size),),
        **laid,
        "average over the centre": (centre(size),),
        **{f"reach {name}": changed for name, changed in reach.items()},
        "edge, centre": (centre(size), embedding("edge", size)),
        "edge, logn": (*reach["logn"], embedding("edge", size)),
        "edge, stretch": (*reach["stretch"], embedding("edge", size)),
        "edge, windows": (*reach["windows"], embedding("edge", size)),
        "reflect, windows": (*reach["windows"], embedding("reflect", size)),
        "reflect, logn": (*reach["logn"], embedding("reflect", size)),
        # Take the offsets first, while the model's grid is still the trained one.
        "reflect, offsets too": (offsets(size), embedding("reflect", size)),
    }


def main() -> None:
    """Print the accuracy of each change."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--root", help="folder of the images; default: the one of the training")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--split", default="test")
    given = parser.parse_args()
    checkpoint = Checkpoint.read(given.checkpoint)
    classifier, data = classifier_of(checkpoint), checkpoint.data_module(root=given.root)
    table = Table("change", "accuracy", "±", "minus as it is", box=None)
    made, first = classifier.net, None
    for name, parts in changes(given.size, data.img_size[0]).items():
        classifier.net = copy.deepcopy(made)
        for change in parts:
            change(classifier.net)
        row = evaluate_size(classifier, data, given.size, given.split, "field")
        accuracy = row["acc1"]
        first = accuracy if first is None else first
        table.add_row(name, f"{100 * accuracy:.1f}", f"{100 * row['acc1_se']:.1f}", f"{100 * (accuracy - first):+.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
