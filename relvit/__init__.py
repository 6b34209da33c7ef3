"""relvit: Vision Transformers that see where things are relative to each other in two dimensions.

Importing it registers the models with timm: `timm.create_model('relvit_small')`.
"""

from relvit import layers, models, ops
from relvit.models import RelVisionTransformer, retrofit
from relvit.version import __version__

__all__ = ["__version__", "RelVisionTransformer", "retrofit", "layers", "models", "ops"]
