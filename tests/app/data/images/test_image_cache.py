"""Image cache in memory: same items as from the files, each file decoded once, refused if the memory is too small."""

import os
import pickle
import signal
from collections import Counter
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from grey_folders import data_of, make, spoil
from PIL import Image

from relvit.app.data import ImageFolderData, UnreadableImageError, load_rgb
from relvit.app.data.images.file_datasets import LabelledFiles, NamedFiles
from relvit.app.data.images.image_cache import AnySizeImages, InMemoryBatches, StackedImages, in_units
from relvit.app.data.inspect import check_data
from relvit.app.utils.seeding import seeded

ONE_PROCESS = {"world_size": 1, "num_devices": 1, "current_epoch": 0, "global_rank": 0, "progress_bar_callback": None}


def noise(generator, height, width, channels=3):
    return generator.integers(0, 256, (height, width, channels)).astype(np.uint8)


def folders(root, size=None, count=4):
    """Write two classes of noise images in train, val and test, all of one size or of different sizes and kinds."""
    generator = np.random.default_rng(0)
    for split in ("train", "val", "test"):
        for name in ("a", "b"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                shape = generator.integers(5, 12, 2) if size is None else size
                Image.fromarray(noise(generator, *shape)).save(folder / f"{i}.png")
            if size is None:
                Image.fromarray(noise(generator, 6, 9)).save(folder / "x.jpg", exif=rotated())
                Image.fromarray(noise(generator, 7, 8, 4)).save(folder / "y.png")
                Image.fromarray(noise(generator, 8, 5)[:, :, 0]).save(folder / "z.png")
    return str(root)


def rotated():
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def pair(root, **options):
    """Return the data without and with the cache."""
    defaults = {"img_size": (8, 6), "num_workers": 0, "mean": (0.2, 0.4, 0.6), "std": (0.5, 0.3, 0.1), "crop_pct": 1.0}
    return [ImageFolderData(root, cache=cache, **defaults | options) for cache in (False, True)]


@pytest.mark.parametrize("size", [None, (8, 6), (9, 6)])
def test_every_item_is_bit_for_bit_the_same(tmp_path, size):
    plain, cached = pair(folders(tmp_path, size), augment="deit")
    kind = StackedImages if size == (8, 6) else AnySizeImages
    for split in ("train", "val"):
        ours, theirs = cached.dataset(split), plain.dataset(split)
        assert (type(ours), type(theirs)) == (kind, LabelledFiles)
        assert ours.targets == theirs.targets
        for index in range(-1, len(theirs)):
            with seeded(index + 1):
                image, label = ours[index]
            with seeded(index + 1):
                expected, target = theirs[index]
            assert torch.equal(image, expected)
            assert label == target
        with pytest.raises(IndexError):
            ours[len(ours)]


def compare(loader, expected, exactly):
    ours, theirs = list(loader), list(expected)
    assert len(ours) == len(theirs) > 0
    for (images, labels), (others, targets) in zip(ours, theirs, strict=True):
        assert torch.equal(labels, targets)
        # Single images are divided by 255 and then normalised, but batches in one step, so the rounding differs.
        torch.testing.assert_close(images, others, **({"rtol": 0, "atol": 0} if exactly else {}))


@pytest.mark.parametrize(("size", "workers"), [(None, 0), ((8, 6), 2)])
def test_batches(tmp_path, size, workers):
    plain, cached = pair(folders(tmp_path, size), augment="none", batch_size=3, num_workers=workers)
    train, val = cached.train_dataloader(), cached.val_dataloader()
    assert isinstance(val.dataset.dataset, InMemoryBatches) == (size is not None)
    if size is not None:
        # Batches do not use the transforms of single images.
        cached.dataset("train").transform = cached.dataset("val").transform = None
    compare(train, plain.train_dataloader(), exactly=size is None)
    compare(val, plain.val_dataloader(), exactly=size is None)


def test_augmentation_without_an_equivalent_for_batches(tmp_path):
    root = folders(tmp_path, (8, 6))
    for options in (
        {"augment": "deit"},
        {"augment": "crop-flip", "color_jitter": 0.4},
        {"augment": "none", "random_erasing": 1.0},
    ):
        plain, cached = pair(root, batch_size=4, **options)
        compare(cached.train_dataloader(), plain.train_dataloader(), exactly=True)


def test_each_split_is_stacked_by_itself_and_an_exif_orientation_counts(tmp_path):
    """The header of the rotated image has the size of the other images, but its decoded pixels have another size."""
    folders(tmp_path, (8, 6))
    values = np.zeros((8, 6, 3), np.uint8)
    values[:4] = 255
    Image.fromarray(values).save(tmp_path / "train" / "a" / "1.png", exif=rotated())
    data = pair(str(tmp_path), augment="none")[1]
    data.setup("fit")
    images, val = data.dataset("train"), data.dataset("val")
    assert [type(images), type(val)] == [AnySizeImages, StackedImages]
    assert [images.pixels.nbytes, val.pixels.nbytes] == [3 * 8 * 8 * 6] * 2
    assert images.sizes.tolist() == [[8, 6], [6, 8]] + 6 * [[8, 6]]
    index = [path for path, _ in data.samples("train")].index(f"{tmp_path}/train/a/1.png")
    assert np.array_equal(images.values(index), np.rot90(values, -1))


@pytest.fixture
def decoded(monkeypatch):
    """Count how often each file is decoded in this process."""
    counts = Counter()

    def counting(path):
        counts[path] += 1
        return load_rgb(path)

    for module in ("image_cache", "file_datasets"):
        monkeypatch.setattr(f"relvit.app.data.images.{module}.load_rgb", counting)
    return counts


@pytest.mark.parametrize("size", [None, (8, 6)])
def test_files_are_decoded_once_and_for_training_alone(tmp_path, decoded, size):
    data = pair(folders(tmp_path, size))[1]
    assert check_data(data, processes=1)["splits"]["train"]["images"] >= 8
    for stage, split in (("validate", "val"), ("test", "test"), ("predict", "predict")):
        data.setup(stage)
        assert type(data.dataset(split)) is (NamedFiles if split == "predict" else LabelledFiles)
    assert not decoded
    data.setup("fit")
    for _ in range(2):
        for loader in (data.train_dataloader(), data.val_dataloader()):
            assert sum(len(labels) for _, labels in loader) >= 8
    assert decoded == {path: 1 for split in ("train", "val") for path, _ in data.samples(split)}


def test_a_part_put_aside_is_cached(tmp_path, decoded):
    data = data_of(make(tmp_path, train=10), cache=True, img_size=(4, 6))
    data.setup("fit")
    assert len(data.held_out()) == len(data.dataset("val")) == 3
    assert isinstance(data.dataset("val"), StackedImages)
    assert len(decoded) == 30


@pytest.mark.parametrize("copies", [1, 4])
def test_too_little_memory_is_refused_before_anything_is_decoded(tmp_path, monkeypatch, decoded, copies):
    data = pair(folders(tmp_path))[1]
    data.trainer = SimpleNamespace(**ONE_PROCESS | {"num_devices": copies})
    areas = [np.prod(Image.open(path).size) for split in ("train", "val") for path, _ in data.samples(split)]
    needed = 3 * int(sum(areas))
    enough = -(-needed * copies * 5 // 4)
    monkeypatch.setattr("relvit.app.data.images.image_cache.available_memory", lambda: enough - 2)
    text = rf"cache: the {len(areas)} images of train and val take {in_units(needed)} .*, 80% of .*cache false"
    with pytest.raises(ValueError, match=text) as caught:
        data.setup("fit")
    assert ("in each of 4 processes" in str(caught.value)) == (copies == 4)
    assert not decoded
    # `available_memory` returns None on a system that does not report its memory.
    for available in (enough, None):
        monkeypatch.setattr("relvit.app.data.images.image_cache.available_memory", lambda amount=available: amount)
        pair(str(tmp_path))[1].setup("fit")
        assert len(decoded) == len(areas)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("size", [None, (8, 6)])
def test_unreadable_files_are_skipped_as_without_cache(tmp_path, size, batch_size):
    folders(tmp_path, size)
    # In training, the next readable image replaces a broken image; after the last image comes the first one.
    last = max((tmp_path / "train" / "b").iterdir())
    bad = {
        "train": [tmp_path / "train" / "b" / "1.png", tmp_path / "train" / "b" / "2.png", last],
        "val": [tmp_path / "val" / "a" / "0.png", tmp_path / "val" / "b" / "3.png"],
    }
    spoil(*bad["train"], *bad["val"])
    options = {"augment": "none", "batch_size": batch_size, "on_error": "skip"}
    plain, cached = pair(str(tmp_path), **options)
    compare(cached.train_dataloader(), plain.train_dataloader(), exactly=size is None)
    compare(cached.val_dataloader(), plain.val_dataloader(), exactly=size is None)
    assert cached.unreadable == plain.unreadable
    assert {split: sorted(files) for split, files in cached.unreadable.items()} == {
        split: sorted(map(str, files)) for split, files in bad.items()
    }
    assert isinstance(cached.dataset("train"), AnySizeImages if size is None else StackedImages)


def test_a_pipe_among_the_images_is_never_opened(tmp_path):
    folders(tmp_path, (8, 6))
    pipe = tmp_path / "train" / "a" / "0.png"
    pipe.unlink()
    os.mkfifo(pipe)
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("hangs"))
    signal.alarm(20)
    try:
        data = pair(str(tmp_path), on_error="skip", augment="none")[1]
        assert len(list(data.train_dataloader())) == 1
    finally:
        signal.alarm(0)
    assert list(data.unreadable["train"]) == [str(pipe)]


def test_threads_find_what_one_finds(tmp_path, monkeypatch):
    root = folders(tmp_path)
    spoil(tmp_path / "train" / "a" / "3.png")
    found = {}
    for threads in (1, 3):
        monkeypatch.setattr("relvit.app.data.images.image_cache.cores", lambda count=threads: count)
        found[threads] = pair(root, on_error="skip")[1].dataset("train")
    assert torch.equal(found[1].pixels, found[3].pixels)
    assert list(found[1].unreadable) == [3]
    assert found[1].unreadable == found[3].unreadable
    with pytest.raises(UnreadableImageError, match=r"train.a.3\.png") as caught:
        pair(root)[1].dataset("train")
    assert caught.value.path == f"{root}/train/a/3.png"


@pytest.mark.parametrize("size", [None, (8, 6)])
def test_spawned_workers_share_the_memory(tmp_path, size):
    """PyTorch passes a reference to the shared memory to the workers instead of the pixels."""
    dataset = pair(folders(tmp_path, size), augment="none")[1].dataset("train")
    expected = dataset[0][0].clone()
    theirs = pickle.loads(ForkingPickler.dumps(dataset))
    assert torch.equal(theirs[0][0], expected)
    theirs.pixels.zero_()
    assert not dataset.pixels.any()


@pytest.mark.parametrize(("terminal", "wanted"), [(True, True), (True, False), (False, True)])
def test_a_bar_on_a_terminal_unless_the_trainer_has_none(tmp_path, monkeypatch, capsys, terminal, wanted):
    shown = []

    def bar(items, total, what):
        shown.append((what, total))
        return items

    monkeypatch.setattr("relvit.app.data.modules.image_files.with_bar", bar)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    data = pair(folders(tmp_path, (8, 6)))[1]
    data.trainer = SimpleNamespace(**ONE_PROCESS | {"progress_bar_callback": object() if wanted else None})
    data.setup("fit")
    steps = [f"{what} {split}" for what in ("reading sizes of", "decoding") for split in ("train", "val")]
    assert shown == ([(step, 8) for step in steps] if terminal and wanted else [])
    assert capsys.readouterr().out.startswith("16 images of train and val in memory: 0.0 MiB, ")


def test_units_of_memory():
    assert [in_units(3 * 180_000_000), in_units(2**30)] == ["515.0 MiB", "1.0 GiB"]
