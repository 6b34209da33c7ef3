"""Reversible blocks: backward recomputes each block from its outputs, with the same random state, in constant memory.

A block maps two streams x1, x2 to y1 = x1 + F(x2), y2 = x2 + G(y1), where F is the branch of the mixer and G the branch
of the MLP. The inverse is x2 = y2 - G(y1), x1 = y1 - F(x2). Training keeps only the streams after the last block;
backward computes every branch once more, together with its gradients.

Sources: Gomez et al. 2017 (arXiv 1707.04585), section 3; Kitaev et al. 2020, Reformer (arXiv 2001.04451), section 3;
Mangalam et al. 2022, Reversible Vision Transformers (arXiv 2302.04869), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import get_device_states, set_device_states

from relvit.ops import Grid
from relvit.ops.recompute import Versions
from relvit.ops.tracing import may_recompute


def reversible_blocks(
    blocks: Sequence[nn.Module] | nn.ModuleList,
    x: Tensor,
    grid: Grid,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    taken: Collection[int] = (),
) -> tuple[Tensor, list[Tensor]]:
    """Run tokens through reversible blocks: both streams start as the tokens, and the output is their mean.

    Mangalam et al. concatenate the two streams instead.

    Streams are in float32 at least, also in models of half precision, because backward inverts block after block, and
    the rounding errors of the inverses add up.

    Examples:
        >>> blocks = [RelativeBlock(96, num_heads=3, position=RelativePosition2d) for _ in range(2)]
        >>> tokens, taken = reversible_blocks(blocks, torch.randn(2, 24, 96), make_grid(4, 6))
        >>> tokens.shape, taken
        (torch.Size([2, 24, 96]), [])

    Args:
        blocks: `relvit.layers.GridBlock`s; their `forward` is called with `branch='mixer'` and `branch='mlp'`.
            `forward` may use random numbers of PyTorch's generators, autocast, and buffers that it modifies in place.
            Gradients reach the blocks' parameters, the tokens and the mask.
        x: (B, N, dim) tokens of `grid`.
        grid: where tokens are.
        attn_mask, is_causal: arguments of the blocks.
        taken: indices of blocks after which the mean of the streams is also returned. Training also keeps the streams
            after these blocks.

    Returns:
        The output (B, N, dim), and the mean of the two streams after each block in `taken`, in the order of blocks;
        under autocast in float32 at least, otherwise in the dtype of `x`.

    Raises:
        RuntimeError: in backward, second derivatives are requested; parameters have been replaced, or parameters or the
            mask modified in place, since forward; or `fully_shard` has sharded the parameters.
    """
    inner = None
    wide = x
    if isinstance(x, torch.fx.Proxy):
        run = _run
    else:
        # Without gradients PyTorch keeps no tensors, so recomputation would save no memory. Transforms of torch.func
        # support only plain operations, so they compute without recomputation, too.
        run = _run_recomputed if torch.is_grad_enabled() and may_recompute() else _run
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        autocast = torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type)
        inner = None if autocast or wide is x else x.dtype
    means, streams, start = [], (wide, wide), 0
    for end in sorted({*taken, len(blocks) - 1}):
        streams = run(blocks[start : end + 1], Chain(grid, attn_mask, is_causal, inner), *streams)
        mean = (streams[0] + streams[1]) / 2
        means.append(mean if inner is None else mean.to(inner))
        start = end + 1
    return means[-1], means if len(blocks) - 1 in taken else means[:-1]


@dataclass
class Chain:
    """Arguments and state that consecutive blocks share."""

    grid: Grid
    attn_mask: Tensor | None
    is_causal: bool
    dtype: torch.dtype | None  # dtype of the branches' inputs; None: the dtype of the streams
    # Backward recomputes with the autocast state of forward, in a context that this function makes.
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    # In backward these are the recomputed outputs of the block whose backward runs next.
    streams: tuple[Tensor, Tensor] | None = None

    def branch(self, block: nn.Module, name: str, x: Tensor) -> Tensor:
        """Compute one branch of a block, (B, N, dim) from one stream."""
        x = x if self.dtype is None else x.to(self.dtype)
        return block(x, self.grid, self.attn_mask, self.is_causal, name)


def _run(blocks: Sequence[nn.Module], chain: Chain, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    for block in blocks:
        first = first + chain.branch(block, "mixer", second)
        second = second + chain.branch(block, "mlp", first)
    return first, second


@torch.compiler.disable(reason="reversible blocks are recomputed outside of graphs: model.compile() compiles each one")
def _run_recomputed(blocks: Sequence[nn.Module], chain: Chain, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    chain.autocast = _autocast_of(first.device.type)
    for number, block in enumerate(blocks):
        step = Step(block, chain, last=number == len(blocks) - 1)
        # Parameters are arguments, so that they get gradients even if the tokens need none.
        first, second = ReversibleBlock.apply(step, first, second, chain.attn_mask, *step.parameters)
    return first, second


def _autocast_of(device_type: str) -> Callable[[], AbstractContextManager[object]]:
    """Return a function that makes a context with the present state of autocast."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext
    return partial(
        torch.autocast,
        device_type,
        dtype=torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type),
        # Autocast's cache may hold weights that forward has cast to half precision without recording gradients. The
        # recomputation in backward must not use these weights, so switch the cache off.
        cache_enabled=False,
    )


class Step:
    """One block in a chain, with the parameters and random states that its recomputation needs besides the streams."""

    def __init__(self, block: nn.Module, chain: Chain, last: bool) -> None:
        self.block = block
        self.chain = chain
        self.last = last
        self.parameters: tuple[Tensor, ...] = _parameters_of(block)
        read = self.parameters if chain.attn_mask is None else (*self.parameters, chain.attn_mask)
        self.versions: Versions = Versions(read)
        # `random` maps each branch that used random numbers to the states of the generators before the branch ran.
        self.random: dict[str, list[Tensor]] = {}
        # `changed` maps each branch to the buffers that it modified in place, such as the vectors of spectral norm, and
        # their values before. Inference tensors have no version, and PyTorch forbids to modify them in place.
        self.buffers: list[Tensor] = [buffer for buffer in block.buffers() if not buffer.is_inference()]
        self.changed: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        """Compute both streams after the block from both streams before the block."""
        with self.chain.autocast():
            y1 = x1 + self._noting_state("mixer", x2)
            return y1, x2 + self._noting_state("mlp", y1)

    def _noting_state(self, name: str, x: Tensor) -> Tensor:
        random = _random_states(x)
        buffers = [(buffer, buffer._version, buffer.clone()) for buffer in self.buffers]
        out = self.chain.branch(self.block, name, x)
        if not all(map(torch.equal, random, _random_states(x))):
            self.random[name] = random
        self.changed[name] = [(buffer, value) for buffer, version, value in buffers if buffer._version != version]
        return out

    def backward(
        self, name: str, x: Tensor, grad: Tensor, wants_x: bool, wanted: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Recompute a branch; return its output, and gradients of its input, None unless `wants_x`, and of `wanted`."""
        replayed, restored = _replayed(self.random.get(name), x), _restored(self.changed[name])
        with torch.enable_grad(), self.chain.autocast(), replayed, restored:
            x = x.detach().requires_grad_(wants_x)
            out = self.chain.branch(self.block, name, x)
        if not out.requires_grad:
            return out, [None] * (1 + len(wanted))
        inputs = (x, *wanted) if wants_x else wanted
        grads = list(torch.autograd.grad(out, inputs, grad.to(out.dtype), allow_unused=True))
        return out.detach(), grads if wants_x else [None, *grads]


class ReversibleBlock(torch.autograd.Function):
    """One block: `apply(step, x1, x2, attn_mask, *parameters)` -> y1, y2; only a chain's last block saves y1 and y2."""

    @staticmethod
    def forward(ctx: FunctionCtx, step: Step, x1: Tensor, x2: Tensor, *_read: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.step = step
        streams = step.forward(x1, x2)
        if step.last:
            ctx.save_for_backward(*streams)
        return streams

    @staticmethod
    def backward(ctx: FunctionCtx, grad1: Tensor, grad2: Tensor) -> tuple[Tensor | None, ...]:
        step, chain = ctx.step, ctx.step.chain
        if torch.is_grad_enabled():
            # Raise an error here: with PyTorch's `once_differentiable`, second derivatives could lack a part without an
            # error.
            raise RuntimeError(
                "reversible blocks have no second derivatives (create_graph=True), since backward recomputes them: use "
                "the transforms of torch.func, or a model with reversible=False"
            )
        if any(now is not before for now, before in zip(_parameters_of(step.block), step.parameters, strict=True)):
            raise RuntimeError(
                "the parameters of a reversible block changed after forward, and backward would recompute the block "
                "from the new ones: compute gradients of torch.func.functional_call by torch.func.grad, and use "
                "DistributedDataParallel instead of fully_shard"
            )
        y1, y2 = ctx.saved_tensors if step.last else chain.streams
        chain.streams = None
        wants_x = any(ctx.needs_input_grad[1:3])
        read = (chain.attn_mask, *step.parameters)
        wanted = [tensor for tensor, wants in zip(read, ctx.needs_input_grad[3:], strict=True) if wants]
        step.versions.check()
        out, (added, *of_mlp) = step.backward("mlp", y1, grad2, True, wanted)
        x2 = y2 - out
        grad1 = grad1 + added
        out, (added, *of_mixer) = step.backward("mixer", x2, grad1, wants_x, wanted)
        if not wants_x:
            grad1 = grad2 = None
        else:
            chain.streams = y1 - out, x2
            grad2 = grad2 + added
        found = list(map(_sum, of_mixer, of_mlp))
        if wanted and all(grad is None for grad in found):
            # Refuse `fully_shard`: it gives a module other parameters during computation, whose gradients would be lost
            # here.
            raise RuntimeError(
                "a reversible block was recomputed without its own parameters, so these would get no gradients: use "
                "DistributedDataParallel instead of fully_shard, or a model with reversible=False"
            )
        grads = iter(found)
        return None, grad1, grad2, *(next(grads) if wants else None for wants in ctx.needs_input_grad[3:])


def _parameters_of(block: nn.Module) -> tuple[Tensor, ...]:
    """Return the parameters of a block; the replicas that `nn.DataParallel` makes hold them in another dictionary."""
    held = [vars(part).get("_former_parameters", part._parameters) for part in block.modules()]
    return tuple(dict.fromkeys(tensor for tensors in held for tensor in tensors.values() if tensor is not None))


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return one if other is None else other
    return one + other


def _random_states(x: Tensor) -> list[Tensor]:
    """Return the states of the random number generators of the CPU and of the device of `x`."""
    return [torch.get_rng_state(), *get_device_states(x)[1]]


@contextmanager
def _replayed(states: list[Tensor] | None, x: Tensor) -> Iterator[None]:
    """Set the random number generators to `states` within the context; None: do nothing."""
    if states is None:
        yield
        return
    of_cpu, *of_device = states
    devices = [x.get_device()] if of_device else []
    with torch.random.fork_rng(devices, device_type=x.device.type if devices else "cuda"):
        torch.set_rng_state(of_cpu)
        set_device_states(devices, of_device, device_type=x.device.type)
        yield


@contextmanager
def _restored(buffers: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Give each buffer the value beside it within the context."""
    present = [(buffer, buffer.clone()) for buffer, _ in buffers]
    _set(buffers)
    yield
    _set(present)


@torch.no_grad()
def _set(buffers: list[tuple[Tensor, Tensor]]) -> None:
    for buffer, value in buffers:
        buffer.copy_(value)
