"""Base classes of relvit's models: timm's Vision Transformer, handing every block the grid of its tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from timm.layers import PatchDropoutWithIndices
from timm.models import checkpoint
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from relvit.layers import AnySizePatchEmbed, AxialPositionEmbedding, GridBlock
from relvit.layers.feed_forward import check_chunk
from relvit.layers.patch_embed import check_divisible
from relvit.models.absolute import AbsoluteEmbedding
from relvit.models.depth import DEPTHS, Depth, OwnDepth
from relvit.models.recurrence import Recurrence
from relvit.models.sizes.native import embed_native, pool_native
from relvit.models.weights.convert import load_jax_archive
from relvit.ops import Grid
from relvit.ops.checks import int_pair, integer
from relvit.ops.grid import keep_patches, keep_tokens
from relvit.ops.tracing import is_exporting
from relvit.utils.constants import FillConstants
from relvit.utils.messages import an, check_choice

# `AXIAL` maps values of `pos_embed` to the argument `combine` of `AxialPositionEmbedding`.
AXIAL = {"axial": "concat", "axial-sum": "sum"}
POS_EMBEDS = ("", "learn", *AXIAL)
POOLS = ("", "avg", "avgmax", "max", "token", "map", "prr")


def put_classifier_last(model: nn.Module) -> None:
    """Register the classifier `head`, if the model has one, after the modules that were added later.

    Adaptive gradient clipping leaves out the classifier, and timm's `model_parameters(exclude_head=True)` assumes that
    the last two parameters of a model are the classifier's weight and bias.
    """
    if (head := model._modules.pop("head", None)) is not None:
        model.head = head


class NoTorchScript:
    """Mixin before one of timm's models that refuses `torch.jit.script`."""

    def __prepare_scriptable__(self) -> nn.Module:
        # `torch.jit.script` calls this method first, so a user reads this error instead of an error about an operation.
        raise TypeError(
            f"{type(self).__name__} has no TorchScript, which PyTorch has deprecated: use torch.export or torch.compile"
        )


class TablesWithoutDecay:
    """Mixin before one of timm's models that exempts the parameters named by positions and mixers from weight decay."""

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay: timm's, and tables of positions and mixers."""
        tables = {
            f"{name}.{table}"
            for name, module in self.named_modules()
            if module is not self and hasattr(module, "no_weight_decay")
            for table in module.no_weight_decay()
        }
        return super().no_weight_decay() | tables


class CheckedReset:
    """Mixin before one of timm's models whose `reset_classifier` does not change the model if it raises."""

    def reset_classifier(self, num_classes: int, global_pool: str | None = None, **options: Any) -> None:
        """Replace the classifier, and the pooling unless `global_pool` is None, as timm does with its own options.

        Raises:
            TypeError: `num_classes` is not an integer.
            ValueError: `num_classes` is negative, or the model cannot have this pooling.
        """
        before, number = self.num_classes, integer("num_classes", num_classes, 0)
        try:
            super().reset_classifier(number, global_pool, **options)
        except AssertionError as error:
            # timm sets `num_classes` before it checks the pooling.
            self.num_classes: int = before
            cannot = f"this {type(self).__name__} cannot get global_pool {global_pool!r}" + f": {error}".rstrip(": .")
            raise ValueError(f"{cannot}; leave it out, or create a new model with it") from error


class GridForward(CheckedReset, AbsoluteEmbedding):
    """Mixin before timm's `VisionTransformer` that makes the `Grid` at the patch embedding and hands it to every block.

    timm's model must be built with `dynamic_img_size=True`, and needs `PatchDropoutWithIndices` if it drops patches.
    The class must have a method `_run_block` that calls a block with the grid.
    """

    depth_plan: Depth = Depth()
    recurrence: Recurrence | None = None  # None: the model computes whole images
    own_recurrence: Recurrence | None = None  # value of `recurrence` for reach 'trained', from the model's arguments

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_run_steps" in cls.__dict__:
            cls.depth_plan = OwnDepth()

    def embed(self, x: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Grid]:
        """Embed images (B, in_chans, height, width), or a native batch, as tokens (B, N, embed_dim) with their grid.

        For native batches see `relvit.models.sizes.native.embed_native`, for `keep` see `forward_features`.
        """
        if isinstance(x, dict):
            x, grid = embed_native(self, x)
            x = self.pos_drop(x)
        else:
            x = self.patch_embed(x)
            grid = Grid(x.shape[1], x.shape[2], self.num_prefix_tokens)
            x = self._pos_embed(x)
        if keep is not None:
            x, grid = keep_tokens(x, grid, keep)
        dropped = self.patch_drop(x)
        x, kept = dropped if isinstance(dropped, tuple) else (dropped, None)
        if kept is not None:
            grid = keep_patches(grid, kept)
        return self.norm_pre(x), grid

    def _pos_embed(self, x: Tensor) -> Tensor:
        return self.pos_drop(self.embed_tokens(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False, patch_valid: Tensor | None = None) -> Tensor:
        """Pool tokens (B, N, embed_dim) and classify them.

        To leave out the padding of a native batch, give `patch_valid` (B, patches), or give as `x` the dictionary that
        `forward_features` returns.
        """
        if isinstance(x, dict):
            x, patch_valid = x["patches"], x["patch_valid"]
        x = self.pool(x) if patch_valid is None else pool_native(self, x, patch_valid)
        x = self.head_drop(self.fc_norm(x))
        return x if pre_logits else self.head(x)

    def forward_features(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        keep: Tensor | None = None,
    ) -> Tensor:
        """Compute the tokens (B, N, embed_dim), prefix tokens first, of images (B, in_chans, height, width).

        The tokens are normalised by `norm`. As in timm, a model that pools by average has no such norm, but `fc_norm`
        after the pooling; a model made with `fc_norm=False` normalises its tokens.

        For a native batch, the method returns a dictionary as timm's `NaFlexVit` does: the tokens as 'patches', and
        'patch_valid'.

        Args:
            x: the images.
            attn_mask, is_causal: see `relvit.ops.relative_attention`; with `keep`, the mask has rows and columns for
                the kept tokens only.
            keep: for masked pretraining (MAE, I-JEPA), the indices (B, K) of the K patches of each image to encode;
                patches are counted in raster order, without prefix tokens. Patches keep their places on the grid, so
                the outputs are as for the whole image under a mask that hides all other patches. Reach 'logn' is an
                exception: with `keep` it counts the kept patches, under a mask all patches. None: all patches.

        Raises:
            TypeError: `keep` does not hold integers.
            ValueError: `keep` has another shape, or the model computes images part by part.
        """
        if self.recurrence is not None:
            if keep is not None:
                name = type(self.recurrence).__name__
                raise ValueError(
                    f"keep is for whole images; this model computes in parts ({name}): call {self.recurrence.undo}"
                )
            # An exported graph serves all sizes, so the number of parts is not known. Instead of parts the graph
            # computes the whole image under a mask that gives the same outputs.
            if not is_exporting():
                return self.recurrence.features(self, x, attn_mask, is_causal)
            attn_mask = self.recurrence.mask(self, x, attn_mask, is_causal)
        x, grid = self.embed(x, keep)
        x = self.norm(self._run_blocks(x, grid, attn_mask, is_causal))
        return x if grid.valid is None else {"patches": x, "patch_valid": grid.valid}

    def _run_blocks(self, x: Tensor, grid: Grid, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        return self._run_steps(x, grid, attn_mask, is_causal, (), self._count_steps() - 1)[0]

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> list[Any] | tuple[Tensor, list[Any]] | dict[str, Any]:
        """Compute features after chosen blocks, as timm's `VisionTransformer.forward_intermediates`.

        `norm=True` has no effect on a model without `norm`, see `forward_features`. For a native batch the dictionary
        of `output_dict=True` also has 'patch_valid', as timm's `NaFlexVit` returns it.
        """
        check_choice("output_fmt", output_fmt, ("NCHW", "NLC"))
        if self.recurrence is not None and (why := self.recurrence.lacks.get("hooks")):
            raise ValueError(f"there are no features of single blocks: {why}")
        count = self._count_steps()
        take_indices, max_index = feature_take_indices(count, indices)
        x, grid = self.embed(x)
        if grid.coords is not None and output_fmt == "NCHW":
            raise ValueError("output_fmt 'NCHW' needs all patches of one grid (patch_drop_rate drops some): use 'NLC'")
        last = max_index if stop_early else count - 1
        x, taken = self._run_steps(x, grid, attn_mask, is_causal, take_indices, last)
        taken = [self.norm(tokens) if norm else tokens for tokens in taken]

        prefixes = [tokens[:, : self.num_prefix_tokens] for tokens in taken] if self.num_prefix_tokens else None
        patches = [tokens[:, self.num_prefix_tokens :] for tokens in taken]
        if output_fmt == "NCHW":
            patches = [p.transpose(1, 2).unflatten(2, (grid.height, grid.width)).contiguous() for p in patches]

        if output_dict:
            result: dict[str, Any] = {"image_intermediates": patches}
            if return_prefix_tokens and prefixes is not None:
                result["image_intermediates_prefix"] = prefixes
            if grid.valid is not None:
                result["patch_valid"] = grid.valid
            if not intermediates_only:
                result["image_features"] = self.norm(x)
            return result
        if return_prefix_tokens and prefixes is not None:
            patches = list(zip(patches, prefixes, strict=True))
        return patches if intermediates_only else (self.norm(x), patches)

    def _count_steps(self) -> int:
        """Count the states that `_run_steps` can take; a model that overrides one method overrides both."""
        return self.depth_plan.count(self)

    def _run_steps(
        self, x: Tensor, grid: Grid, attn_mask: Tensor | None, is_causal: bool, take: Collection[int], last: int
    ) -> tuple[Tensor, list[Tensor]]:
        return self.depth_plan.run(self, x, grid, attn_mask, is_causal, take, last)


class GridVisionTransformer(NoTorchScript, TablesWithoutDecay, FillConstants, GridForward, VisionTransformer):
    """timm's `VisionTransformer` for images of every size, whose blocks are `GridBlock`s.

    Args:
        pos_embed: absolute embedding, learned for `img_size`: '' (none), 'learn' (one vector per patch, interpolated at
            other sizes), 'axial' (half a vector per row, half a vector per column) or 'axial-sum' (one vector per row
            plus one per column); see `AxialPositionEmbedding`. Only 'learn' has vectors for prefix tokens.
        class_token: whether to put a class token, which has no position, before the patches.
        global_pool: timm's pooling 'avg', 'token' (needs a class token), 'max', 'avgmax', 'map', 'prr' or '' (none).
        patch_drop_rate: share of patches dropped in training; the other patches keep their coordinates.
        reversible: whether to train in memory that does not grow with the depth, see `relvit.families.reversible`.
        mlp_chunk: number of tokens for which the MLP is computed at a time; a small number saves memory, see
            `relvit.layers.feed_forward`. None: all tokens at once.
        **kwargs: see `timm.models.vision_transformer.VisionTransformer` (img_size, patch_size, embed_dim, depth ...);
            `block_fn` is a class of `GridBlock`s or a `functools.partial` of one, such as of `MixerBlock`.

    Raises:
        ValueError: `pos_embed` or `global_pool` is unknown; or `global_pool` is 'token', and there is no class token.
        ValueError: `patch_drop_rate` is not in 0 <= x < 1; or a side of `img_size` is not a multiple of the patch.
        ValueError: `mlp_chunk` is below 1, or is given with an MLP that may mix tokens.
        ValueError: `reversible` is not boolean, or is True for a class that does not run its blocks one after the
            other.
        TypeError: `mlp_chunk` is not an integer, or `block_fn` does not make `GridBlock`s.
    """

    # `fixed` maps arguments that users of this class cannot choose to the reason, which the error gives.
    fixed: ClassVar[dict[str, str]] = {}

    def __init__(
        self,
        *,
        pos_embed: str = "",
        class_token: bool = False,
        global_pool: str = "avg",
        patch_drop_rate: float = 0.0,
        reversible: bool = False,
        mlp_chunk: int | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(reversible, bool):
            raise ValueError(f"reversible must be True or False, got {reversible!r}")
        if not 0 <= patch_drop_rate < 1:
            raise ValueError(f"patch_drop_rate must be in 0 <= x < 1, got {patch_drop_rate}")
        for name in ("img_size", "patch_size"):
            if kwargs.get(name) is not None:
                int_pair(name, kwargs[name], 1)
        check_choice("pos_embed", pos_embed, POS_EMBEDS)
        check_choice("global_pool", global_pool, POOLS)
        if global_pool == "token" and not class_token:
            raise ValueError("global_pool 'token' needs class_token=True")
        kwargs = {"embed_layer": AnySizePatchEmbed, "attn_layer": nn.Identity} | kwargs
        super().__init__(
            pos_embed="" if pos_embed in AXIAL else pos_embed,
            class_token=class_token,
            global_pool=global_pool,
            dynamic_img_size=True,
            **kwargs,
        )
        self.blocks: nn.ModuleList = nn.ModuleList(self.blocks)
        if other := next((block for block in self.blocks if not isinstance(block, GridBlock)), None):
            raise TypeError(
                f"block_fn must make GridBlocks, got {an(type(other).__name__)}: give block_fn=partial(MixerBlock, "
                "mixer=...), or choose RelVisionTransformer, whose blocks have relative attention"
            )
        embed = self.patch_embed
        if isinstance(embed, AnySizePatchEmbed) and not embed.dynamic_img_pad:
            check_divisible(embed.img_size, embed.patch_size)
        self.depth_plan: Depth = self.depth_for({"reversible": reversible})
        for block in self.blocks:
            block.mlp_chunk = check_chunk(mlp_chunk, block.mlp)
        if patch_drop_rate > 0:
            # The grid needs the indices of the kept patches, which timm's `PatchDropout` does not return.
            self.patch_drop: nn.Module = PatchDropoutWithIndices(
                patch_drop_rate, num_prefix_tokens=self.num_prefix_tokens
            )
        self.axial: AxialPositionEmbedding | None = None
        if pos_embed in AXIAL:
            factory_kwargs = {name: kwargs.get(name) for name in ("device", "dtype")}
            self.axial = AxialPositionEmbedding(
                self.embed_dim, self.patch_embed.grid_size, AXIAL[pos_embed], **factory_kwargs
            )
            put_classifier_last(self)

    @classmethod
    def depth_for(cls, arguments: Mapping[str, Any]) -> Depth:
        """Return the object that applies the blocks of a model with these arguments.

        Raises:
            ValueError: an argument such as `reversible` is True, but this class has a `Depth` of its own.
        """
        chosen = next((name for name in DEPTHS if arguments.get(name)), None)
        if chosen is None:
            return cls.depth_plan
        if type(cls.depth_plan) is not Depth:
            raise ValueError(
                f"{chosen}=True is for blocks that run one after the other; {cls.__name__} runs its blocks in another "
                f"way: leave {chosen} out"
            )
        return DEPTHS[chosen]

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Resample absolute embeddings for another image or patch size; models without embeddings take every size."""
        super().set_input_size(img_size, patch_size)
        if self.axial is not None:
            self.axial.set_grid_size(self.patch_embed.grid_size)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in backward from its input.

        Raises:
            ValueError: backward recomputes the model's blocks already, as in a reversible model.
        """
        if enable and (why := self.depth_plan.lacks.get("checkpointing")):
            raise ValueError(why)
        super().set_grad_checkpointing(enable)

    def prune_intermediate_layers(self, *args: Any, **kwargs: Any) -> list[int]:
        """Remove the blocks after the last chosen one, as timm does for `features_only`.

        Raises:
            ValueError: the model's class has a `_run_steps` of its own, with another number of states than of blocks.
        """
        count = self._count_steps()
        if isinstance(self.depth_plan, OwnDepth) and count != len(self.blocks):
            raise ValueError(
                f"{type(self).__name__} has {count} states of {len(self.blocks)} blocks, and which block computes "
                "which state is not known: use forward_intermediates instead of features_only and pruning"
            )
        return super().prune_intermediate_layers(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model as `nn.Module.compile` does, and the parts that a graph of the whole model cannot hold."""
        super().compile(*args, **kwargs)
        self.depth_plan.compile(self, *args, **kwargs)

    def load_pretrained(self, checkpoint_path: str, prefix: str = "") -> None:
        """Load an original JAX archive, see `relvit.models.weights.load_jax_archive`."""
        load_jax_archive(self, checkpoint_path, prefix)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return timm's patterns of parameter names by depth, with axial tables in the stem."""
        groups = super().group_matcher(coarse)
        return groups if self.axial is None else {**groups, "stem": rf"{groups['stem']}|axial\."}

    def embed_tokens(self, x: Tensor) -> Tensor:
        if self.axial is not None:
            x = x + self.axial(Grid(x.shape[1], x.shape[2])).view(x.shape[1:])
        return super().embed_tokens(x)

    def _run_block(self, block: nn.Module, x: Tensor, grid: Grid, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        if self.grad_checkpointing:
            return checkpoint(block, x, grid, attn_mask, is_causal)
        return block(x, grid, attn_mask, is_causal)
