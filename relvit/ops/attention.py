"""The public operations: what is checked, and which backend computes."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from relvit.names import did_you_mean, listing
from relvit.ops import fused, gathered, reference, tiled
from relvit.ops.buckets import BUCKETINGS
from relvit.ops.grid import Grid, num_tokens
from relvit.ops.terms import AxisTables, JointTable, RelativeTerms

BACKENDS: dict[str, ModuleType] = {"reference": reference, "fused": fused, "tiled": tiled, "gathered": gathered}


class Case(NamedTuple):
    """What the choice of a backend depends on."""

    device: str
    dtype: torch.dtype
    joint: bool  # some table is joint
    graph: bool  # a graph is being compiled or exported
    stock: bool  # torch.func is at work, or its user has switched flash kernels off (`torch.nn.attention.sdpa_kernel`)
    width: int  # of the longer vectors of `fused`
    gradient: bool


class Choice(NamedTuple):
    """A backend, why it is the one, and what it keeps for backward besides its inputs and its output."""

    backend: str
    reason: str
    keeps: str


NOTHING = "nothing: no gradient is wanted"
LITTLE = "logits and marginals, O(N (H + W)): backward forms each tile again"
# The first rule that applies decides. The CPU's: at head_dim 64, on 14 x 14 patches tiles took as long as longer
# vectors, on 24 x 24 three quarters, on 64 x 64 two thirds, on 1 x 1024 a tenth (`tools/benchmark.py --level layer`).
RULES: tuple[tuple[Callable[[Case], bool], Choice], ...] = (
    (
        lambda case: case.joint,
        Choice(
            "gathered", "joint tables do not split into rows and columns", "nothing: backward forms each tile again"
        ),
    ),
    (
        lambda case: case.graph,
        Choice("fused", "one graph serves all sizes", "longer output and logits, O(N (H + W))"),
    ),
    (
        lambda case: case.stock,
        Choice("fused", "stock parts have all that torch.func and second derivatives need", "what stock parts keep"),
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
            is kept for backward; with `dropout_p` > 0 PyTorch's CPU kernel gives up this promise), 'tiled' (one tile of
            queries after the other, formed again in backward: nothing of N x N either; no second derivatives),
            'gathered' (tiles as well, every pair looks up its table entries: slower, but for joint tables too),
            'reference' (the paper's own n products, O(N^2 head_dim) memory) or 'auto' (see `choose`).

    Returns:
        (B, heads, Nq, value_dim), dtype of the query. A sample with no valid key gets zeros.

    Raises:
        ValueError: shapes, dtypes or names that do not fit; the message names the tensor, its shape and the one
            expected.
        TypeError: `terms` that are none.
    """
    key_grid = grid if key_grid is None else key_grid
    _check_backend(backend)
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
    if backend == "auto":
        backend = choose(query, key, value, terms, grid, key_grid).backend
    if backend in ("fused", "tiled"):
        _check_separable(terms, backend)
    run = BACKENDS[backend].relative_attention
    return run(query, key, value, terms, grid, key_grid, attn_mask, is_causal, dropout_p, scale)


def choose(
    query: Tensor, key: Tensor, value: Tensor, terms: RelativeTerms, grid: Grid, key_grid: Grid | None = None
) -> Choice:
    """Which backend `relative_attention` takes for 'auto', why, and what it keeps for backward.

    Args: see `relative_attention`.

    Returns:
        `backend`, `reason` and `keeps`, three strings.
    """
    key_grid = grid if key_grid is None else key_grid
    places = key_grid.height + key_grid.width
    on_query = places if terms.key is not None or terms.bias is not None else 0
    on_query += grid.height + grid.width if terms.query is not None else 0
    on_value = places if terms.value is not None else 0
    tables = [table for term in terms[:4] if term is not None for table in term]
    graph = torch.compiler.is_compiling()
    # torch.func forbids the hooks; the switch is for all devices, wherever its name says it lives.
    stock = not graph and not (
        torch._C._autograd._saved_tensors_hooks_is_enabled() and torch.backends.cuda.flash_sdp_enabled()
    )
    case = Case(
        device=query.device.type,
        dtype=query.dtype,
        joint=any(isinstance(term, JointTable) for term in terms),
        graph=graph,
        stock=stock,
        width=max(query.shape[-1] + on_query + (key_grid.valid is not None), value.shape[-1] + on_value),
        gradient=torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value, *tables)),
    )
    choice = next(choice for applies, choice in RULES if applies(case))
    return choice if case.gradient or case.graph else choice._replace(keeps=NOTHING)


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
    _check_backend(backend)
    _check_shape("query", query, ("B", "heads", "N", "head_dim"))
    _check_grid("query", query, "grid", grid)
    if terms.key is None:
        raise ValueError("relative_logits needs terms.key, which is None")
    if isinstance(terms.key, JointTable):
        raise ValueError("relative_logits needs separate rows and columns, terms.key is a joint table")
    _check_terms(RelativeTerms(key=terms.key, bucketing=terms.bucketing), query.shape[1], query.shape[3], 0)
    module = reference if backend == "reference" else fused
    return module.relative_logits(query, terms, grid, key_grid)


def _check_backend(name: str) -> None:
    allowed = ["auto", *BACKENDS]
    if name not in allowed:
        raise ValueError(f"unknown backend {name!r}{did_you_mean(str(name), allowed)}, allowed: {listing(allowed)}")


def _check_separable(terms: RelativeTerms, backend: str) -> None:
    for name, tables in zip(RelativeTerms._fields, terms, strict=True):
        if isinstance(tables, JointTable):
            raise ValueError(f"terms.{name} is a joint table: backend 'gathered' or 'reference', not {backend!r}")


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
    if not isinstance(terms, RelativeTerms):
        raise TypeError(f"terms must be RelativeTerms, got {type(terms).__name__}; RelativeTerms() has none")
    if terms.bucketing not in BUCKETINGS:
        hint = did_you_mean(str(terms.bucketing), BUCKETINGS)
        raise ValueError(f"terms.bucketing must be one of {listing(BUCKETINGS)}, got {terms.bucketing!r}{hint}")
    widths = {"query": (head_dim,), "key": (head_dim,), "value": (value_dim,), "bias": ()}
    for term, width in widths.items():
        tables: AxisTables | JointTable | None = getattr(terms, term)
        axes = 2 if isinstance(tables, JointTable) else 1
        for part, table in zip(() if tables is None else tables._fields, tables or (), strict=True):
            name, shape = f"terms.{term}.{part}", tuple(table.shape)
            offsets = shape[len(shape) - len(width) - axes : len(shape) - len(width)]
            lead = shape[: max(0, len(shape) - len(width) - axes)]
            if len(offsets) != axes or shape[len(lead) + axes :] != width or lead not in ((), (heads,)):
                tail = ", ".join(["2k + 1"] * axes + [str(size) for size in width])
                raise ValueError(f"{name} has shape {shape}, expected ({tail}) or ({heads}, {tail})")
            if any(size % 2 == 0 for size in offsets):
                sizes = " x ".join(map(str, offsets))
                raise ValueError(f"{name} has {sizes} rows, expected an odd number, 2k + 1 for clip distance k")
