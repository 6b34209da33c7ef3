"""Convert the tables of iRPE's DeiT checkpoints, exactly, the entries of the class token included."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from relvit.layers import RelativePosition2d
from relvit.layers.positions.tables import TERMS

# A table of iRPE has 7 x 7 entries for offsets, and a 50th entry, the last one, for all pairs with the class token.
SIDE, ENTRIES = 7, 50
# `BUCKETS` maps an offset of 0, 1 ... 4 patches along an axis to the distance between the offset's entry and the middle
# of the table, counted in entries. All larger offsets use the last value. These are the values of iRPE's piecewise
# index for alpha 1.9, beta 3.8 and gamma 15.2.
BUCKETS = (0, 1, 2, 2, 3)
REACH = len(BUCKETS) - 1


def convert_irpe(state: dict[str, Tensor], model: nn.Module) -> None:
    """Convert tables of iRPE (Wu et al. 2021, arXiv 2107.14222; contextual, product method, 50 entries), in place.

    In the authors' code each term has a vector r for all pairs with the class token. In relvit such pairs have no
    vector, so r is subtracted from all other vectors of the term, and the outputs stay the same:

    - Query term (vectors times keys): r is added to the layer's bias of queries instead.
    - Key term (queries times vectors): the subtraction changes all logits of a query by the same number, and softmax
      ignores that.
    - Value term: r is added to the layer's bias of values instead; the attention weights of a query sum to 1.

    If there are both a query term and a key term, adding r to the queries also adds scale * (r . a) to the logit of
    each pair, where a is the pair's vector in the key term. So relvit adds a bias per pair that subtracts this number.

    A state dict without iRPE's tables stays the same.

    Raises:
        ValueError: a table does not have the 50 entries of iRPE's product method, or the file has tables of the
            query or value term, but no bias of `qkv`.
        ValueError: the positions of the model are not joint tables with clipping, lack a term of the file, or have too
            small a `max_distance`.
    """
    names = [name for name in state if ".rpe_" in name]
    if not names:
        return
    for name in names:
        if not name.endswith(".lookup_table_weight") or ENTRIES not in state[name].shape[1:]:
            raise ValueError(
                f"{name} has shape {tuple(state[name].shape)}: of iRPE's tables only tables of the product method "
                f"with {ENTRIES} entries, as in the authors' files, can be converted"
            )
    terms = "".join(letter for letter in "qkv" if any(f".rpe_{letter}." in name for name in names))
    terms += "b" if "q" in terms and "k" in terms else ""
    for block in model.blocks:
        position = getattr(block.attn, "position", None)
        joint = isinstance(position, RelativePosition2d) and position.layout == "joint" and position.bucketing == "clip"
        if not joint or set(terms) - set(position.rel_terms) or min(position.max_distance) < REACH:
            raise ValueError(
                f"iRPE's tables of this file need a model with rel_terms={terms!r}, layout='joint', bucketing='clip', "
                f"max_distance={REACH} or more, got position {position}"
            )
    for layer in sorted({name.partition(".rpe_")[0] for name in names}):
        _convert_layer(state, layer, model.blocks[0].attn.num_heads)


def _convert_layer(state: dict[str, Tensor], layer: str, num_heads: int) -> None:
    index = torch.tensor([SIDE // 2 - row for row in BUCKETS[:0:-1]] + [SIDE // 2 + row for row in BUCKETS])
    tables: dict[str, Tensor] = {}
    for number, letter in enumerate("qkv"):
        given = state.pop(f"{layer}.rpe_{letter}.lookup_table_weight", None)
        if given is None:
            continue
        # Give all tables the shape of the table of the value term, (heads or 1, entries, head_dim).
        given = given if letter == "v" else given.mT
        patches, prefix = given[:, :-1], given[:, -1:]
        table = (patches - prefix).unflatten(1, (SIDE, SIDE))[:, index][:, :, index]
        # In relvit an offset is key minus query. In the authors' code only the table of the query term, 'q', has such
        # offsets; in the other tables an offset is query minus key, so reverse these tables.
        tables[letter] = table if letter == "q" else table.flip(1, 2)
        if letter != "k":
            if f"{layer}.qkv.bias" not in state:
                raise ValueError(
                    f"the checkpoint has no {layer}.qkv.bias, to which the class token's entries of iRPE's tables are "
                    "added: take a checkpoint that was trained with qkv_bias=True"
                )
            bias = state[f"{layer}.qkv.bias"].unflatten(0, (3, num_heads, -1)).clone()
            bias[number] += prefix[:, 0]
            state[f"{layer}.qkv.bias"] = bias.flatten()
        if letter == "q":
            of_queries = prefix
    if "q" in tables and "k" in tables:
        excess = (of_queries[:, None] * tables["k"]).sum(-1) * tables["k"].shape[-1] ** -0.5
        tables["b"] = -excess.expand(num_heads, -1, -1)
    for letter, table in tables.items():
        shared = letter != "b" and len(table) == 1
        state[f"{layer}.position.{TERMS[letter]}_table"] = table[0] if shared else table.contiguous()
