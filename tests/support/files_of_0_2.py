"""Files that relvit 0.2.0 wrote (`tests/fixtures/of_0_2`), and the images on which it computed `expected.json`."""

import json
from pathlib import Path

import numpy as np
import torch

FOLDER = Path(__file__).parents[1] / "fixtures" / "of_0_2"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
# The folder of each family's run; `config.yaml` in it has the options.
FAMILIES = [name for name, found in EXPECTED.items() if "resumed" in found]


def images():
    """Two grey images, 16 x 24 px, of numbers that every version of PyTorch computes alike."""
    return (torch.arange(2 * 16 * 24, dtype=torch.float32).reshape(2, 1, 16, 24) * 37 % 101) / 50 - 1


def picture():
    grey = (np.add.outer(np.arange(24) * 7, np.arange(24) * 5) % 256).astype(np.uint8)
    return np.stack([grey] * 3, -1)
