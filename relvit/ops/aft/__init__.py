"""Attention-free transformers (Zhai et al. 2021, arXiv 2105.14103): averages of values with weights exp(K_j + w_ij)."""

from relvit.ops.aft.operations import aft_conv, aft_full, aft_local, aft_simple

__all__ = ["aft_full", "aft_local", "aft_simple", "aft_conv"]
