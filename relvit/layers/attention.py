"""Multi-head self-attention with relative positions, windows or a memory of earlier tokens: relvit's own layer."""

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from timm.layers import Attention
from torch import Tensor, nn

from relvit.layers.attention_weights import show_weights, wants_weights
from relvit.layers.mixer import LayerPlan, Mixer, count_parameters
from relvit.layers.positions.base import needs_tokens, terms_of
from relvit.layers.positions.by_name import check_position
from relvit.ops import Grid, RelativeTerms, choose, from_windows, num_tokens, to_windows
from relvit.ops.attention import BACKENDS, attend, attend_projected
from relvit.ops.backends.fused import augmented_width
from relvit.ops.checks import check_backend, check_heads
from relvit.ops.inputs import AttentionInputs, Projected, checked, separate
from relvit.ops.terms import add_channels, with_query_bias
from relvit.ops.windows import exceeds_window

# `LayerPlan.terms` has one letter for each term of a layer: the letter of `rel_terms`, or 'c' for
# `RelativeTerms.channels`, which `rel_terms` has no letter for. The letter of `axis_logits` is 'k', too, because a
# position computes these logits as products of queries and key tables.
LETTERS = {"query": "q", "key": "k", "value": "v", "bias": "b", "channels": "c", "axis_logits": "k"}


def relative_terms(layer: "GridAttention", x: Tensor, grid: Grid, key_grid: Grid) -> RelativeTerms:
    """Compute the terms of a layer's `position` and `prefix_bias` for tokens `x`, (B, N, dim) of `grid`."""
    terms, prefix_bias = _position_terms(layer, x, grid, key_grid), layer.bias_of_prefix()
    return terms if prefix_bias is None else add_channels(terms, prefix_bias(grid, key_grid))


def _position_terms(layer: "GridAttention", x: Tensor, grid: Grid, key_grid: Grid) -> RelativeTerms:
    # Read `_modules`: in PyTorch looking up a module as an attribute takes as long as making a view of a tensor.
    position = layer._modules.get("position")
    if position is None:
        # In some retrofitted layers `position` is a property, which makes a position from the layer's tables, so also
        # look it up as an attribute.
        position = layer.position
    return RelativeTerms() if position is None else terms_of(position, x, grid, key_grid)


def attend_with(
    layer: "GridAttention",
    x: Tensor,
    projected: Projected,
    grid: Grid,
    key_grid: Grid | None = None,
    rotate: Callable[[Tensor, Grid], Tensor] | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Compute attention with the relative terms of a layer: relvit's own attention, or a retrofitted one.

    Let q_i be the projected query of token i, k_j the projected key of token j, R the rotation of a rotary embedding,
    a^K_ij and a^Q_ij the vectors of the key and query tables for the offset from i to j, and b_ij the bias. Then

        logit_ij = scale * (R q_i . R k_j + q_i . a^K_ij + k_j . a^Q_ij) + b_ij

    The vectors of the tables are multiplied by unrotated queries and keys. A rotated query or key depends on the
    coordinates of its token, so the product would no longer depend on the offset alone. `relvit.ops.relative_attention`
    has the formula with all terms.

    Args:
        layer: the attention layer, which has `position`, `scale`, `attn_drop` and `backend`.
        x: (B, Nq, dim), the tokens of `grid`, from which a position may compute its terms.
        projected: queries (B, heads, Nq, head_dim), and keys and values of all tokens that the queries attend to; or
            one tensor, see `Projected`. Under autocast norms may return float32 queries and keys; these are then
            rotated in float32, as in timm.
        grid: grid of the queries.
        key_grid: grid of the keys; None: the grid of the queries.
        rotate: function of queries (or keys) and their grid that returns them rotated; None: there is no rotation.
        attn_mask, is_causal: see `relvit.ops.relative_attention`.

    Returns:
        (B, Nq, heads head_dim).
    """
    keys, attn_drop = grid if key_grid is None else key_grid, layer.attn_drop
    dropout_p = attn_drop.p if layer.training else 0.0
    terms, prefix_bias = _position_terms(layer, x, grid, keys), layer.bias_of_prefix()
    usual = not is_causal and dropout_p == 0 and layer.trained_keys is None and rotate is None and keys is grid
    # If `prefix_bias` has hooks, call the module below instead of reading its weight here: a hook may compute the
    # weight, as in pruning, or replace the output.
    if usual and not wants_weights(attn_drop) and (prefix_bias is None or not has_hooks(prefix_bias)):
        biases = None if prefix_bias is None else prefix_bias.weight
        mixed = attend_projected(projected, terms, grid, layer.scale, layer.backend, attn_mask, biases)
        if mixed is not None:
            return mixed
    if prefix_bias is not None:
        terms = add_channels(terms, prefix_bias(grid, keys))
    query, key, value = separate(projected)
    query, terms = with_query_bias(query, terms)
    position_query = position_key = None
    if rotate is not None:
        position_query, position_key = query.to(value.dtype), key.to(value.dtype)
        query, key = rotate(query, grid), rotate(key, keys)
    query, key = query.to(value.dtype), key.to(value.dtype)
    inputs = AttentionInputs(
        query, key, value, terms, grid, key_grid, attn_mask, is_causal,
        dropout_p, layer.scale, position_query, position_key, layer.trained_keys,
    )  # fmt: skip
    show_weights(attn_drop, inputs)
    return attend(inputs, layer.backend).transpose(1, 2).flatten(2)


def has_hooks(module: object) -> bool:
    """Return whether a call of the module would call a user's hooks; an object that is no module has none."""
    if not isinstance(module, nn.Module):
        return False
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _does_nothing(part: nn.Module | None) -> bool:
    """Return whether a norm or a dropout is None, or a module without effect and without hooks."""
    kind = type(part)
    if kind is nn.Identity or (kind is nn.Dropout and (not part.training or part.p == 0)):
        return not has_hooks(part)
    return part is None


class GridAttention(Mixer):
    """Base of attention with relative terms between its projections: relvit's own, and timm's after a retrofit.

    Attributes:
        position: module that maps a `Grid` to `RelativeTerms`, such as `RelativePosition2d`; None: plain attention.
        backend: see `relvit.ops.relative_attention`; may be set at any time.
        prefix_bias: `PrefixBias` or None; a retrofitted layer of timm may lack the attribute.
        trained_keys: see `relvit.ops.relative_attention`; `relvit.models.set_reach` sets it.
        window: rows and columns of patches; on larger grids tokens attend within windows of this size. None: tokens
            attend to the whole grid.
        block_window: rows and columns of the windows into which the block cuts every image; None: no windows.
        rotates: whether queries and keys are rotated.
    """

    lacks: ClassVar[Mapping[str, str]] = {}
    # Give `position` and `prefix_bias` no default values here: Python would find a default value, a class attribute,
    # before the module of the same name in `_modules`.
    position: nn.Module | None
    prefix_bias: nn.Module | None
    backend: str
    trained_keys: int | None = None
    window: tuple[int, int] | None = None
    block_window: tuple[int, int] | None = None
    rotates: bool = False

    def bias_of_prefix(self) -> nn.Module | None:
        """Return the layer's `prefix_bias`; None: the layer has none, or lacks the attribute."""
        return self._modules.get("prefix_bias")

    def attend(
        self,
        x: Tensor,
        grid: Grid,
        attn_mask: Tensor | None,
        is_causal: bool,
        rotate: Callable[[Tensor, Grid], Tensor] | None,
        memory: Tensor | None = None,
        key_grid: Grid | None = None,
    ) -> Tensor:
        """Map (B, N, dim) tokens to (B, N, dim), within windows on grids that are larger than `window`.

        Args: see `RelativeAttention.forward` and, for `rotate`, `attend_with`.
        """
        if exceeds_window(grid, self.window, attn_mask, is_causal):
            if memory is not None:
                raise ValueError("attention in windows takes no memory: leave memory and key_grid out")
            windows, inner = to_windows(x, grid, self.window)
            return from_windows(self.attend(windows, inner, None, False, rotate), grid, self.window)
        if memory is not None and key_grid is None:
            raise ValueError("memory needs key_grid, the Grid of the tokens in memory and x")
        projected = self.project(x if memory is None else torch.cat((memory, x), dim=1))
        if memory is not None:
            query, key, value = separate(projected)
            projected = query[:, :, -x.shape[1] :], key, value
            if is_causal and attn_mask is None:
                # `is_causal` would give query i the keys 0 ... i, but the memory's keys come first: use a mask.
                attn_mask = torch.ones(x.shape[1], key.shape[2], dtype=torch.bool, device=x.device)
                attn_mask, is_causal = attn_mask.tril(memory.shape[1]), False
        return self.output(x, attend_with(self, x, projected, grid, key_grid, rotate, attn_mask, is_causal))

    # `project`, `heads` and `output` read submodules from the dictionary `_modules`, because looking up a module as an
    # attribute takes as long as making a view of a tensor.
    def project(self, x: Tensor) -> Projected:
        """Compute queries, keys and values of (B, N, dim) tokens."""
        batch, tokens, _ = x.shape
        return self.heads(self._modules["qkv"](x).view(batch, tokens, 3 * self.num_heads, self.head_dim))

    def heads(self, projected: Projected) -> Projected:
        """Normalise queries and keys, if there are norms."""
        query_norm, key_norm = self._modules.get("q_norm"), self._modules.get("k_norm")
        if _does_nothing(query_norm) and _does_nothing(key_norm):
            return projected
        query, key, value = separate(projected)
        return query_norm(query), key_norm(key), value

    def output(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Compute the result (B, N, dim) of tokens (B, N, dim) from their mixed values (B, N, heads head_dim)."""
        parts = self._modules
        if (norm := parts.get("norm")) is not None:
            mixed = norm(mixed)
        if (gate := parts.get("gate")) is not None:
            mixed = mixed * gate(x).sigmoid()
        out, drop = parts["proj"](mixed), parts["proj_drop"]
        return out if _does_nothing(drop) else drop(out)

    def position_terms(self, grid: Grid) -> RelativeTerms | None:
        """Return the terms of `position` on a grid, or on a window that the block cuts; see `Mixer`."""
        if self.position is None or needs_tokens(self.position):
            return None
        return self.position(grid if self.block_window is None else Grid(*self.block_window))

    def plan(self, name: str, grid: Grid, training: bool, device: str | None = None) -> LayerPlan:
        """Return which backend attends to the tokens of a grid, and why; only tables are computed."""
        given, position = self.example(grid), self.position
        with torch.set_grad_enabled(training):
            dropout_p = self.attn_drop.p if training else 0.0
            options = {"device": device, "dropout_p": dropout_p, "trained_keys": self.trained_keys}
            options["position_query"] = given.position_query
            backend, reason, keeps = choose(given.query.requires_grad_(training), *given[1:6], **options)
        if self.backend != "auto":
            keeps = keeps if backend == self.backend else ""
            backend, reason = self.backend, "chosen by name"
        letters = "".join(letter for field, letter in LETTERS.items() if getattr(given.terms, field) is not None)
        width = augmented_width(checked(given), padded=False) if letters else self.head_dim
        kind = "" if position is None else type(position).__name__
        return LayerPlan(
            name, kind, letters, backend, reason, (self.head_dim, width), keeps, count_parameters(position)
        )

    def example(self, grid: Grid) -> AttentionInputs:
        """Return inputs of attention for the tokens of a grid; only the tables hold numbers."""
        if self.block_window is not None:
            grid = Grid(*self.block_window)
        # Quantised layers have no parameters, and their `weight` is a method, so take the first parameter of any part.
        known = next((tensor for tensor in self.parameters() if tensor.is_floating_point()), torch.empty(0))
        like = {"device": known.device, "dtype": known.dtype}
        # `plan` reads only the shapes of terms that depend on tokens, so these tokens need not be initialised.
        x = torch.empty(1, num_tokens(grid), self.num_heads * self.head_dim, **like)
        if exceeds_window(grid, self.window, None, False):
            x, grid = to_windows(x, grid, self.window)
        vectors = torch.empty(len(x), self.num_heads, num_tokens(grid), self.head_dim, **like)
        terms = relative_terms(self, x, grid, grid)
        before_rotation = torch.empty_like(vectors) if self.rotates else None
        return AttentionInputs(vectors, vectors, vectors, terms, grid, position_query=before_rotation)


class RelativeAttention(GridAttention, Attention):
    """timm's `Attention` with `relvit.ops.relative_attention` between its projections.

    Parameters and options are the same as in `timm.layers.Attention`, so timm's weights load; a position module is
    added. Tables are multiplied by queries after `q_norm` and by keys after `k_norm`.

    For other projections override `project` in a subclass. A `forward` of your own has to call `attend`: otherwise
    `rope`, `trained_keys` and `window`, which a model or `relvit.models.set_reach` sets on the layer, have no effect.

    Examples:
        >>> position = RelativePosition2d(head_dim=64, num_heads=3, rel_terms="kv", max_distance=3)
        >>> attention = RelativeAttention(192, num_heads=3, position=position)
        >>> attention(torch.randn(2, 24, 192), make_grid(4, 6)).shape
        torch.Size([2, 24, 192])

    Args:
        dim: width of the tokens.
        num_heads: number of heads.
        position, backend: see `GridAttention`; both may also be set later, as attributes.
        **kwargs: see `timm.layers.Attention`.

    Attributes:
        rope: module that rotates queries and keys, `RotaryEmbedding2d`; None: there is no rotation.

    Raises:
        ValueError: `backend` is unknown, `num_heads` does not divide `dim`, or the tables of `position` are for another
            number or width of heads.
        TypeError: `position` is not a module that maps a `Grid` to `RelativeTerms`, but a class, for example.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        position: nn.Module | None = None,
        backend: str = "auto",
        **kwargs: object,
    ) -> None:
        check_backend(backend, tuple(BACKENDS))
        check_heads(dim, num_heads)
        super().__init__(dim, num_heads, **kwargs)
        if position is not None:
            check_position(position, self.head_dim, self.num_heads)
        self.position = position
        self.rope: nn.Module | None = None
        self.prefix_bias: nn.Module | None = None
        self.backend = backend

    @property
    def rotates(self) -> bool:
        """See `GridAttention`."""
        return self.rope is not None

    def forward(
        self,
        x: Tensor,
        grid: Grid,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        memory: Tensor | None = None,
        key_grid: Grid | None = None,
    ) -> Tensor:
        """Map (B, N, dim) tokens to (B, N, dim).

        Where to find the computation: `position.terms` makes the terms; `attend_with` above calls two functions in
        `ops/attention.py`, `attend_projected` for the usual case, computed by `backends/lean.py`, and `attend` for all
        other cases. On a CPU `backends/tiled.py` computes inputs with more than `lean.MOST_PAIRS` pairs of tokens,
        counted over all heads and images together. One image of 224 px in `relvit_small` has more.

        Args:
            x: the tokens.
            grid: places of the tokens in `x`.
            attn_mask, is_causal: see `relvit.ops.relative_attention`; causal attention sees the whole memory.
            memory: (B, M, dim), M further tokens that `x` attends to; their keys come before the keys of `x`.
            key_grid: places of the tokens in `memory` and `x`; None: there is no memory, and keys come from `x` alone.

        Raises:
            ValueError: `memory` is given without `key_grid`.
            ValueError: the grid is larger than the attribute `window`, and has prefix tokens or coordinates, or
                `memory`, `attn_mask` or `is_causal` is given.
        """
        return self.attend(x, grid, attn_mask, is_causal, self.rope, memory, key_grid)
