"""Record the arguments of a data module in plain types, to build it again; give it the transforms of a training."""

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum, EnumType
from functools import wraps
from typing import Any, ParamSpec, get_args

import numpy as np
from lightning import LightningDataModule

from relvit.app.data.shape import AS_PATCHES, remaining
from relvit.app.utils.masks import MASK, mask_secrets
from relvit.utils.messages import did_you_mean

# `ImageData` and `ImageFilesData` require these arguments, but a subclass computes them itself, so its `**options`
# cannot contain them.
_OF_SUBCLASS = ("class_names", "in_chans")
_LEFT_OUT = object()
# These attributes of a data module describe the classes and the transforms of its images.
IMAGES = ("class_names", "img_size", "mean", "std", "crop_pct", *AS_PATCHES)
# These are the transforms that `transforms_of` sets.
_TRANSFORMS: ContextVar[Mapping[str, Any]] = ContextVar("transforms")
P = ParamSpec("P")


class RecordedArguments(LightningDataModule):
    """Base class of data modules that know the arguments with which they were built.

    relvit's own classes keep each argument in an attribute of the same name, and pass arguments that they do not know
    to their parent as ``**options``. A user's class need not follow this rule, so the arguments of its constructor are
    recorded when it is called.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls) and cls.is_of_user():
            # Use `type.__setattr__`, because type checkers would take an assignment to `cls.__init__` for a definition
            # of `RecordedArguments.__init__`.
            type.__setattr__(cls, "__init__", _recording(cls.__init__))

    @classmethod
    def is_of_user(cls) -> bool:
        """Return whether the constructor is not one of relvit's."""
        return not str(cls.__init__.__module__).startswith("relvit.")

    def init_args(self) -> dict[str, Any]:
        """Return the arguments with which ``type(self)(**init_args)`` builds the same module, class names included.

        Values are str, int, float, bool, None and lists or dictionaries of these, so that a checkpoint can store them;
        the member of an enum is its name, if the constructor's annotation or default is of the enum.
        For a user's class these are the given arguments and the defaults of its constructor. But if the module has an
        attribute with the name of an argument, the attribute's value replaces an argument that is None, and a text
        replaces a text, such as an absolute path a relative path. A number stays as given, because the constructor may
        keep another number, such as ``fold - 1``. An argument whose value is not of the types above, such as a
        dataset, is left out.
        """
        given: dict[str, Any] | None = vars(self).get("_given")
        if given is None:
            return plain_values({name: getattr(self, name) for name in self.argument_names()})
        return plain_values({name: _kept(value, getattr(self, name, value)) for name, value in given.items()})

    def recorded_args(self) -> dict[str, Any]:
        """Return the arguments of :meth:`init_args` as files record them: with `***` in place of each given secret.

        If a secret was given as None, and the module itself found the secret, None is recorded.
        """
        given, recorded = vars(self).get("_given") or {}, mask_secrets(self.init_args(), self.public_names())
        found = [name for name, value in recorded.items() if value == MASK and name in given and given[name] is None]
        return recorded | dict.fromkeys(found)

    @classmethod
    def public_names(cls) -> set[str]:
        """Names of the arguments that relvit's own classes have: `max_tokens` and `input_key` are not secrets."""
        own = [part for part in cls.__mro__ if issubclass(part, RecordedArguments) and not part.is_of_user()]
        return {name for part in own for name in part.argument_names()}

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Refuse arguments that this class does not have; called by constructors that pass on ``**options``.

        Python's own error would name the constructor of `ImageData`, which the user has not called.

        Raises:
            TypeError: An argument is unknown.
        """
        for name in options:
            if name not in self.public_names():
                hint = did_you_mean(name, self.argument_names())
                raise TypeError(f"{type(self).__name__} has no argument {name!r}{hint}")

    @classmethod
    def argument_names(cls) -> list[str]:
        """Names of the constructor's arguments, including arguments that it passes on as ``**options``."""
        return list(cls.argument_defaults())

    @classmethod
    def argument_defaults(cls) -> dict[str, Any]:
        """Defaults of the constructor's arguments by name; `inspect.Parameter.empty` if an argument has none."""
        return {name: parameter.default for name, (parameter, _) in cls.arguments().items()}

    @classmethod
    def arguments(cls) -> dict[str, tuple[inspect.Parameter, type]]:
        """Parameters of the constructor by name, each with the class whose constructor has it."""
        found: dict[str, tuple[inspect.Parameter, type]] = {}
        constructors = [part for part in cls.__mro__ if "__init__" in vars(part)]
        for part in constructors:
            _, *parameters = inspect.signature(part.__init__).parameters.values()
            for p in parameters:
                by_subclass = part is not constructors[0] and p.name in _OF_SUBCLASS and p.default is p.empty
                if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and not by_subclass:
                    found.setdefault(p.name, (p, part))
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
        return found

    @classmethod
    def names_to_restore(cls) -> list[str]:
        """Names of the arguments that a class takes from a checkpoint of other data.

        For a user's class only the arguments in the signature of its own constructor are returned, because it is
        unknown what the class does with its ``**options``.
        """
        found = cls.arguments()
        return [name for name, (_, part) in found.items() if not cls.is_of_user() or part.__init__ is cls.__init__]


@contextmanager
def transforms_of(training: Mapping[str, Any]) -> Iterator[None]:
    """Within a `with` block, new data modules have the transforms of a training where they are given no others.

    A checkpoint cannot pass these transforms to a user's class as arguments, because only the constructor of the class
    knows which of them it sets itself.
    """
    token = _TRANSFORMS.set({name: training[name] for name in IMAGES[1:] if name in training})
    try:
        yield
    finally:
        _TRANSFORMS.reset(token)


def with_transforms(init: Callable[P, None]) -> Callable[P, None]:
    """Wrap the constructor of `ImageData`, so that it takes the transforms of `transforms_of` if it gets no others."""
    signature = inspect.signature(init)

    @wraps(init)
    def constructor(*args: P.args, **given: P.kwargs) -> None:
        known = remaining(_TRANSFORMS.get({}), given)
        # If the images have other channels, or the checkpoint has no list here, `Checkpoint` says so later and better.
        channels = signature.bind(*args, **given).arguments["in_chans"]
        other = [name for name in ("mean", "std") if name in known and np.size(known[name]) != channels]
        given |= {name: value for name, value in known.items() if name not in (*other, *given)}
        init(*args, **given)

    return constructor


def _recording(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor of a user's class: objects of exactly this class keep the arguments in `_given`."""
    signature = inspect.signature(init)
    hints = {p.name: (type(p.default), p.annotation, *get_args(p.annotation)) for p in signature.parameters.values()}
    enums = {name: kind for name, kinds in hints.items() for kind in kinds if isinstance(kind, EnumType)}

    @wraps(init)
    def recording(self: Any, *args: Any, **kwargs: Any) -> None:
        # A checkpoint records the names of members of enums, so convert the names back to the members.
        for name in enums.keys() & kwargs.keys():
            if isinstance(kwargs[name], str):
                kwargs[name] = enums[name].__members__.get(kwargs[name], kwargs[name])
        init(self, *args, **kwargs)
        if type(self).__init__ is recording:
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            _, *parameters = signature.parameters.values()
            self._given = {}
            for p in parameters:
                if p.kind is p.VAR_KEYWORD:
                    self._given |= bound.arguments[p.name]
                elif p.kind is not p.VAR_POSITIONAL:
                    value = bound.arguments[p.name]
                    self._given[p.name] = value.name if isinstance(value, enums.get(p.name, ())) else value

    return recording


def _kept(given: Any, kept: Any) -> Any:
    """Choose between the value given for an argument and the value of the attribute, see `init_args`."""
    given = os.fspath(given) if isinstance(given, os.PathLike) else given
    is_text = isinstance(given, str) and isinstance(kept, str) and not isinstance(kept, Enum)
    return kept if given is None or is_text else given


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values in plain types, tuples as lists and paths as text; leave out values that hold other types."""
    found = {name: _plain(value) for name, value in values.items()}
    return {name: value for name, value in found.items() if value is not _LEFT_OUT}


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    # Convert NumPy's numbers and texts, which `torch.load(weights_only=True)` refuses when `relvit.load` reads a
    # checkpoint.
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, tuple | list):
        items = [_plain(item) for item in value]
        return _LEFT_OUT if _LEFT_OUT in items else items
    if isinstance(value, Mapping):
        items = {name: _plain(item) for name, item in value.items()}
        return _LEFT_OUT if _LEFT_OUT in items.values() else items
    # The members of some enums are texts or numbers, too, but `torch.load(weights_only=True)` refuses them.
    plain = value is None or (isinstance(value, str | int | float | bool) and not isinstance(value, Enum))
    return value if plain else _LEFT_OUT
