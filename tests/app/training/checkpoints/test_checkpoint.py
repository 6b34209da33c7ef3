"""The type `Checkpoint`."""

import re
from dataclasses import replace

import pytest
import timm
import torch
from sample_files import write_sample

import relvit
from relvit.app.data import DigitsData, ImageData, ImageFolderData, ImageListData
from relvit.app.training import Checkpoint, classifier_of, read_checkpoint
from relvit.app.utils.masks import MASK


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_sample(tmp_path_factory.mktemp("samples") / "last.ckpt")


@pytest.fixture(scope="module")
def checkpoint(path):
    return Checkpoint.read(path)


def test_what_a_checkpoint_holds(path, checkpoint):
    content = read_checkpoint(path)
    assert checkpoint.weights.keys() == content["state_dict"].keys()
    classifier = classifier_of(checkpoint)
    assert not classifier.training
    assert all(torch.equal(tensor, checkpoint.weights[name]) for name, tensor in classifier.state_dict().items())
    assert checkpoint.architecture().model == content["relvit"]["model"]["model"] == classifier.hparams.model
    assert checkpoint.versions["relvit"] == relvit.__version__
    assert (checkpoint.resumable, checkpoint.finished_epochs()) == (True, 2)
    assert replace(checkpoint, resume_point=None, epoch=4).finished_epochs() == 5
    args = content["relvit"]["data"]["init_args"]
    mean, std = tuple(args["mean"]), tuple(args["std"])
    assert checkpoint.normalisation() == (mean, std)
    assert checkpoint.transforms() == ((16, 16), mean, std, args["crop_pct"])


def test_a_backend_of_the_training_that_is_not_installed_here_is_not_needed(checkpoint):
    classifier = classifier_of(replace(checkpoint, model=checkpoint.model | {"compile": "tensorrt"}))
    assert classifier.hparams.compile is False


def test_data_module_with_changes(checkpoint):
    data = checkpoint.data_module(img_size=24, root=None, batch_size=None)
    assert isinstance(data, DigitsData)
    assert (data.img_size, data.batch_size) == ((24, 24), checkpoint.data_args["batch_size"])
    with pytest.raises(ValueError, match=r"last.ckpt was trained with DigitsData, which has no rot: leave it out"):
        checkpoint.data_module(rot=1)
    foreign = replace(checkpoint, data={"class_path": "os.system", "init_args": {}})
    with pytest.raises(ValueError, match=r"the data module os.system: import it, or give --data os.system"):
        foreign.data_module()
    hidden = replace(checkpoint, data={"class_path": "relvit.app.data.ImageFolderData", "init_args": {"root": MASK}})
    with pytest.raises(ValueError, match=r"'root' of ImageFolderData; secrets are not saved: give --data.root"):
        hidden.data_module()


def test_another_kind_of_data_is_in_another_place(checkpoint, tmp_path):
    images = checkpoint.images_args | {"root": str(tmp_path)}
    folder = replace(checkpoint, data={"class_path": "relvit.app.data.ImageFolderData", "init_args": images})
    assert folder.with_data(ImageFolderData, batch_size=3).data_args["root"] == str(tmp_path)
    listed = folder.with_data(ImageListData, train="a.csv").data_args
    assert (listed["train"], listed["mean"], "root" in listed) == ("a.csv", images["mean"], False)
    assert folder.with_data(ImageListData, root="here").data_args["root"] == "here"


def test_options_that_contradict_the_weights_are_refused(checkpoint):
    checkpoint.check_network(checkpoint.model)
    for name, value in {"model": "test_vit", "img_size": [12, 8], "pretrained": "x.ckpt", "in_chans": 3}.items():
        with pytest.raises(ValueError, match=rf"was trained with {name} .*, not {re.escape(repr(value))}: drop that"):
            checkpoint.check_network(checkpoint.model | {name: value})
    data: ImageData = checkpoint.data_module()
    checkpoint.check_data(data)
    data.class_names = data.class_names[::-1]
    with pytest.raises(ValueError, match=r"was trained on other classes than the data has: their order is another; "):
        checkpoint.check_data(data)


def test_data_with_several_labels_are_refused_for_a_model_of_one_and_the_reverse(checkpoint, monkeypatch):
    assert not checkpoint.data_module().multi_label
    several = replace(checkpoint, model=checkpoint.model | {"multi_label": True})
    with pytest.raises(
        ValueError, match=r"trained with several labels per image \(multi_label True\), the data have one: .*separator"
    ):
        several.data_module()
    monkeypatch.setattr(DigitsData, "multi_label", True)
    assert several.data_module().multi_label
    with pytest.raises(
        ValueError, match=r"trained with one label per image \(multi_label False\), the data have several: "
    ):
        checkpoint.data_module()


@pytest.mark.parametrize(
    ("read", "changes"),
    [
        (classifier_of, {"weights": {}}),
        (classifier_of, {"model": {"model": "none"}}),
        (Checkpoint.architecture, {"model": {}}),
        (Checkpoint.class_names, {"data": {"class_path": "", "init_args": {}}}),
        (Checkpoint.class_names, {"data": {"class_path": "", "init_args": {"class_names": None}}}),
        (Checkpoint.transforms, {"data": {"class_path": "", "init_args": {"mean": [0.5]}}}),
        (Checkpoint.normalisation, {"data": {"class_path": "", "init_args": {"mean": ["red"]}}}),
        (Checkpoint.finished_epochs, {"resume_point": {"epoch": 1}}),
        (Checkpoint.finished_epochs, {"resume_point": None, "epoch": None}),
    ],
)
def test_content_that_is_missing_is_a_value_error(read, changes, checkpoint):
    with pytest.raises(ValueError, match=r"checkpoint|ckpt"):
        read(replace(checkpoint, **changes))


def test_a_model_of_a_users_own_has_to_be_imported(checkpoint, monkeypatch):
    foreign = replace(checkpoint, model=checkpoint.model | {"model": "of_my_own"})
    message = f"no model can be built from {re.escape(checkpoint.path)}: unknown model 'of_my_own'.* import the mod"
    with pytest.raises(ValueError, match=message):
        classifier_of(foreign)
    made = timm.model_entrypoint(checkpoint.model["model"])
    monkeypatch.setitem(timm.models._registry._model_entrypoints, "of_my_own", made)
    classifier_of(foreign)
