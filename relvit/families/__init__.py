"""A folder for each paper beyond Shaw's, with operation, reference, layers and models; each can be removed.

Importing a subpackage registers its positions, depths and models by name.
"""

from relvit.families import aft, reformer, reversible, transformer_xl, universal

__all__ = ["aft", "reformer", "reversible", "transformer_xl", "universal"]
