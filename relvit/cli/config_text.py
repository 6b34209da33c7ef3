"""Load the YAML of configuration files: keys that repeat are refused, class paths of earlier releases still work."""

from __future__ import annotations

from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

from relvit.data.modules.registry import public_class_path

# The name under which parsers find `load_config`.
MODE = "relvit"

_stock_loader = get_loader("yaml")


class RepeatedKeyError(yaml.MarkedYAMLError):
    """Report a key that comes twice in one mapping, of which YAML itself would silently use the last."""


def load_config(text: str) -> Any:
    """Return the plain values of a YAML text.

    Raises:
        yaml.YAMLError: not YAML, a tag that stands for code, or a key that comes twice in one mapping.
    """
    _check_keys(yaml.compose(text, Loader=yaml.SafeLoader), set())
    return _stock_loader(public_class_path(text))


def _check_keys(node: yaml.Node | None, seen: set[int]) -> None:
    # A node that an alias repeats is the same object.
    if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        children = node.value
    else:
        children = [value for _, value in node.value]
        names = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"):
            if key.value in names:
                raise RepeatedKeyError(problem=f"the key {key.value!r} comes twice", problem_mark=key.start_mark)
            names.add(key.value)
    for child in children:
        _check_keys(child, seen)


set_loader(MODE, load_config, exceptions=(yaml.YAMLError, RecursionError, ValueError))
