"""Relative positions for existing timm models, weights and all."""
