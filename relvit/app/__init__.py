"""Training, evaluation, plots, deployment and the command line, with `pip install 'relvit[train]'`."""
