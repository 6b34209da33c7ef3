"""Commands other than `fit`: a file each, with options and output; `relvit.evaluation` does the work."""
