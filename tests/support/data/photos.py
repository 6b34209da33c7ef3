"""Small photographs in class folders, and options for a tiny training on them."""

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = {"cat": (200, 40, 40), "dog": (40, 200, 40), "owl": (40, 40, 200)}
TINY = [
    "--model.model=test_relvit",
    "--model.model_kwargs.patch_size=8",
    "--model.model_kwargs.embed_dim=16",
    "--model.model_kwargs.depth=2",
    "--model.model_kwargs.max_distance=2",
    "--data.img_size=16",
    "--data.batch_size=8",
    # Writing the TensorBoard log, which is the default, takes a tenth of the time of a short training.
    "--trainer.logger=false",
    "--data.num_workers=0",
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
]


def write_photos(root: Path, splits=("train", "val", "test"), count=6) -> Path:
    """Write noisy pictures of several sizes as root/split/class/number.jpg, each class with its own colour."""
    generator = np.random.default_rng(0)
    for split in splits:
        for name, colour in CLASSES.items():
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                shape = (int(generator.integers(16, 40)), int(generator.integers(16, 40)), 3)
                pixels = np.clip(generator.normal(colour, 40, shape), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.jpg")
    return root
