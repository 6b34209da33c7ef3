"""Convert position biases of timm's BEiT, Swin and relpos ViTs to relvit's modules and back; change their window.

In timm an offset is query minus key, in relvit key minus query, so tables are reversed along each axis.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from timm.layers import RelPosMlp, resize_rel_pos_bias_table
from timm.models.swin_transformer_v2 import WindowAttention as WindowAttentionV2
from torch import Tensor, nn

from relvit.layers.positions import ContinuousPosition2d, RelativePosition2d
from relvit.layers.prefix_bias import PrefixBias
from relvit.models.retrofit.source import SHARED_MODULES, Layers, OwnPositions

TABLE = "relative_position_bias_table"
# If the model has a class token, a bias table has this number of entries for it, as `PrefixBias` has.
PREFIX_ENTRIES = 3
# Some models compute the bias with a small MLP instead of a table. `NETWORKS` maps the prefixes of its parameters'
# names in timm to their prefixes in relvit.
NETWORKS = {"rel_pos.mlp.": "mlp.", "mlp.": "mlp.", "cpb_mlp.0.": "mlp.fc1.", "cpb_mlp.2.": "mlp.fc2."}


class BiasPositions(OwnPositions):
    """`OwnPositions` whose tables become modules of relvit under other names."""

    replaced: ClassVar[tuple[str, ...]] = (
        "rel_pos",
        "cpb_mlp",
        TABLE,
        "relative_position_index",
        "relative_coords_table",
    )
    # A model whose blocks share a table may hold the table's module under one of these names.
    shared: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def source_of(cls, model: nn.Module, attn: nn.Module) -> nn.Module:
        """Return the module that has the table or the network of an original attention."""
        shared = next((part for name in cls.shared if (part := getattr(model, name, None)) is not None), None)
        return shared or getattr(attn, "rel_pos", None) or attn

    @classmethod
    def has_positions(cls, model: nn.Module, attn: nn.Module) -> bool:
        source = cls.source_of(model, attn)
        return isinstance(source, RelPosMlp | WindowAttentionV2) or getattr(source, TABLE, None) is not None

    @classmethod
    def make_layers(cls, model: nn.Module, factory: Callable[..., nn.Module]) -> Layers:
        """Build modules with the tables of the original model; layers that share tables have the same modules."""
        layers: dict[str, nn.ModuleDict] = {}
        for path, attn in cls.named_attentions(model):
            if layers and all(getattr(attn, part, None) is None for part in cls.replaced):
                layers[path] = next(iter(layers.values()))
            else:
                layers[path] = nn.ModuleDict(modules_for(attn, cls.source_of(model, attn))).to(attn.proj.weight)
        # Convert with gradients, so that each converted tensor says whether the original tensor is trainable.
        with torch.enable_grad():
            state = cls.convert_tables(model.state_dict(keep_vars=True), layers)
        for path in _with_own_tables(layers):
            layers[path].load_state_dict({key: state[f"{path}.{key}"] for key in layers[path].state_dict()})
            for key, parameter in layers[path].named_parameters():
                parameter.requires_grad_(state[f"{path}.{key}"].requires_grad)
        return layers

    def position_layers(self) -> Layers:
        """Return the modules of each attention of a retrofitted model."""
        return {
            path: {
                name: part for name in ("position", "prefix_bias") if (part := getattr(attn, name, None)) is not None
            }
            for path, attn in self.named_attentions(self)
        }

    def adapt_tables(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        layers = self.position_layers()
        adapted = self.convert_tables(state, layers)
        for name in getattr(self, SHARED_MODULES, ()):
            first = f"{next(iter(layers))}.{name}."
            for key in [key for key in adapted if key.startswith(first)]:
                adapted[f"{SHARED_MODULES}.{name}.{key.removeprefix(first)}"] = adapted.pop(key)
        return adapted

    @classmethod
    def convert_tables(cls, state: Mapping[str, Tensor], layers: Layers) -> dict[str, Tensor]:
        """Convert the tables in a state dict of the original model; all other tensors stay the same."""
        given = dict(state)
        for key in [key for key in given if key.partition(".")[0] in cls.shared]:
            tensor = given.pop(key)
            for layer in _with_own_tables(layers):
                own = f"{layer}.{key.partition('.')[2]}"
                given[own] = given[own] + tensor if own in given else tensor
        converted = {}
        for key, tensor in given.items():
            block, _, leaf = key.rpartition(".attn.")
            layer = f"{block}.attn"
            parts = convert(leaf, tensor, layers[layer]) if layer in layers else {}
            converted |= {f"{layer}.{name}": part for name, part in parts.items()} if parts else {key: tensor}
        return converted

    def original_tables(self, shapes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        layers, found, taken = self.position_layers(), {}, set()
        for key, shape in shapes.items():
            first, _, leaf = key.partition(".")
            layer = next(iter(layers))
            if first not in self.shared:
                block, attn, leaf = key.rpartition(".attn.")
                layer = f"{block}.attn"
                if not attn:
                    return super().original_tables({key: shape})
                if layer not in layers:
                    # This block was pruned after the retrofit, so there is no layer for its tables.
                    continue
            names = convert(leaf, shape, layers[layer])
            if not taken.isdisjoint((layer, name) for name in names):
                raise ValueError(
                    f"{type(self).__name__} cannot be restored: retrofit added {key} to the tables of {layer}; build "
                    "the original model again"
                )
            taken |= {(layer, name) for name in names}
            tensors = nn.ModuleDict(layers[layer]).state_dict(keep_vars=True)
            with torch.enable_grad():
                found[key] = revert(leaf, {name: tensors[name] for name in names})
        return found


def _with_own_tables(layers: Layers) -> list[str]:
    """Return the layers whose tables are not the tables of an earlier layer."""
    return [*{modules["position"]: layer for layer, modules in reversed(layers.items())}.values()][::-1]


def modules_for(attn: nn.Module, source: nn.Module) -> dict[str, nn.Module]:
    """Build the modules of an original attention; `source` is the module with its table or network."""
    head_dim, heads = attn.proj.in_features // attn.num_heads, attn.num_heads
    if isinstance(source, RelPosMlp | WindowAttentionV2):
        first, mode = (source.cpb_mlp[0], "swin") if source is attn else (source.mlp.fc1, source.mode)
        scaled_by = source.pretrained_window_size if source.pretrained_window_size[0] > 0 else source.window_size
        window = [max(size, 2) for size in scaled_by]
        position = ContinuousPosition2d(head_dim, heads, mode, first.out_features, window)
        if source is not attn:
            # In training timm's network applies dropout after its hidden layer, so give relvit's network the same
            # rate.
            position.mlp.drop1.p = source.mlp.drop1.p
        return {"position": position}
    rows, columns = source.window_size
    modules = {"position": RelativePosition2d(head_dim, heads, "b", (rows - 1, columns - 1), layout="joint")}
    if len(getattr(source, TABLE)) > (2 * rows - 1) * (2 * columns - 1):
        modules["prefix_bias"] = PrefixBias(heads)
    return modules


def convert(leaf: str, tensor: Tensor, modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Convert a table, or a weight of a network, of timm's attention to tensors of relvit's `modules`, by name.

    All other tensors keep their name, `leaf`, and their values.
    """
    for theirs, ours in NETWORKS.items():
        if leaf.startswith(theirs):
            return {f"position.{ours}{leaf.removeprefix(theirs)}": tensor}
    if not leaf.endswith(TABLE):
        return {leaf: tensor}
    rows, columns = _table_size(len(tensor), modules["position"])
    patches, prefix = tensor[: rows * columns], tensor[rows * columns :]
    converted = {"position.bias_table": patches.flip(0).T.unflatten(1, (rows, columns)).contiguous()}
    return converted | ({"prefix_bias.weight": prefix} if len(prefix) else {})


def revert(leaf: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """Convert tensors that `convert` returned back to the tensor of the original attention."""
    if not leaf.endswith(TABLE):
        (tensor,) = tensors.values()
        return tensor
    patches = tensors["position.bias_table"].flatten(1).T.flip(0)
    return torch.cat((patches, *(part for name, part in tensors.items() if name.startswith("prefix_bias"))))


def set_window(position: nn.Module, old: tuple[int, int], new: tuple[int, int]) -> None:
    """Change the window, (rows, columns), for which a position of `modules_for` is made, as timm's `set_input_size`.

    Tables are interpolated, as in timm. An MLP that computes the bias gets offsets that are divided by the window size,
    so only the window size changes; with mode 'cr' nothing changes.
    """
    if new == old or getattr(position, "mode", None) == "cr":
        return
    if isinstance(position, ContinuousPosition2d):
        position.window = (max(new[0], 2), max(new[1], 2))
    else:
        table = position.bias_table
        given = revert(TABLE, {"position.bias_table": table.detach()})
        shape = (math.prod(2 * size - 1 for size in new), given.shape[1])
        # timm's function before 1.0.31 lacks `old_window_size`, and assumes that all tables are square.
        takes = inspect.signature(resize_rel_pos_bias_table).parameters
        options = {"old_window_size": old} if "old_window_size" in takes else {}
        resized = resize_rel_pos_bias_table(given, new, shape, **options)
        position.max_distance = (new[0] - 1, new[1] - 1)
        converted = convert(TABLE, resized.to(table.dtype), {"position": position})
        position.bias_table = nn.Parameter(converted["position.bias_table"], table.requires_grad)
    if position.trained_grid is not None:
        position.trained_grid = new


def _table_size(entries: int, position: nn.Module) -> tuple[int, int]:
    """Return rows and columns of a bias table: those of the position's own table, or else those of a square window."""
    rows, columns = (2 * k + 1 for k in position.max_distance)
    if entries - rows * columns in (0, PREFIX_ENTRIES):
        return rows, columns
    for patches in (entries, entries - PREFIX_ENTRIES):
        side = math.isqrt(max(patches, 0))
        if side * side == patches and side % 2:
            return side, side
    raise ValueError(f"{TABLE} has {entries} entries, which fit no square window, with or without a class token")
