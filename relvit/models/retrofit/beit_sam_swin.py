"""Import the relative positions of BEiT, SAM, Swin and timm's relpos models as relvit's modules; convert their tables.

timm's offsets are query minus key, relvit's key minus query: tables are reversed along each axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from timm.layers import RelPosMlp
from timm.models.swin_transformer_v2 import WindowAttention as WindowAttentionV2
from timm.models.vision_transformer_sam import Attention as SamAttention
from torch import Tensor, nn

from relvit.layers.positions import ContinuousPosition2d, RelativePosition2d
from relvit.layers.prefix_bias import PrefixBias
from relvit.layers.timm_relpos import OWN_ATTENTIONS, TimmRelativeBeit

TABLE = "relative_position_bias_table"
# Modules of a model whose tables serve all blocks.
SHARED = ("shared_rel_pos", "rel_pos_bias")
# Entries of a bias table for the class token, as in `PrefixBias`.
PREFIX_ENTRIES = 3
# What timm's attention holds for its positions.
REPLACED = (
    *("rel_pos", "rel_pos_h", "rel_pos_w", "cpb_mlp"),
    *(TABLE, "relative_position_index", "relative_coords_table"),
)


def import_positions(model: nn.Module) -> dict[str, nn.ModuleDict]:
    """Build relvit's modules with the tables of a timm model, which is not changed.

    Returns:
        For each attention layer by name a module 'position', and 'prefix_bias' where the class token has entries.
        Layers that share tables have the same modules.

    Raises:
        ValueError: layers without relative positions.
    """
    shared = [part for name in SHARED if (part := getattr(model, name, None)) is not None]
    layers: dict[str, nn.ModuleDict] = {}
    for name, attn in model.named_modules():
        if type(attn) not in OWN_ATTENTIONS:
            continue
        if shared and layers and getattr(attn, TABLE, None) is None:
            layers[name] = next(iter(layers.values()))
            continue
        layers[name] = nn.ModuleDict(_modules(name, attn, shared[0] if shared else getattr(attn, "rel_pos", None)))
    state = convert_tables(model.state_dict(), layers)
    for name, modules in layers.items():
        own = {key: tensor for key, tensor in state.items() if key.startswith(f"{name}.")}
        own = {key.removeprefix(f"{name}."): tensor for key, tensor in own.items()}
        modules.load_state_dict({key: own[key] for key in modules.state_dict()})
        # Of a frozen layer tables are frozen.
        modules.requires_grad_(model.get_submodule(name).proj.weight.requires_grad)
    return layers


def _modules(name: str, attn: nn.Module, given: nn.Module | None) -> dict[str, nn.Module]:
    """Modules for the positions of an attention layer, which are in `given` or in the layer itself."""
    source, weight, heads = attn if given is None else given, attn.proj.weight, attn.num_heads
    like: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
    head_dim = attn.proj.in_features // heads
    if isinstance(source, RelPosMlp | WindowAttentionV2):
        first, mode = (source.cpb_mlp[0], "swin") if source is attn else (source.mlp.fc1, source.mode)
        scaled_by = source.pretrained_window_size if source.pretrained_window_size[0] > 0 else source.window_size
        window = [max(size, 2) for size in scaled_by]
        position = ContinuousPosition2d(head_dim, heads, mode, first.out_features, window, **like)
        if source is not attn:
            # With timm's dropout of the hidden layer in training.
            position.mlp.drop1.p = source.mlp.drop1.p
        return {"position": position}
    if isinstance(attn, SamAttention) and attn.use_rel_pos:
        distance = [len(table) // 2 for table in (attn.rel_pos_h, attn.rel_pos_w)]
        return {"position": RelativePosition2d(head_dim, heads, "k", distance, **like)}
    table = getattr(source, TABLE, None)
    if table is None:
        raise ValueError(
            f"{name} has no relative positions, and {type(attn).__name__} of this family can be given none: build the "
            "model with its own"
        )
    rows, columns = source.window_size
    position = RelativePosition2d(head_dim, heads, "b", (rows - 1, columns - 1), layout="joint", **like)
    if len(table) == (2 * rows - 1) * (2 * columns - 1):
        return {"position": position}
    return {"position": position, "prefix_bias": PrefixBias(heads, **like)}


def forget_own_positions(attn: nn.Module) -> None:
    """Remove what timm's attention holds for its positions, after the class of the layer has been exchanged."""
    for name in REPLACED:
        if hasattr(attn, name):
            setattr(attn, name, None)
    if isinstance(attn, TimmRelativeBeit):
        # Of no window, so that timm resizes nothing.
        attn.window_size = None


def convert_tables(state: Mapping[str, Tensor], layers: Mapping[str, Mapping[str, nn.Module]]) -> dict[str, Tensor]:
    """Convert timm's tables in a state dict to those of relvit's modules; all other tensors stay.

    Args:
        state: tensors by timm's names.
        layers: for each attention layer by name its module 'position', as `import_positions` returns them.

    Raises:
        ValueError: a table whose number of entries is that of no window.
    """
    given = dict(state)
    for key in [key for key in given if key.partition(".")[0] in SHARED]:
        tensor = given.pop(key)
        for layer in layers:
            own = f"{layer}.{key.partition('.')[2]}"
            given[own] = given[own] + tensor if own in given else tensor
    converted = {}
    for key, tensor in given.items():
        layer, found, leaf = key.rpartition(".attn.")
        layer, leaf = f"{layer}.attn", leaf.removeprefix("rel_pos.")
        if found and leaf == TABLE:
            rows, columns = _table_size(key, len(tensor), layers.get(layer))
            patches, prefix = tensor[: rows * columns], tensor[rows * columns :]
            converted[f"{layer}.position.bias_table"] = patches.flip(0).T.unflatten(1, (rows, columns)).contiguous()
            if len(prefix):
                converted[f"{layer}.prefix_bias.weight"] = prefix
        elif found and leaf in ("rel_pos_h", "rel_pos_w"):
            # timm's meet queries that are not scaled.
            axis = "rows" if leaf == "rel_pos_h" else "cols"
            converted[f"{layer}.position.key_{axis}"] = tensor.flip(0) * tensor.shape[1] ** 0.5
        elif found and leaf.startswith(("mlp.", "cpb_mlp.")):
            leaf = leaf.replace("cpb_mlp.0", "mlp.fc1").replace("cpb_mlp.2", "mlp.fc2")
            converted[f"{layer}.position.{leaf}"] = tensor
        else:
            converted[key] = tensor
    return converted


def _table_size(name: str, entries: int, modules: Mapping[str, nn.Module] | None) -> tuple[int, int]:
    """Rows and columns of a bias table: those of the layer's own, or else of a square window."""
    for patches in (entries, entries - PREFIX_ENTRIES):
        rows, columns = (2 * k + 1 for k in modules["position"].max_distance) if modules else (0, 0)
        if rows * columns == patches:
            return rows, columns
    for patches in (entries, entries - PREFIX_ENTRIES):
        side = math.isqrt(max(patches, 0))
        if side * side == patches and side % 2:
            return side, side
    raise ValueError(f"{name} has {entries} entries, which fit no square window, with or without a class token")
