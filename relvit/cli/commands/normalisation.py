"""By what a command normalises its images: what was given, else what the weights were trained with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relvit.data import ImageData
from relvit.training.checkpoints.pretrained import Normalisation, normalisation_of


def set_normalisation(
    data: ImageData, config: dict[str, Any], remembered: Mapping[str, Any] | None, pretrained: str | None
) -> str:
    """Let data that were given no mean or std have those of the weights; note in the configuration what is used.

    Args:
        data: as built by that configuration.
        config: the data module's arguments; its own default is None.
        remembered: the arguments of the data that a checkpoint was trained with; none: there is no checkpoint.
        pretrained: what a training starts from, see `read_pretrained`.

    Returns:
        What is used and why, in words.
    """
    known, whose = Normalisation(), ""
    if remembered is not None:
        known, whose = Normalisation(*(remembered.get(name) for name in Normalisation._fields)), "the checkpoint's"
    elif pretrained is not None and any(name in config and config[name] is None for name in Normalisation._fields):
        known, whose = normalisation_of(pretrained), "the pretrained weights'"
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
