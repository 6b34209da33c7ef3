"""Sharded training (FSDP2, `--trainer.strategy fsdp2`): weights, gradients and optimiser states across devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
    StrategyRegistry,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from typing_extensions import override

from relvit.models.depth import lack
from relvit.utils.messages import listing

if TYPE_CHECKING:
    from lightning import Trainer

NAME = "fsdp2"
PRECISIONS = ("32-true", "bf16-mixed")
# The optimisers of timm whose sharded steps are tested to be those of one device; those of Muon and others are not.
OPTIMIZERS = ("adam", "adamw", "lamb", "momentum", "nadamw", "sgd", "sgdw")


class FullySharded(ModelParallelStrategy):
    """PyTorch's `fully_shard` over all devices (Zhao et al. 2023, arXiv 2304.11277), for models that are too large for
    one; `--trainer.strategy fsdp2`.

    The network's blocks are gathered one by one when they compute. A step is that of DDP, and checkpoints are those of
    one device: a file, which any number of devices resumes from, with this strategy or without.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(save_distributed_checkpoint=False, **kwargs)

    def shard(self, net: nn.Module) -> None:
        """Divide a network's parameters, in place; those of the first process count."""
        for tensor in (*net.parameters(), *net.buffers()):
            value = tensor.detach().to(self.root_device)
            torch.distributed.broadcast(value, 0)
            tensor.detach().copy_(value)
        # Lightning's own mesh keeps a copy of the parameters on each machine.
        mesh = init_device_mesh(self.root_device.type, (self.world_size,))
        for block in getattr(net, "blocks", ()):
            fully_shard(block, mesh=mesh)
        # Otherwise the parameters outside the blocks would stay gathered behind an evaluation, and would not be shards
        # for the optimiser and the average.
        fully_shard(net, mesh=mesh, reshard_after_forward=True)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @override
    def setup(self, trainer: Trainer) -> None:
        # What is gathered in inference mode cannot be trained with afterwards.
        loops = trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop
        for loop in loops:
            loop.inference_mode = False
        super().setup(trainer)

    # Checkpoints are read and written as by strategies that do not shard, of full tensors.

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return False

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only=True)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return gather_full(self.lightning_module.state_dict(), keep=self.is_global_zero)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        load_full(self.lightning_module, checkpoint["state_dict"])

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return gather_full(Strategy.optimizer_state(self, optimizer), keep=self.is_global_zero)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, stored in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            numbers = [number for group in stored["param_groups"] for number in group["params"]]
            state = {
                number: {name: _shard_like(parameter, value) for name, value in stored["state"][number].items()}
                for number, parameter in zip(numbers, parameters, strict=True)
                if number in stored["state"]
            }
            optimizer.load_state_dict({"state": state, "param_groups": stored["param_groups"]})


if NAME not in StrategyRegistry.available_strategies():
    StrategyRegistry.register(NAME, FullySharded, description="fully_shard over all devices, by relvit")


def check_strategy(strategy: str | Strategy) -> None:
    """Refuse other strategies that shard: averages, checkpoints and norms of gradients would be of one shard alone."""
    if isinstance(strategy, str):
        name = strategy
        refused = strategy.startswith(("fsdp", "deepspeed")) and strategy != NAME
    else:
        name = type(strategy).__name__
        shards = isinstance(strategy, FSDPStrategy | DeepSpeedStrategy | ModelParallelStrategy)
        refused = shards and not isinstance(strategy, FullySharded)
    if refused:
        raise ValueError(
            f"strategy {name} cannot train here: averages, checkpoints and gradients' norms would be of shards alone; "
            f"give --trainer.strategy {NAME} for a model that is too large for one device, else ddp"
        )


def check_sharding(trainer: Trainer, hparams: Mapping[str, Any], net: nn.Module) -> None:
    """Refuse other strategies that shard, and what has not been tested under `FullySharded`."""
    check_strategy(trainer.strategy)
    if not isinstance(trainer.strategy, FullySharded):
        return
    if any(isinstance(module, _BatchNorm) for module in net.modules()):
        raise ValueError(f"strategy {NAME} does not go with batch norm, whose statistics each device would have alone")
    if why := lack(net, "sharding"):
        raise ValueError(f"strategy {NAME} cannot train this model: {why}; train with ddp")
    for what, given, allowed in (
        ("optimiser", hparams["opt"], OPTIMIZERS),
        ("precision", trainer.precision, PRECISIONS),
    ):
        if given not in allowed:
            raise ValueError(f"strategy {NAME} has no {what} {given!r}; allowed are {listing(allowed)}")
    for name in ("compile", "channels_last"):
        if hparams[name]:
            raise ValueError(f"strategy {NAME} does not go with {name}: leave out one of them")


def is_sharded(net: nn.Module) -> bool:
    """Check whether a network's parameters are divided among processes."""
    return any(isinstance(parameter, DTensor) for parameter in net.parameters())


def gather_full(values: Any, keep: bool = True) -> Any:
    """Return nested dictionaries and lists with shards put together, on the CPU. All processes have to call this.

    Args:
        values: The values; tensors that are no shards stay as they are.
        keep: False in processes that do not need the result: their full tensors are empty.
    """
    if isinstance(values, DTensor):
        full = values.detach().full_tensor()
        return full.cpu() if keep else full.new_empty(0)
    if isinstance(values, dict):
        return {name: gather_full(value, keep) for name, value in values.items()}
    return [gather_full(value, keep) for value in values] if isinstance(values, list) else values


def load_full(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a state dict of full tensors into a module, sharded or not."""
    targets = module.state_dict()
    module.load_state_dict({name: _shard_like(targets.get(name), value) for name, value in state.items()})


@contextmanager
def full_network(net: nn.Module, build: Callable[[], nn.Module]) -> Iterator[nn.Module]:
    """Yield a network to change weights of: the same, or, of a sharded one, a full one by `build`, loaded back then."""
    if not is_sharded(net):
        yield net
        return
    full = build()
    full.load_state_dict(gather_full(net.state_dict()))
    yield full
    load_full(net, full.state_dict())


def _shard_like(target: Any, value: Any) -> Any:
    """Return this process' shard of a full tensor where `target` is a shard of that shape, else the value itself."""
    if not isinstance(target, DTensor) or not isinstance(value, Tensor) or value.shape != target.shape:
        return value
    return distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
