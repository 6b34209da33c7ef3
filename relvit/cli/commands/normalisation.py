"""By what a command normalises its images: what was given, else what the weights were trained with."""

from __future__ import annotations

from typing import Any

from relvit.data import ImageData
from relvit.training import Checkpoint
from relvit.training.checkpoints.checkpoint import Normalisation
from relvit.training.checkpoints.pretrained import Pretrained


def set_normalisation(
    data: ImageData, config: dict[str, Any], checkpoint: Checkpoint | None, pretrained: Pretrained | None
) -> str:
    """Let data that were given no mean or std have those of the weights; note in the configuration what is used.

    Args:
        data: as built by that configuration.
        config: the data module's arguments; its own default is None.
        checkpoint: the checkpoint that a command uses, if there is one.
        pretrained: what a training starts from.

    Returns:
        What is used and why, in words.
    """
    known, whose = Normalisation(), ""
    if checkpoint is not None:
        known, whose = checkpoint.normalisation(), "the checkpoint's"
    elif pretrained is not None and any(name in config and config[name] is None for name in Normalisation._fields):
        known, whose = pretrained.normalisation(), "the pretrained weights'"
    used: dict[str, tuple[float, ...]] = {}
    reasons: dict[str, list[str]] = {}
    for name in Normalisation._fields:
        used[name], reason = getattr(data, name), "as given"
        if config.get(name) is None:
            reason = f"the default of {type(data).__name__}"
            if name in config and (value := getattr(known, name)) and len(value) == data.in_chans:
                used[name], reason = tuple(value), whose
        shown = f"{name} [{', '.join(f'{value:.4g}' for value in used[name])}]"
        reasons.setdefault(reason, []).append(shown)
    # Only then: a data module of the user's may have made its own transforms.
    if used != {name: getattr(data, name) for name in used}:
        data.normalise_by(**used)
    for name in used:
        if name in config:
            config[name] = used[name]
    told = (f"{' and '.join(shown)}, {reason}" for reason, shown in reasons.items())
    return f"images normalised by {'; '.join(told)}"
