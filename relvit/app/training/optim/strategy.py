"""Refuse strategies that divide a model's weights among devices (FSDP, DeepSpeed); relvit trains with DDP."""

from __future__ import annotations

from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy

DIVIDING = FSDPStrategy | DeepSpeedStrategy | ModelParallelStrategy


def check_strategy(strategy: str | Strategy) -> None:
    """Refuse a strategy that divides the weights, since averages, checkpoints and norms need all weights.

    Raises:
        ValueError: The strategy divides the weights.
    """
    if isinstance(strategy, str):
        name, divides = strategy, strategy.startswith(("fsdp", "deepspeed", "model_parallel"))
    else:
        name, divides = type(strategy).__name__, isinstance(strategy, DIVIDING)
    if divides:
        raise ValueError(
            f"strategy {name} cannot train here: averages, checkpoints and gradients' norms would cover only a part "
            "of the weights; give --trainer.strategy ddp, which keeps a whole model on each device"
        )
