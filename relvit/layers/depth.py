"""The former place of `reversible_blocks`, which is in `relvit.families.reversible`."""

from relvit._moved import moved

__getattr__ = moved("relvit.layers.depth")
