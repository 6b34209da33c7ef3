"""DigitsData: the fixed split, the pixel values, and wrong arguments."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from relvit.app.data import DigitsData
from relvit.app.data.modules.digits import _digits

SPLITS = ("train", "val", "test")


def test_split_is_stratified_disjoint_and_the_same_whatever_the_seed():
    _, labels, indices = _digits()
    assert {name: len(indices[name]) for name in SPLITS} == {"train": 1257, "val": 180, "test": 360}
    assert sorted(np.concatenate([indices[name] for name in SPLITS])) == list(range(1797))
    assert np.bincount(labels[indices["val"]]).tolist() == [18] * 10
    assert set(np.bincount(labels[indices["test"]])) <= {35, 36, 37}
    assert indices["test"][:5].tolist() == [21, 24, 28, 34, 35]
    np.random.seed(123)
    torch.manual_seed(123)
    again = _digits.__wrapped__()[2]
    assert all(np.array_equal(again[name], indices[name]) for name in SPLITS)


def test_values_labels_and_statistics():
    images, _, indices = _digits()
    pixels = images[indices["train"]] / 255
    assert pixels.mean() == pytest.approx(DigitsData().mean[0], abs=1e-9)
    assert pixels.std() == pytest.approx(DigitsData().std[0], abs=1e-9)
    data = DigitsData(mean=(0.0,), std=(1.0,))
    bunch = load_digits()
    for position, index in enumerate(indices["test"][:5]):
        image, label = data.dataset("test")[position]
        assert label == bunch.target[index]
        expected = torch.from_numpy(bunch.images[index] / 16)
        torch.testing.assert_close(image[0].double(), expected, atol=0.501 / 255, rtol=0)


def test_loaders():
    data = DigitsData(batch_size=100)
    assert (data.class_names, data.num_classes, data.in_chans) == (list("0123456789"), 10, 1)
    data.setup("fit")
    assert len(data.train_dataloader()) == 13  # The last batch has 57 images.
    assert len(DigitsData(batch_size=1256).train_dataloader()) == 1  # A last batch of one image is left out.
    assert len(DigitsData(batch_size=5000).train_dataloader()) == 1  # The only batch is kept.
    assert [len(labels) for _, labels in data.val_dataloader()] == [100, 80]
    loader = data.train_dataloader()
    (images, first), again = next(iter(loader)), next(iter(loader))[1]
    assert (images.shape, images.dtype, first.dtype) == ((100, 1, 8, 8), torch.float32, torch.int64)
    loader.sampler.set_epoch(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, next(iter(loader))[1])


def test_predict_names_the_test_images():
    data = DigitsData(img_size=(16, 8))
    data.setup("predict")
    images, names = next(iter(data.predict_dataloader()))
    assert images.shape == (64, 1, 16, 8)
    assert names[7] == "digits/test/0007"
    torch.testing.assert_close(images[7], data.dataset("test")[7][0], rtol=0, atol=0)
    assert data.dataset("predict")[359][1] == "digits/test/0359"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"class_names": ["cat", "dog"]}, "class_names"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"num_workers": -1}, "num_workers must be"),
        ({"mean": (0.5, 0.5, 0.5)}, "have 1 channel, give one number for each"),
        ({"augment": "shfit"}, "did you mean 'shift'"),
        ({"img_size": (8, 8, 1)}, "img_size"),
    ],
)
def test_wrong_arguments(wrong, message):
    with pytest.raises(ValueError, match=message):
        DigitsData(**wrong)
