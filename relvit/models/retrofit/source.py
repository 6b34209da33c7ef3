"""Base classes of retrofitted models: `Retrofitted`, and `OwnPositions` for models that have relative positions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar

from timm.layers import Format, HybridEmbed, PatchEmbed
from torch import Tensor, nn

from relvit.layers.patch_embed import AnySizePatchEmbed
from relvit.layers.positions.by_name import make_position, numbered
from relvit.models.base import CheckedReset, NoTorchScript, TablesWithoutDecay
from relvit.utils.constants import FillConstants
from relvit.utils.messages import an, full_name, listing

Classes = tuple[type[nn.Module], ...]
# An `Exchange` maps the class of a part of the original model to the class that the part becomes.
Exchange = Mapping[type[nn.Module], type[nn.Module]]
# `Layers` maps the path of each attention module to the submodules that it gets: 'position', 'prefix_bias',
# 'attn_drop'.
Layers = Mapping[str, Mapping[str, nn.Module]]
# The model holds modules that its layers share under this name, which begins with `rel_pos_bias`, so that timm's BEiT
# puts their parameters into the group of the stem.
SHARED_MODULES = "rel_pos_bias_shared"
PATCH_EMBEDS = (PatchEmbed, AnySizePatchEmbed, HybridEmbed)


class Retrofitted(NoTorchScript, TablesWithoutDecay, FillConstants):
    """Mixin before the class of a model: it passes the grid to the model's attention modules."""

    block_classes: ClassVar[Classes]  # blocks that the retrofit knows; it refuses all others
    container: ClassVar[str] = "blocks"  # name of the module that holds the blocks; Swin has one for each stage
    in_block: ClassVar[str] = "attn"  # path of the attention within a block
    attention_classes: ClassVar[Exchange]
    # These patch embeddings return, or can be set to return, their patches as a grid.
    patch_embed_classes: ClassVar[Collection[type[nn.Module]]] = PATCH_EMBEDS
    absolute: ClassVar[tuple[str, ...]] = ("pos_embed",)  # names of the absolute embeddings among the parameters
    own_positions: ClassVar[bool] = False  # whether the original model has relative positions, which are kept
    replaced: ClassVar[tuple[str, ...]] = ()  # attributes of the original attention that the position module replaces

    @classmethod
    def named_blocks(cls, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield the blocks of a model with their names; blocks of Swin stage by stage."""
        for path, part in model.named_modules():
            # Skip the stem: in a hybrid model it may be a ResNet, whose blocks have no attention.
            if path.rpartition(".")[2] == cls.container and not path.startswith("patch_embed."):
                yield from ((f"{path}.{name}", block) for name, block in part.named_children())

    @classmethod
    def named_attentions(cls, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield the attention of each block with its name; an attention that blocks share has its first name."""
        names: dict[nn.Module, str] = {}
        for name, block in cls.named_blocks(model):
            names.setdefault(block.get_submodule(cls.in_block), f"{name}.{cls.in_block}")
        yield from ((name, attn) for attn, name in names.items())

    @classmethod
    def check(cls, model: nn.Module) -> None:
        """Raise ValueError unless all parts of the original model are of known classes."""
        for name, block in cls.named_blocks(model):
            check_part(name, block, cls.block_classes)
        for path, attn in cls.named_attentions(model):
            check_part(path, attn, tuple(cls.attention_classes))
            projection = getattr(attn, "proj", None)
            # In layers that PyTorch has quantised, `weight` is a method.
            if callable(weight := getattr(projection, "weight", None)):
                raise ValueError(f"{path}.proj is quantised: retrofit the model before it is quantised")
            if projection is not None and weight is None:
                raise ValueError(
                    f"{path}.proj is {an(full_name(type(projection)))} without a weight: retrofit the model before you "
                    "replace its layers"
                )
            if "forward" in vars(attn):
                raise ValueError(
                    f"{path} has a forward of its own, from hooks of accelerate (cpu_offload, dispatch_model) for "
                    "example, which would be called instead of relvit's: retrofit the model before you replace forward"
                )
        # If the model has `dynamic_img_size`, its patch embedding already returns a grid, so the class of the patch
        # embedding need not be checked.
        if hasattr(model, "patch_embed") and not getattr(model, "dynamic_img_size", False):
            check_part("patch_embed", model.patch_embed, tuple(cls.patch_embed_classes))

    @classmethod
    def make_layers(cls, model: nn.Module, factory: Callable[..., nn.Module]) -> Layers:
        """Build a position module for each attention of the original model; the model itself is not changed."""
        attentions = dict(cls.named_attentions(model))
        factory = numbered(factory, len(attentions))
        layers = {}
        for path, attn in attentions.items():
            like = {"device": attn.proj.weight.device, "dtype": attn.proj.weight.dtype}
            layers[path] = {"position": make_position(factory, attn.head_dim, attn.num_heads, **like)}
        return layers

    def open_to_all_sizes(self) -> None:
        """Make the model accept images of every size; `relvit.retrofit` calls this method once, at the end."""


class OwnPositions(Retrofitted):
    """`Retrofitted` for models that already have relative positions.

    In a state dict, tables have the same names as in the original model, so that its weights can be loaded; only in
    `BiasPositions` they have other names.
    """

    own_positions: ClassVar[bool] = True
    # If a model was built without relative positions, the error ends with 'build the model with' and this text: the
    # argument of the original class that adds relative positions.
    built_with: ClassVar[str] = "its own"

    @classmethod
    def has_positions(cls, model: nn.Module, attn: nn.Module) -> bool:
        """Return whether an attention of the original model has relative positions; sources implement the method."""
        raise NotImplementedError

    @classmethod
    def dropout(cls, attn: nn.Module) -> float:
        """Return the dropout rate of the attention weights, for an original attention without a dropout module."""
        return 0.0

    @classmethod
    def check(cls, model: nn.Module) -> None:
        super().check(model)
        for path, attn in cls.named_attentions(model):
            if not cls.has_positions(model, attn):
                raise ValueError(
                    f"{path} has no relative positions, and {type(attn).__name__} can be given none: build the model "
                    f"with {cls.built_with}"
                )

    @classmethod
    def make_layers(cls, model: nn.Module, factory: Callable[..., nn.Module]) -> Layers:
        """Build the dropout of attention weights for layers that have no module for it."""
        return {
            path: {} if hasattr(attn, "attn_drop") else {"attn_drop": nn.Dropout(cls.dropout(attn))}
            for path, attn in cls.named_attentions(model)
        }

    def windows(self) -> dict[str, tuple[int, int]]:
        """Return the windows, (rows, columns) by name, whose tables timm's `set_input_size` would resize."""
        return {}

    def adapt_tables(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert the tables of an original model, whose images may have another size, to tables of this model."""
        return dict(state)

    def original_tables(self, shapes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute tensors that only the original model has, from the tensors of the retrofitted model.

        A tensor requires gradients if a tensor from which it is computed does.

        Args:
            shapes: maps the names of these tensors to tensors of the original shapes on the meta device.

        Raises:
            ValueError: a tensor cannot be computed, such as an absolute embedding that `abs_pos='drop'` has removed.
        """
        for key in shapes:
            raise ValueError(
                f"{type(self).__name__} cannot be restored: abs_pos='drop' has removed {key}; build the original model "
                "again, and retrofit it with another abs_pos to restore it later"
            )
        return {}


class WholeImages(CheckedReset):
    """Mixin before timm's models without the argument `keep` of relvit's `forward_features`."""

    def forward_features(self, *arguments: Any, keep: Tensor | None = None, **options: Any) -> Any:
        """Compute what timm's model does; `keep` raises ValueError."""
        if keep is not None:
            raise ValueError(
                "keep is for models of relvit and for a VisionTransformer, VisionTransformerRelPos or Beit after "
                f"retrofit; {type(self).__name__} encodes all patches of an image"
            )
        return super().forward_features(*arguments, **options)


def open_patch_embed(model: nn.Module, becomes: type[AnySizePatchEmbed] = AnySizePatchEmbed) -> None:
    """Make a model embed images of every size, as timm's constructors do for `dynamic_img_size=True`."""
    embed = model.patch_embed
    model.dynamic_img_size = True
    embed.flatten, embed.output_fmt, embed.strict_img_size = False, Format.NHWC, False
    if type(embed) is PatchEmbed:
        embed.__class__ = becomes
        if any(size % patch for size, patch in zip(embed.img_size, embed.patch_size, strict=True)):
            # At the size in training timm leaves out the pixels beyond the last whole patch, and so does the
            # retrofitted model, which refuses other sizes that are not whole patches.
            embed.cropped_size = tuple(embed.img_size)
    declare_any_size(model)


def declare_any_size(model: nn.Module) -> None:
    """Tell timm's transforms that the model takes images of other sizes."""
    model._traits = {**getattr(model, "_traits", {}), "fixed_input_size": False}


def check_part(name: str, part: nn.Module, allowed: Classes) -> None:
    """Raise unless the part's class is one of `allowed`: a subclass may compute something else."""
    if type(part) not in allowed:
        names = listing([full_name(cls) for cls in allowed])
        raise ValueError(f"{name} is {an(full_name(type(part)))}, which cannot be retrofitted; allowed: {names}")
