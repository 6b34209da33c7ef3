"""`retrofitted`: the name under which timm builds and loads its own models after `relvit.retrofit`.

`retrofit` puts its arguments into the model (`_describe` in `api.py`), and timm's `save_for_hf` writes them. A reach or
a backend that is set after the retrofit is not saved.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import timm
from timm.models import load_pretrained, load_state_dict, register_model
from timm.models._builder import pretrained_cfg_for_features
from timm.models._features import FeatureGetterNet, FeatureHookNet
from timm.models._features_fx import FeatureGraphNet
from torch import nn

from relvit.models.retrofit.api import retrofit as retrofit_model
from relvit.models.retrofit.api import retrofit_arguments
from relvit.models.weights.transfer import POSITION, filter_of
from relvit.utils.messages import check_choice

FEATURE_CLASSES: dict[str, Callable[..., nn.Module]] = {
    "getter": FeatureGetterNet,
    "hook": FeatureHookNet,
    "fx": FeatureGraphNet,
}


@register_model
def retrofitted(
    pretrained: bool = False,
    pretrained_cfg: Any = None,
    cache_dir: Any = None,
    *,
    model: str | None = None,
    retrofit: dict[str, Any] | None = None,
    features_only: bool = False,
    out_indices: int | Sequence[int] | None = None,
    feature_cls: str = "getter",
    **kwargs: Any,
) -> nn.Module:
    """Create a timm model and retrofit it.

    Examples:
        >>> vit = timm.create_model("retrofitted", model="vit_tiny_patch16_224", retrofit={"rel_terms": "k"}, depth=1)
        >>> vit(torch.randn(1, 3, 64, 96)).shape
        torch.Size([1, 1000])

    Args:
        pretrained: whether to load weights. For names that begin with 'local-dir:' or 'hf-hub:', timm passes a
            dictionary as `pretrained_cfg`, and the weights that it describes are loaded after the retrofit, with
            relative tables. So are the weights of a retrofitted model in the 'file' of `pretrained_cfg_overlay`, which
            is `--pretrained-path` of timm's `train.py`. Other weights are loaded before the retrofit.
        pretrained_cfg, cache_dir: see `timm.create_model`.
        model: any name that `timm.create_model` knows; it has to be given.
        retrofit: arguments of `relvit.retrofit`; None: its defaults.
        features_only: whether to return a model that computes feature maps (B, channels, rows, columns).
        out_indices: indices of the blocks or stages whose features are returned, or a number n for the last n. None:
            all stages of a model whose stages have different resolutions, such as Swin, or else the last three blocks.
        feature_cls: how timm gets the features: 'getter', by `forward_intermediates`; 'hook' or 'fx', the outputs of
            the blocks, which in plain ViTs are tokens (B, N, channels).
        kwargs: arguments of `model`.

    Raises:
        TypeError: `model` is not a name.
        TypeError: `retrofit` is not a dictionary, or holds an unknown argument, or an argument of `relvit.retrofit` is
            given outside of it.
        ValueError: there is no `model`, or the model cannot be retrofitted with these arguments.
    """
    if model is None:
        raise ValueError(
            "model= is missing, the name of the timm model to retrofit: "
            "timm.create_model('retrofitted', model='vit_small_patch16_224')"
        )
    if not isinstance(model, str):
        raise TypeError(
            f"model must be the name of a timm model, got a {type(model).__name__}: a model that exists already is "
            "changed by relvit.retrofit(model), and model.forward_intermediates computes its features"
        )
    if not isinstance(retrofit, Mapping | None):
        raise TypeError(
            f"retrofit must hold arguments of relvit.retrofit, such as {{'rel_terms': 'kv'}}, got {retrofit!r}"
        )
    if misplaced := [name for name in retrofit_arguments() if name in kwargs]:
        name = misplaced[0]
        raise TypeError(f"{name} is an argument of relvit.retrofit: give retrofit={{{name!r}: {kwargs[name]!r}}}")
    file = (kwargs.get("pretrained_cfg_overlay") or {}).get("file")
    with_tables = isinstance(pretrained_cfg, dict) or (pretrained and file is not None and _holds_tables(str(file)))
    net = timm.create_model(model, pretrained and not with_tables, pretrained_cfg, cache_dir=cache_dir, **kwargs)
    retrofit_model(net, **(retrofit or {}))
    if pretrained and with_tables:
        adapt = filter_of(net, {})
        load_pretrained(
            net,
            num_classes=net.num_classes,
            in_chans=kwargs.get("in_chans", 3),
            filter_fn=None if adapt is None else lambda state, _: adapt(state),
            cache_dir=cache_dir,
        )
    return _features(net, out_indices, feature_cls) if features_only else net


def _holds_tables(file: str) -> bool:
    """Return whether a checkpoint is of a retrofitted model; JAX archives (.npz), which torch cannot read, are not."""
    return not file.endswith(".npz") and any(POSITION in name for name in load_state_dict(file))


def _features(net: nn.Module, out_indices: int | Sequence[int] | None, feature_cls: str) -> nn.Module:
    """Wrap a model as timm's builder does with `features_only`, which would wrap it before the retrofit."""
    if out_indices is None:
        has_stages = len({info["reduction"] for info in net.feature_info}) > 1
        out_indices = len(net.feature_info) if has_stages else min(3, len(net.feature_info))
    check_choice("feature_cls", feature_cls, tuple(FEATURE_CLASSES))
    features = FEATURE_CLASSES[feature_cls](net, out_indices=out_indices)
    features.pretrained_cfg = features.default_cfg = pretrained_cfg_for_features(net.pretrained_cfg)
    # From these attributes timm's transforms learn the channels and the size of the images.
    for name in ("_traits", "in_chans"):
        if hasattr(net, name):
            setattr(features, name, copy.copy(getattr(net, name)))
    return features
