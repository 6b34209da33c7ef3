"""A tiny classifier, noise to train it on, and a record of its optimiser steps."""

import math

import torch
from lightning import LightningDataModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from relvit.app.data import ImageData
from relvit.app.training import ImageClassifier

NAMES = [f"class {i}" for i in range(7)]
# These are arguments of a small timm model, and of a small relvit model.
VIT = {"patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}
KWARGS = VIT | {"max_distance": 1}
# In this model patches halt, some of them at the first step.
HALTING = {
    "model": "test_relvit_universal",
    "model_kwargs": {"depth": 3, "halting": "act", "halting_bias": 0.3},
    "ponder_weight": 0.5,
    "ponder_warmup_epochs": 1.0,
}


class Noise(LightningDataModule):
    """A data module with 23 random images of 7 classes in batches of 4, the last one smaller; image 9 may be NaN."""

    def __init__(self, spoilt=False):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(23, 3, 8, 12, generator=generator)
        self.labels = torch.randint(0, 7, (23,), generator=generator)
        if spoilt:
            self.images[9] = math.inf

    def train_dataloader(self):
        return DataLoader(TensorDataset(self.images, self.labels), batch_size=4)

    val_dataloader = test_dataloader = train_dataloader


class Record:
    """Record the learning rate, the norm of the gradients and the new weights of every optimiser step."""

    def __init__(self, module):
        self.rates, self.norms, self.weights = [], [], []
        step, log = module.optimizer_step, module.log

        def recording(*args, **kwargs):
            self.rates.append(args[2].param_groups[0]["lr"])
            step(*args, **kwargs)
            self.weights.append({name: p.detach().clone() for name, p in module.net.named_parameters()})

        def logging(name, value, **kwargs):
            if name == "grad_norm":
                self.norms.append(float(value))
            log(name, value, **kwargs)

        module.optimizer_step, module.log = recording, logging


def record_steps(module, note):
    """Call `note(batch, batch_idx)` before every training step."""
    step = module.training_step

    def recording(batch, batch_idx):
        note(batch, batch_idx)
        return step(batch, batch_idx)

    module.training_step = recording


def assert_close(ours, theirs, **tolerances):
    """Compare tensors by name; without tolerances they must be equal."""
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        options = tolerances or {"atol": 0, "rtol": 0}
        torch.testing.assert_close(ours[name], value, msg=lambda text, name=name: f"{name}: {text}", **options)


def build(model="test_relvit", model_kwargs=None, cls=ImageClassifier, **kwargs):
    torch.manual_seed(0)
    return cls(model, 7, 3, (8, 12), model_kwargs=KWARGS | (model_kwargs or {}), **kwargs)


def train(module, data=None, ckpt_path=None, **kwargs):
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(**{"accelerator": "cpu", "num_sanity_val_steps": 0, **dict.fromkeys(off, False), **kwargs})
    trainer.fit(module, data or Noise(), ckpt_path=ckpt_path, weights_only=True)
    return trainer


def train_and_save(path, module, data=None, ckpt_path=None, **kwargs):
    """Train, write a checkpoint with the same description as `relvit fit`, and return the trainer."""
    trainer = train(module, data, ckpt_path, **kwargs)
    trainer.save_checkpoint(path)
    return trainer


class NoiseImages(ImageData):
    """Random images of 7 classes, the same in all splits, in batches of 4, loaded by relvit's own loaders."""

    def __init__(self, count, in_order=False, batch_size=4, **options):
        own = {"img_size": (8, 12), "augment": "none", "crop_pct": 1.0, "mean": (0.5,) * 3, "std": (0.5,) * 3}
        super().__init__(NAMES, 3, batch_size=batch_size, num_workers=0, **own | options)
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(count, 3, 8, 12, generator=generator)
        self.labels = torch.randint(0, 7, (count,), generator=generator)
        self.count, self.in_order = count, in_order

    def missing(self, split):
        return None

    def build(self, split):
        return TensorDataset(self.images, self.labels)

    def train_dataloader(self):
        """With `in_order`, step i on two devices has the same images as step i on one device with twice the batch."""
        if not self.in_order:
            return super().train_dataloader()
        world, rank = self.trainer.world_size, self.trainer.global_rank
        return DataLoader(self.dataset("train"), self.batch_size, sampler=range(rank, len(self.images), world))

    def indices(self, images):
        """Find the indices of images."""
        return [int((self.images == image).flatten(1).all(1).nonzero()) for image in images]


class SeveralLabels(NoiseImages):
    """Random images, each with any number of the 7 classes; only one image has the last class."""

    multi_label = True

    def __init__(self, count, **options):
        super().__init__(count, **options)
        self.labels = torch.rand(count, 7, generator=torch.Generator().manual_seed(2)) < 0.3
        self.labels[:, 6] = torch.arange(count) == min(5, count - 1)
