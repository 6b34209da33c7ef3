"""The states of metrics in the middle of an epoch, which Lightning does not put into checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torchmetrics import MetricCollection

States = dict[str, dict[str, Any]]


def copy_states(metrics: MetricCollection) -> States:
    """Copies of the states of metrics whose states are sums."""
    return {
        name: {"updates": metric.update_count, **{key: value.clone() for key, value in metric.metric_state.items()}}
        for name, metric in metrics.items(keep_base=True)
    }


def of_all_processes(states: States) -> list[States]:
    """The states of each process, on the CPU; all of them have to call this, also one that has none."""
    own = {
        name: {key: value.cpu() if isinstance(value, Tensor) else value for key, value in state.items()}
        for name, state in states.items()
    }
    if not torch.distributed.is_initialized():
        return [own]
    gathered: list[States] = [{} for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(gathered, own)
    return gathered


def of_this_process(stored: Sequence[States], rank: int, world: int) -> States:
    """What one process goes on with: its own states, or, where there were more or fewer processes, one takes all.

    Each its own, as sums in another order differ in the last digits.
    """
    if len(stored) == world:
        return stored[rank]
    return _summed(stored) if rank == 0 else {}


def _summed(stored: Sequence[States]) -> States:
    summed: States = {}
    for states in stored:
        for name, state in states.items():
            before = summed.get(name)
            summed[name] = dict(state) if before is None else {key: before[key] + state[key] for key in state}
    return summed


def restore_states(metrics: MetricCollection, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Put states back."""
    for name, metric in metrics.items(keep_base=True):
        if name not in states:
            continue
        for key, value in states[name].items():
            if key == "updates":
                metric._update_count = value
            else:
                setattr(metric, key, value.to(metric.device))
