"""Build any timm model by name with its arguments checked first, so that a misspelling is named and not forwarded."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, get_type_hints

import timm
from torch import nn

from relvit.models.limits import MemoryLimit, check_memory, check_numbers
from relvit.models.retrofit.api import retrofit as retrofit_model
from relvit.models.retrofit.api import retrofit_arguments
from relvit.utils.messages import did_you_mean, listing

# What timm's own builder takes besides the arguments of the model's class.
BUILDER_ARGUMENTS = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict", "checkpoint_path"}
# What the data decides.
DATA_ARGUMENTS = ("num_classes", "in_chans", "img_size")


def build_model(
    name: str,
    num_classes: int,
    in_chans: int = 3,
    img_size: int | Sequence[int] | None = None,
    model_kwargs: dict[str, Any] | None = None,
    retrofit: dict[str, Any] | None = None,
) -> nn.Module:
    """Create a relvit or timm model.

    Args:
        name: any name that `timm.create_model` knows.
        num_classes: outputs of the classifier.
        in_chans: channels of the images.
        img_size: size of the images, for models that want to know.
        model_kwargs: further arguments of the model's class.
        retrofit: give a timm model relative positions with these arguments of `relvit.retrofit`, {} for its defaults;
            None: leave it as it is.

    Raises:
        ValueError: an unknown model or argument; the message holds the nearest right name. A model that cannot be
            retrofitted, or cannot be meant: larger than the memory that there is.
    """
    kwargs = dict(model_kwargs or {})
    for key in retrofit or {}:
        if key not in retrofit_arguments():
            hint = did_you_mean(key, retrofit_arguments()) or f", allowed: {listing(retrofit_arguments())}"
            raise ValueError(f"retrofit has no argument {key!r}{hint}")
    arguments = model_arguments(name)
    for key in kwargs:
        if key in DATA_ARGUMENTS:
            raise ValueError(f"model_kwargs must not hold {key!r}: it comes from the data")
        if arguments and key not in arguments:
            why = getattr(_model_class(name), "fixed", {}).get(key)
            hint = f": {why}; take it out of model_kwargs" if why else did_you_mean(key, arguments)
            raise ValueError(f"model {name!r} has no argument {key!r}{hint}")
    if img_size is not None and "img_size" in arguments:
        kwargs["img_size"] = img_size if isinstance(img_size, int) else tuple(img_size)
    given = {"num_classes": num_classes, "in_chans": in_chans, **kwargs}
    check_numbers({**given, "retrofit": retrofit or {}})

    def build() -> nn.Module:
        model = timm.create_model(name, **given)
        return model if retrofit is None else retrofit_model(model, **retrofit)

    # Names alone are of models that somebody has built.
    if kwargs or retrofit:
        check_memory(build)
    with MemoryLimit():
        return build()


def model_arguments(name: str) -> set[str]:
    """Names of all arguments that the model takes; empty where its class cannot be known without building it.

    Raises:
        ValueError: an unknown model.
    """
    architecture = name.split(".", 1)[0]
    if not timm.is_model(architecture):
        ours = ", ".join(model for model in timm.list_models("*relvit*") if not model.startswith("test_"))
        raise ValueError(
            f"unknown model {name!r}{did_you_mean(architecture, timm.list_models())} ({ours}, or any timm model)"
        )
    model_class = _model_class(name)
    if model_class is None:
        return set()
    arguments: set[str] = set(BUILDER_ARGUMENTS)
    for cls in model_class.__mro__:
        parameters = inspect.signature(cls.__init__).parameters.values()
        arguments |= {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)} - {"self"}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return arguments


def _model_class(name: str) -> type | None:
    """The class that a registered model's function says it returns."""
    made = get_type_hints(timm.model_entrypoint(name.split(".", 1)[0])).get("return")
    return made if inspect.isclass(made) else None
