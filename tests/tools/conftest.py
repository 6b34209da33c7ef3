"""Fixtures of data and runs from the application's tests."""

from trained_runs import best, photos, run

__all__ = ["best", "photos", "run"]
