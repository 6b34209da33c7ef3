"""Build an optimizer of timm by its name, with parameter groups for weight decay and learning rates by layer."""

from __future__ import annotations

import inspect
from typing import Any

from timm.optim import create_optimizer_v2, get_optimizer_class, get_optimizer_info, list_optimizers
from torch import nn
from torch.optim import Optimizer

from relvit.models import classifiers_of, param_groups
from relvit.utils.messages import did_you_mean

# `opt_kwargs` must not hold these arguments of an optimiser, because `make_optimizer` passes them itself.
TAKEN = {"self", "params", "lr", "weight_decay"}


def make_optimizer(
    net: nn.Module,
    opt: str,
    lr: float,
    weight_decay: float,
    layer_decay: float | None = None,
    opt_kwargs: dict[str, Any] | None = None,
    position_lr_scale: float = 1.0,
) -> Optimizer:
    """Build an optimiser of `timm.optim` over all parameters of a network.

    Norms, biases and the parameters that the network's `no_weight_decay()` names (tables of relative positions,
    embeddings, tokens) have no weight decay. With Muon, which is for matrices, a fallback optimiser takes all
    parameters without weight decay, and the classifier.

    Args:
        net: A timm model.
        opt, weight_decay, opt_kwargs: See `ImageClassifier`; `timm.optim.list_optimizers()` lists the names.
        lr: The learning rate of the last layer, and of all layers if there is no `layer_decay`. `make_plan` in
            `schedule.py` has scaled this rate to the batch.
        layer_decay: See `ImageClassifier`; above 0, up to 1. The network's `group_matcher` says which parameters belong
            to which layer (ELECTRA, Clark et al. 2020, arXiv 2003.10555; BEiT, arXiv 2106.08254).
        position_lr_scale: See `ImageClassifier` and `relvit.models.param_groups`.

    Raises:
        ValueError: `opt` is unknown, needs second derivatives, or needs a package that is missing.
        ValueError: `opt_kwargs` has an argument that the optimiser lacks, or has `lr` or `weight_decay`, which are
            separate options; or `layer_decay` is not in 0 < x <= 1.
        ValueError: `position_lr_scale` is not 1, and the model has no relative positions with trainable parameters.
    """
    check_optimizer(opt, layer_decay, opt_kwargs)
    extra: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in (opt_kwargs or {}).items()}
    fallback: dict[str, Any] = {}
    if "fallback_lr_scale" in _arguments(opt):
        parts = {parameter for head in classifiers_of(net) for parameter in head.parameters()}
        fallback["fallback_list"] = [name for name, parameter in net.named_parameters() if parameter in parts]
        fallback["fallback_no_weight_decay"] = True
    groups = param_groups(net, lr, position_lr_scale, weight_decay, layer_decay, **fallback)
    return create_optimizer_v2(groups, opt=opt, lr=lr, **extra)


def check_optimizer(opt: str, layer_decay: float | None, opt_kwargs: dict[str, Any] | None) -> None:
    """Raise the errors of `make_optimizer` before there is a network, except that a package is missing."""
    names = list_optimizers()
    if opt not in names:
        raise ValueError(
            f"unknown optimiser {opt!r}{did_you_mean(str(opt), names)}; timm.optim.list_optimizers() lists them"
        )
    if get_optimizer_info(opt).second_order:
        raise ValueError(
            f"optimiser {opt!r} needs second derivatives, which training here does not compute; choose another, "
            "timm.optim.list_optimizers() lists them"
        )
    if layer_decay is not None and not 0 < layer_decay <= 1:
        raise ValueError(f"layer_decay must be in 0 < x <= 1, got {layer_decay}")
    try:
        allowed = _arguments(opt)
    except ValueError:
        # Raise no error here, so that a trained classifier can be used without the package of its optimiser.
        # `make_optimizer` raises the error when a training starts.
        return
    for key in opt_kwargs or {}:
        if key in TAKEN:
            raise ValueError(f"opt_kwargs must not hold {key!r}: it is an option of its own")
        if key not in allowed:
            raise ValueError(f"optimiser {opt!r} has no argument {key!r}{did_you_mean(key, allowed)}")


def _arguments(opt: str) -> set[str]:
    try:
        optimizer_class = get_optimizer_class(opt, bind_defaults=False)
    except (AssertionError, ImportError) as error:
        # timm's optimisers from apex and bitsandbytes need these packages and a GPU; timm's error says what is missing,
        # so repeat it.
        raise ValueError(f"optimiser {opt!r} cannot be used here: {error}") from error
    return set(inspect.signature(optimizer_class).parameters) - TAKEN
