"""`Retrofitted`: base of what models become in `relvit.retrofit`; `OwnPositions`: of those whose tables are kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import ClassVar

from timm.layers import Format, HybridEmbed, PatchEmbed
from torch import Tensor, nn

from relvit.layers.patch_embed import AnySizePatchEmbed
from relvit.layers.positions.factory import make_position, numbered
from relvit.models.base import NoTorchScript, TablesWithoutDecay
from relvit.utils.messages import listing

# For each attention by name the module 'position', and 'prefix_bias' where the class token has a bias.
Layers = Mapping[str, Mapping[str, nn.Module]]
PATCH_EMBEDS = (PatchEmbed, AnySizePatchEmbed, HybridEmbed)


class Retrofitted(NoTorchScript, TablesWithoutDecay):
    """Mixin before the class of a model, whose attention it hands the grid.

    Attributes:
        block_classes: blocks that hand an argument on to their attention `attn` untouched.
        attention_classes: attention of the original model -> the class that it becomes.
        patch_embed_classes: patch embeddings whose patches come as a grid or can be made to.
        absolute: names of the parameters that are absolute embeddings.
        own_positions: whether the original model has relative positions, which are kept.
        replaced: attributes of the original attention that its position module replaces.
    """

    block_classes: ClassVar[tuple[type[nn.Module], ...]]
    attention_classes: ClassVar[Mapping[type[nn.Module], type[nn.Module]]]
    patch_embed_classes: ClassVar[Collection[type[nn.Module]]] = PATCH_EMBEDS
    absolute: ClassVar[tuple[str, ...]] = ("pos_embed",)
    own_positions: ClassVar[bool] = False
    replaced: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def named_blocks(cls, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield the blocks of a model with their names, those of Swin stage by stage."""
        for path, part in model.named_modules():
            if path.rpartition(".")[2] == "blocks":
                yield from ((f"{path}.{name}", block) for name, block in part.named_children())

    @classmethod
    def check(cls, model: nn.Module) -> None:
        """Raise ValueError unless all parts of the original model are of known classes."""
        for name, block in cls.named_blocks(model):
            check_part(name, block, cls.block_classes)
            check_part(f"{name}.attn", block.attn, tuple(cls.attention_classes))
        # With dynamic sizes timm itself has made sure that patches come as a grid.
        if hasattr(model, "patch_embed") and not getattr(model, "dynamic_img_size", False):
            check_part("patch_embed", model.patch_embed, tuple(cls.patch_embed_classes))

    @classmethod
    def make_layers(cls, model: nn.Module, factory: Callable[..., nn.Module]) -> Layers:
        """Build the modules for the original model, which is not changed."""
        blocks = list(cls.named_blocks(model))
        factory = numbered(factory, len(blocks))
        return {f"{name}.attn": {"position": make_position(factory, block.attn)} for name, block in blocks}

    def open_to_all_sizes(self) -> None:
        """Let images of every size in; `relvit.retrofit` calls it once, at the end."""


class OwnPositions(Retrofitted):
    """`Retrofitted` for models that bring relative positions, which become relvit's modules.

    Attributes:
        shared: names of modules of the model whose tables serve all blocks.
    """

    own_positions: ClassVar[bool] = True
    shared: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def modules_for(cls, attn: nn.Module, source: nn.Module) -> dict[str, nn.Module] | None:
        """Build the modules of an original attention, whose tables `source` holds; None: there are none."""
        return None

    @classmethod
    def convert(cls, leaf: str, tensor: Tensor, modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
        """Convert a tensor of an original attention to those of its modules; another tensor stays as it is."""
        return {leaf: tensor}

    @classmethod
    def make_layers(cls, model: nn.Module, factory: Callable[..., nn.Module]) -> Layers:
        """Build modules with the tables of the original model; layers that share tables have the same modules."""
        shared = next((part for name in cls.shared if (part := getattr(model, name, None)) is not None), None)
        layers: dict[str, nn.ModuleDict] = {}
        for name, block in cls.named_blocks(model):
            attn, path = block.attn, f"{name}.attn"
            if shared and layers and all(getattr(attn, part, None) is None for part in cls.replaced):
                layers[path] = next(iter(layers.values()))
                continue
            modules = cls.modules_for(attn, shared or getattr(attn, "rel_pos", None) or attn)
            if modules is None:
                raise ValueError(
                    f"{path} has no relative positions, and {type(attn).__name__} of this family can be given none: "
                    "build the model with its own"
                )
            layers[path] = nn.ModuleDict(modules).to(attn.proj.weight)
        state = cls.convert_tables(model.state_dict(), layers)
        for path, modules in layers.items():
            modules.load_state_dict({key: state[f"{path}.{key}"] for key in modules.state_dict()})
            # Tables of a frozen layer are frozen.
            modules.requires_grad_(model.get_submodule(path).proj.weight.requires_grad)
        return layers

    def position_layers(self) -> Layers:
        """Return the modules of each attention of a retrofitted model."""
        layers = {}
        for name, block in self.named_blocks(self):
            prefix_bias = getattr(block.attn, "prefix_bias", None)
            modules = {"position": block.attn.position}
            layers[f"{name}.attn"] = modules if prefix_bias is None else modules | {"prefix_bias": prefix_bias}
        return layers

    def original_tables(self, shapes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert the tables of a retrofitted model back to tensors with the original's names.

        Args:
            shapes: the names, and tensors of the original shapes on the meta device.

        Raises:
            ValueError: a tensor that the model no longer has, alone.
        """
        layers, found, taken = self.position_layers(), {}, set()
        for key, shape in shapes.items():
            first, _, leaf = key.partition(".")
            layer = next(iter(layers))
            if first not in self.shared:
                block, attn, leaf = key.rpartition(".attn.")
                if not attn:
                    raise ValueError(f"{type(self).__name__} cannot be restored: abs_pos='drop' has removed {key}")
                layer = f"{block}.attn"
                if layer not in layers:
                    # The block has been pruned since.
                    continue
            names = self.convert(leaf, shape, layers[layer])
            if not taken.isdisjoint((layer, name) for name in names):
                raise ValueError(f"{type(self).__name__} cannot be restored: {key} was added to the tables of {layer}")
            taken |= {(layer, name) for name in names}
            tensors = nn.ModuleDict(layers[layer]).state_dict()
            found[key] = self.revert(leaf, {name: tensors[name] for name in names})
        return found

    @classmethod
    def revert(cls, leaf: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Convert tensors as `convert` returns them back to that of the original attention."""
        (tensor,) = tensors.values()
        return tensor

    @classmethod
    def convert_tables(cls, state: Mapping[str, Tensor], layers: Layers) -> dict[str, Tensor]:
        """Convert the tables in a state dict of the original model; all other tensors stay.

        Raises:
            ValueError: a table whose number of entries is that of no window.
        """
        given = dict(state)
        for key in [key for key in given if key.partition(".")[0] in cls.shared]:
            tensor = given.pop(key)
            for layer in layers:
                own = f"{layer}.{key.partition('.')[2]}"
                given[own] = given[own] + tensor if own in given else tensor
        converted = {}
        for key, tensor in given.items():
            block, _, leaf = key.rpartition(".attn.")
            layer = f"{block}.attn"
            parts = cls.convert(leaf, tensor, layers[layer]) if layer in layers else {}
            converted |= {f"{layer}.{name}": part for name, part in parts.items()} if parts else {key: tensor}
        return converted


def open_patch_embed(model: nn.Module, becomes: type[AnySizePatchEmbed] = AnySizePatchEmbed) -> None:
    """Do what timm's `dynamic_img_size=True` does in the constructor."""
    embed = model.patch_embed
    model.dynamic_img_size = True
    embed.flatten, embed.output_fmt, embed.strict_img_size = False, Format.NHWC, False
    if type(embed) is PatchEmbed:
        embed.__class__ = becomes
        if any(size % patch for size, patch in zip(embed.img_size, embed.patch_size, strict=True)):
            # timm leaves out the pixels beyond the last whole patch, so the retrofitted model does so at this size.
            embed.cropped_size = tuple(embed.img_size)
    declare_any_size(model)


def declare_any_size(model: nn.Module) -> None:
    """Say to timm's transforms, which read it, that other sizes are allowed."""
    model._traits = {**getattr(model, "_traits", {}), "fixed_input_size": False}


def check_part(name: str, part: nn.Module, allowed: tuple[type[nn.Module], ...]) -> None:
    """Raise unless the part is exactly of these classes: how a subclass differs is not known."""
    if type(part) not in allowed:
        names = listing([cls.__name__ for cls in allowed])
        raise ValueError(f"{name} is a {type(part).__name__}, which cannot be retrofitted; allowed: {names}")
