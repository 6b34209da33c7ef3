"""Draw arrays as heat maps with Matplotlib, colours and heads chosen: position tables, kernels, maps over patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from relvit.app.plots.style import FONT, SMALL, literal

# At most this number of heads is drawn, because more heads would not be legible side by side.
MOST_HEADS = 12
SIGNED, UNSIGNED = "RdBu_r", "viridis"
ZERO = "all are 0"


class MapRow(NamedTuple):
    """A row of maps over the patches of an image.

    Attributes:
        label: label of the colour bar, with the unit.
        maps: the maps of the row, one for each column of the figure: (columns, rows of patches, columns of patches).
        signed: whether colours are symmetric around zero; otherwise they go from the lowest to the highest number.
    """

    label: str
    maps: np.ndarray
    signed: bool = False


def plot_tables(tables: Mapping[str, Mapping[str, np.ndarray]], title: str) -> Figure:
    """Draw position tables as heat maps: a column per table, with the layers one below the other in the same colours.

    Args:
        tables: for each layer its tables by name: (heads, offsets, channels) for vectors, with heads drawn one below
            the other; (heads, offsets) for scalars; (heads, row offsets, column offsets) if the name ends in 'joint'.
            Offsets, key minus query, go from -k to k.
        title: title of the figure.
    """
    names = list(dict.fromkeys(name for of_layer in tables.values() for name in of_layer))
    most_heads = max((len(table) for of in tables.values() for table in of.values() if table.ndim == 3), default=1)
    each = 1.6 if most_heads == 1 else min(0.8 + 0.7 * most_heads, 6)
    width, height = max(3.6 * len(names) + 1.0, 0.115 * len(title)), each * len(tables) + 1.6
    figure = Figure(figsize=(width, height), dpi=100)
    FigureCanvasAgg(figure)
    figure.suptitle(literal(title), fontsize=FONT, y=1 - 0.15 / height, va="top")
    # Compute the margins here from lengths in inches, because Matplotlib's automatic layout would draw everything
    # twice, which takes long.
    edges = {"left": 1.2 / width, "right": 1 - 0.2 / width, "bottom": 0.6 / height, "top": 1 - 1.0 / height}
    columns = figure.subplots(1, len(names), squeeze=False, gridspec_kw={**edges, "wspace": 0.3})[0]
    for axes, name in zip(columns, names, strict=True):
        found = {row: of_layer[name] for row, of_layer in enumerate(tables.values()) if name in of_layer}
        most = max(abs(table).max() for table in found.values()) or 1.0
        ticks = {}
        for row, table in found.items():
            ticks |= _draw_table(axes, name, table, row, most)
        colours = f"blue {-most:.2g} to red {most:.2g}"
        axes.set_title(f"{name}\n{colours if any(map(np.any, found.values())) else ZERO}", fontsize=FONT)
        axes.set(xlim=axes.dataLim.intervalx, ylim=(len(tables), 0))
        axes.set_yticks(list(ticks), list(ticks.values()))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.tick_params(labelsize=SMALL)
    for row, layer in enumerate(tables):
        beside = {"xytext": (-60, 0), "textcoords": "offset points", "xycoords": ("axes fraction", "data")}
        columns[0].annotate(layer, (0, row + 0.5), **beside, rotation=90, ha="center", va="center", fontsize=SMALL)
    return figure


def _draw_table(axes: Axes, name: str, table: np.ndarray, row: int, most: float) -> dict[float, int]:
    """Draw the table of one layer between the heights `row` and `row` + 1, and return the label of each height."""
    heads, offsets = table.shape[:2]
    reach, half = (offsets - 1) // 2, table.shape[-1] / 2
    along = "dy (patches)" if name.endswith("rows") else "dx (patches)"
    heads_across = heads_down = 1
    pixels, labels = table, {0: -reach, reach: 0, 2 * reach: reach}
    left, right, xlabel, ylabel = -0.5, table.shape[-1] - 0.5, "channel", along
    if name.endswith("joint"):
        pixels, ylabel = np.concatenate(list(table), axis=1), "dy (patches)"
        left, right, xlabel = -half, half, along
        if heads > 1:
            left, right, xlabel, heads_across = -0.5, heads - 0.5, "head, each by dx", heads
    elif table.ndim == 2:
        labels = {head: head for head in (0, heads // 2, heads - 1)}
        left, right, xlabel, ylabel = -half, half, along, "head"
    else:
        pixels = table.reshape(heads * offsets, -1)
        if heads > 1:
            labels = {head * offsets + reach: head for head in range(heads)}
            ylabel, heads_down = f"head, each by {along[:2]}", heads
    top, bottom = row + 0.04, row + 0.96
    colours = {"cmap": SIGNED, "vmin": -most, "vmax": most, "aspect": "auto", "interpolation": "nearest"}
    axes.imshow(pixels, **colours, extent=(left, right, bottom, top))
    axes.vlines(np.linspace(left, right, heads_across + 1), top, bottom, color="black", linewidth=0.7)
    axes.hlines(np.linspace(top, bottom, heads_down + 1), left, right, color="black", linewidth=0.7)
    axes.set_xlabel(xlabel, fontsize=SMALL)
    axes.set_ylabel(ylabel, fontsize=SMALL, labelpad=2)
    step = (bottom - top) / len(pixels)
    return {top + (place + 0.5) * step: label for place, label in labels.items()}


def plot_kernels(kernels: Mapping[str, np.ndarray], title: str, label: str, head: int | None = None) -> Figure:
    """Draw numbers by offset, key minus query, as small images around the query: a row per layer, a column per head.

    If there are more than 12 heads, the 12 heads whose numbers span the widest range are drawn.

    Args:
        kernels: for each layer (heads, rows, columns), with odd rows and columns; the offset zero is in the middle.
            NaN: there is no such offset.
        title: title of the figure.
        label: label of the colour bars, with the unit.
        head: number of the only head to draw; None: all heads.
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
        _finish_row(figure, row, image, f"{layer}\ndy (patches)", _named(label, kernel[heads]))
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
        names: titles of the columns.
        title: title of the figure.
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
            frame(axes, patch)
        _finish_row(figure, row, image, "row of patches", _named(quantity.label, quantity.maps))
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
        values: the map, which covers the whole image, with any numbers of rows and columns.
        size: rows and columns of patches, for the axes.
        title: title of the figure.
        label: label of the colour bar, with the unit.
        patch: row and column of a patch that gets a frame.
    """
    figure, grid = _panels(1, 3, _sides(3.6, size), title)
    (left, middle, right), extent = grid[0], _extent(size)
    left.imshow(picture, extent=extent)
    opaque = middle.imshow(values, extent=extent, cmap="inferno")
    right.imshow(picture, extent=extent)
    right.imshow(values, extent=extent, cmap="inferno", alpha=0.55)
    for axes, name in zip(grid[0], ("image", "map", "both"), strict=True):
        axes.set_title(name, fontsize=FONT)
        axes.set_xlabel("column of patches", fontsize=SMALL)
        frame(axes, patch)
    _finish_row(figure, grid[0], opaque, "row of patches", _named(label, values))
    return figure


def all_zero(figure: Figure) -> bool:
    """Return whether a figure has maps, and all their numbers are 0; pictures in colours are ignored."""
    found = [image.get_array() for axes in figure.axes for image in axes.images]
    maps = [values for values in found if values.ndim == 2]
    return bool(maps) and not any(np.ma.filled(values, 0).any() for values in maps)


def _named(label: str, values: np.ndarray) -> str:
    """Return the label of a colour bar, which says where all numbers are 0, since one colour may be any number."""
    return label if np.nan_to_num(values).any() else f"{label}: {ZERO}"


def _panels(rows: int, columns: int, each: tuple[float, float], title: str) -> tuple[Figure, np.ndarray]:
    """Make a figure with panels of these sizes in inches, no narrower than the title."""
    lines = title.splitlines()
    width = max(each[0] * columns + 1.6, 0.115 * max(map(len, lines)))
    figure = Figure(figsize=(width, each[1] * rows + 0.8 + 0.3 * len(lines)), layout="constrained", dpi=100)
    FigureCanvasAgg(figure)
    figure.suptitle(literal(title), fontsize=FONT)
    return figure, figure.subplots(rows, columns, squeeze=False, sharex="all", sharey="all")


def _sides(width: float, shape: Sequence[int]) -> tuple[float, float]:
    """Compute the inches of a panel with its labels for a map of this shape; a long or tall map gets margins."""
    return width, width * min(max(shape[0] / shape[1], 0.4), 2) + 0.4


def _finish_row(figure: Figure, row: Sequence[Axes], image: AxesImage, ylabel: str, label: str) -> None:
    row[0].set_ylabel(ylabel, fontsize=SMALL)
    for axes in row:
        axes.tick_params(labelsize=SMALL)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(3, integer=True))
    bar = figure.colorbar(image, ax=list(row), aspect=12)
    bar.set_label(label, fontsize=SMALL)
    bar.ax.tick_params(labelsize=SMALL)


def _extent(size: Sequence[int]) -> tuple[float, float, float, float]:
    """Return Matplotlib's extent in which whole numbers are the middles of patches."""
    return -0.5, size[1] - 0.5, size[0] - 0.5, -0.5


def frame(axes: Axes, cell: tuple[int, int] | None) -> None:
    """Draw a red frame around the cell of this row and column."""
    if cell is not None:
        corner = cell[1] - 0.5, cell[0] - 0.5
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="red", linewidth=2))
