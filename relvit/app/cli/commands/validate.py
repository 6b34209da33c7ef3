"""`relvit validate`: the loss and accuracy of a checkpoint on the images of val."""

from __future__ import annotations

from relvit.app.cli.arguments import Arguments
from relvit.app.cli.trainer.lightning_cli import Evaluation, evaluate
from relvit.models import Reach


def validate(evaluation: Evaluation, *, reach: Reach = "trained", verbose: bool = True) -> None:
    """Validate a checkpoint, at any image size (--img_size).

    Args:
        evaluation: The checkpoint's classifier and data.
        verbose: Whether the results are printed.
    """
    evaluation.set_reach(reach)
    evaluation.run(verbose=verbose)


def main(given: Arguments) -> None:
    """Run the command line."""
    evaluate(validate, given)
