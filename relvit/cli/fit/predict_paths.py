"""`relvit predict CKPT PATH ...`: images that are named one by one, by folders or by patterns."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import replace

from relvit.cli.aliases import option
from relvit.cli.errors import UsageError
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
        paths = json.loads(given)
    except ValueError as error:
        raise UsageError(f"name the images without an option: relvit predict CKPT {given}") from error
    for other in ("--data", "--data.root"):
        if (value := option(arguments, other)) is not None:
            first, *more = paths
            shown = f"{first} (and {len(more)} more)" if more else first
            raise UsageError(f"{other} {value} and {shown} both name the images: give one of them")
    return paths


def data_of_paths(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the data module for named images, with its own transforms and classes."""
    # Not above: the parser's help would list it among the kinds of data.
    from relvit.data.modules.paths import ImagePathsData

    # A broken file shall not cost the others their predictions, whatever the training did about it.
    known = inspect.signature(ImagePathsData).parameters.keys() - {"on_error"}
    arguments = {name: value for name, value in checkpoint.data_args.items() if name in known}
    data = {"class_path": ImagePathsData.__name__, "init_args": arguments | {"paths": []}}
    return replace(checkpoint, data=data)
