"""Pretrain a model of the study without labels, by lightly's MAE, and probe its features before and after.

    python tools/study/pretrain.py --images DIR --work WORK                      # 20,000 images, 5 epochs, one thread
    python tools/study/pretrain.py --images DIR --work WORK --models kv-2-start-0.1 --epochs 50 --seeds 0 1 2

DIR has train/<class>/* and test/<class>/*, as for study.py. The encoder sees a quarter of the patches, which keep their
coordinates. WORK gets a folder for each encoder before and after, which timm and `relvit fit --pretrained` read. The
table has the test accuracies of logistic regression and of 20 nearest neighbours, see `probe_models`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import timm.optim
import torch
from study import MODELS, PART, SIZE, prepare
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from relvit.app.data import ImageFolderData
from relvit.app.evaluation import probe_models, save_model
from relvit.app.utils.exceptions import MissingPackageError

try:
    from lightly.models import utils
    from lightly.models.modules import MaskedVisionTransformerDecoderTIMM
except ModuleNotFoundError as error:
    sys.exit(str(MissingPackageError("pretraining", error.name)))

# The models of the study whose encoders can leave patches out.
ENCODERS = [name for name, model in MODELS.items() if model.name == "relvit_tiny"]
MASKED = 0.75
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)


class MaskedAutoencoder(nn.Module):
    """MAE (He et al. 2022, arXiv 2111.06377): encode some patches, and predict the normalised pixels of the others."""

    def __init__(self, encoder: nn.Module, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.encoder = encoder
        self.patches: int = encoder.patch_embed.num_patches
        self.patch: int = encoder.patch_embed.patch_size[0]
        self.embed = nn.Linear(encoder.embed_dim, width)
        self.decoder = MaskedVisionTransformerDecoderTIMM(self.patches, width, depth, num_heads=4, num_prefix_tokens=0)
        self.predict = nn.Linear(width, 3 * self.patch**2)

    def forward(self, images: Tensor) -> Tensor:
        """Return the mean squared error of the masked patches of images (B, 3, size, size)."""
        size = len(images), self.patches
        keep, masked = utils.random_token_mask(size, MASKED, mask_class_token=True, device=images.device)
        tokens = self.encoder.forward_features(images, keep=keep)[:, self.encoder.num_prefix_tokens :]
        every = utils.set_at_index(utils.repeat_token(self.decoder.mask_token, size), keep, self.embed(tokens))
        predicted = self.predict(utils.get_at_index(self.decoder(every), masked))
        target = utils.get_at_index(utils.patchify(images, self.patch), masked)
        return nn.functional.mse_loss(predicted, utils.normalize_mean_var(target))


def pretrain(encoder: nn.Module, images: Path, epochs: int, batch: int, lr: float) -> list[float]:
    """Train the encoder in place; return the loss of each epoch."""
    crop = transforms.RandomResizedCrop(SIZE, scale=(0.4, 1))
    steps = (crop, transforms.RandomHorizontalFlip(), transforms.ToTensor(), transforms.Normalize(MEAN, STD))
    loader = DataLoader(ImageFolder(images, transforms.Compose(steps)), batch, shuffle=True, drop_last=True)
    model = MaskedAutoencoder(encoder).train()
    optimizer = timm.optim.create_optimizer_v2(model, "adamw", lr=lr, weight_decay=0.05, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=epochs * len(loader), pct_start=0.1)
    losses = []
    for _ in range(epochs):
        total = 0.0
        for pixels, _ in loader:
            loss = model(pixels)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            total += float(loss.detach())
        losses.append(total / len(loader))
        print(f"epoch {len(losses)}: loss {losses[-1]:.4f}", flush=True)
    return losses


def compare(name: str, seed: int, images: Path, work: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Pretrain a model with a seed, and return the rows of `probe_models` before and after."""
    torch.manual_seed(seed)
    encoder = timm.create_model("relvit_tiny", num_classes=0, img_size=SIZE, **MODELS[name].arguments)
    as_evaluated = {"input_size": (3, SIZE, SIZE), "mean": MEAN, "std": STD, "crop_pct": 1.0}
    encoder.pretrained_cfg = {**encoder.pretrained_cfg, **as_evaluated}
    folders = [work / f"{name}_{seed}_{state}" for state in ("start", "mae")]
    save_model(encoder, folders[0], class_names=[])
    pretrain(encoder, images / "train", given.epochs, given.batch, given.lr)
    save_model(encoder, folders[1], class_names=[])
    data = ImageFolderData(str(images), img_size=SIZE, crop_pct=1.0, num_workers=0)
    return probe_models(
        [f"local-dir:{folder}" for folder in folders], data, "test", given.shares, batch_size=given.batch
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Pretrain and probe the models of the command line, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--images", type=Path, required=True, help="class folders of CIFAR-10, in train and test")
    add("--work", type=Path, required=True, help="folder for the encoders")
    add("--models", nargs="+", choices=ENCODERS, default=["kv-2-start-0.1"])
    add("--seeds", nargs="+", type=int, default=[0])
    add("--epochs", type=int, default=5)
    add("--batch", type=int, default=128)
    add("--lr", type=float, default=1.5e-3)
    add("--shares", nargs="+", type=float, default=[0.1, 1.0], help="shares of the labels for the probes")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    images = prepare(given.images, given.work / "images", PART)
    print("| model | seed | share of labels | encoder | linear probe | 20-NN |\n|---|---|---|---|---|---|")
    for name in given.models:
        for seed in given.seeds:
            for row in compare(name, seed, images, given.work, given):
                state = "random start" if row["model"].endswith("_start") else f"MAE, {given.epochs} epochs"
                cells = [f"{100 * row[probe]:.1f} ± {100 * row[f'{probe}_se']:.1f}" for probe in ("linear", "knn")]
                print(f"| {name} | {seed} | {row['share']} | {state} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
