"""Build the trained classifier that a checkpoint describes; `relvit.load` makes a `Predictor` of it."""

from __future__ import annotations

import os

import torch

from relvit.app.training.checkpoints.checkpoint import Checkpoint
from relvit.app.training.classifier import ImageClassifier
from relvit.app.utils.defaults import torch_defaults
from relvit.app.utils.shown_text import one_line


@torch_defaults()
def classifier_of(checkpoint: Checkpoint) -> ImageClassifier:
    """Build the trained classifier of a checkpoint, on the CPU, in evaluation mode.

    Raises:
        ValueError: No model can be built from the checkpoint.
    """
    try:
        # Do not read `pretrained`, the weights from which the training started: the checkpoint's weights replace them.
        # Nothing here compiles the model, so the backend that the training used need not be known on this machine.
        # The random weights are replaced, so drawing them must not change the random numbers of the user's training.
        with torch.random.fork_rng(devices=[]):
            classifier = ImageClassifier(**checkpoint.model | {"pretrained": None, "compile": False})
        classifier.load_state_dict(checkpoint.weights)
    # The file may hold any arguments, and models raise almost any type of error for wrong arguments, so catch all of
    # them.
    except Exception as error:
        raise ValueError(f"no model can be built from {checkpoint.path}: {one_line(error)[:400]}") from error
    classifier.temperature = checkpoint.temperature
    classifier.labels = classifier.labels.restored(checkpoint.thresholds)
    return classifier.eval()


def load_classifier(path: str | os.PathLike[str]) -> ImageClassifier:
    """Load the trained classifier of a checkpoint, on the CPU, in evaluation mode; errors as in `read_checkpoint`."""
    return classifier_of(Checkpoint.read(path))
