"""Choose, build and check the position of a layer, by name ("a+b" too) or class; give it the index of its layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from itertools import count
from numbers import Real
from typing import Any

from torch import nn

from relvit.layers.positions import POSITIONS
from relvit.layers.positions.base import needs_tokens
from relvit.layers.positions.combined import CombinedPosition2d
from relvit.ops import Grid, RelativeTerms
from relvit.ops.checks import check_kind
from relvit.ops.inputs import check_terms
from relvit.utils.messages import check_choice

# Models name this argument `rel_init_std`; `retrofit` and positions name it `init_std`. Users give the arguments of a
# named position to `RelVisionTransformer` or `retrofit`, so add a new argument there, too.
ALIASES = {"rel_init_std": "init_std"}
# The command line takes callbacks by the path of a class, so users may try a path for positions and mixers, too.
NO_PATHS = (
    "a text cannot stand for your own class: give the class in Python, or register a model that has it, see "
    "docs/own_position.md"
)


def position_factory(position: str | Callable[..., nn.Module], **arguments: Any) -> Callable[..., nn.Module]:
    """Return the factory of position modules, for `make_position`.

    Args:
        position: a name in `relvit.layers.positions.POSITIONS`, several with + between them (`CombinedPosition2d`), or
            a class of the user.
        **arguments: arguments of positions that are given by name; their names are the names in models or in
            `retrofit`. Of several positions each takes the arguments that it has. None: the position's own default.
            `init_std=0` and `rel_init_std=0` are ignored if no position of these names has an `init_std`. For a class
            of the user only `init_std=0` is ignored, because it is the default of `retrofit`.

    Raises:
        ValueError: a name is unknown or given twice, no position has one of the arguments, or `init_std` is negative.
        TypeError: `init_std` is not a number.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    for name, value in given.items():
        if ALIASES.get(name, name) == "init_std":
            check_kind(name, value, Real, "a number")
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
    if not isinstance(position, str):
        foreign = {name: value for name, value in given.items() if (name, value) != ("init_std", 0)}
        # A recipe may set several of these arguments, so the error names all of them.
        if foreign:
            listed = ", ".join(f"{name}={value!r}" for name, value in foreign.items())
            own_ones = ", ".join(f"{ALIASES.get(name, name)}=..." for name in foreign)
            are, them = ("are", "them") if len(foreign) > 1 else ("is", "it")
            raise ValueError(
                f"{listed} {are} for positions known by name; leave {them} out (on the command line: null), or give "
                f"{them} to your own one: position=functools.partial(YourPosition, {own_ones})"
            )
        return position
    if "." in position:
        raise ValueError(f"position is {position!r}: {NO_PATHS}")
    names = position.split("+")
    for name in names:
        check_choice("position", name, tuple(POSITIONS))
    if len(set(names)) < len(names):
        raise ValueError(f"position is {position!r}: give each name once")
    taken: dict[str, dict[str, Any]] = {name: {} for name in names}
    for name, value in given.items():
        own = ALIASES.get(name, name)
        owners = [each for each in names if accepts(each, own)]
        if not owners and (own, value) != ("init_std", 0):
            others = ", ".join(repr(other) for other in POSITIONS if accepts(other, own))
            raise ValueError(
                f"{name} is for position {others}, got {name}={value!r} with position {position!r}: leave {name} out "
                "(on the command line: null)"
            )
        for each in owners:
            taken[each][own] = value
    makers = {name: partial(POSITIONS[name], **own) if own else POSITIONS[name] for name, own in taken.items()}
    return makers[position] if position in makers else partial(CombinedPosition2d, makers=makers)


def accepts(position: str, argument: str) -> bool:
    """Return whether the position of this name has an argument."""
    return argument in inspect.signature(POSITIONS[position]).parameters


def numbered(factory: Callable[..., nn.Module], depth: int) -> Callable[..., nn.Module]:
    """Give `layer=(index, depth)` to a factory that accepts this argument; the first position that it makes gets 0."""
    try:
        if not callable(factory) or "layer" not in inspect.signature(factory).parameters:
            return factory
    except ValueError:
        # `inspect.signature` fails for a `partial` with wrong arguments. Return this `partial`: its call raises an
        # error that names the wrong argument.
        return factory
    index = count()
    return lambda *args, **kwargs: factory(*args, layer=(next(index), depth), **kwargs)


def make_position(factory: Callable[..., nn.Module], head_dim: int, num_heads: int, **like: Any) -> nn.Module:
    """Build a position module for an attention layer, given its `device` and `dtype`, and check factory and module."""
    check_maker("position", factory, "head_dim, num_heads", "RelativePosition2d")
    position = factory(head_dim, num_heads, **like)
    if not isinstance(position, nn.Module):
        raise TypeError(
            f"position({head_dim}, {num_heads}) returned {position!r}: it must return a module from Grid to "
            "RelativeTerms, such as RelativePosition2d(head_dim, num_heads)"
        )
    check_position(position, head_dim, num_heads)
    return position


def check_maker(name: str, given: object, arguments: str, example: str) -> None:
    """Raise TypeError for an argument that cannot be called to make a module for each block, such as a module."""
    if isinstance(given, nn.Module) or not callable(given):
        kind = f"a module {type(given).__name__}" if isinstance(given, nn.Module) else repr(given)
        raise TypeError(
            f"{name} must make a module of its own for every block, called as {name}({arguments}, device=, dtype=): "
            f"give a class such as {example} or a functools.partial of it, got {kind}"
            + (f"; {NO_PATHS}" if isinstance(given, str) else "")
        )


def check_position(position: object, head_dim: int, num_heads: int) -> None:
    """Raise unless a position is a module that maps a grid of one patch to `RelativeTerms` for these heads."""
    if not isinstance(position, nn.Module):
        kind = f"the class {position.__name__}" if isinstance(position, type) else repr(position)
        raise TypeError(
            "a position must be a module from Grid to RelativeTerms, such as RelativePosition2d(head_dim, num_heads), "
            f"got {kind}"
        )
    # Terms that depend on tokens cannot be computed here, because there are no tokens.
    if needs_tokens(position):
        return
    try:
        terms = position(Grid(1, 1))
    except Exception as error:
        raise TypeError(f"position {type(position).__name__} cannot be called with a Grid: {error}") from error
    if not isinstance(terms, RelativeTerms):
        raise TypeError(f"position {type(position).__name__} must return RelativeTerms, got {type(terms).__name__}")
    try:
        check_terms(terms, num_heads, head_dim, head_dim)
    except ValueError as error:
        raise ValueError(
            f"position {type(position).__name__} is not for {num_heads} heads of width {head_dim}: {error}"
        ) from error
