"""Draw what positions do, layer by layer, as heat maps: tables, kernels, and maps over the patches of an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from relvit.plots.style import FONT, SMALL, literal

# More heads than this are not legible side by side: those with the largest numbers are drawn.
MOST_HEADS = 12
SIGNED, UNSIGNED, MARK = "RdBu_r", "viridis", "red"


class MapRow(NamedTuple):
    """A row of maps over the patches of an image.

    Attributes:
        label: of the colour bar, with the unit.
        maps: (columns, rows of patches, columns of patches).
        signed: colours around zero instead of from the lowest to the highest number.
    """

    label: str
    maps: np.ndarray
    signed: bool = False


class TableImage(NamedTuple):
    """A position table as an image: what is drawn, and what its axes say."""

    pixels: np.ndarray
    across: tuple[float, float]
    ticks: dict[float, Any]
    xlabel: str
    ylabel: str
    heads_across: int = 1
    heads_down: int = 1


def plot_tables(tables: Mapping[str, Mapping[str, np.ndarray]], title: str) -> Figure:
    """Draw position tables as heat maps, a column per table, its layers one below the other in common colours.

    Args:
        tables: layer -> name -> numbers: (heads, offsets, channels) of vectors, where heads are drawn one below the
            other; (heads, offsets) of scalars; of a name that ends in 'joint' (heads, row offsets, column offsets).
            Offsets, key minus query, go from -k to k.
        title: above all.
    """
    names = list(dict.fromkeys(name for of_layer in tables.values() for name in of_layer))
    of_heads = [len(table) for of_layer in tables.values() for table in of_layer.values() if table.ndim == 3]
    each = 1.6 if max(of_heads, default=1) == 1 else min(0.8 + 0.7 * max(of_heads), 6)
    width, height = max(3.6 * len(names) + 1.0, 0.115 * len(title)), each * len(tables) + 1.6
    figure = Figure(figsize=(width, height), dpi=100)
    FigureCanvasAgg(figure)
    figure.suptitle(literal(title), fontsize=FONT, y=1 - 0.15 / height, va="top")
    # Margins in inches, as the labels need them. Matplotlib's own layout draws everything twice.
    edges = {"left": 1.2 / width, "right": 1 - 0.2 / width, "bottom": 0.6 / height, "top": 1 - 1.0 / height}
    columns = figure.subplots(1, len(names), squeeze=False, gridspec_kw={**edges, "wspace": 0.3})[0]
    for axes, name in zip(columns, names, strict=True):
        found = {row: of_layer[name] for row, of_layer in enumerate(tables.values()) if name in of_layer}
        most = max(abs(table).max() for table in found.values()) or 1.0
        axes.set_title(f"{name}\nblue {-most:.2g} to red {most:.2g}", fontsize=FONT)
        _draw_column(axes, {row: _table_image(name, table) for row, table in found.items()}, most)
        axes.set_ylim(len(tables), 0)
    for row, layer in enumerate(tables):
        beside = {"xytext": (-60, 0), "textcoords": "offset points", "xycoords": ("axes fraction", "data")}
        columns[0].annotate(layer, (0, row + 0.5), **beside, rotation=90, ha="center", va="center", fontsize=SMALL)
    return figure


def _draw_column(axes: Axes, images: Mapping[int, TableImage], most: float) -> None:
    """Draw the table of each layer, by its row, from 0.04 below that number on and as far above the next."""
    ticks, margin = {}, 0.04
    for row, image in images.items():
        left, right = image.across
        top, bottom = row + margin, row + 1 - margin
        colours = {"cmap": SIGNED, "vmin": -most, "vmax": most, "aspect": "auto", "interpolation": "nearest"}
        axes.imshow(image.pixels, **colours, extent=(left, right, bottom, top))
        axes.vlines(np.linspace(left, right, image.heads_across + 1), top, bottom, color="black", linewidth=0.7)
        axes.hlines(np.linspace(top, bottom, image.heads_down + 1), left, right, color="black", linewidth=0.7)
        step = (bottom - top) / len(image.pixels)
        ticks |= {top + (place + 0.5) * step: label for place, label in image.ticks.items()}
    axes.set_xlim(min(image.across[0] for image in images.values()), max(image.across[1] for image in images.values()))
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.tick_params(labelsize=SMALL)
    # Of all layers alike.
    axes.set_xlabel(image.xlabel, fontsize=SMALL)
    axes.set_ylabel(image.ylabel, fontsize=SMALL, labelpad=2)


def _table_image(name: str, table: np.ndarray) -> TableImage:
    heads, offsets = table.shape[:2]
    reach = (offsets - 1) // 2
    offset = "dy (patches)" if name.endswith("rows") else "dx (patches)"
    of_offsets = {0: -reach, reach: 0, 2 * reach: reach}
    if name.endswith("joint"):
        half = table.shape[2] / 2
        across = (-half, half) if heads == 1 else (-0.5, heads - 0.5)
        xlabel = "dx (patches)" if heads == 1 else "head, each by dx"
        return TableImage(np.concatenate(list(table), axis=1), across, of_offsets, xlabel, "dy (patches)", heads)
    if table.ndim == 2:
        shown = sorted({0, heads // 2, heads - 1})
        return TableImage(table, (-offsets / 2, offsets / 2), dict(zip(shown, shown, strict=True)), offset, "head")
    across = (-0.5, table.shape[2] - 0.5)
    if heads == 1:
        return TableImage(table[0], across, of_offsets, "channel", offset)
    of_heads = {head * offsets + reach: head for head in range(heads)}
    pixels, ylabel = table.reshape(heads * offsets, -1), f"head, each by {offset[:2]}"
    return TableImage(pixels, across, of_heads, "channel", ylabel, heads_down=heads)


def plot_kernels(kernels: Mapping[str, np.ndarray], title: str, label: str, head: int | None = None) -> Figure:
    """Draw numbers by offset, key minus query, as small images around the query: a row per layer, a column per head.

    Of more than 12 heads those whose numbers span the widest range are drawn.

    Args:
        kernels: layer -> (heads, rows, columns), both odd; the offset of the middle is zero. NaN: no such offset.
        title: above all.
        label: of the colour bars, with the unit.
        head: number of the one head to draw; None: all.
    """
    most_heads = max(len(kernel) for kernel in kernels.values())
    columns = min(most_heads, MOST_HEADS) if head is None else 1
    if head is None and most_heads > columns:
        title += f"\nof {most_heads} heads the {columns} of the widest range in each layer"
    shape = next(iter(kernels.values())).shape[1:]
    figure, grid = _panels(len(kernels), columns, _sides(1.9, shape), title)
    for row, (layer, kernel) in zip(grid, kernels.items(), strict=True):
        spread = np.nanmax(kernel, axis=(1, 2)) - np.nanmin(kernel, axis=(1, 2))
        heads = np.sort(np.argsort(-spread, kind="stable")[:columns]) if head is None else [head]
        most = np.nanmax(abs(kernel[heads])) or 1.0
        down, across = (size / 2 for size in kernel.shape[1:])
        for axes, index in zip(row, heads, strict=False):
            extent = (-across, across, down, -down)
            image = axes.imshow(kernel[index], cmap=SIGNED, vmin=-most, vmax=most, extent=extent)
            axes.plot(0, 0, marker="+", color="black", markersize=10)
            axes.set_title("all heads" if len(kernel) == 1 else f"head {index}", fontsize=SMALL)
        _finish_row(figure, row, image, f"{layer}\ndy (patches)", label)
    for axes in grid[-1]:
        axes.set_xlabel("dx (patches)", fontsize=SMALL)
    return figure


def plot_maps(
    picture: np.ndarray,
    rows: Sequence[MapRow],
    names: Sequence[str],
    title: str,
    patch: tuple[int, int] | None = None,
) -> Figure:
    """Draw maps over the patches of an image beside the image: a row per quantity, a column per head.

    Args:
        picture: uint8 (height, width, 3).
        rows: the quantities, each with as many maps as there are names.
        names: of the columns.
        title: above all.
        patch: row and column of the query, which gets a frame.
    """
    size = rows[0].maps.shape[1:]
    figure, grid = _panels(len(rows), len(names) + 1, _sides(2.2, size), title)
    for number, (row, quantity) in enumerate(zip(grid, rows, strict=True)):
        row[0].imshow(picture, extent=_extent(size))
        row[0].set_title("image" if number == 0 else "", fontsize=SMALL)
        most = abs(quantity.maps).max() or 1.0
        low, high = (-most, most) if quantity.signed else (quantity.maps.min(), quantity.maps.max())
        colours = {"cmap": SIGNED if quantity.signed else UNSIGNED, "vmin": low, "vmax": high}
        for axes, values, name in zip(row[1:], quantity.maps, names, strict=True):
            image = axes.imshow(values, extent=_extent(size), **colours)
            axes.set_title(name if number == 0 else "", fontsize=SMALL)
        for axes in row:
            _frame(axes, patch)
        _finish_row(figure, row, image, "row of patches", quantity.label)
    for axes in grid[-1]:
        axes.set_xlabel("column of patches", fontsize=SMALL)
    return figure


def plot_overlay(
    picture: np.ndarray,
    values: np.ndarray,
    size: tuple[int, int],
    title: str,
    label: str,
    patch: tuple[int, int] | None = None,
) -> Figure:
    """Draw an image, a map of the image, and the map over the image.

    Args:
        picture: uint8 (height, width, 3).
        values: (rows, columns) of any number: the map covers the whole image.
        size: rows and columns of patches, for the axes.
        title: above all.
        label: of the colour bar, with the unit.
        patch: row and column of a patch that gets a frame.
    """
    figure, grid = _panels(1, 3, _sides(3.6, size), title)
    for axes, name in zip(grid[0], ("image", "map", "both"), strict=True):
        axes.set_title(name, fontsize=FONT)
        axes.set_xlabel("column of patches", fontsize=SMALL)
        if name != "map":
            axes.imshow(picture, extent=_extent(size))
        if name != "image":
            alpha = 0.55 if name == "both" else None
            image = axes.imshow(values, extent=_extent(size), cmap="inferno", alpha=alpha)
        _frame(axes, patch)
        if name == "map":
            opaque = image
    _finish_row(figure, grid[0], opaque, "row of patches", label)
    return figure


def _panels(rows: int, columns: int, each: tuple[float, float], title: str) -> tuple[Figure, np.ndarray]:
    """Make a figure with panels of so many inches, no narrower than the title."""
    lines = title.splitlines()
    width = max(each[0] * columns + 1.6, 0.115 * max(map(len, lines)))
    figure = Figure(figsize=(width, each[1] * rows + 0.8 + 0.3 * len(lines)), layout="constrained", dpi=100)
    FigureCanvasAgg(figure)
    figure.suptitle(literal(title), fontsize=FONT)
    return figure, figure.subplots(rows, columns, squeeze=False, sharex="all", sharey="all")


def _sides(width: float, shape: Sequence[int]) -> tuple[float, float]:
    """Inches of a panel, and of its labels, for a map of this shape; of a long or tall one with margins."""
    return width, width * min(max(shape[0] / shape[1], 0.4), 2) + 0.4


def _finish_row(figure: Figure, row: Sequence[Axes], image: AxesImage, ylabel: str, label: str) -> None:
    row[0].set_ylabel(ylabel, fontsize=SMALL)
    for axes in row:
        axes.tick_params(labelsize=SMALL)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(3, integer=True))
    _colour_bar(figure, image, list(row), label, aspect=12)


def _colour_bar(figure: Figure, image: AxesImage, row: list[Axes], label: str, **options: Any) -> None:
    bar = figure.colorbar(image, ax=row, **options)
    bar.set_label(label, fontsize=SMALL)
    bar.ax.tick_params(labelsize=SMALL)


def _extent(size: Sequence[int]) -> tuple[float, float, float, float]:
    """Coordinates in patches, whole numbers in their middle."""
    return -0.5, size[1] - 0.5, size[0] - 0.5, -0.5


def _frame(axes: Axes, patch: tuple[int, int] | None) -> None:
    if patch is not None:
        row, column = patch
        axes.plot(
            [column - 0.5, column + 0.5, column + 0.5, column - 0.5, column - 0.5],
            [row - 0.5, row - 0.5, row + 0.5, row + 0.5, row - 0.5],
            color=MARK,
            linewidth=2,
        )
