"""Figures."""

from relvit.plots.curves import plot_curves, read_metrics

__all__ = ["plot_curves", "read_metrics"]
