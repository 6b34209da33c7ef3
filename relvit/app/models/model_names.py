"""The model of timm that a misspelt or shortened name likely means."""

import timm

from relvit.utils.messages import nearest


def nearest_model(name: str) -> str | None:
    """Return the model of timm that a misspelt or shortened name likely means; of `vit_base` the usual variant."""
    known, usual = timm.list_models(), f"{name.lower().replace('-', '_')}_patch16_224"
    return usual if usual in known else nearest(name, known)


def model_hint(name: str) -> str:
    """Return ``" (did you mean 'x'?)"`` for the model of timm nearest to a name, or '' if none is near."""
    found = nearest_model(name)
    return "" if found is None else f" (did you mean {found!r}?)"
