"""Parameter groups of an optimiser: timm's weight decay, none for tables; relative positions learn at another rate."""

from __future__ import annotations

import re
from typing import Any

from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

from relvit.layers.mixer import Mixer
from relvit.ops.checks import check_model

# This is the default of `position_lr_scale`, the factor on the learning rate of relative positions.
POSITION_LR_SCALE = 10.0

# If a parameter `kernel` is parametrized (torch.nn.utils.parametrize), its module stores the tensor as
# `parametrizations.kernel.original`, or as several tensors, `original0`, `original1` and so on.
STORED = re.compile(r"parametrizations\.([^.]+)\.original\d*$")


def param_groups(
    model: nn.Module,
    lr: float,
    position_lr_scale: float | None = None,
    weight_decay: float = 0.05,
    layer_decay: float | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Make the parameter groups of an optimiser as timm does, with another learning rate for relative positions.

    Tables that `relvit.retrofit` has added start at zero, while all other weights are trained already. In a short
    fine-tuning the tables would learn too slowly at the learning rate of the other weights.

    With a `layer_decay`, timm's groups have an entry `lr_scale`, which only timm's schedulers read. Here each group
    holds its scaled `lr` instead, so that PyTorch's schedulers work, too.

    Examples:
        >>> vit = relvit.retrofit(timm.create_model("vit_tiny_patch16_224"), rel_terms="kv")
        >>> optimizer = torch.optim.AdamW(param_groups(vit, lr=0.0005))
        >>> [(group["lr"], group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]
        [(0.0005, 0.0, 102), (0.005, 0.0, 48), (0.0005, 0.05, 50)]

    Args:
        model: a model of relvit or timm, or a module that contains one.
        lr: the learning rate of the last layer, and of all layers if there is no `layer_decay`.
        position_lr_scale: the learning rate of the parameters of position modules, such as tables, is multiplied by
            this number, in addition to `layer_decay`; with 1 they have the rate of their layer. None: 10, or no effect
            for a model whose relative positions have no trainable parameters. For such a model, a number other than 1
            is an error.
        weight_decay: the weight decay. Biases and norms have no weight decay, nor do parameters that the
            `no_weight_decay()` of the model, or of a module in it, names.
        layer_decay: the learning rate is multiplied by this number from each layer to the layer before it, from the
            classifier down to the stem; None: all layers have the same rate. timm finds no layers in a module that has
            further parameters beside a model, such as a detector: call this function for the model alone.
        **options: further arguments of timm's `param_groups_weight_decay`, or with a `layer_decay` of
            `param_groups_layer_decay`.

    Raises:
        TypeError: `model` is not a module.
        ValueError: a `position_lr_scale` other than 1 is given for a model whose relative positions have no trainable
            parameters.
        ValueError: a `layer_decay` is given for a module in which timm finds no layers.
    """
    check_model(model)
    model, prefix = _with_layers(model)
    given = {"weight_decay": weight_decay, **options}
    undecayed = {name.removeprefix(prefix) for name in given.get("no_weight_decay_list", ())}
    # In a larger model, such as a segmentation model, the backbone names the parameters without weight decay.
    for path, part in model.named_modules():
        if hasattr(part, "no_weight_decay"):
            undecayed |= {f"{path}.{name}" if path else name for name in part.no_weight_decay()}
    # `torch.nn.utils.parametrize`, which weight norm uses, for example, stores a tensor under other names.
    undecayed |= {name for name, _ in model.named_parameters() if STORED.sub(r"\1", name) in undecayed}
    given["no_weight_decay_list"] = undecayed
    if layer_decay is None:
        groups = param_groups_weight_decay(model, **given)
    else:
        # timm finds the layers by one of these attributes. Without both, all parameters are one layer.
        if layer_decay != 1 and not (hasattr(model, "group_matcher") or hasattr(model, "pretrained_cfg")):
            raise ValueError(
                f"layer_decay {layer_decay:g} has no effect on {type(model).__name__}, in which timm finds no layers: "
                "call param_groups for the model in it, and make the groups of its other parameters separately"
            )
        groups = param_groups_layer_decay(model, layer_decay=layer_decay, **given)
    scaled = {id(parameter) for parameter in scaled_positions(model, position_lr_scale)}
    scale = POSITION_LR_SCALE if position_lr_scale is None else position_lr_scale
    found = []
    for group in groups:
        rate = lr * group.pop("lr_scale", 1.0)
        others = [parameter for parameter in group["params"] if id(parameter) not in scaled]
        positions = [parameter for parameter in group["params"] if id(parameter) in scaled]
        if others:
            found.append(group | {"params": others, "lr": rate})
        if positions:
            # The entry `position_lr_scale` marks groups of relative positions, so that other code can find the learning
            # rate of the model's last layer: it is the highest `lr` among the groups without this entry.
            own = {"params": positions, "lr": rate * scale, "position_lr_scale": scale}
            found.append(group | own)
    return found


def _with_layers(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the model in a wrapper without further parameters, and the prefix of its parameters' names.

    timm finds a parameter's layer by its name, and the prefixes of `torch.compile`, `DistributedDataParallel` and PEFT
    hide the layer: all parameters would get the learning rate of the last layer.
    """
    number = len(list(model.parameters()))
    for path, part in model.named_modules():
        if hasattr(type(part), "group_matcher") and len(list(part.parameters())) == number:
            return part, f"{path}." if path else ""
    return model, ""


def scaled_positions(model: nn.Module, position_lr_scale: float | None) -> list[nn.Parameter]:
    """Return the parameters to which `position_lr_scale` applies, none if it is 1; for errors see `param_groups`."""
    if position_lr_scale == 1:
        return []
    mixers = [part for part in model.modules() if isinstance(part, Mixer)]
    positions = [getattr(mixer, name, None) for mixer in mixers for name in ("position", "prefix_bias")]
    parameters = [each for position in positions if position is not None for each in position.parameters()]
    learning = [each for each in parameters if each.requires_grad]
    if not learning and position_lr_scale is not None:
        raise ValueError(
            f"position_lr_scale {position_lr_scale:g} has no effect on {type(model).__name__}, which has no relative "
            "positions that learn: leave it out, or add them by relvit.retrofit"
        )
    return learning
