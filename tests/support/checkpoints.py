"""Checkpoints of other models with random weights, as if `relvit fit` had trained them like an existing one."""

import torch

from relvit.training import ImageClassifier


def write_checkpoint_like(path, target, model, model_kwargs, **data):
    """Write `target` like the checkpoint `path`, of another model, with some arguments of the data changed."""
    content = torch.load(path, weights_only=True)
    content["relvit"]["model"] |= {"model": model, "model_kwargs": model_kwargs}
    content["relvit"]["data"]["init_args"] |= data
    torch.manual_seed(1)
    content["state_dict"] = ImageClassifier(**content["relvit"]["model"]).state_dict()
    torch.save(content, target)
    return target
