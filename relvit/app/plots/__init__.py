"""Draw figures with Matplotlib: curves, curves by image size, confusion matrices, sheets of images, tables, maps."""

from relvit.app.plots.accuracy_by_size import plot_sizes
from relvit.app.plots.confusion import plot_confusion
from relvit.app.plots.curves import plot_curves, read_metrics
from relvit.app.plots.heat_maps import MapRow, all_zero, plot_kernels, plot_maps, plot_overlay, plot_tables
from relvit.app.plots.probe_curves import plot_probes
from relvit.app.plots.sheet import picture_of, plot_sheet
from relvit.app.plots.size_grid import plot_size_grid
from relvit.app.plots.steps import plot_steps

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
    "all_zero",
]
