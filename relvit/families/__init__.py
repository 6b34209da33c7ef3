"""A folder for each paper beyond Shaw's, with operation, reference, layers and models; each can be removed.

The import of a folder registers its positions, depths and models under their names.
"""

from relvit.families import aft, reformer, reversible, transformer_xl, universal

__all__ = ["aft", "reformer", "reversible", "transformer_xl", "universal"]
