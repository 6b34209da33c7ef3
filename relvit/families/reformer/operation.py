"""LSH attention of Reformer: each token attends to tokens whose hash falls into the same bucket, found by sorting."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from relvit.ops.buckets import bucket
from relvit.ops.checks import check_shape
from relvit.ops.grid import Grid, batched_coords, check_tokens, key_mask, without_padding
from relvit.ops.index_range import check_tensor_size
from relvit.ops.inputs import check_terms
from relvit.ops.recompute import recomputed
from relvit.ops.terms import JointTable, RelativeTerms
from relvit.ops.tracing import is_eager, without_autocast

# A token has this logit with itself, so low that it attends to itself only if it can attend to no other token.
SELF_LOGIT = -1e5


def lsh_attention(
    query_key: Tensor,
    value: Tensor,
    grid: Grid,
    rotations: Tensor,
    *,
    chunk_size: int | None = None,
    terms: RelativeTerms | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float = 1.0,
) -> Tensor:
    """Compute Reformer's LSH attention, in time and memory that grow with N log N instead of N x N.

    The query of token i is q_i, and its key is k_i = q_i / |q_i|. Round r has a random matrix R_r. In this round the
    bucket of token i is the index of the largest number in (q_i R_r, -q_i R_r). Tokens are sorted by bucket, stably,
    and cut into chunks. P_i is the set of tokens j that in at least one round are in the bucket of i, and in the chunk
    of i or the chunk before. Then

        out_i = sum_{j in P_i} softmax_j(logit_ij) v_j,    logit_ij = scale * q_i . k_j + b_ij,

    and i itself counts only if P_i holds no other token. A token that several rounds put into P_i counts once. If each
    P_i holds all tokens, the result is full attention in which tokens do not attend to themselves. Source: Kitaev et
    al. 2020, Reformer (arXiv 2001.04451), section 2 and appendix A. As in the authors' code, keys have unit length, so
    the default `scale` is 1 instead of head_dim^(-1/2).

    Examples:
        >>> query_key, value = torch.randn(2, 2, 4, 400, 16).unbind()  # (B, heads, N, width) each
        >>> lsh_attention(query_key, value, make_grid(20, 20), lsh_rotations(rounds=2, head_dim=16, buckets=8)).shape
        torch.Size([2, 4, 400, 16])

    Args:
        query_key: q, (B, heads, N, head_dim), any floating dtype: queries, and keys before they are normalised.
        value: (B, heads, N, value_dim), same dtype.
        grid: where tokens are; padding (False in `valid`) is in no bucket, and its output is zero. Prefix tokens are
            hashed like patches, and have no bias.
        rotations: R, (rounds, head_dim, buckets / 2), see `lsh_rotations`; without columns there is one bucket.
        chunk_size: number of tokens in a chunk; None: twice the average number in a bucket, as in the paper.
        terms: relative terms, of which only `bias` may be given: b, as in `relvit.ops.relative_attention`.
        is_causal: whether to leave out tokens that come later in the sequence.
        dropout_p: dropout rate of the attention weights.
        scale: factor on the products of queries and keys.

    Returns:
        (B, heads, N, value_dim) in the value's dtype; the softmax is computed in float32 or better.

    Raises:
        ValueError: a tensor has another shape than above, or `value` has another dtype than `query_key`.
        ValueError: `terms` has other terms than `bias`, `chunk_size` is below 1, or a device's kernels cannot index
            such large tensors.
        TypeError: `grid` is not a `Grid`, `terms` are not `RelativeTerms`, or another argument is not a tensor of
            floating-point numbers.
    """
    check_tokens("query_key", query_key, "grid", grid)
    batch, heads, tokens, head_dim = query_key.shape
    check_shape("value", value, (batch, heads, tokens, "value_dim"))
    if value.dtype != query_key.dtype:
        raise ValueError(f"value has dtype {value.dtype}, expected that of query_key, {query_key.dtype}")
    check_shape("rotations", rotations, ("rounds", head_dim, "buckets / 2"))
    if rotations.shape[0] < 1:
        raise ValueError(f"rotations must have 1 round or more, got shape {tuple(rotations.shape)}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    if terms is not None:
        check_terms(terms, heads, head_dim, value.shape[3])
        check_bias_alone(terms)
    if is_eager():
        _check_tensor_size(query_key, value, rotations, chunk_size)
    return _run(query_key, value, grid, rotations, chunk_size, terms, is_causal, dropout_p, scale)


# Do not compile this function: chunk sizes are quotients of the number of tokens, and Dynamo takes minutes to simplify
# such symbolic sizes.
@torch.compiler.disable
def _run(*arguments: object) -> Tensor:
    """Attend; keep only the arguments for backward, which computes everything else again, as in the paper."""
    return recomputed(_attend, *arguments, preserve_rng_state=True)


def _attend(
    query_key: Tensor,
    value: Tensor,
    grid: Grid,
    rotations: Tensor,
    chunk_size: int | None,
    terms: RelativeTerms | None,
    is_causal: bool,
    dropout_p: float,
    scale: float,
) -> Tensor:
    tokens, rounds = query_key.shape[2], rotations.shape[0]
    valid = key_mask(grid)
    if valid is not None:
        query_key, value = without_padding(query_key, valid), without_padding(value, valid)
    wide = torch.promote_types(query_key.dtype, torch.float32)
    # Autocast would compute the hashes in half precision, in which some tokens fall into other buckets.
    with without_autocast(query_key.device):
        hashes = _hash(query_key.detach().to(wide), rotations.to(wide))
    buckets, size = _division(tokens, rotations, chunk_size)
    if valid is not None:
        hashes = hashes.masked_fill(~valid[:, None, None], buckets)
    # Fill up the last chunk with tokens that, like the padding of the grid, are in a last bucket, to which no token
    # attends.
    extra = -tokens % size
    hashes = F.pad(hashes, (0, extra), value=buckets)
    # Each token has a different sort key, so that tokens within a bucket keep their order under every sorting
    # algorithm.
    order = (hashes * (tokens + extra) + torch.arange(tokens + extra, device=hashes.device)).argsort(dim=-1)
    place = order.argsort(dim=-1)
    chunks = (tokens + extra) // size

    def windows(x: Tensor) -> tuple[Tensor, Tensor]:
        """Cut sorted tokens into chunks (..., chunks, size), and windows of two chunks, (..., chunks, 2 size)."""
        own = x.unflatten(3, (chunks, size))
        return own, torch.cat((own.roll(1, 3), own), dim=4)

    def of_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the windows of a vector per token, (B, heads, N, dim)."""
        x = F.pad(x, (0, 0, 0, extra))[:, :, None].expand(-1, -1, rounds, -1, -1)
        return windows(x.gather(3, order[..., None].expand(*order.shape, x.shape[-1])))

    queries = of_tokens(query_key)[0]
    keys = of_tokens(F.normalize(query_key.to(wide), dim=-1).to(query_key.dtype))[1]
    logits = (queries @ keys.transpose(-1, -2)).to(wide) * scale
    index, other = windows(order)
    index, other = index[..., None], other[..., None, :]
    if terms is not None and terms.bias is not None:
        # Backward adds up the gradients of many pairs for each entry of a table, and in half precision each addition
        # would round.
        bias = type(terms.bias)(*(table.to(wide) for table in terms.bias))
        logits = logits + _bias(terms._replace(bias=bias), grid, index, other, query_key)

    # A code combines the bucket and the chunk of a token. A query meets a key in a round if both are in one bucket, and
    # the key is in the query's chunk or in the chunk before: if the query's code is the key's code or larger by 1.
    codes = (2 * chunks * hashes + place // size).to(torch.int32)
    owns, met = [], 0
    for each in range(rounds):
        # For each pair of tokens in a window of any round, find out whether the two tokens also meet in round `each`.
        code = codes[:, :, each, None].expand(order.shape).gather(3, order)
        mine, theirs = windows(code)
        meet = (mine[..., None] - theirs[..., None, :]) >> 1 == 0
        owns.append(meet[:, :, each])
        met = met + meet.to(torch.int16)
    allowed = torch.stack(owns, dim=2)
    # The first chunk has no chunk before it, so mask the first half of its window.
    first = torch.arange(chunks, device=order.device)[:, None] == 0
    before = torch.arange(2 * size, device=order.device) < size
    allowed = allowed & ~(first & before)[:, None] & (windows(hashes.gather(3, order))[1] < buckets)[..., None, :]
    if is_causal:
        allowed = allowed & (other <= index)
    if rounds > 1:
        logits = logits - met.to(wide).clamp(min=1).log()
    logits = logits.masked_fill(index == other, SELF_LOGIT).masked_fill(~allowed, -torch.inf)

    total = logits.logsumexp(dim=-1, keepdim=True)
    # Padding attends to no token, so its log-sum-exp `total` is -inf; replace it, because -inf - -inf would be NaN.
    weights = (logits - total.masked_fill(total.isneginf(), 0.0)).exp()
    out = F.dropout(weights, dropout_p).to(value.dtype) @ of_tokens(value)[1]
    out, total = out.flatten(3, 4), total.flatten(3, 4)
    back_in_place = place[..., :tokens, None]
    out = out.gather(3, back_in_place.expand(-1, -1, -1, -1, out.shape[-1]))
    total = total.gather(3, back_in_place)
    if valid is not None:
        total = total.masked_fill(~valid[:, None, None, :, None], 0.0)
    # Under autocast products are in half precision, even for float32 inputs, so convert the result back.
    return (out * total.softmax(dim=2).to(out.dtype)).sum(dim=2).to(value.dtype)


def _division(tokens: int, rotations: Tensor, chunk_size: int | None) -> tuple[int, int]:
    """Return the number of buckets, and the number of tokens in a chunk."""
    buckets = max(1, 2 * rotations.shape[2])
    return buckets, min(tokens, chunk_size or 2 * -(-tokens // buckets))


def _check_tensor_size(query_key: Tensor, value: Tensor, rotations: Tensor, chunk_size: int | None) -> None:
    """Raise if a tensor has more numbers than the kernels of the device can index."""
    batch, heads, tokens, head_dim = query_key.shape
    buckets, size = _division(tokens, rotations, chunk_size)
    # For each token in a head and a round, the largest tensor holds the two offsets to each of the 2 `size` keys of the
    # token's window (`_bias`); or, because windows overlap, two vectors (keys or values); or a number for each bucket
    # (`_hash`).
    per_token = max(4 * size, 2 * head_dim, 2 * value.shape[3], buckets)
    number = batch * heads * rotations.shape[0] * (tokens + size) * per_token
    check_tensor_size(query_key.device.type, number, f"LSH attention of {tokens} tokens in chunks of {size}")


def lsh_rotations(
    rounds: int,
    head_dim: int,
    buckets: int,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draw the random rotations of LSH attention, (rounds, head_dim, buckets / 2) normal numbers in float32.

    Examples:
        >>> lsh_rotations(rounds=2, head_dim=16, buckets=8).shape
        torch.Size([2, 16, 4])

    Source: Kitaev et al. 2020 (arXiv 2001.04451), section 2, after Andoni et al. 2015 (arXiv 1509.02897).

    Raises:
        ValueError: `rounds` is below 1, or `buckets` is neither 1 nor a positive even number.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if buckets != 1 and (buckets < 2 or buckets % 2):
        raise ValueError(f"buckets must be 1 or an even number, got {buckets}")
    shape = (rounds, head_dim, buckets // 2)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)


def _hash(vectors: Tensor, rotations: Tensor) -> Tensor:
    """Return the buckets (B, heads, rounds, N) of vectors (B, heads, N, head_dim)."""
    if rotations.shape[2] == 0:
        return vectors.new_zeros(*vectors.shape[:2], rotations.shape[0], vectors.shape[2], dtype=torch.int64)
    rotated = vectors[:, :, None] @ rotations
    return torch.cat((rotated, -rotated), dim=-1).argmax(dim=-1)


def _bias(terms: RelativeTerms, grid: Grid, index: Tensor, other: Tensor, like: Tensor) -> Tensor:
    """Look up b_ij of queries `index` (B, heads, rounds, chunks, size, 1) and keys `other` (..., 1, 2 size)."""
    if isinstance(terms.bias, JointTable):
        table = terms.bias.table
    else:
        table = terms.bias.rows[..., :, None] + terms.bias.cols[..., None, :]
    rows, cols = table.shape[-2:]
    table = table.expand(like.shape[1], rows, cols)
    # Prefix tokens get the coordinates (0, 0), and the tokens that fill the last chunk get the coordinates of the last
    # token. These coordinates have no effect, because the bias of these tokens is not used.
    coords = F.pad(batched_coords(grid, like.device).to(torch.int32), (0, 0, grid.prefix, 0))
    coords = coords.expand(index.shape[0], -1, -1)
    batch = torch.arange(index.shape[0], device=like.device)[:, None, None, None, None, None]
    here, there = (coords[batch, tokens.clamp(max=coords.shape[1] - 1)] for tokens in (index, other))
    dy, dx = (there - here).unbind(-1)
    entry = bucket(dy, (rows - 1) // 2, terms.bucketing) * cols + bucket(dx, (cols - 1) // 2, terms.bucketing)
    heads = torch.arange(like.shape[1], device=like.device, dtype=torch.int32)[:, None, None, None, None]
    bias = table.flatten()[(heads * (rows * cols) + entry).to(torch.int64)]
    return bias.masked_fill((index < grid.prefix) | (other < grid.prefix), 0.0) if grid.prefix else bias


def check_bias_alone(terms: RelativeTerms) -> None:
    """Raise ValueError for terms that LSH attention cannot use."""
    names = ("query", "key", "value", "channels", "query_bias", "axis_logits")
    others = [name for name in names if getattr(terms, name) is not None]
    if others:
        raise ValueError(
            f"LSH attention takes a bias alone, got relative terms on {' and '.join(others)}: build models with "
            "rel_terms='b' or position='slopes', and give lsh_attention RelativeTerms(bias=...)"
        )
