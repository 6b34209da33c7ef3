"""Registration of models with timm: check of arguments, configurations, and the entry points that create them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import DefaultCfg, build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from relvit.models.base import GridVisionTransformer
from relvit.models.depth import lack
from relvit.utils.messages import did_you_mean, full_name
from relvit.utils.ranges import Range, check_in_ranges

# Users must not give these arguments of timm's class, because relvit's models set them.
FIXED = {"dynamic_img_size", "block_fn", "attn_layer"}
# `check_arguments` checks these numbers, because timm's class does not check them, and would fail later with less clear
# errors.
RANGES = {name: Range(1) for name in ("in_chans", "img_size", "patch_size", "embed_dim", "depth", "num_heads")}
RANGES |= {"num_classes": Range(0), "reg_tokens": Range(0), "mlp_ratio": Range(0, above=True)}
RANGES |= {
    f"{part}_rate": Range(0, 1) for part in ("drop", "pos_drop", "patch_drop", "proj_drop", "attn_drop", "drop_path")
}


def check_arguments(model: type[GridVisionTransformer], given: dict[str, Any]) -> None:
    """Refuse unknown arguments of a model, arguments that cannot be chosen, and numbers out of range.

    The function removes `dynamic_img_size=True` from `given`: a configuration that also serves timm's models may hold
    this argument, and relvit's models set it themselves.
    """
    if given.get("dynamic_img_size") is True:
        del given["dynamic_img_size"]
    fixed = dict.fromkeys(FIXED, "these models take every image size, through blocks of their own") | model.fixed
    allowed: set[str] = set()
    for cls in model.__mro__:
        if issubclass(cls, VisionTransformer):
            allowed |= inspect.signature(cls).parameters.keys()
    allowed -= fixed.keys() | {"kwargs"}
    for name in given:
        if name in fixed:
            raise ValueError(f"{name} cannot be chosen: {fixed[name]}")
        if name not in allowed:
            hint = did_you_mean(name, allowed) or f"; help({full_name(model)}) lists its arguments"
            raise TypeError(f"{model.__name__} has no argument {name!r}{hint}")
    check_in_ranges(RANGES, given)


CFG: dict[str, Any] = {
    "url": "",
    "num_classes": 1000,
    "input_size": (3, 224, 224),
    "pool_size": None,
    "crop_pct": 0.9,
    "interpolation": "bicubic",
    "mean": IMAGENET_DEFAULT_MEAN,
    "std": IMAGENET_DEFAULT_STD,
    "first_conv": "patch_embed.proj",
    "classifier": "head",
    "license": "apache-2.0",
}
# `CFGS` maps the image size of a model to the model's configuration for timm, `pretrained_cfg`.
CFGS: dict[int, dict[str, Any]] = {
    224: CFG,
    160: CFG | {"input_size": (3, 160, 160), "crop_pct": 0.95},
    # `mean` and `std` are computed from CIFAR-10's training images; the values of CIFAR-100 differ by less than 0.03.
    32: CFG
    | {
        "num_classes": 10,
        "input_size": (3, 32, 32),
        "crop_pct": 1.0,
        "mean": (0.4914, 0.4822, 0.4465),
        "std": (0.2470, 0.2435, 0.2616),
    },
}


def default_cfgs_of(variants: dict[str, dict[str, Any]]) -> dict[str, DefaultCfg]:
    """Return timm's `default_cfgs` for models by name, given the arguments that make them."""
    return generate_default_cfgs(
        {f"{name}.untrained": CFGS[arguments.get("img_size", 224)] for name, arguments in variants.items()}
    )


def entry_point(
    name: str,
    model_class: type[GridVisionTransformer],
    filter_fn: Callable[..., dict[str, Tensor]],
    arguments: Callable[[dict[str, Any]], dict[str, Any]],
    module: str | None = None,
) -> Callable[..., GridVisionTransformer]:
    """Make the function that timm calls to create a model, and register it with timm.

    Args:
        filter_fn: function that converts checkpoints, see `checkpoint_filter_fn`.
        arguments: function that returns the arguments of a call, completed with the arguments of the model `name`.
        module: name of the module that has `default_cfgs`, which timm reads; None: the module of the class.
    """

    def create(pretrained: bool = False, **kwargs: Any) -> GridVisionTransformer:
        kwargs = arguments(kwargs)
        way = str(kwargs.get("feature_cls", "getter"))

        def build(**given: Any) -> GridVisionTransformer:
            model = model_class(**given)
            if way != "getter" and (why := lack(model, "hooks")):
                raise ValueError(f"features of {name} need feature_cls 'getter', got {way!r}: {why}")
            return model

        return build_model_with_cfg(
            build,
            name,
            pretrained,
            pretrained_filter_fn=filter_fn,
            feature_cfg={"out_indices": kwargs.pop("out_indices", 3), "feature_cls": "getter"},
            **kwargs,
        )

    create.__name__ = create.__qualname__ = name
    create.__module__ = module or model_class.__module__
    create.__doc__ = f"Create the `{model_class.__name__}` of this name; arguments: those of the class."
    # From this annotation other code learns the model's class, and so its arguments, before the model is built.
    create.__annotations__["return"] = model_class
    return register_model(create)


def record_arguments(model: GridVisionTransformer, **arguments: Any) -> None:
    """Record arguments that a call has changed in a model, since timm saves a model with the arguments that made it."""
    if hasattr(model, "_model_args"):
        model._model_args = {**model._model_args, **arguments}
