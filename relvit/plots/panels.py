"""Draw rows of panels, one row per layer, each with a colour bar: tables, kernels and maps of a model."""

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


def plot_tables(tables: Mapping[str, Mapping[str, np.ndarray]], title: str) -> Figure:
    """Draw position tables as heat maps, a row per layer and a column per table; colours are common to a column.

    Args:
        tables: layer -> name -> numbers: (heads, offsets, channels) of vectors, where heads are drawn one below the
            other; (heads, offsets) of scalars; of a name that ends in 'joint' (heads, row offsets, column offsets).
            Offsets, key minus query, go from -k to k.
        title: above all.
    """
    names = list(dict.fromkeys(name for of_layer in tables.values() for name in of_layer))
    of_heads = [len(table) for of_layer in tables.values() for table in of_layer.values() if table.ndim == 3]
    height = 1.8 if max(of_heads, default=1) == 1 else min(1.0 + 0.7 * max(of_heads), 6)
    # Shared axes would cut longer tables to the last layer's.
    shapes = {name: {of_layer[name].shape for of_layer in tables.values() if name in of_layer} for name in names}
    share = "col" if all(len(of_name) == 1 for of_name in shapes.values()) else "none"
    figure, grid = _panels(len(tables), len(names), (3.4, height), title, share)
    for column, name in enumerate(names):
        most = max(abs(of_layer[name]).max() for of_layer in tables.values() if name in of_layer) or 1.0
        for axes, (layer, of_layer) in zip(grid[:, column], tables.items(), strict=True):
            if name not in of_layer:
                axes.set_axis_off()
                continue
            image = _draw_table(axes, name, of_layer[name], most)
            axes.tick_params(labelsize=SMALL)
            ylabel = axes.get_ylabel()
            axes.set_ylabel(f"{layer}\n{ylabel}" if column == 0 else ylabel, fontsize=SMALL)
        for axes in grid[:-1, column]:
            axes.set_xlabel("")
        grid[0, column].set_title(name, fontsize=FONT)
        bar = {"location": "bottom", "aspect": 15, "fraction": 0.15 / len(grid), "pad": 0.05 / len(grid)}
        _colour_bar(figure, image, list(grid[:, column]), "table entry", **bar)
    return figure


def _draw_table(axes: Axes, name: str, table: np.ndarray, most: float) -> AxesImage:
    colours = {"cmap": SIGNED, "vmin": -most, "vmax": most, "aspect": "auto", "interpolation": "nearest"}
    heads, offsets = table.shape[:2]
    reach = (offsets - 1) / 2
    if name.endswith("joint"):
        across = (table.shape[2] - 1) / 2
        axes.set(xlabel="dx (patches)" if heads == 1 else "head, each by dx", ylabel="dy (patches)")
        left, right = (-across - 0.5, across + 0.5) if heads == 1 else (-0.5, heads - 0.5)
        side_by_side = np.concatenate(list(table), axis=1)
        image = axes.imshow(side_by_side, **colours, extent=(left, right, reach + 0.5, -reach - 0.5))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        for head in range(1, heads):
            axes.axvline(head - 0.5, color="black", linewidth=0.7)
    elif table.ndim == 2:
        axes.set(xlabel=_offset(name), ylabel="head")
        image = axes.imshow(table, **colours, extent=(-reach - 0.5, reach + 0.5, heads - 0.5, -0.5))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    elif heads == 1:
        axes.set(xlabel="channel", ylabel=_offset(name))
        image = axes.imshow(table[0], **colours, extent=(-0.5, table.shape[2] - 0.5, reach + 0.5, -reach - 0.5))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    else:
        axes.set(xlabel="channel", ylabel=f"head, each by {_offset(name)[:2]}")
        image = axes.imshow(table.reshape(heads * offsets, -1), **colours)
        axes.set_yticks((np.arange(heads) + 0.5) * offsets - 0.5, range(heads))
        for head in range(1, heads):
            axes.axhline(head * offsets - 0.5, color="black", linewidth=0.7)
    axes.xaxis.label.set_size(SMALL)
    return image


def _offset(name: str) -> str:
    return "dy (patches)" if name.endswith("rows") else "dx (patches)"


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


def _panels(
    rows: int, columns: int, each: tuple[float, float], title: str, share: str = "all"
) -> tuple[Figure, np.ndarray]:
    """Make a figure with panels of so many inches, no narrower than the title."""
    lines = title.splitlines()
    width = max(each[0] * columns + 1.6, 0.115 * max(map(len, lines)))
    figure = Figure(figsize=(width, each[1] * rows + 0.8 + 0.3 * len(lines)), layout="constrained", dpi=100)
    FigureCanvasAgg(figure)
    figure.suptitle(literal(title), fontsize=FONT)
    return figure, figure.subplots(rows, columns, squeeze=False, sharex=share, sharey=share)


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
