"""Training in shards: each device keeps a part of weights, gradients, optimiser states and of the average."""

from __future__ import annotations

from collections.abc import Mapping
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
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from typing_extensions import override

from relvit.utils.messages import listing

if TYPE_CHECKING:
    from lightning import Trainer

NAME = "fsdp2"
PRECISIONS = ("32-true", "bf16-mixed")
# Of timm's those whose steps in shards are tested to be those of one device; Muon's and others' are not.
OPTIMIZERS = ("adam", "adamw", "lamb", "momentum", "nadamw", "sgd", "sgdw")


class FullySharded(ModelParallelStrategy):
    """PyTorch's `fully_shard` over all devices (Zhao et al. 2023, arXiv 2304.11277), for models that are too large for
    one; `--trainer.strategy fsdp2`.

    The network's blocks are gathered one by one when they compute. A step is that of DDP, and checkpoints are those of
    one device: a file, which any number of devices goes on from, with this strategy or without.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False, **kwargs)

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return False

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @override
    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    @override
    def setup(self, trainer: Trainer) -> None:
        # What is gathered in inference mode could not be trained with afterwards.
        for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
            loop.inference_mode = False
        trainer.predict_loop.inference_mode = False
        super().setup(trainer)

    def shard(self, net: nn.Module) -> None:
        """Divide a network's parameters, in place; those of the first process count."""
        for tensor in (*net.parameters(), *net.buffers()):
            value = tensor.detach().to(self.root_device)
            torch.distributed.broadcast(value, 0)
            tensor.detach().copy_(value)
        mesh = self.device_mesh["data_parallel"]
        for block in getattr(net, "blocks", ()):
            fully_shard(block, mesh=mesh)
        # Without this what lies outside the blocks would stay gathered behind an evaluation, and be no shards to the
        # optimiser, the average and whoever else looks at parameters.
        fully_shard(net, mesh=mesh, reshard_after_forward=True)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return whole(self.lightning_module.state_dict(), keep=self.is_global_zero)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        load_whole(self.lightning_module, checkpoint["state_dict"])

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return whole(Strategy.optimizer_state(self, optimizer), keep=self.is_global_zero)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, stored in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            numbers = [number for group in stored["param_groups"] for number in group["params"]]
            state = {
                number: {name: shard_like(parameter, value) for name, value in stored["state"][number].items()}
                for number, parameter in zip(numbers, parameters, strict=True)
                if number in stored["state"]
            }
            optimizer.load_state_dict({"state": state, "param_groups": stored["param_groups"]})

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        torch.cuda.empty_cache()
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=True)


if NAME not in StrategyRegistry.available_strategies():
    StrategyRegistry.register(NAME, FullySharded, description="fully_shard over all devices, by relvit")


def check_strategy(strategy: str | Strategy) -> None:
    """Refuse strategies under which steps, averages or checkpoints would not be what they are elsewhere.

    Raises:
        ValueError: such a one.
    """
    if isinstance(strategy, str):
        name = strategy
        refused = strategy.startswith(("fsdp", "deepspeed")) and strategy != NAME
    else:
        name = type(strategy).__name__
        others = isinstance(strategy, FSDPStrategy | DeepSpeedStrategy | ModelParallelStrategy)
        refused = others and not isinstance(strategy, FullySharded)
    if refused:
        raise ValueError(
            f"strategy {name} cannot train here: averages, checkpoints and gradients' norms would be of shards alone; "
            f"give --trainer.strategy {NAME} for a model that is too large for one device, else ddp"
        )


def check_sharding(trainer: Trainer, hparams: Mapping[str, Any], net: nn.Module) -> None:
    """Refuse what is not known to come out right in shards.

    Args:
        trainer: with the strategy `FullySharded`.
        hparams: arguments of `ImageClassifier`.
        net: its network.

    Raises:
        ValueError: an optimiser, a precision, an option or a network.
    """
    if any(isinstance(module, _BatchNorm) for module in net.modules()):
        raise ValueError(f"strategy {NAME} does not go with batch norm, whose statistics each device would have alone")
    if hparams["opt"] not in OPTIMIZERS:
        raise ValueError(f"strategy {NAME} has no optimiser {hparams['opt']!r}; allowed are {listing(OPTIMIZERS)}")
    if trainer.precision not in PRECISIONS:
        raise ValueError(f"strategy {NAME} has no precision {trainer.precision!r}; allowed are {listing(PRECISIONS)}")
    for name in ("compile", "channels_last"):
        if hparams[name]:
            raise ValueError(f"strategy {NAME} does not go with {name}: leave out one of them")


def is_sharded(net: nn.Module) -> bool:
    """Whether its parameters are divided among processes."""
    return any(isinstance(parameter, DTensor) for parameter in net.parameters())


def whole(values: Any, keep: bool = True) -> Any:
    """Nested dictionaries and lists with all shards put together, on the CPU. All processes have to call this.

    Args:
        values: what may hold shards; other tensors stay as they are.
        keep: false in processes that only give their shards, and need no room for all of them.
    """
    if isinstance(values, DTensor):
        full = values.detach().full_tensor()
        return full.cpu() if keep else full.new_empty(0)
    if isinstance(values, dict):
        return {name: whole(value, keep) for name, value in values.items()}
    return [whole(value, keep) for value in values] if isinstance(values, list) else values


def shard_like(target: Tensor, value: Any) -> Any:
    """This process' shard of a whole tensor, where `target` is one of a tensor of this shape; else the value itself."""
    if not isinstance(target, DTensor) or not isinstance(value, Tensor) or value.shape != target.shape:
        return value
    return distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)


def load_whole(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """`load_state_dict` of whole tensors, into a module with shards or without."""
    targets = module.state_dict()
    module.load_state_dict({name: shard_like(targets.get(name, value), value) for name, value in state.items()})
