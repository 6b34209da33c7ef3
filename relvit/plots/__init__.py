"""Draw figures with Matplotlib: curves, curves by image size, confusion matrices, sheets of images, tables, maps."""

from relvit.plots.confusion import plot_confusion
from relvit.plots.curves import plot_curves, read_metrics
from relvit.plots.heat_maps import MapRow, plot_kernels, plot_maps, plot_overlay, plot_tables
from relvit.plots.probe import plot_probes
from relvit.plots.sheet import picture_of, plot_sheet
from relvit.plots.size_grid import plot_size_grid
from relvit.plots.sizes import plot_sizes
from relvit.plots.steps import plot_steps

__all__ = [
    "plot_curves",
    "read_metrics",
    "plot_confusion",
    "picture_of",
    "plot_sheet",
    "plot_sizes",
    "plot_size_grid",
    "plot_probes",
    "plot_steps",
    "MapRow",
    "plot_tables",
    "plot_kernels",
    "plot_maps",
    "plot_overlay",
]
