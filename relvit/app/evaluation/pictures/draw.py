"""Kinds of pictures of a model, and how to draw each, for `relvit show` and the boxes of `relvit demo`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from relvit.app.evaluation.pictures.grad_cam import grad_cam
from relvit.app.evaluation.pictures.positions import (
    NotApplicableError,
    aft_windows,
    chosen_layer,
    effective_kernels,
    logit_parts,
    patch_index,
    position_tables,
)
from relvit.app.plots import MapRow, plot_kernels, plot_maps, plot_overlay, plot_tables
from relvit.layers import Mixer
from relvit.models import attention_maps, attention_rollout, patch_grid
from relvit.ops import Grid
from relvit.utils.messages import check_choice

Kind = Literal["tables", "kernels", "logits", "attention", "rollout", "cam", "aft-windows"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# The demo page offers these kinds of pictures in this order, with these labels.
LABELS: dict[Kind, str] = {
    "attention": "attention weights of the patch",
    "logits": "its logits: content and positions",
    "kernels": "positions around the patch",
    "tables": "position tables",
    "rollout": "attention rollout",
    "cam": "Grad-CAM",
    "aft-windows": "AFT biases around the patch",
}
# These kinds of pictures show only the model, and depend on the size of the image, not on its content.
OF_THE_MODEL: tuple[Kind, ...] = ("tables", "aft-windows")
# Pictures of these kinds have a panel per head.
OF_HEADS: tuple[Kind, ...] = ("kernels", "logits", "attention", "aft-windows")
PARTS = {"q": "term q", "k": "term k", "b": "bias b", "channels": "free channels"}


class Subject(NamedTuple):
    """The arguments of `draw`."""

    model: nn.Module
    image: Tensor
    picture: np.ndarray
    patch: tuple[int, int] | None
    layer: int | None
    head: int | None
    class_names: Sequence[str] | None
    probabilities: Callable[[Tensor], Tensor] | None

    @property
    def grid(self) -> tuple[int, int]:
        return patch_grid(self.model, self.image.shape[-2:])

    @property
    def size(self) -> str:
        rows, columns = self.grid
        return f"{rows} x {columns} patches"

    def heads(self, count: int) -> list[int]:
        """Return the numbers of the heads to draw for a layer with `count` heads."""
        if self.head is None:
            return list(range(count))
        if not 0 <= self.head < count:
            raise ValueError(f"head is {self.head}, the layer has {count}: give a number from 0 to {count - 1}")
        return [self.head]

    def of_layer(self, found: dict[str, Any]) -> dict[str, Any]:
        """Return the entry of the layer to draw, or all entries."""
        if self.layer is None:
            return found
        name = chosen_layer(list(found), self.layer)
        return {name: found[name]}

    def row_of_query(self, weights: Tensor, prefix: int) -> tuple[Tensor, str]:
        """Return the row (..., N) of weights (..., N, N) of the query to draw, and the query's name."""
        if self.patch is not None:
            return weights[..., prefix + patch_index(self.patch, Grid(*self.grid)), :], f"patch {self.patch}"
        if prefix and getattr(self.model, "global_pool", "") == "token":
            return weights[..., 0, :], "the class token"
        return weights[..., prefix:, :].mean(-2), "the mean of all patches"


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
    probabilities: Callable[[Tensor], Tensor] | None = None,
) -> Figure:
    """Draw one picture of what a model has learned, or does with an image.

    The logits of a relvit model's attention are a content part plus position terms (q, k, b), which depend on the
    offset from the query's patch to the key's patch.

    ===============  =================================================================================================
    ``tables``       position tables by offset, for each layer and term (q, k, v, b), see `position_tables`
    ``kernels``      position part of the logits by offset, per layer and head, see `effective_kernels`
    ``logits``       content and position parts of the logits of one patch, per head, see `logit_parts`
    ``attention``    attention weights per head, see `relvit.models.attention_maps`
    ``rollout``      attention rollout, see `relvit.models.attention_maps.attention_rollout`
    ``cam``          Grad-CAM of the most probable class, see `grad_cam`
    ``aft-windows``  biases of attention-free layers by offset, see `aft_windows`
    ===============  =================================================================================================

    Args:
        kind: one of the kinds above.
        model: a relvit or retrofitted model, in evaluation mode, on the device of the image.
        image: (in_chans, height, width) as the model takes it, normalised; 'tables' and 'aft-windows' only use its
            size.
        picture: the image as uint8 (height, width, 3), on which maps are drawn, see `relvit.app.plots.picture_of`;
            None: maps are drawn on plain grey.
        patch: row and column of the query, from 0. None: for 'logits' the patch in the middle; for 'attention' and
            'rollout' the class token if the classifier reads it, otherwise the mean over all patches; for 'kernels' and
            'aft-windows' the mean over all patches. 'cam' draws a frame around the patch.
        layer: index of the layer; negative ones count from the last layer. None: all layers; for 'logits', 'attention'
            and 'cam' the last layer.
        head: index of the only head to draw, for kinds with a panel per head; None: all heads.
        class_names: names of the classes.
        probabilities: function from images (1, in_chans, height, width) to probabilities (1, classes), for 'cam', such
            as `Predictor.probabilities`, which knows temperature and labels; None: the softmax of the model's logits.

    Raises:
        NotApplicableError: a ValueError: there is no picture of this kind for the model.
        ValueError: `kind` is unknown, `patch`, `layer` or `head` does not exist, or the model is in training mode.
        MissingPackageError: `kind` is 'cam', and the package `grad-cam` is not installed.
    """
    check_choice("kind", kind, KINDS)
    if head is not None and kind not in OF_HEADS:
        raise NotApplicableError(f"{kind} has no panel per head: leave head out")
    if picture is None:
        picture = np.full((*image.shape[-2:], 3), 128, np.uint8)
    if patch is not None:
        patch = (int(patch[0]), int(patch[1])) if len(patch) == 2 else tuple(patch)
        patch_index(patch, Grid(*patch_grid(model, image.shape[-2:])))
    return DRAW[kind](Subject(model, image, picture, patch, layer, head, class_names, probabilities))


def _tables(subject: Subject) -> Figure:
    if subject.patch is not None:
        raise NotApplicableError("tables are the same for all patches: leave patch out")
    found = subject.of_layer(position_tables(subject.model, subject.image.shape[-2:]))
    tables = {name: {table: numbers.numpy() for table, numbers in of.items()} for name, of in found.items()}
    return plot_tables(tables, "Relative position tables by offset, key minus query")


def _kernels(subject: Subject) -> Figure:
    kernels = effective_kernels(subject.model, subject.image, subject.patch)
    query = "mean query of all patches" if subject.patch is None else f"query of patch {subject.patch}"
    return _by_offset(subject, kernels, f"Position part of the logits around a query\n{query}, {subject.size}", "logit")


def _aft_windows(subject: Subject) -> Figure:
    biases = aft_windows(subject.model, subject.image.shape[-2:], subject.patch)
    query = "" if subject.patch is None else f"\nquery of patch {subject.patch}"
    return _by_offset(subject, biases, f"Biases w by offset, key minus query{query}", "w")


def _by_offset(subject: Subject, found: dict[str, Tensor], title: str, label: str) -> Figure:
    kernels = {name: kernel.numpy() for name, kernel in subject.of_layer(found).items()}
    subject.heads(min(map(len, kernels.values())))
    return plot_kernels(kernels, title, label, subject.head)


def _logits(subject: Subject) -> Figure:
    rows, columns = subject.grid
    patch = subject.patch or (rows // 2, columns // 2)
    layer = -1 if subject.layer is None else subject.layer
    parts = logit_parts(subject.model, subject.image, patch, layer)
    total = torch.stack(list(parts.values())).sum(0)
    named = {"content": parts.pop("content"), **{PARTS[name]: part for name, part in parts.items()}, "sum": total}
    named = {f"{name} (logit)": part for name, part in named.items()} | {"attention weight": total.softmax(-1)}
    first = total.shape[-1] - rows * columns
    chosen = subject.heads(len(total))
    drawn = []
    for name, part in named.items():
        maps = part[chosen, first:].unflatten(1, (rows, columns)).float().numpy()
        drawn.append(MapRow(name, maps, signed=name.startswith(tuple(PARTS.values()))))
    heads = [f"head {head}" for head in chosen]
    title = f"Logits of the query of patch {patch}, layer {_number(subject, layer)}, {subject.size}"
    return plot_maps(subject.picture, drawn, heads, title, patch)


def _attention(subject: Subject) -> Figure:
    layer = -1 if subject.layer is None else subject.layer
    maps = _applied(lambda: attention_maps(subject.model, subject.image[None], [layer]))
    weights, query = subject.row_of_query(maps.weights[0][0].cpu(), maps.prefix)
    chosen = subject.heads(len(weights))
    weights = weights[chosen]
    drawn = weights[:, maps.prefix :].unflatten(1, maps.grid).numpy()
    heads = [f"head {head}" for head in chosen]
    if maps.prefix:
        parts = weights[:, : maps.prefix].sum(1)
        heads = [f"{head}\n{part:.0%} to prefix" for head, part in zip(heads, parts, strict=True)]
    title = f"Attention weights of {query}, layer {_number(subject, layer)}, {subject.size}"
    return plot_maps(subject.picture, [MapRow("attention weight", drawn)], heads, title, subject.patch)


def _rollout(subject: Subject) -> Figure:
    if subject.layer is not None:
        raise NotApplicableError("rollout goes through all layers: leave layer out")
    rollout = _applied(lambda: attention_rollout(subject.model, subject.image[None]))[0].cpu()
    rows, columns = subject.grid
    prefix = len(rollout) - rows * columns
    row, query = subject.row_of_query(rollout, prefix)
    title = f"Attention rollout of {query}\nall layers, {subject.size}"
    values = row[prefix:].unflatten(0, (rows, columns)).numpy()
    return plot_overlay(subject.picture, values, subject.grid, title, "rollout weight", subject.patch)


def _cam(subject: Subject) -> Figure:
    image = subject.image[None]
    with torch.no_grad():
        if subject.probabilities is None:
            (probabilities,) = subject.model(image).float().softmax(-1)
        else:
            (probabilities,) = subject.probabilities(image)
    label = int(probabilities.argmax())
    layer = -1 if subject.layer is None else subject.layer
    values = grad_cam(subject.model, subject.image, label, layer).numpy()
    name = f"class {label}" if subject.class_names is None else subject.class_names[label]
    title = f"Grad-CAM of {name}, the most probable class ({probabilities[label]:.0%})"
    title += f"\nat layer {_number(subject, layer)}, {subject.size}"
    return plot_overlay(subject.picture, values, subject.grid, title, "0: lowest, 1: highest", subject.patch)


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
    """Return the kinds that the demo page shows first."""
    mixers = [type(layer) for layer in model.modules() if isinstance(layer, Mixer)]
    biased = any(mixer.learned_bias is not Mixer.learned_bias for mixer in mixers)
    return ["attention", "kernels", *(["aft-windows"] if biased else [])]


def _number(subject: Subject, layer: int) -> int:
    # Models of transformers have other names for their blocks, so count mixers: each block has one.
    blocks = getattr(subject.model, "blocks", None) or [m for m in subject.model.modules() if isinstance(m, Mixer)]
    return layer % len(blocks)


def _applied(compute: Callable[[], Any]) -> Any:
    """Call a function of attention maps, which raises TypeError or ValueError for models without attention."""
    try:
        return compute()
    except (TypeError, ValueError) as error:
        raise NotApplicableError(str(error)) from error
