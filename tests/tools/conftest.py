"""The data and runs of the application's tests."""

from trained_runs import best, photos, run

__all__ = ["best", "photos", "run"]
