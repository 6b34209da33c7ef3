"""Images in the place of a checkpoint's data: `relvit predict CKPT PATH ...`, `relvit test CKPT --robustness DIR`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from relvit.cli.aliases import option
from relvit.cli.errors import UsageError
from relvit.data import ImageData
from relvit.training import Checkpoint


def asked_paths(arguments: Sequence[str]) -> list[str] | None:
    """Return the files, folders and patterns that a user named; None where there are none.

    Raises:
        UsageError: the data are named as well, or `--paths` was given by its name.
    """
    given = option(arguments, "--paths")
    if given is None:
        return None
    try:
        first, *more = paths = json.loads(given)
    except (TypeError, ValueError) as error:
        raise UsageError(f"name the images without an option: relvit predict CKPT {given}") from error
    _refuse(arguments, ("--data", "--data.root"), f"{first} (and {len(more)} more)" if more else first)
    return paths


def data_of_paths(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the data module for named images."""
    # Not above, as in the next function: the parser's help would list it among the kinds of data.
    from relvit.data.modules.paths import ImagePathsData

    # A broken file shall not cost the others their predictions, whatever the training did about it.
    return _with_data(checkpoint, ImagePathsData, {"paths": []}, without="on_error")


def data_of_robustness(checkpoint: Checkpoint, arguments: Sequence[str]) -> Checkpoint:
    """Return the checkpoint with the data module of the robustness set that a user named.

    Raises:
        UsageError: the images are named by another option as well.
    """
    from relvit.data.modules.robustness import RobustnessData

    root = option(arguments, "--robustness")
    _refuse(arguments, ("--data", "--data.root", "--split"), f"--robustness {root}")
    return _with_data(checkpoint, RobustnessData, {"root": root}, without="paths")


def _refuse(arguments: Sequence[str], others: Sequence[str], given: str) -> None:
    for other in others:
        if (value := option(arguments, other)) is not None:
            raise UsageError(f"{other} {value} and {given} both name the images: give one of them")


def _with_data(checkpoint: Checkpoint, cls: type[ImageData], images: dict[str, Any], without: str) -> Checkpoint:
    """Return the checkpoint with another data module, of the same transforms and classes."""
    shared = set(cls.argument_names()) - {without}
    known = {name: value for name, value in checkpoint.data_args.items() if name in shared}
    return replace(checkpoint, data={"class_path": cls.__name__, "init_args": known | images})
