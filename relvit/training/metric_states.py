"""The states of metrics in the middle of an epoch, which Lightning does not put into checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
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


def summed_over_processes(states: States) -> States:
    """The sum of all processes' states; all of them have to call this."""
    summed = {}
    for name, state in states.items():
        tensors = {key: value.clone() for key, value in state.items() if isinstance(value, Tensor)}
        for value in tensors.values():
            torch.distributed.all_reduce(value)
        summed[name] = {"updates": state["updates"], **tensors}
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
