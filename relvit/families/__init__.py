"""A folder for each paper beyond Shaw's. Only this file imports the folders, so each folder can be removed.

Importing a folder registers the positions, depths, recurrences and models of its paper by name.
"""

from relvit.families import aft, reformer, reversible, transformer_xl, universal

__all__ = ["aft", "reformer", "reversible", "transformer_xl", "universal"]
