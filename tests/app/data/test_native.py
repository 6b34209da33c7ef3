"""Native shapes: transforms and batches compared with timm's, padding, and the order on which resume relies."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.naflex_dataset import NaFlexCollator
from timm.data.transforms_factory import transforms_imagenet_eval
from torchvision.transforms import v2

from relvit.app.data import CIFAR10Data, ImageFolderData, eval_transform, train_transform
from relvit.app.data.batches import image_of, images_of, mirrored
from relvit.app.data.images.image_cache import StackedImages
from relvit.app.data.shape import NativeShapes
from relvit.app.utils.seeding import seeded

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.25)
PATCH = (8, 4)
SHAPES = NativeShapes((40, 20), PATCH, 30)
# Photographs have these aspect ratios: landscape, portrait, square and panorama.
ASPECTS = [4 / 3] * 7 + [3 / 2] * 5 + [16 / 9] * 2 + [1] * 2 + [3 / 4] * 2 + [9 / 16, 2 / 3, 2.5, 4]


def picture(height, width):
    return Image.fromarray(np.random.default_rng(height * width).integers(0, 256, (height, width, 3), np.uint8))


@pytest.mark.parametrize("size", [(50, 90), (90, 31), (6, 200), (1, 1), (3000, 5)])
def test_evaluation_is_timms(size):
    ours = SHAPES.adapt(eval_transform(64, MEAN, STD, 0.9))(picture(*size))
    options = {"naflex": True, "patch_size": PATCH, "max_seq_len": 30, "patchify": True, "interpolation": "bicubic"}
    theirs = transforms_imagenet_eval(mean=MEAN, std=STD, **options)(picture(*size))
    assert len(ours["patches"]) <= 30
    torch.testing.assert_close(ours["patches"].flatten(1), theirs["patches"], atol=1e-5, rtol=0)
    for name in ("patch_coord", "patch_valid"):
        assert torch.equal(ours[name], theirs[name])


@pytest.mark.parametrize(
    ("augment", "count"),
    [("none", 5), ("shift", 6), ("crop-flip", 7), ("resized-crop", 6), ("deit", 8), ("three-augment", 8)],
)
def test_training_keeps_the_shape_and_the_augmentation(augment, count):
    transform = SHAPES.adapt(train_transform(64, MEAN, STD, augment))
    assert len(transform.transforms) == count
    grids = []
    for seed in range(5):
        with seeded(seed):
            image = transform(picture(40, 80))
        grids.append(tuple((image["patch_coord"].amax(0) + 1).tolist()))
        assert len(image["patches"]) == math.prod(grids[-1]) <= 30
        # Patches are twice as high as wide, so an image of 1 : 2 has a quarter as many rows as columns.
        assert 1 / 8 < grids[-1][0] / grids[-1][1] < 1 / 2
    assert len(set(grids)) == 1 or augment in ("resized-crop", "deit", "three-augment")


def test_a_shift_moves_the_image_by_an_eighth_at_most():
    transform = NativeShapes((32, 32), (4, 4), 64).adapt(train_transform(32, (0.0,), (1.0,), "shift"))
    dot = Image.new("L", (32, 32))
    dot.putpixel((16, 20), 255)
    places = set()
    for seed in range(60):
        with seeded(seed):
            image = image_of(transform(dot))[0]
        ((row, column),) = image.nonzero().tolist()
        places.add((row - 20, column - 16))
    assert {shift for place in places for shift in place} == set(range(-4, 5))


def batch_of(*sizes, targets=None):
    transform = SHAPES.adapt(eval_transform(64, MEAN, STD))
    items = [(transform(picture(*size)), target) for size, target in zip(sizes, targets or range(9), strict=False)]
    return items, SHAPES.collate(items)


def test_batches_are_timms():
    items, (batch, labels) = batch_of((50, 90), (90, 31), (7, 60))
    longest = max(len(image["patches"]) for image, _ in items)
    theirs, wanted = NaFlexCollator(longest)(items)
    assert torch.equal(labels, wanted)
    for name, value in theirs.items():
        assert torch.equal(batch[name], value) if isinstance(value, torch.Tensor) else batch[name] == value
    rows, columns = batch["grid_size"]
    assert (rows, columns) == tuple((batch["patch_coord"].flatten(0, 1).amax(0) + 1).tolist())
    _, (_, names) = batch_of((50, 90), (90, 31), targets=["a.png", "b.png"])
    assert list(names) == ["a.png", "b.png"]
    assert {name: value.shape[1:] for name, value in batch.items() if isinstance(value, torch.Tensor)} == {
        "patches": (longest, *PATCH, 3),
        "patch_coord": (longest, 2),
        "patch_valid": (longest,),
    }
    empty = SHAPES.empty(3)
    assert empty.keys() == batch.keys()


def test_images_and_mirror_images_come_back():
    items, (batch, _) = batch_of((50, 90), (90, 31), (7, 60))
    whole = eval_transform(64, MEAN, STD).transforms[2:]
    for (image, _), back, flipped, size in zip(
        items, images_of(batch), images_of(mirrored(batch)), ((50, 90), (90, 31), (7, 60)), strict=True
    ):
        rows, columns = (image["patch_coord"].amax(0) + 1).tolist()
        resized = v2.functional.resize(picture(*size), [rows * 8, columns * 4], v2.InterpolationMode.BICUBIC)
        torch.testing.assert_close(back, v2.Compose(whole)(resized))
        assert torch.equal(flipped, back.flip(-1))
    images = torch.rand(2, 3, 4, 6)
    assert torch.equal(mirrored(images), images.flip(-1))


def write_shapes(root, count):
    """Write pictures of two classes, with the aspect ratios of photographs."""
    for split in ("train", "val"):
        for number in range(count):
            folder = root / split / "ab"[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            side, aspect = 30 + number, ASPECTS[number % len(ASPECTS)] ** 0.5
            picture(round(side / aspect), round(side * aspect)).save(folder / f"{number:03d}.png")
    return str(root)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return write_shapes(tmp_path_factory.mktemp("shapes"), 60)


def data_of(root, **options):
    return ImageFolderData(root, **{"native": True, "patch_size": 8, "batch_size": 16, "num_workers": 0, **options})


@pytest.mark.parametrize("budget", [16, 196])
def test_little_padding(shapes, budget):
    data = data_of(shapes, max_tokens=budget)
    for loader in (data.train_dataloader(), data.val_dataloader()):
        tokens = real = 0
        for images, _ in loader:
            assert images["patch_valid"].shape[1] <= budget
            tokens, real = tokens + images["patch_valid"].numel(), real + int(images["patch_valid"].sum())
        assert real >= 0.9 * tokens


def assert_same(one, other):
    for (images, labels), (theirs, wanted) in zip(one, other, strict=True):
        assert torch.equal(labels, wanted)
        for name, value in images.items():
            assert torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name]


def test_order_and_augmentation_follow_from_seed_epoch_and_position(shapes):
    """Neither the number of workers nor the batch at which a training resumes matters."""
    data = data_of(shapes, max_tokens=16, augment="deit")
    first = list(data.train_dataloader())
    assert_same(list(data_of(shapes, max_tokens=16, augment="deit", num_workers=2).train_dataloader()), first)
    data.begin_at(0, 2)
    assert_same(list(data.train_dataloader()), first[2:])
    data.begin_at(1, 0)
    assert not torch.equal(next(iter(data.train_dataloader()))[1], first[0][1])


def test_evaluation_is_in_order_and_names_what_it_skips(shapes, tmp_path):
    write_shapes(tmp_path, 6)
    (tmp_path / "val" / "a" / "008.png").touch()
    data = data_of(str(tmp_path), max_tokens=16, batch_size=2, on_error="skip")
    paths = data.dataset("predict").paths
    names = [name for _, batch in data.predict_dataloader() for name in batch]
    assert names == [path for path in paths if not path.endswith("008.png")]
    assert [path[-7:] for path in data.unreadable["predict"]] == ["008.png"]


def test_images_in_memory(monkeypatch):
    """Images in memory are transformed one by one, although images of one size could be transformed as a batch."""
    images = StackedImages(torch.randint(256, (5, 32, 32, 3), dtype=torch.uint8), [0] * 5, None)
    data = CIFAR10Data("nowhere", native=True, patch_size=4, batch_size=5, num_workers=0, augment="none")
    images.transform = data.eval_transform
    monkeypatch.setattr(data, "build", lambda split: images)
    monkeypatch.setattr(data, "missing", lambda split: None)
    ((batch, _),) = data.val_dataloader()
    assert batch["grid_size"] == (8, 8)
    one_size = eval_transform(32, data.mean, data.std)
    for i, image in enumerate(images_of(batch)):
        assert torch.equal(image, one_size(Image.fromarray(images.values(i))))


def test_budget_and_size_of_the_model(shapes):
    assert data_of(shapes, max_tokens=30).img_size == (40, 40)
    data = data_of(shapes, img_size=(50, 26))
    assert (data.shape.max_tokens, data.img_size, data.max_tokens) == (18, (50, 26), None)
    assert data_of(shapes, img_size=5).shape.max_tokens == 1
    kept = data_of(shapes, max_tokens=30, patch_size=(8, 4))
    again = type(kept)(**kept.init_args())
    assert (again.shape.max_tokens, again.patch_size, again.img_size) == (30, (8, 4), (40, 20))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"native": False, "max_tokens": 9}, "max_tokens 9 is for native images: set native, or leave it out"),
        ({"max_tokens": 0}, "max_tokens is 0; give the number of patches of an image, such as 196"),
        ({"patch_size": 0}, "patch_size is 0; give a positive integer"),
        ({"train_sizes": [32, 48]}, "train_sizes gives all images of a batch one size"),
        ({"augment": "three-augment-crop"}, "'three-augment-crop' crops to one size: with native use 'three-augment'"),
    ],
    ids=str,
)
def test_errors(shapes, options, message):
    with pytest.raises(ValueError, match=message):
        data_of(shapes, **options)
