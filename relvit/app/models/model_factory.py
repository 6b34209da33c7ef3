"""Build any model of timm by name: first check its arguments, its description, and that its weights fit in memory."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, get_type_hints

import timm
import torch
from timm.models import build_model_with_cfg
from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from relvit.app.models.model_names import model_hint
from relvit.app.utils.devices import available_memory
from relvit.app.utils.shown_text import one_line
from relvit.models import GridVisionTransformer, retrofit_arguments, retrofitted
from relvit.models import retrofit as retrofit_model
from relvit.utils.messages import an, did_you_mean, full_name, listing

# These are the arguments of timm's builders; some of them choose the weights that are loaded. The description of a
# model must hold none of them, because a description may come from a downloaded checkpoint or from the hub, and such a
# file must not choose other files to load.
BUILDER_ARGUMENTS = {
    name for build in (timm.create_model, build_model_with_cfg) for name in inspect.signature(build).parameters
} - {"kwargs"}
# These arguments come from the data module, so `model_kwargs` must not contain them.
DATA_ARGUMENTS = ("num_classes", "in_chans", "img_size")
# Larger numbers among a model's arguments, or more layers, are refused: no model has them, and even counting the bytes
# of such a model would take long.
LARGEST, DEEPEST = 10**6, 1000


def build_model(
    name: str,
    num_classes: int,
    in_chans: int = 3,
    img_size: int | Sequence[int] | None = None,
    model_kwargs: dict[str, Any] | None = None,
    retrofit: dict[str, Any] | None = None,
) -> nn.Module:
    """Create a relvit or timm model.

    Examples:
        >>> model = build_model("vit_tiny_patch16_224", num_classes=5, img_size=64, retrofit={"rel_terms": "kb"})
        >>> model(torch.randn(1, 3, 64, 64)).shape
        torch.Size([1, 5])

    Args:
        name: any name that `timm.create_model` knows.
        num_classes: number of outputs of the classifier.
        in_chans: number of channels of the images.
        img_size: size of the images, which only models with the argument `img_size` get. If the function that makes a
            model does not declare the model's class, the model gets `img_size` unless this raises a TypeError.
        model_kwargs: further arguments of the model's class.
        retrofit: arguments of `relvit.retrofit`, {} for its defaults, to give a timm model relative positions; None: no
            retrofit.

    Raises:
        ValueError: the model or an argument is unknown (the message has the nearest name); or the model cannot be
            retrofitted, is larger than the memory, or cannot be built with these arguments.
        TypeError: `model_kwargs` or `retrofit` does not hold arguments by name.
    """
    if not isinstance(model_kwargs, Mapping | None):
        raise TypeError(f"model_kwargs must hold arguments by name, such as {{'depth': 6}}, got {model_kwargs!r}")
    if not isinstance(retrofit, Mapping | None):
        raise TypeError(
            "retrofit must hold arguments of relvit.retrofit by name, such as {'rel_terms': 'kv'}, or {} for its "
            f"defaults, got {retrofit!r}"
        )
    kwargs = dict(model_kwargs or {})
    for key in retrofit or {}:
        if key not in retrofit_arguments():
            hint = did_you_mean(key, retrofit_arguments()) or f", allowed: {listing(retrofit_arguments())}"
            raise ValueError(f"retrofit has no argument {key!r}{hint}")
    arguments = model_arguments(name)
    _check_retrofit(name, retrofit, arguments)
    check_description(name, kwargs)
    _check_tag(name)
    for key in kwargs:
        if key in DATA_ARGUMENTS:
            raise ValueError(f"model_kwargs must not hold {key!r}: it comes from the data")
        if arguments and key not in arguments:
            why = getattr(_model_class(name), "fixed", {}).get(key)
            hint = f": {why}; take it out of model_kwargs" if why else did_you_mean(key, arguments)
            hint = hint or f"; help({full_name(_model_class(name))}) lists its arguments"
            raise ValueError(f"model {name!r} has no argument {key!r}{hint}")
    if img_size is not None and ("img_size" in arguments or not arguments):
        kwargs["img_size"] = img_size if isinstance(img_size, int) else tuple(img_size)
    given = {"num_classes": num_classes, "in_chans": in_chans, **kwargs}

    def build() -> nn.Module:
        try:
            model = timm.create_model(name, **given)
        except TypeError:
            # `img_size` was given without knowing the model's class, and may be the wrong argument: try again without
            # it.
            if arguments or "img_size" not in given:
                raise
            model = timm.create_model(name, **{key: value for key, value in given.items() if key != "img_size"})
        return model if retrofit is None else retrofit_model(model, **retrofit)

    # `model_kwargs` and `retrofit` may come from a hostile file and make a model of any size. So if they are given,
    # first build the model on the meta device to measure it.
    check_model_size(build if kwargs or retrofit else None, {**given, "retrofit": retrofit or {}})
    try:
        return build()
    # timm's classes check few of their arguments, so wrong arguments can raise any of these errors, all of which mean
    # that the arguments are wrong.
    except (AssertionError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        if not kwargs:
            raise
        # The size of the images comes from the data, not from `model_kwargs`.
        given = [f"with model_kwargs {dict(model_kwargs)}"] if model_kwargs else []
        given += [f"for images of {kwargs['img_size']} px"] if "img_size" in kwargs else []
        raise ValueError(f"model {name!r} cannot be built {' '.join(given)}: {one_line(error)}") from error


def _check_tag(name: str) -> None:
    """Refuse a tag of weights, the part of the name after the first point, that timm does not know."""
    try:
        timm.get_pretrained_cfg(name)
    except RuntimeError as error:
        architecture = name.split(".", 1)[0]
        known = timm.list_models(f"{architecture}.*", include_tags=True)
        raise ValueError(
            f"there are no weights {name!r}{did_you_mean(name, known)}; known: {listing(known)}: give one of these, or "
            f"{architecture} without a tag"
        ) from error


def _check_retrofit(name: str, retrofit: Mapping[str, Any] | None, arguments: set[str]) -> None:
    """Refuse the retrofit of a model of relvit, and name the model's own arguments of the same meaning."""
    if retrofit is None or not issubclass(_model_class(name) or nn.Module, GridVisionTransformer):
        return
    ours = [key for key in retrofit if key in arguments] or ["rel_terms"] * ("rel_terms" in arguments)
    own = f"give its own arguments, such as --model.model_kwargs.{ours[0]}, and " if ours else ""
    raise ValueError(
        f"model {name!r} has relative positions, so there is nothing to retrofit: {own}leave retrofit out "
        "(--model.retrofit null where a configuration has it)"
    )


def described_model(
    architecture: str, arguments: Mapping[str, Any], source: str
) -> tuple[str, dict[str, Any] | None, dict[str, Any] | None]:
    """Turn the description of a model that `timm.models.save_for_hf` wrote into arguments of `build_model`.

    Examples:
        >>> described_model("relvit_tiny", {"rel_terms": "k", "num_classes": 5}, "config.json")
        ('relvit_tiny', {'rel_terms': 'k'}, None)

    Args:
        architecture: the name in the description.
        arguments: the arguments in the description.
        source: where the description comes from, for messages.

    Returns:
        `name`, `model_kwargs` and `retrofit` of `build_model`.

    Raises:
        ValueError: the name of the model is unknown or missing, or an argument chooses which weights are loaded.
    """
    check_description(architecture, arguments, source)
    kwargs = {key: value for key, value in arguments.items() if key not in DATA_ARGUMENTS}
    if architecture != retrofitted.__name__:
        return architecture, kwargs or None, None
    if "model" not in kwargs:
        raise ValueError(f"{source} lacks 'model': add the name of the timm model that was retrofitted")
    model, retrofit = kwargs.pop("model"), kwargs.pop("retrofit", None)
    return model, kwargs or None, retrofit or {}


def check_description(name: str, arguments: Mapping[str, Any], source: str = "model_kwargs") -> None:
    """Refuse a description of a model that chooses which weights are loaded; a downloaded file may try to.

    Args:
        name: name of the model.
        arguments: arguments of the model; if `name` is 'retrofitted', they contain the name of the model that was
            retrofitted.
        source: where the arguments come from, for the message.

    Raises:
        ValueError: the model is unknown, or `arguments` holds an argument of timm's builder.
    """
    if chosen := sorted(BUILDER_ARGUMENTS & arguments.keys()):
        raise ValueError(
            f"{source} must not hold {chosen[0]!r}: a description does not choose which weights are loaded, "
            "--model.pretrained does"
        )
    if name == retrofitted.__name__ and "model" in arguments:
        check_description(arguments["model"], {}, source)
    model_arguments(name)


def check_model_size(build: Callable[[], nn.Module] | None, arguments: Mapping[str, Any]) -> None:
    """Refuse a model larger than the memory, which a broken or hostile checkpoint or configuration may describe.

    Examples:
        >>> check_model_size(partial(timm.create_model, "relvit_tiny", depth=2), {"depth": 2})

    Args:
        build: function that makes the model, called on the meta device, where tensors take no memory. None: only the
            numbers are checked.
        arguments: arguments of the model. Numbers among them are checked first, since building many layers takes time
            even on the meta device.

    Raises:
        ValueError: a number is above a million, the layers are more than a thousand in all, or the parameters take more
            bytes than there is memory.
    """
    layers = 0.0
    for name, number in _numbers("", arguments):
        most = LARGEST
        if "depth" in name or "layers" in name:
            most, layers = DEEPEST, layers + number
            number = layers
        # A comparison with NaN is always false, so `not ... <= most` refuses NaN, too.
        if not abs(number) <= most:
            raise ValueError(f"{name} is {number:.6g}; a model's numbers may be at most {most}")
    if build is None:
        return
    model = None
    # `fork_rng` keeps the state of the caller's random numbers. If the model uses operations that the meta device
    # lacks, they raise the suppressed errors, and the model's size is not checked.
    with (
        torch.random.fork_rng(devices=[]),
        contextlib.suppress(RuntimeError, TypeError, AssertionError, ArithmeticError, AttributeError, LookupError),
        torch.device("meta"),
        _WithoutClamping(),
    ):
        model = build()
    memory = available_memory()
    if model is None or memory is None:
        return
    needed = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    if needed > memory:
        raise ValueError(
            f"the model needs {needed / 2**30:.1f} GiB of memory, {memory / 2**30:.1f} are available: take a smaller "
            "model"
        )


class _WithoutClamping(TorchFunctionMode):
    """Skip `Tensor.clamp_`, by which timm's truncated normal ends: PyTorch computes it in Python on the meta device.

    Otherwise these calls take three quarters of the time to build a model there.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if function is Tensor.clamp_ else function(*args, **(kwargs or {}))


def _numbers(name: str, given: Any) -> Iterator[tuple[str, float]]:
    """Yield all numbers in nested dictionaries and lists, with their names."""
    if isinstance(given, Mapping):
        for key, value in given.items():
            yield from _numbers(f"{name}.{key}" if name else str(key), value)
    elif isinstance(given, Sequence) and not isinstance(given, str):
        for value in given:
            yield from _numbers(name, value)
    elif isinstance(given, int | float):
        yield name, given


def model_arguments(name: str) -> set[str]:
    """Return the names of all arguments of a model; an empty set if only building the model would show its class.

    Examples:
        >>> "max_distance" in model_arguments("relvit_tiny"), "max_distance" in model_arguments("vit_tiny_patch16_224")
        (True, False)

    Raises:
        TypeError: `name` is not a text.
        ValueError: the model is unknown.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"a model is given by its name, such as 'relvit_small', got {an(type(name).__name__)}: register "
            "one of your own with timm.models.register_model"
        )
    architecture = name.split(".", 1)[0]
    if not timm.is_model(architecture):
        ours = sorted(timm.list_models("relvit*"), key=len)
        weights = name.startswith(("hf-hub:", "hf_hub:", "local-dir:"))
        hint = " (--pretrained takes such weights, and builds their model)" if weights else model_hint(architecture)
        raise ValueError(
            f"unknown model {name!r}{hint}; known: {listing(ours, 4)}, and every model of timm; "
            "for one of your own, import the module that registers it"
        )
    model_class = _model_class(name)
    if model_class is None:
        return set()
    arguments: set[str] = set()
    if issubclass(model_class, NaFlexVit):
        arguments |= {field.name for field in fields(NaFlexVitCfg)}
    for cls in model_class.__mro__:
        parameters = inspect.signature(cls.__init__).parameters.values()
        arguments |= {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)} - {"self"}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return arguments


def _model_class(name: str) -> type | None:
    """Return the return type of a registered model's function."""
    try:
        made = get_type_hints(timm.model_entrypoint(name.split(".", 1)[0])).get("return")
    # The module of a user's function may import the class for type checkers alone.
    except NameError:
        return None
    return made if inspect.isclass(made) else None
