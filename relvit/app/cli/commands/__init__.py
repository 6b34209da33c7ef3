"""Commands other than `fit`: a file each, with options and output; `relvit.app.evaluation` does the work."""
