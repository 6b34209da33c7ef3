"""relvit: Vision Transformers that see where things are relative to each other in two dimensions."""

from relvit.version import __version__

__all__ = ["__version__"]
