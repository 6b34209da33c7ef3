"""Commands other than `fit`, a file each, listed in `relvit_start.py`; `relvit.app.evaluation` does the work."""
