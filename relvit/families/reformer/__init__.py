"""Reformer's LSH attention (Kitaev et al. 2020, arXiv 2001.04451): tokens attend to tokens in the same bucket."""

from relvit.families.reformer.lsh_attention import LSHAttention
from relvit.families.reformer.lsh_vit import LSHVisionTransformer
from relvit.families.reformer.operation import lsh_attention, lsh_rotations

__all__ = ["lsh_attention", "lsh_rotations", "LSHAttention", "LSHVisionTransformer"]
