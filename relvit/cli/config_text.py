"""Configuration files may come from others: what repeats a key or unfolds without end is refused before it is built."""

from __future__ import annotations

from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

from relvit.data.modules.registry import public_class_path

# The name under which parsers find `load_config`.
MODE = "relvit"

DEPTH, NODES = 50, 100_000

_stock_loader = get_loader("yaml")


class ConfigError(yaml.YAMLError):
    """A text that is YAML but no configuration."""


def load_config(text: str) -> Any:
    """The plain values of a YAML text: no tags that name objects of Python, no key twice, no depth without end.

    Raises:
        yaml.YAMLError: not YAML, more than 50 levels, more than 100,000 values with all aliases written out, a key that
            comes twice in one mapping, or a tag that stands for code.
    """
    _Checker().check(text)
    return _stock_loader(public_class_path(text))


class _Checker:
    """Goes through the events of a parser, which unlike the building of values needs neither stack nor memory."""

    def __init__(self) -> None:
        self.count = 0
        self.sizes: dict[str, int] = {}
        # Of each open collection: its anchor, the count at its start, and the keys so far (None: a sequence).
        self.open: list[tuple[str | None, int, list[str | None] | None]] = []
        # Of each open collection: children so far, of which every other one in a mapping is a key.
        self.children: list[int] = []

    def check(self, text: str) -> None:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            match event:
                case yaml.ScalarEvent():
                    self._child(event, event.value)
                    if event.anchor:
                        self.sizes[event.anchor] = 1
                case yaml.AliasEvent():
                    self._child(event, None)
                    # One that is still open has no size yet: it would hold itself.
                    if event.anchor not in self.sizes:
                        raise ConfigError(f"unknown or endless alias *{event.anchor}{_place(event)}")
                    self.count += self.sizes[event.anchor]
                case yaml.CollectionStartEvent():
                    self._child(event, None)
                    keys: list[str | None] | None = [] if isinstance(event, yaml.MappingStartEvent) else None
                    self.open.append((event.anchor, self.count, keys))
                    self.children.append(0)
                    if len(self.open) > DEPTH:
                        raise ConfigError(f"more than {DEPTH} levels{_place(event)}")
                case yaml.CollectionEndEvent():
                    anchor, start, _ = self.open.pop()
                    self.children.pop()
                    if anchor:
                        self.sizes[anchor] = self.count - start + 1
            if self.count > NODES:
                raise ConfigError(f"more than {NODES:,} values{_place(event)}")

    def _child(self, event: yaml.NodeEvent, key: str | None) -> None:
        self.count += 1
        if not self.open:
            return
        *_, keys = self.open[-1]
        if keys is not None and self.children[-1] % 2 == 0 and key is not None:
            if key in keys and key != "<<":
                raise ConfigError(f"the key {key!r} comes twice{_place(event)}")
            keys.append(key)
        self.children[-1] += 1


def _place(event: yaml.Event) -> str:
    return f" (line {event.start_mark.line + 1})"


set_loader(MODE, load_config, exceptions=(yaml.YAMLError, RecursionError, ValueError))
