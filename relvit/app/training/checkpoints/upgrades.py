"""The format of checkpoints, and the one place where checkpoints of earlier formats are upgraded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relvit.version import __version__

# Under this key a checkpoint holds the description of model and data, see `description.py`.
KEY = "relvit"
# This is the format that this version writes. Increase the number when a change makes `read_checkpoint` unable to read
# earlier checkpoints.
FORMAT = 1
# For each earlier format, a function changes the content of a checkpoint, in place, to the next format. To rename an
# argument of the model or of a data module, change the description, `content[KEY]`. To rename parameters, change
# 'state_dict' and 'ema_state_dict' (keys: 'net.' and the name in the model) and 'state_dict_ema' (keys: the name in the
# model). Folders that `relvit publish` writes do not pass through these functions, so rename parameters also where such
# folders are loaded: in `checkpoint_filter_fn` of `relvit/models/weights/convert.py` for `relvit_*` models, and in
# `retrofitted` of `relvit/models/retrofit/registered.py` for retrofitted models.
UPGRADES: dict[int, Callable[[dict[str, Any]], None]] = {}


def upgrade(content: dict[str, Any], path: str) -> None:
    """Bring the content of a checkpoint to the format of this version, in place.

    Args:
        content: The content of the file, with a description under `KEY`; nothing else in it has been checked.
        path: The file, for messages.

    Raises:
        ValueError: The description names no format, or names the format of a newer relvit.
    """
    description = content[KEY]
    found = description.get("format") if isinstance(description, dict) else None
    if not isinstance(found, int) or found < 1:
        raise ValueError(f"{path} is not a checkpoint of relvit fit: {KEY}.format must be 1 or more, got {found!r}")
    if found > FORMAT:
        raise ValueError(
            f"{path} has format {found} of relvit's checkpoints, and relvit {__version__} reads formats up to {FORMAT}"
            ": pip install --upgrade relvit"
        )
    for number in range(found, FORMAT):
        UPGRADES[number](content)
        description["format"] = number + 1
