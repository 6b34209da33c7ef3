"""Fixtures of data and runs that the tests of the application share."""

from trained_runs import best, digits_run, fails, photos, run

__all__ = ["best", "digits_run", "fails", "photos", "run"]
