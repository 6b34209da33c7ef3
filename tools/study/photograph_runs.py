"""Trainings of the study of photographs: one training loop and one evaluation for all models, on any device."""

from __future__ import annotations

import math
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import timm
import torch
from photograph_images import Images, middle, random_boxes, resampled
from photograph_models import Model, Part, Run, Setting, Size, Test, base_of, models_of, parts_of, tests_of, tunings_of
from torch import Tensor, nn

import relvit
from relvit.app.models import at_image_size
from relvit.app.training import make_optimizer
from relvit.models import set_reach

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BATCH, WEIGHT_DECAY, WARMUP, CLIP = 128, 0.05, 0.05, 1.0
# Batches of an evaluation have about this many pixels.
EVALUATED_PIXELS = 2**22


def create(setting: Setting, run: Run, work: Path) -> nn.Module:
    """Create the model of a run; for a fine-tuning, change the plain model that was trained below `work`."""
    torch.manual_seed(run.seed)
    size = parts_of(setting)[run.part].size
    if parts_of(setting)[run.part].tuned is None:
        return created(models_of(setting)[run.model], size)
    model = created(models_of(setting)["learned"], (setting.size,) * 2)
    base = work / base_of(setting).folder / "last.pt"
    model.load_state_dict(torch.load(base, weights_only=True, map_location="cpu")["model"])
    tuning = tunings_of(setting)[run.model]
    if tuning.retrofit is not None:
        relvit.retrofit(model, **tuning.retrofit)
        set_reach(model, tuning.reach, setting.size)
    return model


def created(model: Model, size: Size) -> nn.Module:
    """Create a model for images of a size and ten classes."""
    return timm.create_model(model.name, img_size=size, num_classes=10, **model.arguments)


def epoch_of(setting: Setting, part: Part, seed: int, epoch: int, images: Images) -> tuple[Tensor, Tensor]:
    """Draw the order of an epoch and a box for each of its images: the same ones for every model, on every device.

    The last images of the order, fewer than a batch, are left out; each epoch has another order.
    """
    generator = torch.Generator().manual_seed(1000 * seed + epoch)
    count, size = len(images.labels), batch_of(images)
    order = torch.randperm(count, generator=generator)[: count - count % size]
    within = middle(images.pixels.shape[2:], (part.share, part.share))
    ratio = part.size[1] / part.size[0]
    boxes = [random_boxes(generator, size, within, ratio, setting.least_area) for _ in range(count // size)]
    return order.to(images.labels.device), torch.cat(boxes).to(images.labels.device)


def batch_of(images: Images) -> int:
    """Return the number of images in a batch."""
    return min(BATCH, len(images.labels))


def images_of(part: Part, train: Images) -> Images:
    """Return the training images of a part: all, or every fifth, tenth ... image of each class."""
    return train.take(torch.arange(0, len(train.labels), round(1 / part.images))) if part.images < 1 else train


def rate_of(step: int, steps: int) -> float:
    """Return the factor of the learning rate: it rises linearly, then falls as a cosine to zero."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2


def normalised(pixels: Tensor) -> Tensor:
    """Return pixels of 0 to 255 in the units that models see."""
    mean, std = (torch.tensor(each, device=pixels.device).view(3, 1, 1) for each in (MEAN, STD))
    return (pixels / 255 - mean) / std


def train(
    setting: Setting, run: Run, images: Images, work: Path, stop: float = math.inf
) -> tuple[nn.Module, float] | None:
    """Train a model, or resume an interrupted training; return model and minutes, or None if the time was over.

    Args:
        setting, run: the training; `work` holds the folders of this and of other runs.
        images: all training images, on the device of the training.
        work: the folder of all runs. A run's checkpoint, written after each epoch, is `last.pt` in the run's folder.
        stop: the time by `time.monotonic()` after which no epoch begins.
    """
    part, device = parts_of(setting)[run.part], images.pixels.device
    file = work / run.folder / "last.pt"
    file.parent.mkdir(parents=True, exist_ok=True)
    model = create(setting, run, work).to(device)
    own = images_of(part, images)
    lr = part.lr if part.tuned is None else part.lr / 2
    rate = 1.0 if part.tuned is None else tunings_of(setting)[run.model].rate
    options = {"fused": True} if part.optimizer == "adamw" else {}
    optimizer = make_optimizer(model, part.optimizer, lr, WEIGHT_DECAY, opt_kwargs=options, position_lr_scale=rate)
    steps = run.epochs * (len(own.labels) // batch_of(own))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_of(step, steps))
    state: dict[str, Any] = {"epoch": 0, "minutes": 0.0}
    if file.exists():
        state = torch.load(file, weights_only=True, map_location=device)
        model.load_state_dict(state["model"])
        if state["epoch"] < run.epochs:
            optimizer.load_state_dict(state["optimizer"])
            schedule.load_state_dict(state["schedule"])
    for epoch in range(state["epoch"], run.epochs):
        if time.monotonic() > stop:
            return None
        begin, total = now(device), torch.zeros((), device=device)
        model.train()
        drawn = epoch_of(setting, part, run.seed, epoch, own)
        for rows, boxes in zip(*(each.split(batch_of(own)) for each in drawn), strict=True):
            pixels, labels = own.take(rows)
            with autocast(device):
                logits = model(normalised(resampled(pixels, boxes, part.size)))
            loss = nn.functional.cross_entropy(logits.float(), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            total += loss.detach()
        minutes = state["minutes"] + (now(device) - begin) / 60
        state = {"epoch": epoch + 1, "minutes": minutes, "model": model.state_dict()}
        if epoch + 1 < run.epochs:
            state |= {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save(state, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)
        loss_of = float(total) * run.epochs / steps
        print(f"{run.folder}: epoch {epoch + 1}, loss {loss_of:.4f}, {minutes:.2f} minutes", flush=True)
    return model, state["minutes"]


def autocast(device: torch.device) -> torch.autocast:
    """Compute in bfloat16, or in float32 on a CPU without instructions for bfloat16, which may be many times slower."""
    fast = device.type != "cpu" or any(map(torch.cpu.get_capabilities().get, ("avx512_bf16", "amx_bf16")))
    return torch.autocast(device.type, torch.bfloat16, enabled=fast)


def now(device: torch.device) -> float:
    """Return seconds: processor time for a training on the CPU, wall time for a training on a GPU."""
    if device.type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()


def reaches_of(run: Run, model: nn.Module, trained: Size) -> dict[str, nn.Module]:
    """Return the model, and for growing fields a copy whose embedding lies in the centre instead of being stretched.

    A timm model is retrofitted to get such an embedding; otherwise its outputs stay the same.
    """
    found = {"trained": model}
    if run.part == "field" and getattr(model, "pos_embed", None) is not None:
        copy = deepcopy(model)
        if not hasattr(copy, "mirrored_grid"):
            relvit.retrofit(copy)
        found["mirror"] = set_reach(copy, "mirror", trained)
    return found


@torch.inference_mode()
def evaluate(setting: Setting, run: Run, model: nn.Module, images: Images) -> list[dict[str, Any]]:
    """Test a trained model by all tests of its part: a row each."""
    trained = parts_of(setting)[run.part].size
    rows = []
    for reach, net in reaches_of(run, model, trained).items():
        for test in tests_of(setting, run.part):
            if reach == "trained" or test.size > trained:
                accuracy, loss = tested(net, test, images)
                values = {"acc1": round(accuracy, 5), "loss": round(loss, 4)}
                rows.append({"protocol": test.protocol, "size": list(test.size), "reach": reach, **values})
    return rows


def tested(model: nn.Module, test: Test, images: Images) -> tuple[float, float]:
    """Return accuracy and mean cross-entropy of a test."""
    net = at_image_size(model, test.size, 3).eval()
    pixels, labels = images
    box = torch.tensor(middle(pixels.shape[2:], test.share))
    right, loss = 0, 0.0
    count = max(1, EVALUATED_PIXELS // math.prod(test.size))
    for some, wanted in zip(pixels.split(count), labels.split(count), strict=True):
        with autocast(pixels.device):
            logits = net(normalised(resampled(some, box.expand(len(some), 4), test.size))).float()
        right += int((logits.argmax(1) == wanted).sum())
        loss += float(nn.functional.cross_entropy(logits, wanted, reduction="sum"))
    return right / len(labels), loss / len(labels)
