"""A user's own loaders, data modules and subclasses of `ImageClassifier`: accepted batches, and refused ones."""

from types import MappingProxyType

import lightning
import numpy as np
import pytest
import torch
from PIL import Image
from small_training import KWARGS, NAMES, Noise, NoiseImages, assert_close, build, train, train_and_save
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relvit
from relvit.app.data import DatasetData
from relvit.app.training import Checkpoint, ImageClassifier
from relvit.app.training.base_classifier import run_batches

IMAGES = torch.randn(8, 3, 8, 12, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(8) % 7
HOT = torch.nn.functional.one_hot(LABELS, 7)
KIND = {"one": {}, "several": {"multi_label": True}}


def loader(labels):
    return DataLoader(list(zip(IMAGES, labels, strict=True)), batch_size=4)


def fit(training, evaluation, **arguments):
    """Train and validate with labels, and return the logged values."""
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(build(warmup_epochs=0, **arguments), loader(training), loader(evaluation))
    return trainer.callback_metrics


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_labels_of_every_whole_type_are_those_of_int64(dtype):
    assert_close(fit(LABELS.to(dtype), LABELS.to(dtype)), fit(LABELS, LABELS))


def test_labels_of_every_whole_type_are_those_of_int64_without_a_trainer():
    data = NoiseImages(4)
    for labels in (LABELS[:4].int(), LABELS[:4]):
        ((_, found),) = run_batches(torch.sum, [(IMAGES[:4], labels)], data)
        torch.testing.assert_close(found, LABELS[:4])
    with pytest.raises(ValueError, match="labels must be from 0 to 6, as there are 7 classes, got labels from 5 to 8"):
        list(run_batches(torch.sum, [(IMAGES[:4], LABELS[:4] + 5)], data))


class OwnAccuracy(lightning.Callback):
    """A metric of a user, from the logits of each batch of validation."""

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        images, labels = batch
        pl_module.log("val/own", (outputs.argmax(dim=1) == labels).float().mean(), batch_size=len(images))


def test_a_callback_computes_a_metric_from_the_logits_of_validation():
    options = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(callbacks=[OwnAccuracy()], **options)
    model = build()
    # Half of these labels are the model's own answers.
    labels = model.eval()(IMAGES).argmax(dim=1)
    labels[::2] = (labels[::2] + 1) % 7
    trainer.validate(model, loader(labels))
    assert trainer.callback_metrics["val/own"] == trainer.callback_metrics["val/acc1"] == 0.5


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_several_labels_of_every_type_are_those_of_bool(dtype):
    expected = fit(HOT.bool(), HOT.bool(), multi_label=True, label_smoothing=0.0)
    assert_close(fit(HOT.to(dtype), HOT.to(dtype), multi_label=True, label_smoothing=0.0), expected)


@pytest.mark.parametrize(
    ("kind", "training", "evaluation", "got"),
    [
        # If these labels were taken as soft targets, the loss would differ and the accuracy would be zero.
        ("one", LABELS, HOT.float(), r"whole numbers \(B,\); got float32 of shape \(4, 7\)"),
        ("one", LABELS, HOT, r"got int64 of shape \(4, 7\)"),
        ("one", LABELS.float(), LABELS, r"or soft targets, floating point \(B, 7\); got float32 of shape \(4,\)"),
        ("one", LABELS[:, None], LABELS, r"got int64 of shape \(4, 1\)"),
        ("one", HOT[:, :5].float(), LABELS, r"got float32 of shape \(4, 5\)"),
        ("several", LABELS, HOT, r"0 or 1 for each class, \(B, 7\), or soft .*; got int64 of shape \(4,\)"),
        ("several", HOT[:, :5], HOT, r"got int64 of shape \(4, 5\)"),
        # Some datasets mark unknown labels by -1.
        ("several", HOT * 2 - 1, HOT, r"got int64 of shape \(4, 7\) with values from -1 to 1"),
        ("several", HOT, HOT * 2 - 1, r"got int64 of shape \(4, 7\) with values from -1 to 1"),
        ("several", HOT * 1.5, HOT, r"or soft targets between them; got float32 .* from 0 to 1\.5"),
        ("several", HOT, HOT * 0.9, r"0 or 1 for each class, \(B, 7\); got float32 of shape \(4, 7\)"),
    ],
)
def test_labels_of_another_shape_or_type_are_refused(kind, training, evaluation, got):
    with pytest.raises(ValueError, match=f"labels must be .*{got}"):
        fit(training, evaluation, **KIND[kind])


@pytest.mark.parametrize(
    ("items", "got"),
    [
        ([{"image": IMAGES[0], "label": 1}] * 4, r"\(images, labels\), got a dict with 'image', 'label'"),
        ([(IMAGES[0], 1, "a.jpg")] * 4, "got a list of 3"),
        (IMAGES[:4], r"got a Tensor of shape \(4, 3, 8, 12\)"),
        ([(IMAGES[0], "cat")] * 4, r"the labels of a batch must be a tensor, got \('cat', "),
    ],
)
def test_batches_that_are_no_pairs_are_refused(items, got):
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(TypeError, match=got):
        trainer.fit(build(warmup_epochs=0), DataLoader(items, batch_size=4))


def test_images_alone_cannot_be_predicted():
    with pytest.raises(TypeError, match=r"\(images, names\), got a Tensor of shape \(2, 3, 8, 12\)"):
        lightning.Trainer(accelerator="cpu", logger=False).predict(build(), DataLoader(IMAGES[:2], batch_size=2))


@pytest.mark.parametrize(
    ("names", "arguments", "message"),
    [
        (NAMES[:3], {}, "the data have 3 classes .* the model has 7"),
        (NAMES[::-1], {"class_names": NAMES}, "class 0 is 'class 6' in the data and 'class 0' in the model"),
    ],
)
def test_data_of_other_classes_are_refused(names, arguments, message):
    data = NoiseImages(8)
    data.class_names = names
    for run in ("fit", "test"):
        trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
        with pytest.raises(ValueError, match=message):
            getattr(trainer, run)(build(**arguments), data)


class SixChannels(Noise):
    class_names, mean, std, crop_pct = NAMES, 0.5, 0.5, 1.0

    def __init__(self):
        super().__init__()
        self.images = torch.randn(23, 6, 8, 12)


def test_a_model_of_multispectral_images_takes_tensors(tmp_path):
    module, data = ImageClassifier("test_relvit", 7, 6, (8, 12), model_kwargs=KWARGS), SixChannels()
    train_and_save(tmp_path / "own.ckpt", module, data, max_epochs=1)
    clf = relvit.load(tmp_path / "own.ckpt")
    with torch.no_grad():
        torch.testing.assert_close(clf.probabilities(data.images), module.eval()(data.images).softmax(-1))
    assert clf.features(data.images).shape == (23, clf.num_features)
    with pytest.raises(ValueError, match="takes images of 6 channels; only 1 or 3 can be read: give batches"):
        clf.predict(data.images[0])


class InArrays(Noise):
    class_names = np.array(NAMES)
    mean, std = 0.4, np.float32(0.5)


def test_names_in_an_array_and_one_mean_for_all_channels(tmp_path):
    trainer = train(build(warmup_epochs=0), InArrays(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    images = torch.load(tmp_path / "own.ckpt", weights_only=True)["relvit"]["images"]
    assert (images["class_names"], images["mean"], images["std"]) == (NAMES, [0.4] * 3, [0.5] * 3)


def test_arguments_of_numpy_are_in_the_checkpoint_as_plain_values(tmp_path):
    """With NumPy's objects in a checkpoint, `relvit.load` could not read it."""
    names = np.array(NAMES)
    module = build(class_names=list(names), lr=np.float64(0.01), warmup_epochs=0, class_weights=torch.ones(7))
    pairs = [(Image.new("RGB", (12, 8)), label) for label in range(7)]
    data = DatasetData(pairs, pairs, class_names=names, img_size=(8, 12), crop_pct=np.float32(0.5), num_workers=0)
    train(module, data, max_epochs=1).save_checkpoint(tmp_path / "own.ckpt")
    checkpoint = Checkpoint.read(tmp_path / "own.ckpt")
    model = checkpoint.model
    assert (model["class_names"], model["lr"], model["class_weights"]) == (NAMES, 0.01, [1.0] * 7)
    assert checkpoint.transforms().crop_pct == 0.5
    assert relvit.load(tmp_path / "own.ckpt").class_names == NAMES
    with pytest.raises(TypeError, match=r"class_weights is an array .* class_weights.tolist\(\)"):
        build(class_weights=np.ones(7))


class Twice(Noise):
    class_names = (*NAMES[:6], NAMES[0])


class Numbered(Noise):
    class_names = MappingProxyType(dict(enumerate(NAMES)))


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [(Twice, ValueError, "holds 'class 0' more than once"), (Numbered, TypeError, "class_names must be a list")],
)
def test_names_of_own_loaders_are_checked_before_the_training(data, error, message):
    with pytest.raises(error, match=message):
        train(build(warmup_epochs=0), data(), max_epochs=1)


@pytest.mark.parametrize("name", ["model_kwargs", "retrofit", "opt_kwargs"])
def test_arguments_that_no_checkpoint_can_hold_are_refused(name):
    """A training would run to its end, and `relvit.load` could not read its checkpoint."""
    with pytest.raises(TypeError, match=rf"{name} holds 'position': <class .*SlopePosition2d'>, but checkpoints hold"):
        build(**{name: {"position": relvit.layers.SlopePosition2d}})


def test_classes_may_be_named_by_numbers():
    assert build(class_names=range(7)).hparams.class_names == list("0123456")


class Steps(ImageClassifier):
    """A subclass with another optimiser and a scheduler that Lightning calls after each epoch."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Plain(ImageClassifier):
    """A subclass with another optimiser and without a scheduler."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(("subclass", "rate"), [(Steps, 1e-4), (Plain, 0.1)])
def test_a_subclass_may_have_another_optimiser_and_goes_on_with_it(subclass, rate, tmp_path):
    def classifier():
        return build(cls=subclass)

    whole, half = classifier(), classifier()
    train(whole, NoiseImages(8), max_epochs=3)
    train(half, NoiseImages(8), max_epochs=2).save_checkpoint(tmp_path / "half.ckpt")
    resumed = classifier()
    trainer = train(resumed, NoiseImages(8), tmp_path / "half.ckpt", max_epochs=3)
    assert_close(resumed.state_dict(), whole.state_dict())
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(rate)


class ShardWithCopies(Noise):
    """The 23 images of `Noise`, divided among three processes as Lightning divides a user's own loader."""

    def __init__(self, rank, **options):
        super().__init__()
        self.rank, self.options = rank, options

    def val_dataloader(self):
        dataset = TensorDataset(self.images, self.labels)
        sampler = DistributedSampler(dataset, 3, self.rank, **self.options)
        return DataLoader(dataset, batch_size=4, sampler=sampler)

    test_dataloader = val_dataloader


@pytest.mark.parametrize("options", [{"shuffle": False}, {"shuffle": True}])
def test_copies_that_make_the_shards_of_an_evaluation_equal_do_not_count(options):
    """`DistributedSampler` gives each of the three processes eight images, although there are 23."""
    trainer = lightning.Trainer(accelerator="cpu", logger=False, use_distributed_sampler=False)
    module, right = build(), []
    for run in (trainer.validate, trainer.test):
        losses = []
        for rank in range(3):
            metrics = run(module, ShardWithCopies(rank, **options), verbose=False)[0]
            losses += [metrics[name] for name in metrics if name.endswith("loss")] * module.evaluated_images
        assert len(losses) == 23
        right.append(sum(losses) / 23)
    data = Noise()
    whole = torch.nn.functional.cross_entropy(module.eval()(data.images), data.labels)
    assert right == pytest.approx([float(whole)] * 2)


@pytest.mark.parametrize("name", ["class_weights", "class_names", "img_size"])
def test_an_attribute_error_in_a_data_module_is_raised(name):
    """Python takes such an error for a missing attribute, and the training would go on without the class weights."""
    data = type("Own", (Noise,), {name: property(lambda self: self.counts.sum())})()
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(AttributeError, match="'Own' object has no attribute 'counts'"):
        trainer.fit(build(), data)


def test_an_attribute_shape_of_own_data_may_mean_anything():
    data = Noise()
    data.shape = (23, 3, 8, 12)
    train(build(warmup_epochs=0), data, max_steps=1, limit_val_batches=0)


def test_a_training_with_another_number_of_steps_does_not_go_on(tmp_path):
    train_and_save(tmp_path / "x.ckpt", build(warmup_epochs=0), NoiseImages(4), max_epochs=1)
    text = "of 1 step in an epoch, of 4 images each, here it has 2 steps in an epoch, of 4 images each: go on with the"
    with pytest.raises(ValueError, match=text):
        train(build(warmup_epochs=0), NoiseImages(8), tmp_path / "x.ckpt", max_epochs=2)
