"""Draw one picture of a model by its kind: what `relvit show` writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar, get_args

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from relvit.evaluation.pictures.grad_cam import grad_cam
from relvit.evaluation.pictures.positions import (
    NotApplicableError,
    chosen_layer,
    effective_kernels,
    learned_biases,
    logit_parts,
    patch_index,
    position_tables,
)
from relvit.layers.mixer import Mixer
from relvit.models.attention_maps import attention_maps, attention_rollout, patch_grid
from relvit.ops import Grid
from relvit.plots import MapRow, plot_kernels, plot_maps, plot_overlay, plot_tables
from relvit.training.multi_label import to_probabilities
from relvit.utils.messages import check_choice

Kind = Literal["tables", "kernels", "logits", "attention", "rollout", "cam", "aft-windows"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# What they show of a patch, in the order of a page.
LABELS: dict[Kind, str] = {
    "attention": "attention weights of the patch",
    "logits": "its logits: content and positions",
    "kernels": "positions around the patch",
    "tables": "position tables",
    "rollout": "attention rollout",
    "cam": "Grad-CAM",
    "aft-windows": "AFT biases around the patch",
}
# These need no image, but its size.
OF_THE_MODEL: tuple[Kind, ...] = ("tables", "aft-windows")
# These have a panel per head.
OF_HEADS: tuple[Kind, ...] = ("kernels", "logits", "attention", "aft-windows")
PARTS = {"q": "term q", "k": "term k", "b": "bias b", "channels": "free channels"}

Value = TypeVar("Value")


class Subject(NamedTuple):
    """A model, an image and what is asked about both; see `draw`."""

    model: nn.Module
    image: Tensor
    picture: np.ndarray
    patch: tuple[int, int] | None
    layer: int | None
    head: int | None
    class_names: Sequence[str] | None
    multi_label: bool

    @property
    def grid(self) -> tuple[int, int]:
        return patch_grid(self.model, self.image.shape[-2:])

    @property
    def size(self) -> str:
        rows, columns = self.grid
        return f"{rows} x {columns} patches"


def draw(
    kind: Kind,
    model: nn.Module,
    image: Tensor,
    picture: np.ndarray | None = None,
    *,
    patch: Sequence[int] | None = None,
    layer: int | None = None,
    head: int | None = None,
    class_names: Sequence[str] | None = None,
    multi_label: bool = False,
) -> Figure:
    """Draw one picture of what a model has learned, or does with an image.

    ===============  =================================================================================================
    ``tables``       relative tables of each layer and term, see `position_tables`
    ``kernels``      position part of the logits by offset, per layer and head, see `effective_kernels`
    ``logits``       content and position parts of the logits of one patch, per head, see `logit_parts`
    ``attention``    attention weights per head, see `relvit.models.attention_maps`
    ``rollout``      attention rollout, see `relvit.models.attention_maps.attention_rollout`
    ``cam``          Grad-CAM of the most probable class, see `grad_cam`
    ``aft-windows``  biases of attention-free layers by offset, see `learned_biases`
    ===============  =================================================================================================

    Args:
        kind: one of them.
        model: in evaluation mode: any relvit or retrofitted model, on the device of the image.
        image: (in_chans, height, width) as the model takes it, normalised; of 'tables' and 'aft-windows' only the size
            matters.
        picture: the image as uint8 (height, width, 3), for maps over it, see `relvit.plots.picture_of`; None: grey.
        patch: row and column of the query, from 0. None: for 'logits' the patch in the middle; for 'attention' and
            'rollout' the class token where the classifier reads it, else the mean of all patches; for 'kernels' and
            'aft-windows' their mean. 'cam' frames the patch.
        layer: number of the layer, from 0, or from -1 backwards. None: all; for 'logits', 'attention' and 'cam' the
            last.
        head: number of the one head to draw, from 0, where there is a panel per head; None: all.
        class_names: names of the classes.
        multi_label: whether each class has a probability of its own.

    Raises:
        NotApplicableError: a ValueError: a picture that there is not of this model.
        ValueError: an unknown kind, a patch, layer or head that there is not, a model in training mode.
        MissingPackageError: 'cam' without the package `grad-cam`.
    """
    check_choice("kind", kind, KINDS)
    if head is not None and kind not in OF_HEADS:
        raise NotApplicableError(f"{kind} has no panel per head: leave head out")
    if picture is None:
        picture = np.full((*image.shape[-2:], 3), 128, np.uint8)
    if patch is not None:
        patch = (int(patch[0]), int(patch[1])) if len(patch) == 2 else tuple(patch)
        patch_index(patch, Grid(*patch_grid(model, image.shape[-2:])))
    return DRAW[kind](Subject(model, image, picture, patch, layer, head, class_names, multi_label))


def _tables(subject: Subject) -> Figure:
    if subject.patch is not None:
        raise NotApplicableError("tables are the same for all patches: leave patch out")
    found = _of_layer(position_tables(subject.model, subject.image.shape[-2:]), subject.layer)
    tables = {name: {table: numbers.numpy() for table, numbers in of.items()} for name, of in found.items()}
    return plot_tables(tables, "Relative position tables by offset, key minus query")


def _kernels(subject: Subject) -> Figure:
    found = _of_layer(effective_kernels(subject.model, subject.image, subject.patch), subject.layer)
    kernels = {name: kernel.numpy() for name, kernel in found.items()}
    _heads(subject, min(map(len, kernels.values())))
    query = "mean query of all patches" if subject.patch is None else f"query of patch {subject.patch}"
    title = f"Position part of the logits around a query\n{query}, {subject.size}"
    return plot_kernels(kernels, title, "logit", subject.head)


def _logits(subject: Subject) -> Figure:
    rows, columns = subject.grid
    patch = subject.patch or (rows // 2, columns // 2)
    layer = -1 if subject.layer is None else subject.layer
    parts = logit_parts(subject.model, subject.image, patch, layer)
    total = torch.stack(list(parts.values())).sum(0)
    named = {"content": parts.pop("content"), **{PARTS[name]: part for name, part in parts.items()}, "sum": total}
    named = {f"{name} (logit)": part for name, part in named.items()} | {"attention weight": total.softmax(-1)}
    first = total.shape[-1] - rows * columns
    chosen = _heads(subject, len(total))
    drawn = [
        MapRow(
            name,
            part[chosen, first:].unflatten(1, (rows, columns)).float().numpy(),
            name.startswith(tuple(PARTS.values())),
        )
        for name, part in named.items()
    ]
    heads = [f"head {head}" for head in chosen]
    title = f"Logits of the query of patch {patch}, layer {_number(subject, layer)}, {subject.size}"
    return plot_maps(subject.picture, drawn, heads, title, patch)


def _attention(subject: Subject) -> Figure:
    layer = -1 if subject.layer is None else subject.layer
    maps = _applied(lambda: attention_maps(subject.model, subject.image[None], [layer]))
    weights, query = _row_of(subject, maps.weights[0][0].cpu(), maps.prefix)
    chosen = _heads(subject, len(weights))
    weights = weights[chosen]
    drawn = weights[:, maps.prefix :].unflatten(1, maps.grid).numpy()
    heads = [f"head {head}" for head in chosen]
    if maps.prefix:
        heads = [
            f"{head}\n{part:.0%} to prefix" for head, part in zip(heads, weights[:, : maps.prefix].sum(1), strict=True)
        ]
    title = f"Attention weights of {query}, layer {_number(subject, layer)}, {subject.size}"
    return plot_maps(subject.picture, [MapRow("attention weight", drawn)], heads, title, subject.patch)


def _rollout(subject: Subject) -> Figure:
    if subject.layer is not None:
        raise NotApplicableError("rollout goes through all layers: leave layer out")
    rollout = _applied(lambda: attention_rollout(subject.model, subject.image[None]))[0].cpu()
    rows, columns = subject.grid
    prefix = len(rollout) - rows * columns
    row, query = _row_of(subject, rollout, prefix)
    title = f"Attention rollout of {query}\nall layers, {subject.size}"
    values = row[prefix:].unflatten(0, (rows, columns)).numpy()
    return plot_overlay(subject.picture, values, subject.grid, title, "rollout weight", subject.patch)


def _cam(subject: Subject) -> Figure:
    with torch.no_grad():
        probabilities = to_probabilities(subject.model(subject.image[None])[0], subject.multi_label)
    label = int(probabilities.argmax())
    layer = -1 if subject.layer is None else subject.layer
    values = grad_cam(subject.model, subject.image, label, layer).numpy()
    name = f"class {label}" if subject.class_names is None else subject.class_names[label]
    title = (
        f"Grad-CAM of {name}, the most probable class ({probabilities[label]:.0%})\nat layer {_number(subject, layer)}"
    )
    return plot_overlay(subject.picture, values, subject.grid, f"{title}, {subject.size}", "relative to the highest")


def _aft_windows(subject: Subject) -> Figure:
    found = _of_layer(learned_biases(subject.model, subject.image.shape[-2:], subject.patch), subject.layer)
    windows = {name: window.numpy() for name, window in found.items()}
    _heads(subject, min(map(len, windows.values())))
    query = "" if subject.patch is None else f"\nquery of patch {subject.patch}"
    title = f"Biases w by offset, key minus query{query}"
    return plot_kernels(windows, title, "w", subject.head)


DRAW: dict[Kind, Callable[[Subject], Figure]] = {
    "tables": _tables,
    "kernels": _kernels,
    "logits": _logits,
    "attention": _attention,
    "rollout": _rollout,
    "cam": _cam,
    "aft-windows": _aft_windows,
}


def first_kinds(model: nn.Module) -> list[Kind]:
    """Return what to show of a model first."""
    mixers = [type(layer) for layer in model.modules() if isinstance(layer, Mixer)]
    biased = any(mixer.learned_bias is not Mixer.learned_bias for mixer in mixers)
    return ["attention", "kernels", *(["aft-windows"] if biased else [])]


def _of_layer(found: dict[str, Value], layer: int | None) -> dict[str, Value]:
    if layer is None:
        return found
    name = chosen_layer(list(found), layer)
    return {name: found[name]}


def _heads(subject: Subject, count: int) -> list[int]:
    """The numbers of the heads to draw, of so many."""
    if subject.head is None:
        return list(range(count))
    if not 0 <= subject.head < count:
        raise ValueError(f"head is {subject.head}, the layer has {count}: give a number from 0 to {count - 1}")
    return [subject.head]


def _number(subject: Subject, layer: int) -> int:
    return layer % len(subject.model.blocks)


def _row_of(subject: Subject, weights: Tensor, prefix: int) -> tuple[Tensor, str]:
    """The row (..., N) of weights (..., N, N) of the asked query, and what the query is."""
    if subject.patch is not None:
        return weights[..., prefix + patch_index(subject.patch, Grid(*subject.grid)), :], f"patch {subject.patch}"
    if prefix and getattr(subject.model, "global_pool", "") == "token":
        return weights[..., 0, :], "the class token"
    return weights[..., prefix:, :].mean(-2), "the mean of all patches"


def _applied(compute: Callable[[], Value]) -> Value:
    """Call it; what it refuses is a picture that there is not of this model."""
    try:
        return compute()
    except (TypeError, ValueError) as error:
        raise NotApplicableError(str(error)) from error
