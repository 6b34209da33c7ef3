"""The record of a run's images, for every kind of data, and the differences that a resumed training reports."""

import gzip
import shutil

import numpy as np
import pytest
import torch
from grey_folders import AS_STORED, GREY, add, data_of, make
from small_training import NoiseImages
from stored_images import KINDS, grey_files, png, write
from stored_images import data_of as reader_of

from relvit.app.data import DigitsData, ImageListData
from relvit.app.data.images.image_cache import StackedImages
from relvit.app.data.images.manifest import images_in_memory
from relvit.app.training.run.images_csv import FILE, compute_digests, describe_difference, write_manifest


@pytest.fixture
def photos(tmp_path):
    return shutil.copytree(make(tmp_path / "made", train=4, val=2), tmp_path / "photos")


def difference(before, now, folder):
    """Record the images of a training on `before`, and return the message of a resumed training on `now`."""
    digests = write_manifest(before, folder / FILE)
    assert digests == compute_digests(before)
    return describe_difference(digests, compute_digests(now), now, folder / FILE)


def test_images_of_folders_by_names_sizes_and_labels(photos):
    """The record has names, sizes and labels. A missing file has no size, and with on_error skip it is no error."""
    (photos / "train" / "ant" / "x.png").symlink_to("gone.png")
    odd = photos / "train" / "ant" / 'a, "b"\nc\udce9.png'
    shutil.copy(photos / "train" / "ant" / "000.png", odd)
    files = sorted(photos.glob("train/*/*"), key=str)
    sizes = [str(path.stat().st_size) if path.exists() else "" for path in files]
    expected = [(f"{f.parent.name}/{f.name}", size, f.parent.name) for f, size in zip(files, sizes, strict=True)]
    assert [tuple(image) for image in data_of(str(photos), on_error="skip").manifest("train")] == expected


def test_images_that_are_put_aside_are_recorded(photos):
    shutil.rmtree(photos / "val")
    data = data_of(str(photos), val_fraction=0.5)
    names = {split: [image.name for image in data.manifest(split)] for split in ("train", "val")}
    assert [len(found) for found in names.values()] == [6, 6]
    assert names["val"] == [path.removeprefix("train/") for path, _ in data.held_out()]
    # Another validation fraction of the same images is reported as a difference.
    assert "train: 3 added ('ant/003.png', " in difference(data, data_of(str(photos), val_fraction=0.25), photos)


def grow(path):
    path.write_bytes(path.read_bytes() + b"more")


CHANGES = {
    "another size": (lambda root: grow(root / "train/ant/001.png"), "train: 1 of another size ('ant/001.png')"),
    "swapped between class folders": (
        lambda root: (
            grow(root / "train/ant/000.png"),
            (root / "train/ant/000.png").rename(root / "x"),
            (root / "train/cat/000.png").rename(root / "train/ant/000.png"),
            (root / "x").rename(root / "train/cat/000.png"),
        ),
        "train: 1 of another size ('cat/000.png')",
    ),
    "added": (
        lambda root: add(root / "train" / "cat" / "more", count=5),
        "train: 5 added ('cat/more/000.png', 'cat/more/001.png', 'cat/more/002.png' and 2 more)",
    ),
    "removed": (lambda root: (root / "val/bee/001.png").unlink(), "val: 1 removed ('bee/001.png')"),
    "renamed": (
        lambda root: [(root / split / "bee/000.png").rename(root / split / "bee/b.png") for split in ("train", "val")],
        "; ".join(f"{split}: 1 added ('bee/b.png'), 1 removed ('bee/000.png')" for split in ("train", "val")),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_folders(change, photos, tmp_path):
    spoil, expected = CHANGES[change]
    before, moved = data_of(str(photos)), shutil.copytree(photos, tmp_path / "moved")
    assert difference(before, data_of(str(moved)), tmp_path) == ""
    spoil(moved)
    assert difference(before, data_of(str(moved)), tmp_path) == expected
    # Without the manifest of the run the message has only the numbers of images, not the names.
    now = data_of(str(moved))
    split = expected.partition(":")[0]
    count = len(now.samples(split))
    for path in (tmp_path / "none.csv.gz", tmp_path / "other.csv.gz"):
        text = describe_difference(compute_digests(before), compute_digests(now), now, path)
        assert text.startswith(f"{split}: {count} images, not those of before (there is no {path}, or")
        write_manifest(now, tmp_path / "other.csv.gz")


# The manifests are broken: an empty file, not gzip, not text, a truncated file, and a file with changed bytes.
WHOLE = gzip.compress(b"split\n\xff,x\n", mtime=0)
DAMAGED = (b"", b"x" * 99, WHOLE, WHOLE[:15], WHOLE[:10] + b"\xff" * 20)


def test_a_damaged_manifest(photos, tmp_path):
    digests = write_manifest(data_of(str(photos)), tmp_path / FILE)
    (photos / "val/bee/001.png").unlink()
    now = data_of(str(photos))
    for content in DAMAGED:
        (tmp_path / FILE).write_bytes(content)
        text = describe_difference(digests, compute_digests(now), now, tmp_path / FILE)
        assert text.startswith("val: 5 images, not those of before")


def test_lists(photos, tmp_path):
    rows = [f"train/{name}/00{i}.png,{name}" for name in GREY for i in range(4)]

    def data(name, rows, **options):
        (tmp_path / name).write_text("\n".join(["path,label", *rows]) + "\n")
        return ImageListData(str(tmp_path / name), **{"root": str(photos), **AS_STORED, **options})

    before = data("a.csv", rows)
    names = sorted(image.name for split in ("train", "val") for image in before.manifest(split))
    assert names == [row.partition(",")[0] for row in rows]
    moved = shutil.copytree(photos, tmp_path / "elsewhere")
    assert difference(before, data("b.csv", rows, root=str(moved)), tmp_path) == ""
    # Other spellings of the same paths are equal, if the same images are held out.
    both = data("c.csv", rows, val=before.train), data("d.csv", [f"{moved}/{r}" for r in rows], val=before.train)
    both[1].root = str(moved)
    assert difference(*both, tmp_path) == ""
    relabelled = [rows[0].replace(",ant", ",cat"), *rows[1:]]
    text = difference(both[0], data("e.csv", relabelled, val=before.train), tmp_path)
    assert text == "train: 1 with another label ('train/ant/000.png')"
    text = difference(both[0], data("f.csv", [*rows[1:], rows[0]], val=before.train), tmp_path)
    assert text == "train: the same images in another order"
    labels = ["ant;bee", "", "bee", "ant"]
    rows = [f"train/ant/00{i}.png,{label}" for i, label in enumerate(labels)]
    several = data("g.csv", rows, val=str(tmp_path / "g.csv"), label_separator=";")
    assert [image.label for image in several.manifest("train")] == labels


@pytest.mark.parametrize("kind", KINDS)
def test_archives(kind, tmp_path, monkeypatch):
    """Readers know the sizes of images without reading them."""
    files = [
        (name, content + b"x" * len(name) * number, label)
        for number, (name, content, label) in enumerate(grey_files(3))
    ]
    one, other, third = (
        reader_of(**write(kind, tmp_path / place, {"train": of, "val": grey_files(1)}), val_split="val")
        for place, of in (("one", files), ("other", files), ("third", [*files[:4], ("x", png(3), "ant"), *files[5:]]))
    )
    monkeypatch.setattr("relvit.app.data.images.decode.StoredImage.read", lambda *args: pytest.fail("reads"))
    found = list(one.manifest("train"))
    assert sorted((image.content, image.label) for image in found) == sorted(
        (str(len(c)), label) for _, c, label in files
    )
    assert difference(one, other, tmp_path) == ""
    assert difference(one, third, tmp_path).startswith("train: ")


def test_a_column_of_bytes_and_rows_that_name_files(tmp_path):
    datasets = pytest.importorskip("datasets")
    (tmp_path / "a.png").write_bytes(png(1))
    for number, features in enumerate(({"image": datasets.Value("binary")}, {"image": datasets.Image()})):
        images = [png(1), png(2, (60, 40))]
        if number:
            images = [{"bytes": images[1], "path": None}, {"bytes": None, "path": str(tmp_path / "a.png")}]
        table = {"image": images, "label": ["a", "b"]}
        features = datasets.Features({**features, "label": datasets.Value("string")})
        datasets.Dataset.from_dict(table, features=features).save_to_disk(tmp_path / str(number))
    sizes = [
        [image.content for image in reader_of(name=f"hfds/{tmp_path}/{number}", val_split="train").manifest("train")]
        for number in (0, 1)
    ]
    small, large = str(len(png(1))), str(len(png(2, (60, 40))))
    assert sizes == [[small, large], [large, small]]


def test_images_in_memory_by_their_pixels(tmp_path, monkeypatch):
    before = DigitsData()
    digests = write_manifest(before, tmp_path / FILE)
    assert {split: found["images"] for split, found in digests.items()} == {"train": 1257, "val": 180}
    assert describe_difference(digests, compute_digests(DigitsData()), DigitsData(), tmp_path / FILE) == ""
    changed = DigitsData()
    pixels = changed.dataset("train").pixels.clone()
    pixels[3, 2, 5] += 1
    changed.dataset("train").pixels = pixels
    text = describe_difference(digests, compute_digests(changed), changed, tmp_path / FILE)
    assert text == "train: 1 with other pixels ('00003')"
    stack = StackedImages(torch.zeros(2, 4, 6, 3, dtype=torch.uint8), [np.array([True, False, True])] * 2, None)
    assert [image.label for image in images_in_memory(stack, list(GREY))] == ["ant;cat"] * 2


def test_data_that_cannot_be_listed_are_not_compared(tmp_path):
    assert write_manifest(NoiseImages(8), tmp_path / FILE) == compute_digests(NoiseImages(8)) == {}
    assert not (tmp_path / FILE).exists()
