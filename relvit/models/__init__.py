"""Architectures, one file per family; importing this package registers them with timm."""

from relvit.models.relative_vit import RelVisionTransformer

__all__ = ["RelVisionTransformer"]
