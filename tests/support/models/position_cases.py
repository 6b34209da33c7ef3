"""Attention layers with positions, grids for them, and timm's attention that computes the same under a mask."""

import torch
from timm.layers import Attention
from torch import nn

from relvit.layers import RelativeAttention
from relvit.models.retrofit.timm_attention import GridArgument
from relvit.ops import make_grid

DIM, HEADS = 8, 2
LAYOUTS = {
    "raster": make_grid(2, 4),
    "prefix": make_grid(4, 2, prefix=2),
    "dropped": make_grid(4, 6, prefix=1, coords=torch.tensor([[[3, 5], [0, 1], [2, 2]], [[0, 0], [3, 0], [1, 4]]])),
}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(position, cls=RelativeAttention, std=0.5, dim=DIM, heads=HEADS, **options):
    """Build attention in float64 with random parameters, of relvit's class or a retrofitted class of timm."""
    options = {"qkv_bias": True, **options}
    if cls is RelativeAttention:
        attn = RelativeAttention(dim, heads, position=position, **options).double()
    else:
        attn = Attention(dim, heads, **options).double()
        attn.__class__, attn.position, attn.backend = cls, position.double(), "auto"
    torch.manual_seed(0)
    for parameter in attn.parameters():
        nn.init.normal_(parameter, std=std)
    return attn.eval()


def run(attn, x, grid):
    """Call a layer of either class."""
    return attn(x, grid) if isinstance(attn, RelativeAttention) else attn(x, attn_mask=GridArgument(grid, None))


def plain(attn):
    """Build timm's attention with the projections of a layer."""
    state = {key: value for key, value in attn.state_dict().items() if "position" not in key}
    made = Attention(attn.proj.in_features, attn.num_heads, qkv_bias="qkv.bias" in state).to(attn.proj.weight)
    made.load_state_dict(state)
    return made
