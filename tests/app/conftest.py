"""The data and runs that the application's tests share."""

from trained_runs import best, digits_run, fails, photos, run

__all__ = ["best", "digits_run", "fails", "photos", "run"]
