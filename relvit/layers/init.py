"""How tables of positions start."""

from timm.layers import trunc_normal_
from torch import nn


def draw_tables(module: nn.Module, std: float) -> None:
    """Draw all parameters of a module from a normal of standard deviation `std`, cut off at ±2; zeros for 0."""
    for table in module.parameters():
        if std:
            trunc_normal_(table, std=std)
        else:
            nn.init.zeros_(table)
