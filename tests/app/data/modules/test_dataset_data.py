"""DatasetData: transforms, labels, names, the images that are held out, exact resume, and wrong arguments."""

from pathlib import Path

import numpy as np
import pytest
import torch
from lightning import Callback, Trainer, seed_everything
from PIL import Image
from small_training import assert_close
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

import relvit
from relvit.app.cli.errors import describe
from relvit.app.data import DatasetData, DigitsData, eval_transform
from relvit.app.data.loading.deterministic import SeededIndex
from relvit.app.evaluation import EvaluationReport, PredictionTable
from relvit.app.training import ImageClassifier

NAMES = ["ant", "bee", "cat"]
GENERATOR = np.random.default_rng(0)
PIXELS = [GENERATOR.integers(0, 256, (18 + index, 30, 3), dtype=np.uint8) for index in range(20)]


class Pairs(Dataset):
    """Images of different sizes and of one type, with labels of NumPy; `targets` is an attribute only on request."""

    def __init__(self, kind=Image.fromarray, targets=False, labels=None):
        self.kind = kind
        self.labels = np.arange(20) % 3 if labels is None else labels
        if targets:
            self.targets = self.labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.kind(PIXELS[index]), self.labels[index]


class Fewer(Pairs):
    """A dataset with fewer images than labels."""

    def __init__(self):
        super().__init__(targets=True)

    def __len__(self):
        return 5


class Shifted(Pairs):
    """A dataset whose `targets` are not the labels of its items."""

    def __init__(self):
        super().__init__(targets=True)
        self.targets = np.roll(self.labels, 1)


def tensor(pixels):
    return torch.from_numpy(pixels).permute(2, 0, 1) / 255


def data_of(train, **options):
    return DatasetData(
        train, **{"class_names": NAMES, "img_size": (12, 16), "num_workers": 0, "batch_size": 4} | options
    )


@pytest.mark.parametrize("kind", [Image.fromarray, np.asarray, tensor])
def test_images_of_any_kind_are_transformed_as_files_are(kind):
    data = data_of(Pairs(kind), val=Pairs(kind), crop_pct=0.8)
    expected = eval_transform((12, 16), data.mean, data.std, 0.8)
    images, labels = next(iter(data.val_dataloader()))
    assert labels.tolist() == [0, 1, 2, 0]
    for image, pixels in zip(images, PIXELS, strict=False):
        torch.testing.assert_close(image, expected(Image.fromarray(pixels)), atol=0, rtol=0)
    augmented = data.dataset("train")[0][0]
    assert augmented.shape == (3, 12, 16)
    assert not torch.equal(augmented, images[0])
    grey = data_of(Pairs(kind), in_chans=1, mean=(0.2,)).dataset("val")[1][0]
    assert grey.shape == (1, 12, 16)


def test_native_shapes_and_several_sizes():
    data = data_of(Pairs(), val=Pairs(), native=True, max_tokens=6, patch_size=4)
    assert next(iter(data.val_dataloader()))[0]["patches"].shape[2:] == (4, 4, 3)
    loader = data_of(Pairs(), train_sizes=[8, (12, 16)]).train_dataloader()
    assert {tuple(images.shape[2:]) for images, _ in loader} == {(8, 8), (12, 16)}


@pytest.mark.parametrize("known", [True, False])
def test_a_part_of_train_is_put_aside(known):
    data = data_of(Pairs(targets=known), val_fraction=0.25)
    aside, rest = data.dataset("val"), data.dataset("train")
    assert (len(aside), len(rest)) == ((6, 14) if known else (5, 15))
    indices = {*aside.source.indices}
    assert indices.isdisjoint(rest.source.indices)
    if known:
        assert sorted(aside.targets) == [0, 0, 1, 1, 2, 2]
    held_out = {(int(name), label) for name, label in data.held_out()}
    assert held_out == {(index, index % 3 if known else ()) for index in indices}
    assert data.part_note("val").startswith("the images have no val of their own, so val is a part of them, the ")
    # The numbers show a resumed training that other images are held out, also where no labels are known.
    listed = [(int(image.name), image.label) for image in data.manifest("train")]
    assert listed == [(index, NAMES[index % 3] if known else "") for index in rest.source.indices]
    part = data_of(Subset(Pairs(targets=known), range(4, 20)), val=Subset(Pairs(), [3, 1]))
    assert [[int(image.name) for image in part.manifest(split)] for split in ("train", "val")] == [
        [*range(4, 20)],
        [3, 1],
    ]
    assert data_of(Pairs(targets=known), val_fraction=0.25).dataset("val").source.indices == aside.source.indices


def test_options_of_the_split_have_no_effect_where_there_is_a_val(recwarn):
    data_of(Pairs(), val_fraction=0.5).setup("fit")
    data_of(Pairs(), val=Pairs(), val_fraction=0.5, split_seed=3).setup("fit")
    assert [str(warning.message) for warning in recwarn] == [
        f"{name} has no effect, since the data have their own val" for name in ("val_fraction 0.5", "split_seed 3")
    ]


def test_classes_that_a_dataset_knows_and_balance():
    pairs = Pairs(targets=True)
    pairs.classes = NAMES
    data = DatasetData(Subset(pairs, range(16)), val=pairs, class_names=NAMES, balance="loss", img_size=8)
    counts = np.array([6, 5, 5])
    np.testing.assert_allclose(data.class_weights, 16 / (3 * counts), rtol=1e-6)
    assert DatasetData(pairs).class_names == NAMES
    with pytest.raises(ValueError, match=r"balance 'loss' needs .* `targets`"):
        data_of(Pairs(), balance="loss")


def test_labels_of_joined_datasets_are_known_if_those_of_all_parts_are():
    known = Pairs(targets=True)
    joined = ConcatDataset([Subset(known, [0, 3, 4]), Subset(ConcatDataset([known, known]), [22, 21]), known])
    data = data_of(Subset(joined, range(8)), val=joined, balance="loss")
    assert data.dataset("train").targets == [0, 0, 1, 2, 1, 0, 1, 2]
    np.testing.assert_allclose(data.class_weights, 8 / (3 * np.array([3, 3, 2])), rtol=1e-6)
    assert [label for _, label in data.dataset("val")] == data.dataset("val").targets
    with pytest.raises(ValueError, match=r"balance 'loss' needs .* `targets`"):
        data_of(ConcatDataset([known, Pairs()]), balance="loss")


class Turned(Pairs):
    """A dataset whose items have other labels than its `targets`, by a function, as torchvision's datasets."""

    classes = NAMES

    def __init__(self, **options):
        super().__init__(targets=True, **options)
        self.target_transform = lambda label: int(label > 0)

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image, self.target_transform(label)


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor, list])
def test_labels_that_a_dataset_transforms_are_known_transformed(kind):
    data = data_of(Turned(labels=kind(np.arange(20) % 3)), class_names=["ant", "other"], balance="loss")
    train = data.dataset("train")
    assert [train[index][1] for index in range(len(train))] == train.targets
    np.testing.assert_allclose(data.class_weights, len(train) / 2 / np.bincount(train.targets), rtol=1e-6)
    assert {image.label for image in data.manifest("train")} == {"ant", "other"}


def test_a_class_of_several_names():
    pairs = Pairs()
    pairs.classes = [("tench", "Tinca tinca"), ("dog",), "owl"]
    assert DatasetData(pairs).class_names == ["tench, Tinca tinca", "dog", "owl"]


def known_by(*classes):
    pairs = Pairs()
    pairs.classes = classes
    return pairs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": known_by(*NAMES), "val": known_by("ant", "cat")}, "'cat' .* label 1 in `classes` of val, and 2 in"),
        (
            {"train": Subset(known_by("cat", "ant", "bee"), range(9))},
            "'cat' .* 0 in `classes` of train, and 2 in class",
        ),
        (
            {"test": known_by("bee", "cat")},
            "'bee' has the label 0 in `classes` of test, and 1 in class_names: give the",
        ),
        (
            {"train": known_by("n1", "n2", "n3"), "test": Subset(known_by("n1", "n3"), range(9))},
            "'n3' has the label 1 in `classes` of test, and 2 in `classes` of train",
        ),
        (
            {"train": ConcatDataset([known_by(*NAMES), known_by("ant", "cat")])},
            "'cat' has the label 1 in `classes` of train, and 2 in class_names",
        ),
        (
            {"train": known_by(*NAMES), "val": Subset(ConcatDataset([Pairs(), known_by("bee", "cat")]), range(9))},
            "'bee' has the label 0 in `classes` of val, and 1 in class_names",
        ),
    ],
)
def test_labels_of_another_order_are_refused(options, message):
    """torchvision's `ImageFolder` numbers the classes that have a folder, so splits may have different orders."""
    with pytest.raises(ValueError, match=message):
        DatasetData(class_names=NAMES, **options)


def test_classes_of_datasets_may_have_other_names_or_be_fewer():
    DatasetData(known_by("ANT", "bee", "Cat"), known_by("ant", "bee"), Turned(), class_names=NAMES)
    twice = known_by("crane", "bee", "crane")
    DatasetData(twice, twice, class_names=["crane", "bee", "crane (bird)"])


class Renumbered(Subset):
    """The images of some classes, whose labels the subset numbers anew."""

    classes = ("bee", "cat")

    def __init__(self, pairs):
        super().__init__(pairs, np.flatnonzero(pairs.labels > 0))
        self.targets = [pairs.labels[index] - 1 for index in self.indices]

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image, label - 1

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def test_a_subset_may_have_classes_and_labels_of_its_own():
    pairs = known_by(*NAMES)
    pairs.targets = pairs.labels
    data = data_of(Renumbered(pairs), val=Renumbered(pairs), class_names=None, balance="loss")
    labels = torch.cat([labels for _, labels in data.val_dataloader()])
    assert labels.tolist() == [index % 3 - 1 for index in range(20) if index % 3]
    assert data.class_names == ["bee", "cat"]
    np.testing.assert_allclose(data.class_weights, 13 / 2 / np.bincount(labels), rtol=1e-6)


def test_several_labels():
    labels = np.eye(3, dtype=np.int64)[np.arange(20) % 3]
    data = data_of(Pairs(labels=labels, targets=True), multi_label=True)
    assert data.dataset("train").targets[0].dtype == bool
    _, label = data.dataset("val")[0]
    assert label.dtype == bool
    assert label.sum() == 1
    assert {image.label for image in data.manifest("train")} == set(NAMES)


def test_what_is_predicted():
    class Named(Pairs):
        def __getitem__(self, index):
            return self.kind(PIXELS[index]), f"shot {index}"

    class Alone(Pairs):
        def __getitem__(self, index):
            return PIXELS[index]

    files = [(PIXELS[0], Path("shots", f"{index}.png")) for index in range(2)]
    for options, expected in (
        ({"predict": files}, "shots/1.png"),
        ({"test": Pairs()}, "test/00001"),
        ({"val": Pairs()}, "val/00001"),
        ({"predict": Named(), "test": Pairs()}, "shot 1"),
        ({"predict": Alone()}, "predict/00001"),
    ):
        assert data_of(Pairs(), **options).dataset("predict")[1][1] == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: data_of(Pairs(), class_names=None), r"no class_names; give the name of each class"),
        (lambda: data_of(Pairs(), in_chans=4), r"in_chans is 4; .* 3 channels, or 1"),
        (lambda: data_of(Pairs()).dataset("test"), r"no test dataset; give one \(test=...\)"),
        (lambda: data_of(None).dataset("val"), r"no val dataset"),
        (lambda: data_of(Pairs(labels=[])).setup("fit"), r"the train dataset is empty: check where"),
        (lambda: data_of(Pairs(targets=True, labels=[]), balance="loss").setup("fit"), r"the train dataset is empty"),
        (lambda: data_of(Pairs(), val=Pairs(labels=[])).setup("fit"), r"the val dataset is empty"),
        (lambda: data_of(Pairs(), test=Pairs(labels=[])).setup("predict"), r"the test dataset is empty"),
        (
            lambda: data_of(Fewer(), val=Pairs()).setup("fit"),
            r"`targets` of Fewer must be .* its 5 items, in order, as .* got an array of shape \(\d+,\)",
        ),
        (lambda: data_of(Fewer(), balance="sampler"), r"`targets` of Fewer must be .* its 5 items"),
        (lambda: data_of(Pairs(targets=True, labels=np.ones(20)), balance="loss"), r"`targets` .* type float64"),
        (lambda: data_of(Pairs(targets=True, labels=["ant"] * 20), balance="sampler"), r"`targets` .* type <U3"),
        (
            lambda: data_of(Pairs(targets=True, labels=[["ant"], []] * 10), multi_label=True).setup("fit"),
            r"`targets` .* as 0 or 1 for each class, got an array of shape \(20,\) and type object",
        ),
        (
            lambda: data_of(Shifted(), val=Pairs()).dataset("train")[1],
            r"item 1 of Shifted has the label 1, but `targets` says 0: correct `targets`",
        ),
        (
            lambda: data_of(Pairs(targets=True), val=Pairs(), class_names=NAMES[:2]).setup("fit"),
            r"item 2 of Pairs has the label 2; allowed is a whole number from 0 to 1",
        ),
        (lambda: DatasetData(Turned()), r"Turned has a target_transform, .*: give class_names"),
        (lambda: data_of(Pairs()).dataset("predict"), r"no dataset to predict"),
        (lambda: data_of(TensorDataset(torch.rand(9, 3, 8, 8))).dataset("train")[0], r"item \d of .* give a pair"),
        (
            lambda: data_of(None, predict=TensorDataset(torch.rand(9, 3, 8, 8))).dataset("predict")[1],
            r"item 1 of TensorDataset is a tuple of 1; give an image, or a pair \(image, name\)",
        ),
        (lambda: data_of(Pairs(lambda p: tensor(p) * 5 - 2)).dataset("train")[1], r"item \d of Pairs: .* not normal"),
        (lambda: data_of(Pairs(labels=np.full(20, 3))).dataset("train")[1], r"label .*3.*; allowed is .* 0 to 2"),
        (lambda: data_of(Pairs(labels=["ant"] * 20)).dataset("train")[1], r"label 'ant'; allowed is a whole number"),
        (
            lambda: data_of(Pairs(labels=np.eye(3, dtype=int)[[0] * 20])).dataset("train")[1],
            r"label array\(\[1, 0, 0\]\); allowed is .*; with multi_label=True, 0 or 1 for each class",
        ),
        (lambda: data_of(Pairs(), multi_label=True).dataset("train")[1], r"0 or 1 for each of the 3 classes"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def trainer_in(folder, *callbacks, epochs=2):
    off = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(max_epochs=epochs, accelerator="cpu", default_root_dir=folder, callbacks=[*callbacks], **off)


class SaveWithin(Callback):
    """Save in the middle of an epoch; if the file exists already, end the training there."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 6 and not self.path.exists():
            trainer.save_checkpoint(self.path)


def test_a_dataset_is_all_it_takes(tmp_path):
    """A dataset in Python is trained by Lightning's Trainer, resumed bit for bit, tested, predicted and loaded."""
    kwargs = {"patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2, "drop_rate": 0.1}

    def fit(*callbacks, ckpt_path=None):
        seed_everything(3, verbose=False)
        model = ImageClassifier(
            "test_relvit", 3, img_size=(12, 16), class_names=NAMES, model_kwargs=kwargs, mixup=0.5, ema_decay=0.9
        )
        data = data_of(Pairs(targets=True), val=Pairs(), test=Pairs(), augment="crop-flip")
        trainer = trainer_in(tmp_path, *callbacks)
        trainer.fit(model, data, ckpt_path=ckpt_path, weights_only=True)
        return model, data, trainer

    model, data, trainer = fit(SaveWithin(tmp_path / "within.ckpt"))
    again, _, _ = fit(ckpt_path=tmp_path / "within.ckpt")
    assert_close(again.state_dict(), model.state_dict())
    assert_close(again.average.net.state_dict(), model.average.net.state_dict())

    path = trainer.checkpoint_callback.best_model_path
    report, table = EvaluationReport(tmp_path), PredictionTable(tmp_path / "predictions.csv", NAMES, False)
    trainer_in(tmp_path, report).test(again, data, ckpt_path=path, verbose=False)
    trainer_in(tmp_path, table).predict(again, data, ckpt_path=path, return_predictions=False)
    found = relvit.load(path)
    expected = [found.predict(Image.fromarray(pixels)) for pixels in PIXELS]
    right = [prediction.name == NAMES[index % 3] for index, prediction in enumerate(expected)]
    assert report.results["images"] == 20
    assert report.results["test/acc1"] == pytest.approx(np.mean(right))
    lines = (tmp_path / "predictions.csv").read_text().splitlines()[1:]
    assert [line.split(",")[:2] for line in lines] == [
        [f"test/{index:05d}", prediction.name] for index, prediction in enumerate(expected)
    ]


def test_random_transforms_of_the_dataset_itself_are_seeded():
    class Noisy(Pairs):
        def __getitem__(self, index):
            return torch.rand(3, 8, 8), 0

    loader = data_of(Noisy(), val=Pairs()).train_dataloader()
    item = SeededIndex(3, 1, 7)
    assert torch.equal(loader.dataset[item][0], loader.dataset[item][0])


def test_an_unknown_option_is_one_of_the_class_that_was_called():
    for cls, given in ((DatasetData, {"class_names": NAMES}), (DigitsData, {})):
        with pytest.raises(TypeError, match=rf"^{cls.__name__} has no argument 'batchsize' \(did you mean 'batch_size"):
            cls(**given, batchsize=3)


def test_a_dataset_that_can_only_be_iterated_is_refused_at_the_start():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(Pairs())

    with pytest.raises(TypeError, match=r"val is a Stream, which has no length .*: give a dataset with __len__ and"):
        data_of(Pairs(), val=Stream())

    # A table has a length and columns by name, but no numbered items.
    table = type("DataFrame", (), {"__len__": lambda _: 3, "__getitem__": lambda _, name: None})()
    with pytest.raises(TypeError, match=r"train is a DataFrame: .* CSV file for ImageListData, or give a dataset"):
        data_of(table)


class Broken(Pairs):
    """A dataset whose item 7 raises an error."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def __getitem__(self, index):
        if index == 7:
            raise self.error()
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (lambda: KeyError("photo"), "KeyError: 'photo'\nwhile loading item 7 of Broken"),
        # A loader takes this error for the end of the images, so that the other images would silently be left out.
        (StopIteration, "RuntimeError: item 7 of Broken raises StopIteration: correct its __getitem__"),
    ],
)
def test_an_error_of_the_dataset_names_the_item(error, message, workers):
    data = data_of(Pairs(), val=Subset(Broken(error), range(2, 12)), num_workers=workers)
    batches = iter(data.val_dataloader())
    with pytest.raises((KeyError, RuntimeError)) as caught:
        list(batches)
    assert describe(caught.value) == message
    if workers:
        # Without this call the workers of an unfinished iterator end seconds later, while Python waits for them.
        batches._shutdown_workers()
