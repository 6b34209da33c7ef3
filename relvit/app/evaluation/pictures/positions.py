"""Compute the numbers of pictures of positions (`draw` plots them): tables, kernels, parts of logits, AFT biases."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from relvit.layers import Mixer
from relvit.models import logit_inputs, patch_grid
from relvit.ops import AttentionInputs, AxisTables, Channels, Grid, JointTable, RelativeTerms, bucket, saturation
from relvit.ops.reference import attention_logits

LETTERS = {"query": "q", "key": "k", "value": "v", "bias": "b"}


class NotApplicableError(ValueError):
    """The model has no picture of this kind."""


@torch.no_grad()
def position_tables(model: nn.Module, img_size: Sequence[int]) -> dict[str, dict[str, Tensor]]:
    """Collect the relative tables of each layer.

    Args:
        model: a relvit model, or one that `relvit.retrofit` has changed.
        img_size: (height, width) of the images in pixels. The image size determines the size of tables that are
            computed instead of learned.

    Returns:
        For each layer its tables by name, on the CPU, as `relvit.app.plots.plot_tables` takes them. If all heads share
        a table, its first axis is 1 instead of heads. A row that several offsets share, as with the bucketing
        'piecewise', is repeated: there is one row for each offset.

        - 'k rows' and 'k columns' for the term k, likewise for q and v: (heads, offsets, head_dim)
        - 'b rows' and 'b columns': (heads, offsets)
        - 'b, joint', for a joint table: (heads, row offsets, column offsets)
        - 'k length, joint' for a joint table of the term k, likewise for q and v: the lengths of the table's vectors,
          (heads, row offsets, column offsets)

    Raises:
        NotApplicableError: the model has no such tables.
    """
    found, kinds = {}, set()
    grid = Grid(*patch_grid(model, img_size), model.num_prefix_tokens)
    for name, layer in _mixers(model).items():
        position = getattr(layer, "position", None)
        kinds.add("no position" if position is None else type(position).__name__)
        terms = layer.position_terms(grid)
        if terms is None:
            continue
        tables = {}
        for field, letter in LETTERS.items():
            tables |= _tables(letter, getattr(terms, field), terms.bucketing)
        if tables:
            found[name] = tables
    if not found:
        has = f" ({', '.join(sorted(kinds))})" if kinds else ""
        raise NotApplicableError(f"{type(model).__name__} has no tables of rows and columns{has}: choose another kind")
    return found


def _tables(letter: str, tables: AxisTables | JointTable | None, bucketing: str) -> dict[str, Tensor]:
    scalar = letter == "b"
    if isinstance(tables, AxisTables):
        parts = zip(("rows", "columns"), tables, strict=True)
        lead = 2 if scalar else 3
        return {f"{letter} {name}": _for_offsets(_with_heads(table, lead), 1, bucketing) for name, table in parts}
    if tables is None:
        return {}
    table = _with_heads(tables.table, 3 if scalar else 4)
    table = _for_offsets(_for_offsets(table, 1, bucketing), 2, bucketing)
    return {f"{letter}, joint": table} if scalar else {f"{letter} length, joint": table.norm(dim=-1)}


def _for_offsets(table: Tensor, axis: int, bucketing: str) -> Tensor:
    """Return a table with one row for each offset along the axis, up to the offset from which all share a row."""
    distance = (table.shape[axis] - 1) // 2
    far = saturation(distance, bucketing)
    offsets = torch.arange(-far, far + 1, device=table.device)
    return table.index_select(axis, bucket(offsets, distance, bucketing))


def _with_heads(table: Tensor, dims: int) -> Tensor:
    return (table if table.dim() == dims else table[None]).detach().float().cpu()


@torch.no_grad()
def effective_kernels(model: nn.Module, image: Tensor, patch: Sequence[int] | None = None) -> dict[str, Tensor]:
    """Compute the position part of a query's scaled logits for each offset: where a head prefers to look.

    The term k depends on the query: it is computed for the mean query of all patches, or for the query of one patch.
    The term q depends on the key: it is computed for the mean key of all patches. Free channels
    (`RelativeTerms.channels`) depend on places, not only on offsets. So their part at an offset is the mean over all
    pairs of patches with this offset (with `patch`, over the pairs whose query is that patch), and NaN if there is no
    such pair.

    Args:
        model: in evaluation mode, a relvit model with attention, or one that `relvit.retrofit` has changed.
        image: (in_chans, height, width) as the model takes it, normalised.
        patch: row and column of a query; None: the mean query.

    Returns:
        For each layer (heads, 2 H - 1, 2 W - 1) for H x W patches, on the CPU. The offset (0, 0), key minus query, is
        in the middle. If a block runs several times, its kernel is the kernel of the last run.

    Raises:
        NotApplicableError: the model has no relative positions, has positions that differ between queries, or attends
            within windows or bands.
        ValueError: the model is in training mode, or `patch` is outside the grid.
    """
    if all(getattr(layer, "position", None) is None for layer in _mixers(model).values()):
        raise NotApplicableError(
            f"{type(model).__name__} has no attention with relative positions, so there is nothing to draw here: train "
            "a model that has them, such as relvit_small or one of timm after relvit.retrofit; other pictures, such as "
            "'cam', need none"
        )
    return {name: _kernel(given, patch) for name, given in _logit_inputs(model, image).items()}


def _kernel(given: AttentionInputs, patch: Sequence[int] | None) -> Tensor:
    grid, terms = given.grid, given.terms
    position_query, position_key = _position_vectors(given)
    query, key = (part[:, :, grid.prefix :] for part in (position_query, position_key))
    heads, count, _ = query.shape[1:]
    index = None if patch is None else patch_index(patch, grid)
    query = query.mean(dim=2, keepdim=True) if index is None else query[:, :, index : index + 1]
    # Seen from the middle of this larger grid, its places have all offsets that two patches of `grid` can have, each
    # once.
    around = Grid(2 * grid.height - 1, 2 * grid.width - 1)
    middle = torch.tensor([[grid.height - 1, grid.width - 1]], device=query.device)
    key = key.mean(dim=2, keepdim=True).expand(-1, -1, around.height * around.width, -1)
    kernel = attention_logits(
        torch.zeros_like(query), torch.zeros_like(key), terms._replace(channels=None),
        around._replace(coords=middle), around, given.scale, query, key,
    )[0, :, 0].view(heads, around.height, around.width)  # fmt: skip
    if terms.channels is not None:
        of_query, of_key = (
            part[:, :, grid.prefix :].to(query.dtype).expand(1, heads, count, -1) for part in terms.channels
        )
        products = (of_query @ of_key.mT)[0]
        # If the channels serve only the bias of prefix tokens, their products between patches are all zero, so leave
        # them out.
        if products.any():
            kernel = kernel + _by_offset(products, grid, index)
    if (trained := given.trained_keys) is not None:
        kernel = kernel * (math.log(given.key.shape[2]) / math.log(trained))
    return kernel.float().cpu()


def _by_offset(products: Tensor, grid: Grid, index: int | None) -> Tensor:
    """Average (heads, N, N) over pairs of the same offset, all or only one query's: (heads, 2 H - 1, 2 W - 1)."""
    place = torch.arange(grid.height * grid.width, device=products.device)
    y, x = place // grid.width, place % grid.width
    rows, columns = 2 * grid.height - 1, 2 * grid.width - 1
    offset = (y - y[:, None] + grid.height - 1) * columns + (x - x[:, None] + grid.width - 1)
    if index is not None:
        products, offset = products[:, index : index + 1], offset[index : index + 1]
    total = products.new_zeros(products.shape[0], rows * columns).index_add(1, offset.flatten(), products.flatten(1))
    return (total / offset.flatten().bincount(minlength=rows * columns)).view(-1, rows, columns)


@torch.no_grad()
def logit_parts(model: nn.Module, image: Tensor, patch: Sequence[int], layer: int = -1) -> dict[str, Tensor]:
    """Split the logits of one patch's query into the content part and the terms of the position.

    The content part is the scaled product of query and key. The content part includes the rotary embedding, if there is
    one, and Transformer-XL's u.

    Args:
        model: see `effective_kernels`.
        image: see `effective_kernels`.
        patch: row and column of the query.
        layer: index of the attention layer; negative ones count from the last layer.

    Returns:
        The parts of the logits: 'content', and 'q', 'k', 'b' (as in `rel_terms`) and 'channels' (free channels) if the
        layer has these terms. Each part is (heads, N) on the CPU, in the dtype of the queries or float32 if that is
        wider; keys are in the order of `relvit.models.AttentionMaps`. The sum of the parts is the logits.

    Raises:
        NotApplicableError, ValueError: see `effective_kernels`; a ValueError is also raised if the model does not have
            this `layer`.
    """
    inputs = _logit_inputs(model, image)
    given = inputs[chosen_layer(list(inputs), layer)]
    grid = given.grid
    index = grid.prefix + patch_index(patch, grid)
    position_query, position_key = _position_vectors(given)
    query, key = (part.to(position_query.dtype) for part in (given.query, given.key))
    query, position_query = (part[:, :, index : index + 1] for part in (query, position_query))
    place = torch.tensor([list(patch)], device=query.device)
    # Give the reference only one query, because it computes a vector for each pair of tokens.
    alone = Grid(grid.height, grid.width, coords=place)
    options = {"scale": given.scale, "trained_keys": given.trained_keys}
    parts = {"content": attention_logits(query, key, RelativeTerms(), alone, grid, **options)}
    terms = given.terms
    if terms.channels is not None:
        of_query, of_key = terms.channels
        terms = terms._replace(channels=Channels(of_query[:, :, index : index + 1], of_key))
    # The logits are the sum of content and terms, so with zero content and only one term the logits are this term's
    # part.
    zeros = (torch.zeros_like(query), torch.zeros_like(key), RelativeTerms(bucketing=terms.bucketing))
    for field in ("query", "key", "bias", "channels"):
        if (term := getattr(terms, field)) is not None:
            only = zeros[2]._replace(**{field: term})
            parts[LETTERS.get(field, field)] = attention_logits(
                *zeros[:2], only, alone, grid, position_query=position_query, position_key=position_key, **options
            )
    return {name: part[0, :, 0].cpu() for name, part in parts.items()}


@torch.no_grad()
def aft_windows(model: nn.Module, img_size: Sequence[int], patch: Sequence[int] | None = None) -> dict[str, Tensor]:
    """Compute the biases w of attention-free layers by offset, key minus query.

    Args:
        model: a model of `relvit_aft_*`.
        img_size: (height, width) of the images in pixels; the windows of AFT-conv do not depend on it.
        patch: row and column of a query, for AFT-full and AFT-local, which have a bias for each pair of places; None:
            for each offset the mean over all pairs of patches.

    Returns:
        For each layer (heads, rows, columns), with odd rows and columns, float32 on the CPU; heads is 1 for AFT-full
        and AFT-local.

    Raises:
        NotApplicableError: the model has no such biases.
        ValueError: `patch` is outside the grid.
    """
    grid = Grid(*patch_grid(model, img_size), model.num_prefix_tokens)
    index = None if patch is None else patch_index(patch, grid)
    found = {}
    for name, layer in _mixers(model).items():
        bias = layer.learned_bias(grid)
        if bias is not None:
            by_pair = bias.dim() == 2
            bias = _by_offset(bias[None, grid.prefix :, grid.prefix :], grid, index) if by_pair else bias.float()
            found[name] = bias.cpu()
    if not found:
        raise NotApplicableError(
            f"{type(model).__name__} has no attention-free layers with biases: choose another kind"
        )
    return found


def patch_index(patch: Sequence[int], grid: Grid) -> int:
    """Return the index of a patch in a grid, or raise ValueError for a patch outside of the grid."""
    if len(patch) != 2 or not all(0 <= at < size for at, size in zip(patch, grid, strict=False)):
        raise ValueError(
            f"patch {tuple(patch)}: give a row from 0 to {grid.height - 1} and a column from 0 to {grid.width - 1}"
        )
    return patch[0] * grid.width + patch[1]


def chosen_layer(names: Sequence[str], layer: int) -> str:
    """Return the name of a layer by its number, counted from 0, or from -1 backwards; otherwise raise ValueError."""
    if not -len(names) <= layer < len(names):
        raise ValueError(f"layer is {layer}, the model has {len(names)}: give a number from 0 to {len(names) - 1}")
    return names[layer]


def _mixers(model: nn.Module) -> dict[str, Mixer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Mixer)}


def _position_vectors(given: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Return the queries and keys before a rotary embedding, which tables are multiplied by, in float32 at least."""
    query, key = given.position_query, given.position_key
    query, key = given.query if query is None else query, given.key if key is None else key
    dtype = torch.promote_types(query.dtype, torch.float32)
    return query.to(dtype), key.to(dtype)


def _logit_inputs(model: nn.Module, image: Tensor) -> dict[str, AttentionInputs]:
    """Run the model once, and return the inputs of each layer's logits."""
    if model.training:
        raise ValueError("pictures need a model in evaluation mode: call model.eval()")
    try:
        found = logit_inputs(model, image[None])
    except (TypeError, ValueError) as error:
        raise NotApplicableError(str(error)) from error
    if any(given.terms.axis_logits is not None for given in found.values()):
        raise NotApplicableError(
            f"the positions of {type(model).__name__} differ between queries, so no table holds for all of them: "
            "choose another kind"
        )
    return found
