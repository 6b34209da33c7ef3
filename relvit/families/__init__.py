"""One paper beyond Shaw's own is one room, which a reader can delete: operation, reference, layer, depth, models.

A room announces itself where it is imported: its positions, ways through the blocks and models are then known by name.
"""

from relvit.families import aft, reformer, reversible, transformer_xl, universal

__all__ = ["aft", "reformer", "reversible", "transformer_xl", "universal"]
