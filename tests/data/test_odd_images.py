"""Turned and transparent files through every data module of files."""

import numpy as np
import pytest
import torch
from PIL import Image
from stored_images import KINDS
from stored_images import write as write_stored

from relvit.data import ImageFolderData, ImageListData, ImageNetData, ReaderData

OPTIONS = {"img_size": (6, 4), "num_workers": 0, "crop_pct": 1.0, "mean": (0.0,) * 3, "std": (1.0,) * 3}
ODD = {  # file: how a viewer shows its upper left and lower right pixels
    "turned.png": ([255] * 3, [0] * 3),
    "transparent.png": ([255] * 3, [1, 2, 3]),
}


def write(folder):
    folder.mkdir(parents=True)
    exif = Image.Exif()
    exif[0x0112] = 6  # the first stored row is shown as the right column
    stored = np.zeros((4, 6), np.uint8)
    stored[3, 0] = 255  # so the lower left corner comes to the upper left
    Image.fromarray(stored).save(folder / "turned.png", exif=exif)
    rgba = np.full((6, 4, 4), (1, 2, 3, 255), np.uint8)
    rgba[0, 0] = (200, 0, 0, 0)
    Image.fromarray(rgba).save(folder / "transparent.png")


def modules(root):
    names = ["n00000001", "n00000002"]
    for name in names:
        write(root / "test" / name)
    rows = [f"test/{name}/{file},{name}" for name in names for file in ODD]
    (root / "test.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    files = [(f"{name}/{file}", (root / "test" / name / file).read_bytes(), name) for name in names for file in ODD]
    stored = {kind: write_stored(kind, root / kind, {"test": files}) for kind in KINDS}
    return {
        kind: ReaderData(**place, test_split="test", class_names=names, **OPTIONS) for kind, place in stored.items()
    } | {
        "folder": ImageFolderData(str(root), class_names=names, **OPTIONS),
        "imagenet": ImageNetData(str(root), **OPTIONS),
        "list": ImageListData(test=str(root / "test.csv"), class_names=names, **OPTIONS),
    }


@pytest.mark.parametrize("kind", ["folder", "imagenet", "list", *KINDS])
@pytest.mark.parametrize("split", ["test", "predict"])
def test_pixels(tmp_path, kind, split):
    dataset = modules(tmp_path)[kind].dataset(split)
    assert len(dataset) == 4
    paths = [str(path) for path, _ in dataset.samples] if split == "test" else map(str, dataset.paths)
    for (image, _), path in zip(dataset, paths, strict=True):
        corners = (image[:, 0, 0] * 255).round().tolist(), (image[:, -1, -1] * 255).round().tolist()
        assert corners == ODD[path.rsplit("/", 1)[1]], path
        assert (image.shape, image.dtype) == ((3, 6, 4), torch.float32)
