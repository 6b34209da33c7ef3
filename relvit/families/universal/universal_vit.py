"""Universal Transformers: one block applied T times, to all tokens or only to running ones; as `relvit_universal_*`."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from timm.layers import DropPath
from timm.models import DefaultCfg, checkpoint
from timm.models._features import feature_take_indices
from torch import Tensor

from relvit.families.universal.halting import AdaptiveHalting, HaltingState, ponder_cost, start_halting
from relvit.families.universal.running_tokens import put_tokens, run_gathered, take_tokens
from relvit.families.universal.signals import PositionStepSignals
from relvit.layers import RelativeAttention
from relvit.layers.attention import has_hooks
from relvit.layers.attention_weights import wants_weights
from relvit.models.base import put_classifier_last
from relvit.models.depth import Depth
from relvit.models.entry_points import default_cfgs_of, entry_point, record_arguments
from relvit.models.relative_vit import BASE, SMALL, TEST, TINY, RelVisionTransformer
from relvit.models.weights.convert import checkpoint_filter_fn
from relvit.ops import Grid
from relvit.ops.checks import integer
from relvit.ops.grid import keep_patches
from relvit.ops.tracing import is_eager
from relvit.utils.messages import check_choice

HALTINGS = ("", "act")


class Pondered(NamedTuple):
    """The logits of a model with adaptive halting (ACT), the steps of its patches, and its ponder cost.

    Attributes:
        logits: (B, num_classes).
        steps: (B, patches) int64, the number of steps that each patch computed, at least 1; 0 for padding.
        cost: (B,), the ponder cost that training adds to its loss: the mean of N + R, see `AdaptiveHalting`, over the
            patches of an image.
    """

    logits: Tensor
    steps: Tensor
    cost: Tensor

    @property
    def losses(self) -> dict[str, Tensor]:
        """The losses that training adds to its loss, see `relvit.app.training.training_output.TrainingOutput`."""
        return {"ponder": self.cost.mean()}


class RepeatedDepth(Depth):
    """Apply the one block of a `UniversalVisionTransformer` at every step, with the signals of the step."""

    lacks: ClassVar[Mapping[str, str]] = {
        "memory": "its block runs several times, each time with other inputs",
        "rollout": "its block is repeated",
        "hooks": "they are single steps of one block, and no module of the model outputs a single step",
    }

    def count(self, model: UniversalVisionTransformer) -> int:
        """Return the number of steps."""
        return model.steps

    def run(
        self,
        model: UniversalVisionTransformer,
        x: Tensor,
        grid: Grid,
        attn_mask: Tensor | None,
        is_causal: bool,
        take: Collection[int],
        last: int,
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute the tokens after step `last` (with halting a weighted sum), and the tokens after the steps `take`."""
        if model.halting is not None:
            x, _, states = model._halt_masked(x, grid, attn_mask, is_causal, last + 1, take)
            return x, states
        position = model.signals(grid)
        taken: list[Tensor] = []
        for number in range(last + 1):
            x = x + position + model.signals.step(number + 1)
            x = model._run_block(model.blocks[0], x, grid, attn_mask, is_causal)
            if number in take:
                taken.append(x)
        return x, taken


class UniversalVisionTransformer(RelVisionTransformer):
    """Universal Transformer for images: one `RelativeBlock` that is applied `depth` times.

    Source: Dehghani et al. 2018 (arXiv 1807.03819), here with pre-norm blocks and relative positions. At every step
    sinusoids of row, column and step are added to the tokens, see `PositionStepSignals`.

    With `halting='act'` every patch computes as many steps as it needs (Graves 2016, arXiv 1603.08983), see
    `AdaptiveHalting`; class and register tokens compute all steps. A patch that has halted keeps its last state, with
    the signals of the next step, and other tokens still attend to it. The output of a patch is the weighted sum of its
    states. With `global_pool='token'` this sum does not reach the logits, so only the ponder cost trains the halting.
    Patches that have halted leave the batch, which saves time. In compiled, exported and traced graphs, and with masks,
    windows or hooks on the block, all tokens are computed at all steps, with the same outputs.

    timm's `depth`, features and intermediate layers count steps: the features of step t are the states after step t,
    and the final features are the weighted sum. `stop_early` or pruning to step t makes t the last step. `blocks` holds
    one block, so layer decay has three levels: stem, block and head.

    Args:
        depth: The number of steps; with halting, the maximum number of steps. `set_steps` changes it.
        halting: '' (all steps) or 'act'.
        halting_epsilon, halting_bias: See `epsilon` and `bias_init` of `AdaptiveHalting`; None: the defaults of
            `AdaptiveHalting`.
        drop_path_rate: The drop path rate of the block at every step.
        **kwargs: See `RelVisionTransformer`.

    Attributes:
        gather: Whether patches that have halted leave the batch. If False, all tokens are computed at all steps, with
            the same outputs. The attribute may be set at any time.

    Raises:
        ValueError: See `RelVisionTransformer`; or the width is not a multiple of 4, or `drop_path_rate` is not in 0
            <= x <= 1.
        ValueError: `halting` is unknown; `halting` is 'act' and `depth` is below 2; or `halting_epsilon` or
            `halting_bias` is given without `halting`.
        TypeError: `depth` is not an integer.
    """

    depth_plan: Depth = RepeatedDepth()

    def __init__(
        self,
        *,
        depth: int = 12,
        halting: str = "",
        halting_epsilon: float | None = None,
        halting_bias: float | None = None,
        drop_path_rate: float = 0.0,
        **kwargs: Any,
    ) -> None:
        check_choice("halting", halting, HALTINGS)
        if not 0 <= drop_path_rate <= 1:
            raise ValueError(f"drop_path_rate must be in 0 <= x <= 1, got {drop_path_rate}")
        if halting and depth < 2:
            raise ValueError(f"halting={halting!r} needs a depth of 2 steps or more, got {depth}")
        options = {"epsilon": halting_epsilon, "bias_init": halting_bias}
        options = {name: given for name, given in options.items() if given is not None}
        if options and not halting:
            raise ValueError(
                "halting_epsilon and halting_bias have no effect without halting: leave them out, or give halting='act'"
            )
        super().__init__(depth=1, **kwargs)
        factory_kwargs = {name: kwargs.get(name) for name in ("device", "dtype")}
        self.signals: PositionStepSignals = PositionStepSignals(self.embed_dim, **factory_kwargs)
        self.halting: AdaptiveHalting | None = None
        if halting:
            self.halting = AdaptiveHalting(self.embed_dim, **options, **factory_kwargs)
        put_classifier_last(self)
        if drop_path_rate:
            self.blocks[0].drop_path1 = DropPath(drop_path_rate)
            self.blocks[0].drop_path2 = DropPath(drop_path_rate)
        self.gather = True
        self.returns_cost: bool = False
        self.set_steps(depth)

    def set_steps(self, steps: int) -> None:
        """Choose the number of steps, with halting the maximum number; it may differ from the number in training.

        Raises:
            TypeError, ValueError: The number is not an integer, or is below 1.
        """
        self.steps: int = integer("the number of steps (depth)", steps, 1)
        first = self.feature_info[0]
        self.feature_info: list[dict[str, Any]] = [{**first, "index": step} for step in range(self.steps)]
        record_arguments(self, depth=self.steps)

    def set_training_losses(self, enable: bool = True) -> None:
        """Let `forward` return `Pondered` in training mode instead of the logits alone; only with halting.

        relvit's training calls `set_training_losses(True)` on every model that has `training_losses`.
        """
        if enable and self.halting is None:
            raise ValueError("there is no ponder cost without halting='act': build the model with it")
        self.returns_cost = enable

    @property
    def training_losses(self) -> tuple[str, ...]:
        """The names of the losses that `forward` returns in training after `set_training_losses`."""
        return () if self.halting is None else ("ponder",)

    @property
    def counts_steps(self) -> bool:
        """Whether patches halt, so that `step_maps` can count their steps."""
        return self.halting is not None

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Compute the logits (B, num_classes), or `Pondered` in training after `set_training_losses`."""
        if self.training and self.returns_cost:
            return self.ponder(x, attn_mask, is_causal)
        return self.forward_head(self.forward_features(x, attn_mask, is_causal))

    def ponder(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Pondered:
        """Compute the logits, the steps of each patch and the ponder cost; for arguments see `forward_features`.

        Raises:
            ValueError: The model has no halting.
        """
        if self.halting is None:
            raise ValueError("there are no steps to count without halting='act': build the model with it")
        x, grid = self.embed(x)
        x, state = self._halt(x, grid, attn_mask, is_causal)
        logits = self.forward_head(self.norm(x), patch_valid=grid.valid)
        return Pondered(logits, state.steps, ponder_cost(state, grid))

    @torch.no_grad()
    def step_maps(self, x: Tensor) -> list[Tensor]:
        """Count the steps of each patch: a map (rows, columns) int64 for each image; only with halting.

        Args:
            x: Images (B, in_chans, height, width), or a native batch, in which each map has the shape of its image.
        """
        steps = self.ponder(x).steps
        if not isinstance(x, dict):
            return list(steps.unflatten(1, self.patch_embed.dynamic_feat_size(x.shape[-2:])))
        maps = []
        for own, coord, valid in zip(steps, x["patch_coord"], x["patch_valid"], strict=True):
            rows, columns = coord[valid].T
            maps.append(own.new_zeros(int(rows.max()) + 1, int(columns.max()) + 1))
            maps[-1][rows, columns] = own[valid]
        return maps

    def _run_blocks(self, x: Tensor, grid: Grid, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        if self.halting is None:
            return super()._run_blocks(x, grid, attn_mask, is_causal)
        return self._halt(x, grid, attn_mask, is_causal)[0]

    def _halt(self, x: Tensor, grid: Grid, attn_mask: Tensor | None, is_causal: bool) -> tuple[Tensor, HaltingState]:
        """Compute the weighted sum of the states of each token, (B, N, dim), and the last state of its halting."""
        if self._may_gather(x) and attn_mask is None and not is_causal:
            return self._halt_gathered(x, grid)
        output, state, _ = self._halt_masked(x, grid, attn_mask, is_causal, self.steps, [])
        return output, state

    def _halt_masked(
        self, x: Tensor, grid: Grid, attn_mask: Tensor | None, is_causal: bool, steps: int, take: Collection[int]
    ) -> tuple[Tensor, HaltingState, list[Tensor]]:
        """Compute all tokens at all steps; also return the states after the steps `take`, counted from 0."""
        position = self.signals(grid)
        state = start_halting(x[:, grid.prefix :], grid)
        first = torch.ones_like(x[:, : grid.prefix, 0], dtype=torch.bool)
        inputs, output = x, torch.zeros_like(x)
        states: list[Tensor] = []
        ran = torch.ones_like(x[:, :, :1], dtype=torch.bool)
        for number in range(1, steps + 1):
            inputs = torch.where(ran, x + position + self.signals.step(number), inputs)
            ran = torch.cat((first, state.running), dim=1)[..., None]
            probability = self.halting(inputs[:, grid.prefix :])
            weights, state = self.halting.advance(state, probability, number == steps)
            weights = torch.cat((first * float(number == steps), weights), dim=1)[..., None]
            new = self._run_block(self.blocks[0], inputs, grid, attn_mask, is_causal)
            output = output + weights.to(new.dtype) * new
            x = torch.where(ran, new, x)
            if number - 1 in take:
                states.append(x)
        return output, state, states

    def _halt_gathered(self, x: Tensor, grid: Grid) -> tuple[Tensor, HaltingState]:
        """Compute the same as `_halt_masked` without most of the halted tokens, whose keys and values stay.

        The image with the most running tokens sets the length of the batch. Images with fewer running tokens also
        compute some halted tokens, to fill the batch.
        """
        prefix, run = grid.prefix, run_gathered
        if self.grad_checkpointing and torch.is_grad_enabled():
            run = partial(checkpoint, run_gathered)
        batch, count, _ = x.shape
        position = self.signals(grid)
        state = start_halting(x[:, prefix:], grid)
        index = torch.arange(count, device=x.device).expand(batch, -1)
        first = torch.ones_like(index[:, :prefix], dtype=torch.bool)
        inputs, output, memory, query_grid, ran = x, torch.zeros_like(x), None, grid, None
        for number in range(1, self.steps + 1):
            fresh = x + (position + self.signals.step(number))
            inputs = fresh if ran is None else torch.where(ran, fresh, inputs)
            patches = index[:, prefix:] - prefix
            running = state.running.gather(1, patches)
            probability = torch.zeros_like(state.total).scatter(1, patches, self.halting(inputs[:, prefix:]))
            weights, state = self.halting.advance(state, probability, number == self.steps)
            of_images = running.sum(1).tolist()
            least, most = min(of_images, default=0), max(of_images, default=0)
            if prefix + most == 0:
                break
            chosen = None
            if number > 1 and most < running.shape[1]:
                order = running.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]
                chosen = torch.cat((index.new_tensor(range(prefix)).expand(batch, -1), order + prefix), dim=1)
                running, patches = running.gather(1, order), patches.gather(1, order)
                query_grid = keep_patches(grid, patches)
            new, memory = run(self.blocks[0], inputs, index, chosen, memory, query_grid, grid)
            if chosen is not None:
                position = position.expand(batch, -1, -1)
                x, inputs, position, index = (take_tokens(part, chosen) for part in (x, inputs, position, index))
            # If all tokens run, every token gets a new state, so there are no old states to keep.
            ran = None if least == running.shape[1] else torch.cat((first, running), dim=1)[..., None]
            x = new if ran is None else torch.where(ran, new, x)
            weights = torch.cat((first * float(number == self.steps), weights.gather(1, patches)), dim=1)[..., None]
            weights = weights.to(new.dtype)
            if index.shape[1] == count:
                output = output + weights * new
            else:
                output = put_tokens(output, index, weights * new, add=True)
        return output, state

    def _may_gather(self, x: Tensor) -> bool:
        attn = self.blocks[0].attn
        # `run_gathered` calls the parts of `RelativeAttention` and not its `forward`. A subclass may have changed
        # `forward`, so exclude subclasses.
        own = type(attn) is RelativeAttention
        if not self.gather or not own or isinstance(x, torch.fx.Proxy) or not is_eager():
            return False
        # `run_gathered` would skip hooks on the block, `attn` and `attn_drop`, because it calls only parts of these
        # modules. `run_gathered` also changes the outputs of `qkv` and `k_norm` in place, and a hook may have kept such
        # outputs.
        modules = (self.blocks[0], attn, attn.attn_drop, attn.qkv, attn.k_norm)
        return attn.window is None and not any(map(has_hooks, modules)) and not wants_weights(attn.attn_drop)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Make the last of these steps the last step of the model, as timm removes blocks; return their numbers."""
        kept, last = feature_take_indices(self.steps, indices)
        super().prune_intermediate_layers([0], prune_norm, prune_head)
        self.set_steps(last + 1)
        return kept

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return timm's patterns of parameter names by depth; signals and halting belong to the block."""
        groups = super().group_matcher(coarse)
        return {**groups, "blocks": [*groups["blocks"], (r"^(?:signals|halting)\.", (0,))]}


# Prefer the wider models: a single block that is applied many times comes near the accuracy of a Vision Transformer if
# the block is wide, but not if it is narrow (bViT, arXiv 2605.10661).
VARIANTS: dict[str, dict[str, Any]] = {
    "relvit_universal_tiny": TINY,
    "relvit_universal_small": SMALL,
    "relvit_universal_base": BASE,
    "test_relvit_universal": TEST,
}


default_cfgs: dict[str, DefaultCfg] = default_cfgs_of(VARIANTS)
for _name, _own in VARIANTS.items():
    globals()[_name] = entry_point(_name, UniversalVisionTransformer, checkpoint_filter_fn, partial(operator.or_, _own))
