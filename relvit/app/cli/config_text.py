"""Read configuration files (YAML): suggest a name for a missing file, refuse repeated keys and endless aliases."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

from relvit.app.cli.errors import UsageError
from relvit.app.cli.shipped_configs import shipped_configs
from relvit.app.utils.nested_values import check_bounds
from relvit.app.utils.shown_text import cut
from relvit.utils.messages import did_you_mean, listing

# jsonargparse calls `load_value` if `parser_mode` has this name, under which `set_loader` registers it below.
MODE = "relvit"
_stock_loader = get_loader("yaml")


class _UniqueKeys(yaml.SafeLoader):
    """Refuse keys that come twice in one mapping; PyYAML would silently use the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"):
            if key.value in names:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} comes twice: keep one", problem_mark=key.start_mark
                )
            names.add(key.value)
        return super().construct_mapping(node, deep)


def load_config(text: str) -> Any:
    """Return the plain values of a YAML text.

    Raises:
        yaml.YAMLError: the text is not YAML, has a tag that creates a Python object, such as `!!python/object`, or has
            a key twice in one mapping.
        ValueError: with all aliases replaced, the text has too many levels or values.
    """
    check_bounds(yaml.load(text, Loader=_UniqueKeys), "the configuration")
    return _stock_loader(text)


def load_value(text: str) -> Any:
    """Load YAML as `load_config`, for an option or a configuration file, but keep an option that begins with '#'.

    YAML reads '#' as the start of a comment, so a folder '#1' or the separator '#' would be null, as if the option were
    not given. An option is a single line and has no comment.
    """
    found = load_config(text)
    return text if found is None and re.fullmatch("#.*", text) else found


def read_config(config: str) -> dict[str, Any]:
    """Load a configuration: the path of a file, or YAML in one line.

    Raises:
        UsageError: the file cannot be read, `load_config` refuses its content, or its content is not a mapping of
            options.
    """
    try:
        options = load_config(config if config.startswith("{") else Path(config).read_text(encoding="utf-8"))
    except OSError as error:
        near = {file.name: str(file) for file in Path(config).parent.glob("*.y*ml")}
        shipped = sorted(shipped_configs())
        hint = did_you_mean(Path(config).name, near) or did_you_mean(Path(config).stem, shipped)
        if not hint and not Path(config).suffix and Path(config).name == config:
            hint = f"; relvit's configurations are {listing(shipped, len(shipped))}"
        hint = hint if isinstance(error, FileNotFoundError) else ""
        raise UsageError(f"--config {config}: {error.strerror}{hint}") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--config {config}: not UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8"
        ) from error
    except yaml.MarkedYAMLError as error:
        raise UsageError(f"--config {config}: {error.problem} (line {error.problem_mark.line + 1})") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError(f"--config {config}: {cut(error)}") from error
    if not isinstance(options, dict):
        example, found = "such as 'trainer: {max_epochs: 10}'", "nothing" if options is None else cut(options)
        raise UsageError(f"--config {config}: options go by name, {example}, got {found}")
    return options


# Some of Lightning's defaults are members of an Enum, which `SafeDumper` cannot write: write the members' values.
yaml.SafeDumper.add_multi_representer(Enum, lambda dumper, member: dumper.represent_data(member.value))
# jsonargparse also reads texts such as 1e3 and 1.5e3 as numbers, so let `SafeDumper` write such texts in quotes.
_EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
yaml.SafeDumper.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))
set_loader(MODE, load_value, exceptions=(yaml.YAMLError, RecursionError, ValueError))
