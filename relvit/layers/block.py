"""Transformer blocks that hand the grid to their mixer: relative attention, or an attention-free one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from timm.layers import LayerNorm
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from relvit.layers.attention import RelativeAttention
from relvit.layers.feed_forward import chunked_mlp
from relvit.layers.positions.by_name import check_maker, make_position
from relvit.layers.prefix_bias import PrefixBias
from relvit.ops import Grid

# This text says how blocks call `mixer`; the error about a `mixer` that cannot be called shows the text.
MIXER_ARGUMENTS = "dim, num_heads, qkv_bias=, proj_bias=, proj_drop="


class GridBlock(Block):
    """timm's pre-norm `Block` that hands the `Grid` of the tokens to its mixer.

    Examples:
        >>> block = RelativeBlock(192, num_heads=3, position=RelativePosition2d)
        >>> isinstance(block, GridBlock)
        True

    Attributes:
        mlp_chunk: number of tokens that the MLP computes at a time, see `relvit.layers.feed_forward`; None: all tokens.
    """

    mlp_chunk: int | None = None

    def forward(
        self,
        x: Tensor,
        grid: Grid | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        branch: str = "",
        memory: Tensor | None = None,
        key_grid: Grid | None = None,
    ) -> Tensor:
        """Map (B, N, dim) tokens of `grid` to (B, N, dim).

        Args:
            x, grid, attn_mask, is_causal, key_grid: see `RelativeAttention.forward`.
            branch: 'mixer' or 'mlp': return only the output of this branch, without adding `x`, as `reversible_blocks`
                needs it. '': return the block's output.
            memory: (B, M, dim), M earlier inputs of this block; `RelativeAttention` lets the tokens of `x` attend to
                these inputs, too.

        Raises:
            TypeError: there is no grid, as in a loop `for block in model.blocks: x = block(x)` for timm's blocks.
        """
        if grid is None:
            raise TypeError(
                f"{type(self).__name__} needs the grid of the tokens: call the model's forward_features or "
                "forward_intermediates, or take tokens, grid = model.embed(images), and call block(tokens, grid)"
            )
        if branch == "mlp":
            return self.mlp_branch(x)
        context = () if memory is None else (self.norm1(memory), key_grid)
        mixed = self.attn(self.norm1(x), grid, attn_mask, is_causal, *context)
        mixed = self.drop_path1(self.ls1(mixed))
        if branch == "mixer":
            return mixed
        x = x + mixed
        return x + self.mlp_branch(x)

    def mlp_branch(self, x: Tensor) -> Tensor:
        """Compute the MLP's branch of (B, N, dim) tokens, without the residual connection."""
        chunk = self.mlp_chunk
        x = self.mlp(self.norm2(x)) if chunk is None else chunked_mlp(self.norm2, self.mlp, x, chunk)
        return self.drop_path2(self.ls2(x))


class MixerBlock(GridBlock):
    """`GridBlock` with any mixer of tokens, attention or an attention-free one.

    Examples:
        >>> from relvit.families.aft import AFTConv2d
        >>> block = MixerBlock(192, num_heads=3, mixer=partial(AFTConv2d, kernel_size=7))
        >>> block(torch.randn(2, 24, 192), make_grid(4, 6)).shape
        torch.Size([2, 24, 192])

    Args:
        dim: width of the tokens.
        num_heads: number of heads.
        mixer: class or function that makes the block's own mixer, called as `mixer(dim, num_heads, qkv_bias=,
            proj_bias=, proj_drop=, device=, dtype=)`. The mixer's `forward` has the arguments of
            `RelativeAttention.forward`.
        qk_norm, scale_attn_norm, attn_drop, norm_layer: see `timm.models.vision_transformer.Block`; as in timm, they
            are the mixer's arguments `qk_norm`, `scale_norm`, `attn_drop` and `norm_layer`. The block passes the first
            three to the mixer only if they are True or above 0, and `norm_layer` only with one of the two norms.
        attn_layer: not used; timm's models pass it to every block, but here `mixer` makes the attention.
        **kwargs: see `timm.models.vision_transformer.Block`; `qkv_bias`, `proj_bias` and `proj_drop` are passed to the
            mixer, too.

    Raises:
        TypeError: `mixer` cannot be called to make a mixer for each block, because it is a module, for example.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        mixer: Callable[..., nn.Module],
        qkv_bias: bool = False,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
        qk_norm: bool = False,
        scale_attn_norm: bool = False,
        attn_drop: float = 0.0,
        norm_layer: type[nn.Module] = LayerNorm,
        attn_layer: type[nn.Module] = nn.Identity,
        **kwargs: Any,
    ) -> None:
        check_maker("mixer", mixer, MIXER_ARGUMENTS, "RelativeAttention")
        shared = {"proj_bias": proj_bias, "proj_drop": proj_drop}
        super().__init__(dim, num_heads, norm_layer=norm_layer, attn_layer=attn_layer, **shared, **kwargs)
        # Pass only options that are switched on, because a mixer without attention may not have these arguments.
        options = {"attn_drop": attn_drop, "qk_norm": qk_norm, "scale_norm": scale_attn_norm}
        options = {name: given for name, given in options.items() if given}
        if qk_norm or scale_attn_norm:
            options["norm_layer"] = norm_layer
        factory_kwargs = {name: kwargs.get(name) for name in ("device", "dtype")}
        self.attn: nn.Module = mixer(dim, num_heads, qkv_bias=qkv_bias, **shared, **options, **factory_kwargs)


class RelativeBlock(MixerBlock):
    """`MixerBlock` whose mixer may have a relative position, by default `RelativeAttention`.

    Examples:
        >>> block = RelativeBlock(192, num_heads=3, position=partial(RelativePosition2d, max_distance=3))
        >>> block(torch.randn(2, 24, 192), make_grid(4, 6)).shape
        torch.Size([2, 24, 192])

    Args:
        dim, num_heads, **kwargs: see `MixerBlock`.
        position: class or function that makes the block's own position module, called as `position(head_dim, num_heads,
            device=, dtype=)` if the mixer has an attribute `position`.
        rope: class or function that makes the block's own `RotaryEmbedding2d`, called with the same arguments as
            `position`; None: no rotary embedding.
        prefix_bias: whether there is a `PrefixBias`.
        mixer: see `MixerBlock`. If the mixer's `__init__` sets an attribute `position` to None, the block sets this
            attribute to the block's position; such a mixer needs an attribute `head_dim`, too.

    Raises:
        TypeError: `position` or `mixer` cannot be called to make a new module for each block, because it is a module
            itself, for example.
        ValueError: `rope` or `prefix_bias` is given, and the mixer is not a `RelativeAttention`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        position: Callable[..., nn.Module],
        rope: Callable[..., nn.Module] | None = None,
        prefix_bias: bool = False,
        mixer: Callable[..., nn.Module] = RelativeAttention,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, mixer=mixer, **kwargs)
        like = {name: kwargs.get(name) for name in ("device", "dtype")}
        check_maker("position", position, "head_dim, num_heads", "RelativePosition2d")
        if hasattr(self.attn, "position"):
            self.attn.position = make_position(position, self.attn.head_dim, num_heads, **like)
        if (rope is not None or prefix_bias) and not isinstance(self.attn, RelativeAttention):
            raise ValueError(
                f"rope and prefix_bias are for RelativeAttention, not for {type(self.attn).__name__}: leave them out"
            )
        if rope is not None:
            self.attn.rope = rope(self.attn.head_dim, num_heads, **like)
        if prefix_bias:
            self.attn.prefix_bias = PrefixBias(num_heads, **like)
