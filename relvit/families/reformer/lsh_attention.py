"""LSH attention as a mixer: one projection for queries and keys, a bias by 2D offset, and the random rotations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from relvit.families.reformer.operation import check_bias_alone, lsh_attention, lsh_rotations
from relvit.layers.mixer import LayerPlan, Mixer, count_parameters
from relvit.layers.positions.base import needs_tokens
from relvit.ops import Grid, RelativeTerms
from relvit.ops.checks import check_heads, integer
from relvit.utils.constants import KeepConstants

# This is the largest number of buckets. With 32 tokens per bucket, the default, a sequence of 32,768 tokens reaches
# this number; the buckets of longer sequences hold more tokens.
MOST_BUCKETS = 1024


def check_position(position: nn.Module) -> None:
    """Raise ValueError for a position that has other terms than a bias by offset."""
    if needs_tokens(position):
        raise ValueError(
            "LSH attention takes no position that depends on tokens or has free channels, got "
            f"{type(position).__name__}: give one with a bias by offset alone, such as 'slopes'"
        )
    check_bias_alone(position(Grid(1, 1)))


class LSHAttention(Mixer, KeepConstants):
    """Reformer's LSH attention: a token attends only to tokens whose hash falls into the same bucket.

    This module can replace `RelativeAttention`. Each token has one vector that serves as query and as key; keys are
    normalised to unit length. In training every call draws new random rotations from PyTorch's generator; in evaluation
    the rotations are always the same, also in other processes. Source: Kitaev et al. 2020, Reformer (arXiv 2001.04451),
    section 2; see `lsh_attention`. For arguments that are not listed here see `timm.layers.Attention`.

    Examples:
        >>> LSHAttention(64, num_heads=4, bucket_size=16)(torch.randn(2, 400, 64), make_grid(20, 20)).shape
        torch.Size([2, 400, 64])

    Args:
        dim: width of the tokens.
        num_heads: number of heads.
        position: module that maps a `Grid` to `RelativeTerms` with a bias alone, such as `RelativePosition2d` with
            rel_terms 'b' or `SlopePosition2d`; it may also be set later as the attribute `position`. None: no bias.
        bucket_size: number of tokens per bucket, on average at least. Up to 2 `bucket_size` - 1 tokens are one bucket,
            so each token attends to all other tokens. Chunks of sorted tokens are twice as large as the average bucket.
        rounds: how often tokens are hashed; more rounds find more pairs, and take proportionally longer.

    Raises:
        TypeError, ValueError: `bucket_size` or `rounds` is not an integer, or is below 1.
        ValueError: the width is not a multiple of the number of heads, or the position has other terms than a bias.
    """

    lacks: ClassVar[Mapping[str, str]] = Mixer.lacks | {
        "weights": "forms no weights between all tokens",
        "sizes": "has a number of buckets that depends on the number of tokens, which a graph fixes",
    }

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        position: nn.Module | None = None,
        bucket_size: int = 32,
        rounds: int = 4,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: Callable[..., nn.Module] = nn.LayerNorm,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        if position is not None:
            check_position(position)
        factory_kwargs = {"device": device, "dtype": dtype}
        self.num_heads = num_heads
        self.head_dim: int = dim // num_heads
        self.position = position
        self.qk_v: nn.Linear = nn.Linear(dim, 2 * dim, bias=qkv_bias, **factory_kwargs)
        self.qk_norm: nn.Module = norm_layer(self.head_dim, **factory_kwargs) if qk_norm else nn.Identity()
        self.attn_drop: nn.Dropout = nn.Dropout(attn_drop)
        self.norm: nn.Module = norm_layer(dim, **factory_kwargs) if scale_norm else nn.Identity()
        self.proj: nn.Linear = nn.Linear(dim, dim, bias=proj_bias, **factory_kwargs)
        self.proj_drop: nn.Dropout = nn.Dropout(proj_drop)
        self.set_hashing(bucket_size, rounds)

    def set_hashing(self, bucket_size: int, rounds: int) -> None:
        """Set the number of tokens per bucket and of hashing rounds, at any time, because no parameters depend on them.

        Raises:
            TypeError, ValueError: `bucket_size` or `rounds` is not an integer, or is below 1.
        """
        bucket_size, rounds = integer("bucket_size", bucket_size, 1), integer("rounds", rounds, 1)
        self.bucket_size: int = bucket_size
        shape, device = (rounds, self.head_dim, MOST_BUCKETS // 2), self.proj.weight.device
        rotations = torch.empty(shape, device=device, dtype=torch.float32)
        self.register_buffer("rotations", rotations, persistent=False)
        self.init_non_persistent_buffers()

    def init_non_persistent_buffers(self) -> None:
        """Draw the rotations of evaluation."""
        if not self.rotations.is_meta:
            rounds, head_dim, pairs = self.rotations.shape
            generator = torch.Generator().manual_seed(0)
            # Draw one round after the other, so that the first rounds have the same rotations whatever the number of
            # rounds is.
            drawn = [lsh_rotations(1, head_dim, 2 * pairs, generator, "cpu") for _ in range(rounds)]
            self.rotations.copy_(torch.cat(drawn))

    def forward(self, x: Tensor, grid: Grid, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Map (B, N, dim) tokens of `grid` to (B, N, dim).

        Raises:
            ValueError: an `attn_mask` is given; put padding into the grid's `valid`.
        """
        self.refuse_mask(attn_mask)
        B, N, _ = x.shape
        query_key, value = self.qk_v(x).reshape(B, N, 2, self.num_heads, self.head_dim).unbind(2)
        query_key, value = self.qk_norm(query_key.transpose(1, 2)).to(value.dtype), value.transpose(1, 2)
        terms = self.position_terms(grid)
        dropout_p = self.attn_drop.p if self.training else 0.0
        # Each column of a rotation makes a pair of buckets. The number of buckets grows with the number of tokens: use
        # only the first `pairs` columns.
        pairs = min(N // (2 * self.bucket_size), self.rotations.shape[2])
        rotations = self.rotations[:, :, :pairs]
        if self.training:
            rotations = torch.randn_like(rotations)
        x = lsh_attention(query_key, value, grid, rotations, terms=terms, is_causal=is_causal, dropout_p=dropout_p)
        return self.proj_drop(self.proj(self.norm(x.transpose(1, 2).flatten(2))))

    def position_terms(self, grid: Grid) -> RelativeTerms | None:
        """Return the terms of `position` on a grid; see `Mixer`."""
        return None if self.position is None else self.position(grid)

    def plan(self, name: str, grid: Grid, training: bool, device: str | None = None) -> LayerPlan:
        """Return what the mixer of this name computes: whether there is a bias; backends cannot be chosen."""
        terms = "" if self.position is None or self.position(Grid(1, 1)).bias is None else "b"
        plan = super().plan(name, grid, training, device)
        return plan._replace(terms=terms, parameters=count_parameters(self.position))

    def extra_repr(self) -> str:
        return f"bucket_size={self.bucket_size}, rounds={self.rotations.shape[0]}"
