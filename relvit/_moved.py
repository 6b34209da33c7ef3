"""Public names of earlier releases and where they are now: imports from the old place work for one release."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

# Old package -> name -> new package.
_AFT, _REFORMER, _UNIVERSAL, _XL = (
    f"relvit.families.{room}" for room in ("aft", "reformer", "universal", "transformer_xl")
)
_AFT_OPERATIONS = ("aft_conv", "aft_full", "aft_local", "aft_simple")
MOVED: dict[str, dict[str, str]] = {
    "relvit.ops": dict.fromkeys(_AFT_OPERATIONS, _AFT) | dict.fromkeys(("lsh_attention", "lsh_rotations"), _REFORMER),
    "relvit.ops.reference": dict.fromkeys(_AFT_OPERATIONS, f"{_AFT}.reference")
    | {"lsh_attention": f"{_REFORMER}.reference"},
    "relvit.layers": dict.fromkeys(("AFTConv2d", "AFTFull", "AFTLocal", "AFTSimple"), _AFT)
    | {"LSHAttention": _REFORMER, "TransformerXLPosition2d": _XL},
    "relvit.layers.depth": {"reversible_blocks": "relvit.families.reversible"},
    "relvit.models": dict.fromkeys(("Bands", "Memory", "classify_bands", "forward_segment", "set_bands"), _XL)
    | dict.fromkeys(("Pondered", "UniversalVisionTransformer"), _UNIVERSAL)
    | {"AFTVisionTransformer": _AFT, "LSHVisionTransformer": _REFORMER},
}


def moved(package: str) -> Callable[[str], Any]:
    """Make the `__getattr__` of a package from which public names have moved."""

    def find(name: str) -> Any:
        if name not in MOVED[package]:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        place = MOVED[package][name]
        warnings.warn(f"{package}.{name} is now {place}.{name}", DeprecationWarning, stacklevel=2)
        return getattr(import_module(place), name)

    return find
