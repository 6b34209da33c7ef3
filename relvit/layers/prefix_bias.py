"""Learned attention bias of BEiT between prefix tokens (class token, registers) and patches, which have no offset."""

import torch
from torch import Tensor, nn

from relvit.ops import Channels, Grid, num_tokens
from relvit.utils.constants import KeepConstants


class PrefixBias(KeepConstants):
    """Three numbers per head, added to the logits of prefix tokens (class token, registers), as in BEiT.

    Source: the last three rows of the bias table in the authors' code of BEiT (Bao et al. 2021, arXiv 2106.08254),
    which has these rows for the class token only.

    Examples:
        >>> attention = RelativeAttention(192, num_heads=3)
        >>> attention.prefix_bias = PrefixBias(num_heads=3)
        >>> attention(torch.randn(2, 25, 192), make_grid(4, 6, prefix=1)).shape
        torch.Size([2, 25, 192])

    Args:
        num_heads: number of heads.

    Attributes:
        weight: (3, num_heads): the bias for the query of a prefix token and the key of a patch, for the query of a
            patch and the key of a prefix token, and for two prefix tokens; zeros at first.
    """

    def __init__(
        self, num_heads: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight: nn.Parameter = nn.Parameter(torch.empty(3, num_heads, device=device, dtype=dtype))
        self.init_weights()

    def init_weights(self) -> None:
        """Set the biases to zero."""
        nn.init.zeros_(self.weight)

    def no_weight_decay(self) -> set[str]:
        """Return the name of the biases."""
        return {"weight"}

    def forward(self, grid: Grid, key_grid: Grid) -> Channels:
        """Compute the channels of queries on `grid`, (1, 1, Nq, 2), and of keys on `key_grid`, (1, heads, Nk, 2)."""
        return prefix_channels(self.weight, grid, key_grid)


def prefix_channels(weight: Tensor, grid: Grid, key_grid: Grid) -> Channels:
    """Compute the channels of `PrefixBias` with this weight, (3, heads)."""
    query, key = (
        (torch.arange(num_tokens(tokens), device=weight.device) < tokens.prefix).to(weight.dtype)
        for tokens in (grid, key_grid)
    )
    to_patch, to_prefix, between = weight[:, :, None].unbind(0)
    # The two channels of a query are (1, 0) if it is a prefix token and (0, 1) if it is a patch. So the two channels of
    # a key are its biases with a prefix query and with a patch as query.
    met_by_prefix, met_by_patch = between * key + to_patch * (1 - key), to_prefix * key
    return Channels(
        torch.stack((query, 1 - query), dim=-1)[None, None],
        torch.stack((met_by_prefix, met_by_patch), dim=-1)[None],
    )
