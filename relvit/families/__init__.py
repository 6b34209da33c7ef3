"""Rooms of one paper each beyond Shaw's own: a folder with operation, reference, layer and models; it can be deleted.

Importing one of these folders registers the folder's positions, depths and models under their names.
"""

from relvit.families import aft, reformer, reversible, transformer_xl, universal

__all__ = ["aft", "reformer", "reversible", "transformer_xl", "universal"]
