"""Small checkpoints of each family, and a published folder, as relvit writes them after two steps on the digits."""

import numpy as np
import torch
from small_training import train_and_save

import relvit
from relvit.app.data import DigitsData
from relvit.app.evaluation import save_model
from relvit.app.training import ImageClassifier

SMALL = {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "mlp_ratio": 2}
# Each family has arguments of `ImageClassifier`.
FAMILIES = {
    "tables": {"model": "test_relvit", "model_kwargs": SMALL | {"max_distance": 3}},
    "xl_bands": {"model": "relvit_xl_small", "model_kwargs": SMALL | {"depth": 2, "band_rows": 2, "memory_rows": 2}},
    "reversible": {"model": "relvit_rev_small", "model_kwargs": SMALL},
    "lsh": {"model": "relvit_lsh_small", "model_kwargs": SMALL},
    "universal_act": {"model": "relvit_universal_small", "model_kwargs": SMALL | {"depth": 2, "halting": "act"}},
    "aft_conv": {"model": "relvit_aft_conv_tiny", "model_kwargs": SMALL | {"kernel_size": 3}},
    "aft_full": {"model": "relvit_aft_full_tiny", "model_kwargs": SMALL | {"num_heads": 1, "bias_dim": 4}},
    "retrofitted": {
        "model": "vit_tiny_patch16_224",
        "model_kwargs": SMALL,
        "retrofit": {"rel_terms": "kv", "max_distance": 2},
    },
}


def write_sample(path, family="tables"):
    """Write the checkpoint after two epochs of one step each, with averaged weights."""
    data = DigitsData(img_size=16, num_workers=0, batch_size=16)
    torch.manual_seed(0)
    classifier = ImageClassifier(
        num_classes=10, in_chans=1, img_size=(16, 16), class_names=data.class_names, ema_decay=0.9, **FAMILIES[family]
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    train_and_save(path, classifier, data, max_epochs=2, limit_train_batches=1, limit_val_batches=1)
    return path


def publish_sample(checkpoint, folder):
    """Publish the model in a checkpoint."""
    predictor = relvit.load(checkpoint)
    save_model(predictor.model, folder, predictor.class_names)
    return folder


def images():
    """Make two grey images of 16 x 24 px."""
    return (torch.arange(2 * 16 * 24, dtype=torch.float32).reshape(2, 1, 16, 24) * 37 % 101) / 50 - 1


def picture():
    grey = (np.add.outer(np.arange(24) * 7, np.arange(24) * 5) % 256).astype(np.uint8)
    return np.stack([grey] * 3, -1)
