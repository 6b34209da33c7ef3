"""Attention-free transformers (AFT, Zhai et al. 2021, arXiv 2105.14103): averages of values, weighted by exp(K + w)."""

from relvit.ops.aft.api import aft_conv, aft_full, aft_local, aft_simple

__all__ = ["aft_full", "aft_local", "aft_simple", "aft_conv"]
