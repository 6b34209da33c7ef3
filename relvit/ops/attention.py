"""The public operations: what is checked, and which backend computes."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from relvit.names import did_you_mean, listing
from relvit.ops import fused, reference
from relvit.ops.buckets import BUCKETINGS
from relvit.ops.grid import Grid, num_tokens
from relvit.ops.terms import AxisTables, RelativeTerms

BACKENDS: dict[str, ModuleType] = {"reference": reference, "fused": fused}


def relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: RelativeTerms,
    grid: Grid,
    key_grid: Grid | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention in which keys and values depend on where the key lies relative to the query, exactly.

        logit_ij = scale * (q_i . k_j + q_i . a^K_ij + k_j . a^Q_ij) + b_ij
        out_i = sum_j softmax_j(logit_ij) (v_j + a^V_ij)

    with a_ij = rows[clip(y_j - y_i)] + cols[clip(x_j - x_i)], and a_ij = 0 where i or j is a prefix token. Source: Shaw
    et al. 2018 (arXiv 1803.02155), eq. 3 and 4, on rows and columns apart; for the other terms see `RelativeTerms`.

    Args:
        query: (B, heads, Nq, head_dim), any floating dtype.
        key: (B, heads, Nk, head_dim), same dtype.
        value: (B, heads, Nk, value_dim), same dtype.
        terms: the tables; they are cast to the query's dtype. Terms that are None are left out.
        grid: where the query tokens lie, and the key tokens too unless `key_grid` is given.
        key_grid: where the key tokens lie (cross-attention, memory). `valid` is read from this grid alone.
        attn_mask: broadcastable to (B, heads, Nq, Nk): booleans, True where attention is allowed, or numbers that are
            added to the scaled logits. For padding use `Grid.valid`, which needs no N x N.
        is_causal: allow only keys that do not come later in the sequence than the query; not together with `attn_mask`.
        dropout_p: dropout on the attention weights, value term included. Pass 0 in evaluation.
        scale: factor on content and relative logits alike; None: head_dim ** -0.5.
        backend: 'fused' (one `scaled_dot_product_attention` over longer vectors: memory O(N (H + W)), nothing of N x N
            is kept for backward; with `dropout_p` > 0 PyTorch's CPU kernel gives up this promise), 'reference' (the
            paper's own n products, O(N^2 head_dim) memory) or 'auto' ('fused').

    Returns:
        (B, heads, Nq, value_dim), dtype of the query. A sample with no valid key gets zeros.

    Raises:
        ValueError: shapes, dtypes or names that do not fit; the message names the tensor, its shape and the one
            expected.
    """
    key_grid = grid if key_grid is None else key_grid
    module = _backend(backend)
    _check_shape("query", query, ("B", "heads", "N", "head_dim"))
    batch, heads, _, head_dim = query.shape
    _check_shape("key", key, (batch, heads, "N", head_dim))
    _check_shape("value", value, (batch, heads, key.shape[2], "value_dim"))
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}, expected the query's {query.dtype}")
    _check_grid("query", query, "grid", grid)
    _check_grid("key", key, "key_grid" if key_grid is not grid else "grid", key_grid)
    _check_terms(terms, heads, head_dim, value.shape[3])
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal exclude each other: put the causal part into attn_mask")
    return module.relative_attention(query, key, value, terms, grid, key_grid, attn_mask, is_causal, dropout_p, scale)


def relative_logits(
    query: Tensor, terms: RelativeTerms, grid: Grid, key_grid: Grid | None = None, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The relative part of the logits, q_i . a^K_ij, as one number per row and one per column of the key grid.

    The N x N logits never have to exist: q_i . a^K_ij = rows[..., i, y_j] + cols[..., i, x_j], unscaled. This is Shaw
    et al. 2018 (arXiv 1803.02155), eq. 4, second summand, with H + W instead of H W numbers per query.

    Args:
        query: (B, heads, Nq, head_dim), any floating dtype.
        terms: `terms.key` is read.
        grid: where the query tokens lie, and the key tokens too unless `key_grid` is given.
        key_grid: where the key tokens lie.
        backend: 'fused', 'reference' or 'auto', as in `relative_attention`.

    Returns:
        rows (B, heads, Nq, H) and cols (B, heads, Nq, W) for the key grid's H and W; zero for prefix queries.

    Raises:
        ValueError: no key term, or shapes or names that do not fit.
    """
    key_grid = grid if key_grid is None else key_grid
    module = _backend(backend)
    _check_shape("query", query, ("B", "heads", "N", "head_dim"))
    _check_grid("query", query, "grid", grid)
    if terms.key is None:
        raise ValueError("relative_logits needs terms.key, which is None")
    _check_terms(RelativeTerms(key=terms.key, bucketing=terms.bucketing), query.shape[1], query.shape[3], 0)
    return module.relative_logits(query, terms, grid, key_grid)


def _backend(name: str) -> ModuleType:
    if name == "auto":
        return fused
    if name not in BACKENDS:
        allowed = ["auto", *BACKENDS]
        raise ValueError(f"unknown backend {name!r}{did_you_mean(str(name), allowed)}, allowed: {listing(allowed)}")
    return BACKENDS[name]


def _check_shape(name: str, tensor: Tensor, expected: tuple[int | str, ...]) -> None:
    """Compare with the numbers in `expected`; its strings name sizes that may be anything."""
    fits = tensor.dim() == len(expected) and all(
        isinstance(want, str) or have == want for have, want in zip(tensor.shape, expected, strict=True)
    )
    if not fits:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected ({', '.join(map(str, expected))})")


def _check_grid(name: str, tokens: Tensor, grid_name: str, grid: Grid) -> None:
    if tokens.shape[2] != num_tokens(grid):
        raise ValueError(
            f"{name} has shape {tuple(tokens.shape)}, that is {tokens.shape[2]} tokens, expected {num_tokens(grid)}: "
            f"{grid_name} has {grid.prefix} prefix tokens and {num_tokens(grid) - grid.prefix} patches"
        )
    patches = num_tokens(grid) - grid.prefix
    for part, tensor, tail in (("coords", grid.coords, (patches, 2)), ("valid", grid.valid, (patches,))):
        if tensor is not None and tuple(tensor.shape) not in (tail, (1, *tail), (tokens.shape[0], *tail)):
            raise ValueError(
                f"{grid_name}.{part} has shape {tuple(tensor.shape)}, expected {tail} or {(tokens.shape[0], *tail)}"
            )


def _check_terms(terms: RelativeTerms, heads: int, head_dim: int, value_dim: int) -> None:
    if terms.bucketing not in BUCKETINGS:
        hint = did_you_mean(str(terms.bucketing), BUCKETINGS)
        raise ValueError(f"terms.bucketing must be one of {listing(BUCKETINGS)}, got {terms.bucketing!r}{hint}")
    widths = {"query": (head_dim,), "key": (head_dim,), "value": (value_dim,), "bias": ()}
    for term, width in widths.items():
        tables: AxisTables | None = getattr(terms, term)
        for axis, table in zip(AxisTables._fields, tables or (), strict=False):
            name, shape = f"terms.{term}.{axis}", tuple(table.shape)
            lead = shape[: len(shape) - len(width)]
            if shape[len(lead) :] != width or len(lead) not in (1, 2) or (len(lead) == 2 and lead[0] != heads):
                tail = "".join(f", {size}" for size in width)
                wanted = f"(2k + 1{tail or ','}) or ({heads}, 2k + 1{tail})"
                raise ValueError(f"{name} has shape {shape}, expected {wanted}")
            if lead[-1] % 2 == 0:
                raise ValueError(f"{name} has {lead[-1]} rows, expected an odd number, 2k + 1 for clip distance k")
