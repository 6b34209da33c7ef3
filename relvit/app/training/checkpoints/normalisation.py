"""Normalise the images of a run as its options say, or else as the weights were trained."""

from __future__ import annotations

from typing import Any

from relvit.app.data import ImageData
from relvit.app.training.checkpoints.checkpoint import Checkpoint, Normalisation
from relvit.app.training.checkpoints.pretrained import Pretrained


def set_normalisation(
    data: ImageData, config: dict[str, Any], checkpoint: Checkpoint | None, pretrained: Pretrained | None
) -> str:
    """Normalise images with the mean and std of the weights if none are given, and return a description.

    The function also writes the mean and std that it uses into `config`, the arguments of the data module. `checkpoint`
    is the checkpoint that a command uses; `pretrained` are the weights that a training starts from.
    """
    missing = data.unset_statistics
    known, whose = Normalisation(), ""
    if checkpoint is not None:
        known, whose = checkpoint.normalisation(), "the checkpoint's"
    elif pretrained is not None and missing:
        known, whose = pretrained.normalisation(), "the pretrained weights'"
    used: dict[str, tuple[float, ...]] = {}
    reasons: dict[str, list[str]] = {}
    for name in Normalisation._fields:
        used[name] = getattr(data, name)
        reason = "as given" if config.get(name) is not None else f"the default of {type(data).__name__}"
        value = getattr(known, name)
        if name in missing and value and len(value) == data.in_chans:
            used[name] = tuple(value)
        # If there is a checkpoint, the options mean and std have its values and are not in `missing`, so only a
        # comparison shows whether the user has changed them.
        if value and used[name] == tuple(value) and (checkpoint is not None or name in missing):
            reason = whose
        reasons.setdefault(reason, []).append(f"{name} [{', '.join(f'{number:.4g}' for number in used[name])}]")
    # `normalise_by` replaces the transforms, which may be a user's own, so call it only if a value changes.
    if used != {name: getattr(data, name) for name in used}:
        data.normalise_by(**used)
    for name in used:
        if name in config:
            config[name] = used[name]
    shown = (f"{' and '.join(values)}, {reason}" for reason, values in reasons.items())
    return f"images normalised by {'; '.join(shown)}"
