"""`relative_attention`, the public operation: checks arguments, chooses the backend by size and device (`choose`)."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from relvit.ops import reference
from relvit.ops.backends import fused, gathered, lean, pair_bias, tiled, triton
from relvit.ops.backends.axis_logits import axis_logits, grid_axes, joined_with_index
from relvit.ops.backends.stock import switches
from relvit.ops.checks import check_backend, check_kind
from relvit.ops.grid import Grid, Remembered, check_tokens
from relvit.ops.index_range import check_index_range
from relvit.ops.inputs import (
    AttentionInputs,
    Projected,
    check_terms,
    checked,
    completed,
    computing_dtype,
    separate,
    signature,
    with_channels,
    with_equal_heads,
)
from relvit.ops.log_n_scaling import with_log_n_scaling
from relvit.ops.terms import AxisTables, JointTable, RelativeTerms, is_stock
from relvit.ops.tracing import is_compiling, is_eager, is_functorch, may_remember
from relvit.utils.messages import check_names

BACKENDS: dict[str, ModuleType] = {
    module.__name__.rpartition(".")[2]: module for module in (reference, fused, tiled, gathered, lean, triton)
}

# With a joint bias and at most this number N of tokens, the CPU may keep N x N weights: per head these are no more
# numbers than N vectors of width 64.
SMALL_WINDOW = 64
# With a joint bias and more than this number N of tokens, a GPU keeps no N x N weights, except in compiled graphs,
# because N x N weights would take too much memory in training.
LARGEST_MASK = 1024


class Choice(NamedTuple):
    """A backend, the reason for it, and the tensors that it keeps for backward besides its inputs and its output."""

    backend: str
    reason: str
    keeps: str


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
    trained_keys: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute attention in which keys and values depend on where the key is relative to the query, exactly.

        logit_ij = scale * (q_i . k_j + q_i . a^K_ij + k_j . a^Q_ij + r_ij) + b_ij + c_ij
        out_i = sum_j softmax_j(logit_ij) (v_j + a^V_ij)

    with a_ij = rows[clip(y_j - y_i)] + cols[clip(x_j - x_i)], and a_ij = 0 where i or j is a prefix token. Source: Shaw
    et al. 2018 (arXiv 1803.02155), eq. 3 and 4, for rows and columns separately; `RelativeTerms` describes all terms.

    Examples:
        >>> grid = make_grid(4, 6, prefix=1)  # 24 patches and a class token
        >>> query, key, value = torch.randn(3, 2, 12, 25, 64).unbind()  # (B, heads, N, head_dim) each
        >>> tables = AxisTables(torch.randn(15, 64), torch.randn(15, 64))  # offsets from -7 to 7, on each axis
        >>> relative_attention(query, key, value, RelativeTerms(key=tables, value=tables), grid).shape
        torch.Size([2, 12, 25, 64])

    Args:
        query: (B, heads, Nq, head_dim), any floating dtype.
        key: (B, heads, Nk, head_dim), same dtype. For grouped queries repeat the heads of keys and values.
        value: (B, heads, Nk, value_dim), same dtype.
        terms: tables, free channels, logits; they are cast to the query's dtype. Terms that are None are left out.
        grid: where the query tokens are, and also the key tokens unless `key_grid` is given.
        key_grid: where the key tokens are (cross-attention, memory). Only the `valid` of the keys' grid is read.
        position_query: the vectors that are multiplied by a^K, shaped as `query`: queries before rotary embedding, or q
            + v for Transformer-XL's `query` q + u (Dai et al. 2019, arXiv 1901.02860, section 3.3). None: `query`.
        position_key: the vectors that are multiplied by a^Q, shaped as `key`. None: `key`.
        attn_mask: broadcastable to (B, heads, Nq, Nk): booleans, True where attention is allowed, or numbers that are
            added to the scaled logits. For padding use `Grid.valid`, which takes less memory.
        is_causal: allow query i only the keys 0 ... i, also with a `key_grid`; not together with `attn_mask`.
        dropout_p: dropout on the attention weights, also in the value term. Pass 0 in evaluation.
        scale: factor on content and relative logits alike; None: head_dim ** -0.5.
        trained_keys: number of keys in training, 2 or more: all logits, the bias included, are multiplied by log(n) /
            log(trained_keys), with n the number of keys that are not padding; see `relvit.ops.log_n_scaling`.
        backend: 'auto' (see `choose`) or one of these: 'fused' (one `scaled_dot_product_attention` over augmented q, k
            and v, in O(N (H + W)) memory where PyTorch has a fused kernel; N x N with `dropout_p` > 0 on the CPU, in
            float64 on a GPU, or for a joint bias); 'lean' (as 'fused', in the fewest operations, for one grid without
            `coords` or padding, with tables per axis, without mask or dropout); 'tiled' (tiles of queries, recomputed
            in backward); 'gathered' (tiles in which each pair looks up its table entries: slower, but has second
            derivatives, works in `torch.func`, and takes all joint tables; 'fused', 'tiled' and 'triton' take only a
            joint bias of grids without `coords`); 'triton' (GPU kernels without augmented vectors: keys without
            `coords`, no query term, mask or dropout); 'reference' (the paper's formula, in O(N^2 head_dim) memory).
            'lean', 'tiled' and 'triton' have no second derivatives, and cannot be part of compiled or exported graphs;
            'fused' has second derivatives only where PyTorch may take no flash kernel.

    Returns:
        (B, heads, Nq, value_dim), dtype of the query. A query that may attend to no key gets zeros. Keys and values of
        padding, even NaN, change nothing.

    Raises:
        ValueError: the shape, dtype or device of a tensor does not match the query and the grids.
        ValueError: the backend is unknown or cannot compute these inputs, `attn_mask` is given with `is_causal`, or an
            option is out of its range.
        TypeError: an argument has another type, or is a tensor of integers where floating-point numbers are needed.
    """
    options = (attn_mask, is_causal, dropout_p, scale, position_query, position_key, trained_keys)
    return attend(AttentionInputs(query, key, value, terms, grid, key_grid, *options), backend)


def attend(inputs: AttentionInputs, backend: str = "auto") -> Tensor:
    """Compute `relative_attention` of `AttentionInputs`, which layers build."""
    decision = _decision(inputs, backend)
    inputs, dtype, backend = completed(inputs), inputs.query.dtype, decision.backend
    if decision.plan is not None:
        return lean.relative_attention(inputs, decision.plan)
    if backend == "reference":
        return reference.relative_attention(**inputs._asdict())
    if (computes := computing_dtype(inputs.query, backend)) != dtype:
        inputs = inputs.to(computes)
    return BACKENDS[backend].relative_attention(with_log_n_scaling(with_channels(inputs))).to(dtype)


def attend_projected(
    projected: Projected,
    terms: RelativeTerms,
    grid: Grid,
    scale: float,
    backend: str,
    attn_mask: Tensor | None = None,
    prefix_bias: Tensor | None = None,
) -> Tensor | None:
    """Compute attention of a projection's output in the fewest operations, if a backend can; otherwise return None.

    Args:
        projected: queries, keys and values of one grid.
        terms, grid, scale, attn_mask, backend: see `relative_attention`.
        prefix_bias: (3, heads), see `relvit.layers.PrefixBias`.

    Returns:
        (B, N, heads head_dim); None where `attend` has to compute the attention. For one `projected` tensor and tables
        per axis this function uses 'lean'; for a joint bias on small grids or in graphs, stock attention with a mask.
    """
    contents = (projected,) if isinstance(projected, Tensor) else projected
    (query, *of_tables, bucketing, channels, query_bias, logits), (*_, coords, valid) = terms, grid
    usual = query is channels is query_bias is logits is coords is valid is None
    if not (usual and type(contents[0]) is type(contents[-1]) is Tensor):
        return None
    tables, key, decision = [table for term in of_tables if term is not None for table in term], None, None
    if is_eager():
        # `key` identifies a cached decision. The key holds only the shapes of tables, because reading another attribute
        # takes as long as making a view. The key needs no dtypes and devices of tables: `lean` casts tables to one
        # dtype, and PyTorch checks devices.
        of_mask = None if attn_mask is None else _SIGN(attn_mask)
        of_prefix = None if prefix_bias is None else prefix_bias.shape
        signs = *map(_SIGN, contents), *map(_SHAPE, tables), *map(type, of_tables)
        key = (backend, scale, grid, bucketing, switches(contents[0]), of_mask, of_prefix, signs)
        decision = _DECISIONS.find(key)
    elif type(terms.bias) is not JointTable:
        return None
    if decision is None:
        packed, options = len(contents) == 1 and prefix_bias is None, {"attn_mask": attn_mask, "scale": scale}
        decision = _remember(
            key,
            lambda: _decide_projected(AttentionInputs(*separate(projected), terms, grid, **options), backend, packed),
        )
    if (plan := decision.plan) is None:
        return None
    if type(plan) is lean.Plan:
        return lean.attend(contents, tables, plan).view(*plan.shape[:2], plan.heads * plan.width)
    mixed = pair_bias.attend(contents, *tables, plan, prefix_bias, attn_mask)
    return mixed.transpose(1, 2).flatten(2)


_SIGN, _SHAPE = attrgetter("shape", "dtype", "device"), attrgetter("shape")


def _decide_projected(inputs: AttentionInputs, backend: str, packed: bool) -> _Decision:
    """Decide how `attend_projected` computes inputs; without a plan in the decision, it cannot compute them."""
    terms, mask = inputs.terms, inputs.attn_mask
    if joint := type(terms.bias) is JointTable:
        fits = terms.key is terms.value is None and (mask is None or mask.is_floating_point())
    else:
        fits = packed and mask is None
    # Under autocast norms return float32 queries and keys, but values are in half precision: no plan takes two dtypes.
    if not (fits and inputs.query.dtype == inputs.value.dtype and backend in ("auto", "fused" if joint else "lean")):
        return _Decision(backend, None)
    decision, filled = _decision(inputs, backend), completed(inputs)
    if filled.scale != inputs.scale or any(one is not other for one, other in zip(filled.terms, terms, strict=True)):
        # `completed` has changed the queries or the tables, so a plan for the layer's own tensors would be wrong.
        return decision._replace(plan=None)
    if joint and decision.backend == "fused":
        return decision._replace(plan=pair_bias.plan_of(filled))
    return decision


class _Decision(NamedTuple):
    """The backend that computes inputs, and the plan of the fewest operations, if there is one."""

    backend: str
    plan: lean.Plan | pair_bias.PairPlan | None


# These are the cached decisions. A key of the cache holds everything on which its decision depends, so that inputs of a
# layer are checked only once for each size.
_DECISIONS = Remembered()


def _decision(inputs: AttentionInputs, backend: str) -> _Decision:
    """Check inputs, unless such inputs were checked before, and choose the backend."""
    if not is_eager():
        return _decide(checked(inputs), backend)
    try:
        # The choice of a backend depends on whether position queries and queries are one tensor, so the key says so.
        key = (backend, inputs.position_query is inputs.query, signature(inputs), switches(inputs.query))
    except TypeError:
        return _decide(checked(inputs), backend)
    if (decision := _DECISIONS.find(key)) is None:
        decision = _remember(key, lambda: _decide(checked(inputs), backend))
    return decision


def _remember(key: Any, decide: Callable[[], _Decision]) -> _Decision:
    return _DECISIONS.make(key, decide) if may_remember() else decide()


def _decide(inputs: AttentionInputs, backend: str) -> _Decision:
    """Choose the backend for inputs that are checked; raise if the backend chosen by name cannot compute them."""
    check_backend(backend, tuple(BACKENDS))
    backend = _choose(inputs).backend if backend == "auto" else backend
    if backend in ("fused", "tiled", "triton"):
        adds_bias = _adds_pair_bias(inputs)
        for name, tables in zip(RelativeTerms._fields, inputs.terms, strict=True):
            if isinstance(tables, JointTable) and not adds_bias:
                raise ValueError(f"terms.{name} is a joint table: use 'gathered' or 'reference', not {backend!r}")
    if backend in ("tiled", "triton", "lean") and not is_eager():
        raise ValueError(f"backend {backend!r} cannot be compiled, traced or transformed by torch.func: use 'auto'")
    if is_eager():
        check_index_range(inputs, backend)
    return _Decision(backend, lean.plan_of(inputs) if backend == "lean" else None)


def choose(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: RelativeTerms,
    grid: Grid,
    key_grid: Grid | None = None,
    *,
    device: torch.device | str | None = None,
    **options: Any,
) -> Choice:
    """Return which backend `relative_attention` takes for 'auto', why, and what it keeps for backward.

    Examples:
        >>> q = torch.randn(1, 12, 24, 64)
        >>> tables = AxisTables(torch.randn(15, 64), torch.randn(15, 64))
        >>> choose(q, q, q, RelativeTerms(key=tables), make_grid(4, 6), device="cuda").backend
        'lean'

    Arguments and errors are the same as in `relative_attention`, without `backend` and with one more argument:

    Args:
        device: the device that would compute, such as 'cpu' or 'cuda', even if this machine has none; None: the
            query's.
    """
    check_names("choose", options, AttentionInputs._fields[6:])
    choice = _choose(checked(AttentionInputs(query, key, value, terms, grid, key_grid, **options)), device)
    tensors = (leaf for leaf in tree_leaves((query, key, value, terms)) if isinstance(leaf, Tensor))
    if not is_eager() or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return choice
    return choice._replace(keeps="nothing: no gradient is wanted")


def _choose(inputs: AttentionInputs, device: torch.device | str | None = None) -> Choice:
    """Choose by the first rule that applies."""
    query, terms, device = inputs.query, inputs.terms, torch.device(device or inputs.query.device).type
    if any(isinstance(term, JointTable) for term in terms):
        keeps, tokens = "nothing: backward recomputes each tile", max(query.shape[2], inputs.key.shape[2])
        if is_compiling() and not is_functorch() and _adds_pair_bias(inputs):
            return Choice("fused", "one graph serves all sizes: the mask holds the bias of all pairs", "N x N weights")
        if is_eager() and not _math_alone() and _adds_pair_bias(inputs):
            if device == "cpu":
                small = tokens <= SMALL_WINDOW or lean.pays_on_cpu(inputs)
            elif triton.refusal(inputs, device) is None:
                reason = "its tiles look the joint bias up, and add up its gradient, without N x N"
                return Choice("triton", reason, "O(N)")
            else:
                small = device == "cuda" and tokens <= LARGEST_MASK
            if small:
                reason = "stock attention with the bias of all pairs of a small grid as its mask, few operations"
                return Choice("fused", reason, "N x N weights")
            if device == "cpu":
                reason = "slices add the joint bias of a row of queries, no pair looks up its own"
                return Choice("tiled", reason, keeps)
        return Choice("gathered", "joint tables do not split into rows and columns", keeps)
    if is_stock(terms) and (is_compiling() or not is_functorch()):
        return Choice("fused", "without relative terms in tables it is stock attention", "what stock attention keeps")
    if is_compiling():
        return Choice("fused", "one graph serves all sizes", "augmented output and logits, O(N (H + W))")
    if is_functorch():
        reason = "transforms of torch.func need rules that only plain operations have"
        return Choice("gathered", reason, "N x N weights")
    if _math_alone():
        return Choice("fused", "with flash kernels off, stock attention has second derivatives", "N x N weights")
    keeps = "augmented output, logits, marginals: O(N (H + W))"
    usual = lean.refusal(inputs, device) is None
    if device == "cpu" and usual and lean.pays_on_cpu(inputs):
        return Choice("lean", "so few pairs of tokens that on a CPU few operations cost less than narrow ones", keeps)
    little = "logits and marginals, O(N (H + W)) at most: backward recomputes each tile"
    if device == "cpu":
        # `tools/benchmark.py --names plain relvit_small_fused relvit_small_tiled` compares both backends.
        return Choice("tiled", "on the CPU passes over a tile cost less than wider products", little)
    if query.dtype == torch.float64:
        return Choice("tiled", "no fused GPU kernel takes float64: stock attention would keep N x N", little)
    width = fused.augmented_width(inputs, padded=inputs.key_grid.valid is not None)
    if width > 256:
        if triton.refusal(inputs, device) is None:
            return Choice("triton", "stock GPU kernels end at width 256, these augment nothing", "O(N)")
        return Choice("tiled", "fused GPU kernels end at width 256", little)
    # Up to width 256 relvit's Triton kernels are slower than stock attention, in forward and in a training step, on
    # small and large grids (docs/benchmarks/h200.md), but keep less memory.
    narrower = "; 'triton' keeps half" if width > 128 and triton.refusal(inputs, device) is None else ""
    reason = "one stock attention over augmented q, k and v"
    if usual:
        return Choice("lean", f"{reason}, with the fewest operations around it{narrower}", keeps)
    return Choice("fused", reason + narrower, keeps)


def _math_alone() -> bool:
    """Return True where stock attention may take no flash kernel, so that it has second derivatives."""
    # In spite of its name, `flash_sdp_enabled` says for all devices whether PyTorch may take flash kernels.
    return not torch.backends.cuda.flash_sdp_enabled()


def _adds_pair_bias(inputs: AttentionInputs) -> bool:
    """Return True where a bias of grids without `coords` is the only joint table: tiles or a mask add it as a whole."""
    *others, bias = (isinstance(term, JointTable) for term in (*inputs.terms,)[:4])
    return bias and not any(others) and inputs.grid.coords is None and inputs.key_grid.coords is None


def relative_logits(
    query: Tensor, terms: RelativeTerms, grid: Grid, key_grid: Grid | None = None, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Compute the relative part of the logits, q_i . a^K_ij, as one number per row and per column of the key grid.

    Memory never holds the N x N logits: q_i . a^K_ij = rows[..., i, y_j] + cols[..., i, x_j], unscaled. This is Shaw et
    al. 2018 (arXiv 1803.02155), eq. 5, second term, with H + W instead of H W numbers per query.

    Examples:
        >>> tables = AxisTables(torch.randn(15, 64), torch.randn(15, 64))
        >>> rows, cols = relative_logits(torch.randn(2, 12, 24, 64), RelativeTerms(key=tables), make_grid(4, 6))
        >>> rows.shape, cols.shape
        (torch.Size([2, 12, 24, 4]), torch.Size([2, 12, 24, 6]))

    Args:
        query, grid, key_grid: see `relative_attention`.
        terms: only `terms.key` is read.
        backend: 'reference' is slow; all other backends compute in the same fast way.

    Returns:
        rows (B, heads, Nq, H) and cols (B, heads, Nq, W) for the key grid's H and W; zero for prefix queries.

    Raises:
        ValueError: `terms.key` is None or joint, a tensor has another shape or dtype, or the backend is unknown.
    """
    key_grid = grid if key_grid is None else key_grid
    check_backend(backend, tuple(BACKENDS))
    check_tokens("query", query, "grid", grid)
    check_kind("terms", terms, RelativeTerms, "RelativeTerms")
    check_terms(terms._replace(query=None, value=None, bias=None), query.shape[1], query.shape[3], 0)
    check_kind("key_grid", key_grid, Grid, "a Grid")
    if not isinstance(terms.key, AxisTables):
        raise ValueError(f"relative_logits needs terms.key as AxisTables(rows, cols), got {type(terms.key).__name__}")
    if backend == "reference":
        return reference.relative_logits(query, terms, grid, key_grid)
    table, index = joined_with_index(with_equal_heads(terms).key, terms.bucketing, grid, grid_axes(key_grid), query)
    return axis_logits(query, table, index).split((key_grid.height, key_grid.width), dim=-1)
