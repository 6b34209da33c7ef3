"""`relvit test CKPT --robustness DIR`: the folder of a robustness set in the place of the checkpoint's data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from relvit.cli.aliases import option
from relvit.cli.errors import UsageError
from relvit.training import Checkpoint


def data_of_robustness(checkpoint: Checkpoint, arguments: Sequence[str]) -> Checkpoint:
    """Return the checkpoint with the data module of a robustness set, with its own transforms and classes.

    Raises:
        UsageError: the images are named by another option as well.
    """
    # Not above: the parser's help would list it among the kinds of data.
    from relvit.data.modules.robustness import RobustnessData

    root = option(arguments, "--robustness")
    for other in ("--data", "--data.root", "--split"):
        if (value := option(arguments, other)) is not None:
            raise UsageError(f"{other} {value} and --robustness {root} both name the images: give one of them")
    known = set(RobustnessData.argument_names()) - {"paths"}
    kept = {name: value for name, value in checkpoint.data_args.items() if name in known}
    data = {"class_path": RobustnessData.__name__, "init_args": kept | {"root": root}}
    return replace(checkpoint, data=data)
