"""The former place of `reversible_blocks`, which is in `relvit.families.reversible`."""

from typing import TYPE_CHECKING

from relvit._moved import moved

if not TYPE_CHECKING:
    __getattr__ = moved("relvit.layers.depth")
