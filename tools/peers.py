"""Attention layers made of the code of iRPE's and PaPE's authors, for `benchmark.py --level layer --names irpe pape`.

Neither implementation is on PyPI. iRPE: put the folder `iRPE/DeiT-with-iRPE` of https://github.com/microsoft/Cream on
PYTHONPATH, and `pip install easydict`; its CUDA extension `rpe_ops` is used if it has been built. PaPE: put the folder
of https://github.com/DTU-PAS/parabolic-position-encoding on PYTHONPATH, and `pip install tyro dataclasses-json`; the
kernels of its later versions need a GPU.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import torch
from torch import Tensor, nn

# This dictionary maps the name of each layer here to the module that it needs.
MODULES = {"irpe": "irpe", "pape": "pape"}


def installed(name: str) -> bool:
    """Return whether the code of these authors can be imported."""
    return importlib.util.find_spec(MODULES[name]) is not None


class IRPEAttention(nn.Module):
    """Attention with iRPE's contextual vectors on keys and values, tables of the product method shared by heads.

    As in the authors' models (Wu et al. 2021, arXiv 2107.14222), logits and weights of N x N are formed.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        from irpe import build_rpe, get_rpe_config

        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        config = get_rpe_config(ratio=1.9, method="product", mode="ctx", shared_head=True, skip=0, rpe_on="kv")
        _, self.of_keys, self.of_values = build_rpe(config, head_dim=self.head_dim, num_heads=num_heads)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, N, dim) patches of a square grid to the same shape."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        query = query * self.head_dim**-0.5
        weights = (query @ key.mT + self.of_keys(query)).softmax(dim=-1)
        return self.proj((weights @ value + self.of_values(weights)).transpose(1, 2).flatten(2))


class PaPEAttention(nn.Module):
    """The attention layer of PaPE's authors (Ohrstrom et al. 2026, arXiv 2602.01418) on a square grid."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        from pape.configs import Positional
        from pape.nn.encoder import Attention

        sizes = SimpleNamespace(hidden_size=dim, num_heads=num_heads, head_size=dim // num_heads, dropout=0.0)
        pape = SimpleNamespace(parabolas=50)
        self.attention = Attention(SimpleNamespace(model=sizes, pape=pape, num_positions=2, positional=Positional.pape))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, N, dim) patches of a square grid to the same shape."""
        side = round(x.shape[1] ** 0.5)
        places = torch.cartesian_prod(*(torch.arange(side, device=x.device),) * 2)[None]
        return self.attention(x, self.attention.position_encoder.prepare_positions(places))


CLASSES: dict[str, type[nn.Module]] = {"irpe": IRPEAttention, "pape": PaPEAttention}
