"""`retrofitted`: the name under which timm builds and loads its own models after `relvit.retrofit`."""

from __future__ import annotations

from typing import Any

import timm
from timm.models import load_pretrained, register_model
from torch import nn

from relvit.models.retrofit.api import retrofit as retrofit_model
from relvit.models.weights.transfer import filter_of


@register_model
def retrofitted(
    pretrained: bool = False,
    pretrained_cfg: Any = None,
    cache_dir: Any = None,
    *,
    model: str = "vit_small_patch16_224",
    retrofit: dict[str, Any] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Create a timm model and retrofit it.

    Args:
        pretrained: load weights: those that a dictionary `pretrained_cfg` describes, tables included, which timm gives
            for 'local-dir:' and 'hf-hub:'; else those that timm has for `model`, which has no tables yet.
        pretrained_cfg, cache_dir: see `timm.create_model`.
        model: any name that `timm.create_model` knows.
        retrofit: arguments of `relvit.retrofit`; None: its defaults.
        kwargs: arguments of `model`.

    Raises:
        ValueError: a model that cannot be retrofitted, as it is with `features_only`.
    """
    published = isinstance(pretrained_cfg, dict)
    net = timm.create_model(model, pretrained and not published, pretrained_cfg, cache_dir=cache_dir, **kwargs)
    retrofit_model(net, **(retrofit or {}))
    if pretrained and published:
        adapt = filter_of(net, {})
        load_pretrained(
            net,
            num_classes=net.num_classes,
            in_chans=kwargs.get("in_chans", 3),
            filter_fn=None if adapt is None else lambda state, _: adapt(state),
            cache_dir=cache_dir,
        )
    return net
