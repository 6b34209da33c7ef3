"""The public operations: what is checked, and which backend computes."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from relvit.ops import fused, gathered, reference, tiled
from relvit.ops.checks import (
    check_attention,
    check_backend,
    check_options,
    check_separable,
    check_terms,
    check_tokens,
)
from relvit.ops.grid import Grid
from relvit.ops.terms import AxisTables, JointTable, RelativeTerms
from relvit.ops.transforms import in_graph, in_transform

BACKENDS: dict[str, ModuleType] = {"reference": reference, "fused": fused, "tiled": tiled, "gathered": gathered}


class Case(NamedTuple):
    """What the choice of a backend depends on."""

    device: str
    dtype: torch.dtype
    terms: bool  # there are relative terms
    joint: bool  # some table is joint
    graph: bool  # a graph is being compiled, exported or traced
    transform: bool  # torch.func or forward-mode differentiation is at work
    stock: bool  # flash kernels are switched off (`torch.nn.attention.sdpa_kernel`)
    width: int  # of the longer vectors of `fused`
    gradient: bool


class Choice(NamedTuple):
    """A backend, why it is the one, and what it keeps for backward besides its inputs and its output."""

    backend: str
    reason: str
    keeps: str


# Far from where numbers divided or multiplied by it could overflow, in half precision too.
SMALLEST_SCALE, LARGEST_SCALE = 1e-3, 1e3
NOTHING = "nothing: no gradient is wanted"
LITTLE = "logits and marginals, O(N (H + W)): backward computes each tile again"
# The first rule that applies decides. The CPU's is by measurement: `tools/benchmark.py --names plain relvit_small_fused
# relvit_small_tiled`, whose rows are in docs/benchmarks.
RULES: tuple[tuple[Callable[[Case], bool], Choice], ...] = (
    (
        lambda case: case.joint,
        Choice(
            "gathered", "joint tables do not split into rows and columns", "nothing: backward computes each tile again"
        ),
    ),
    (
        lambda case: not case.terms and not case.transform,
        Choice("fused", "without relative terms it is stock attention", "what stock attention keeps"),
    ),
    (
        lambda case: case.graph,
        Choice("fused", "one graph serves all sizes", "longer output and logits, O(N (H + W))"),
    ),
    (
        lambda case: case.transform,
        Choice("gathered", "transforms of torch.func need rules that only plain operations have", "N x N weights"),
    ),
    (
        lambda case: case.stock,
        Choice("fused", "with flash kernels off, stock attention has second derivatives", "N x N weights"),
    ),
    (
        lambda case: case.device == "cpu",
        Choice("tiled", "on the CPU passes over a tile cost less than wider products", LITTLE),
    ),
    (
        lambda case: case.dtype == torch.float64,
        Choice("tiled", "no fused GPU kernel takes float64: stock attention would keep N x N", LITTLE),
    ),
    (
        lambda case: case.width > 256,
        Choice("tiled", "fused GPU kernels end at width 256", LITTLE),
    ),
    (
        lambda case: True,
        Choice("fused", "one stock attention over longer vectors", "longer output, logits, marginals: O(N (H + W))"),
    ),
)


def relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: RelativeTerms,
    grid: Grid,
    key_grid: Grid | None = None,
    *,
    position_query: Tensor | None = None,
    position_key: Tensor | None = None,
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
        position_query: like `query`, what meets a^K in its place: queries before rotary embedding, or Transformer-XL's
            q + v beside q + u (Dai et al. 2019, arXiv 1901.02860, section 3.3). None: `query`.
        position_key: like `key`, what meets a^Q in its place. None: `key`.
        attn_mask: broadcastable to (B, heads, Nq, Nk): booleans, True where attention is allowed, or numbers that are
            added to the scaled logits. For padding use `Grid.valid`, which needs no N x N.
        is_causal: allow only keys that do not come later in the sequence than the query; not together with `attn_mask`.
        dropout_p: dropout on the attention weights, value term included. Pass 0 in evaluation.
        scale: factor on content and relative logits alike; None: head_dim ** -0.5.
        backend: 'fused' (one `scaled_dot_product_attention` over longer vectors: memory O(N (H + W)), nothing of N x N
            is kept for backward; with `dropout_p` > 0 PyTorch's CPU kernel gives up this promise), 'tiled' (one tile of
            queries after the other, computed again in backward: nothing of N x N either; but no second derivatives, and
            no part of compiled or exported graphs), 'gathered' (tiles as well, every pair looks up its table entries:
            slower, but for joint tables, second derivatives and all of `torch.func` too),
            'reference' (the paper's own n products, O(N^2 head_dim) memory) or 'auto' (see `choose`).

    Returns:
        (B, heads, Nq, value_dim), dtype of the query. A query that may attend to no key gets zeros. What padding holds,
        NaN included, changes nothing.

    Raises:
        ValueError: shapes, dtypes or names that do not fit; the message names the tensor, its shape and the one
            expected.
        TypeError: arguments that are not of the kind asked for, such as integer contents or masks.
    """
    key_grid = grid if key_grid is None else key_grid
    check_backend(backend, tuple(BACKENDS))
    check_attention(query, key, value, terms, grid, key_grid, position_query, position_key)
    check_options(query, key, attn_mask, is_causal, dropout_p, scale)
    if backend == "auto":
        backend = _choose(query, key, value, terms, grid, key_grid).backend
    if backend in ("fused", "tiled"):
        check_separable(terms, backend)
    if backend == "tiled" and (in_graph() or in_transform()):
        raise ValueError("backend 'tiled' can be no part of graphs or of torch.func's transforms: use 'auto'")
    # int: to `torch.jit.trace` sizes are tensors, and their powers single precision.
    scale = int(query.shape[3]) ** -0.5 if scale is None else scale
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        # Backends divide the bias, and a mask's gradient, by the scale, and multiply what hides padding by it: here the
        # contents are scaled instead.
        position_query = scale * (query if position_query is None else position_query)
        position_key = scale * (key if position_key is None else position_key)
        query, scale = scale * query, 1.0
    return BACKENDS[backend].relative_attention(
        query,
        key,
        value,
        _with_lead_of_both(terms),
        grid,
        key_grid,
        None if attn_mask is None else _as_stock_mask(attn_mask, query.dtype),
        is_causal,
        dropout_p,
        scale,
        position_query,
        position_key,
    )


def choose(
    query: Tensor, key: Tensor, value: Tensor, terms: RelativeTerms, grid: Grid, key_grid: Grid | None = None
) -> Choice:
    """Which backend `relative_attention` takes for 'auto', why, and what it keeps for backward.

    Args: see `relative_attention`.

    Returns:
        `backend`, `reason` and `keeps`, three strings.

    Raises:
        ValueError: as `relative_attention`.
        TypeError: as `relative_attention`.
    """
    key_grid = grid if key_grid is None else key_grid
    check_attention(query, key, value, terms, grid, key_grid)
    return _choose(query, key, value, terms, grid, key_grid)


def _choose(query: Tensor, key: Tensor, value: Tensor, terms: RelativeTerms, grid: Grid, key_grid: Grid) -> Choice:
    places = key_grid.height + key_grid.width
    on_query = places if terms.key is not None or terms.bias is not None else 0
    on_query += grid.height + grid.width if terms.query is not None else 0
    on_value = places if terms.value is not None else 0
    tables = [table for term in terms[:4] if term is not None for table in term]
    graph = in_graph()
    case = Case(
        device=query.device.type,
        dtype=query.dtype,
        terms=bool(tables),
        joint=any(isinstance(term, JointTable) for term in terms),
        graph=graph,
        transform=not graph and in_transform(),
        # The switch is for all devices, wherever its name says it lives.
        stock=not graph and not torch.backends.cuda.flash_sdp_enabled(),
        width=max(query.shape[-1] + on_query + (key_grid.valid is not None), value.shape[-1] + on_value),
        gradient=torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value, *tables)),
    )
    choice = next(choice for applies, choice in RULES if applies(case))
    return choice if case.gradient or case.graph or case.transform else choice._replace(keeps=NOTHING)


def _as_stock_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """As stock attention takes it: at least two axes, booleans or the dtype of the contents."""
    mask = mask if mask.dtype == torch.bool else mask.to(dtype)
    return mask[(None,) * max(0, 2 - mask.dim())]


def _with_lead_of_both(terms: RelativeTerms) -> RelativeTerms:
    """Where one table of a pair is shared by the heads and the other is not, both per head."""
    for name, tables in zip(RelativeTerms._fields, terms, strict=True):
        if isinstance(tables, AxisTables) and tables.rows.dim() != tables.cols.dim():
            heads = max(tables, key=Tensor.dim).shape[0]
            per_head = (table.expand(heads, *table.shape[-min(t.dim() for t in tables) :]) for table in tables)
            terms = terms._replace(**{name: AxisTables(*per_head)})
    return terms


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
        backend: as in `relative_attention`; 'reference' is the slow one, all others compute the same fast way.

    Returns:
        rows (B, heads, Nq, H) and cols (B, heads, Nq, W) for the key grid's H and W; zero for prefix queries.

    Raises:
        ValueError: no key term, or shapes or names that do not fit.
    """
    key_grid = grid if key_grid is None else key_grid
    check_backend(backend, tuple(BACKENDS))
    check_tokens("query", query, "grid", grid)
    check_terms(terms._replace(query=None, value=None, bias=None), query.shape[1], query.shape[3], 0)
    if terms.key is None:
        raise ValueError("relative_logits needs terms.key, which is None")
    if isinstance(terms.key, JointTable):
        raise ValueError("relative_logits needs separate rows and columns, terms.key is a joint table")
    module = reference if backend == "reference" else fused
    return module.relative_logits(query, terms, grid, key_grid)
