"""`relvit publish`: another process loads the folder with timm, and gets the same logits, images and classes."""

import errno
import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import timm
import torch
from huggingface_hub import HfApi
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

import relvit
from relvit.app.cli import main
from relvit.app.data.modules.paths import ImagePathsData
from relvit.app.evaluation import embed_folder
from relvit.app.evaluation.deploy import PublishError, export_model, publish_model, save_model
from relvit.app.evaluation.deploy.timm_format import save_folder
from relvit.app.training import ImageClassifier
from relvit.app.training.checkpoints.pretrained import Pretrained
from relvit.models import set_reach, transfer_weights

# These values differ from those in timm's configurations.
OWN = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.25), "crop_pct": 0.8}
RETROFIT = {"abs_pos": "drop", "max_distance": [1, 2]}
TINY = {"patch_size": 8, "embed_dim": 12, "depth": 2}
# Each case has changed arguments of the model and of the data. The image size is not square; for native shapes it is
# the largest size.
CASES = {
    "relvit": (
        {"model_kwargs": {**TINY, "rel_terms": "kvb", "pos_embed": "learn", "reg_tokens": 2}, "channels_last": True},
        {"class_names": ["a [b] {c}", 'größe\t"q"', "猫: `x`"]},
    ),
    "native": (
        {"model_kwargs": {**TINY, "reversible": True}},
        {"native": True, "patch_size": 8, "max_tokens": 12},
    ),
    "aft": ({"model": "test_relvit_aft", "model_kwargs": TINY}, {}),
    "universal": ({"model": "test_relvit_universal", "model_kwargs": {**TINY, "halting": "act"}}, {}),
    "lsh": ({"model": "test_relvit_lsh", "model_kwargs": TINY}, {}),
    "retrofit": ({"model": "test_vit", "model_kwargs": None, "retrofit": RETROFIT}, {}),
    "imported": ({"model": "test_vit_relpos", "model_kwargs": None, "retrofit": {}}, {"img_size": [32, 48]}),
    "timm": ({"model": "test_resnet", "model_kwargs": None}, OWN),
}
DEFAULT = {"img_size": [16, 24], "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "crop_pct": 0.9}
BICUBIC = {"crop_mode": "center", "interpolation": "bicubic"}
LOAD = """
import sys, timm, relvit, torch
images = torch.load(sys.argv[1])
logits = {}
for name, image in images.items():
    model = timm.create_model(f"local-dir:{name}", pretrained=True).eval()
    with torch.no_grad():
        logits[name] = model(image)
relvit.load
heavy = {"lightning", "torchmetrics", "matplotlib", "sklearn", "jsonargparse", "relvit.app"}
assert not heavy & set(sys.modules)
torch.save(logits, sys.argv[2])
"""


def write_checkpoint(best, target, model, data):
    """Write a copy of a checkpoint with random weights, and other random weights as the averaged weights."""
    content = torch.load(best, weights_only=True)
    shared = {"img_size": [16, 24]} | {name: data[name] for name in ("class_names", "img_size") if name in data}
    content["relvit"]["model"] |= {**shared, **model}
    content["relvit"]["data"]["init_args"] |= {**shared, **data}
    for key in ("state_dict", "ema_state_dict"):
        classifier = ImageClassifier(**content["relvit"]["model"])
        for parameter in classifier.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        content[key] = classifier.state_dict()
    torch.save(content, target)
    return target


@pytest.fixture(scope="module")
def published(best, tmp_path_factory):
    """Publish each case into a folder beside its checkpoint."""
    place = tmp_path_factory.mktemp("published")
    torch.manual_seed(0)
    for name, (model, data) in CASES.items():
        publish_model(write_checkpoint(best, place / f"{name}.ckpt", model, data), str(place / name))
    return place


@pytest.mark.elsewhere
@pytest.mark.parametrize("name", CASES)
def test_transformers_compute_the_same(published, name, capsys):
    transformers = pytest.importorskip("transformers")
    folder = str(published / name)
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    theirs = transformers.AutoModelForImageClassification.from_pretrained(folder)
    images = torch.randn(2, 3, *CASES[name][1].get("img_size", [16, 24]))
    with torch.no_grad():
        torch.testing.assert_close(theirs(images).logits, model(images), rtol=0, atol=1e-6)
        features = transformers.AutoModel.from_pretrained(folder)(images).last_hidden_state
        torch.testing.assert_close(features, model.forward_features(images), rtol=0, atol=1e-6)
    # transformers' `Trainer` trains with this loss.
    loss = theirs(images, labels=torch.tensor([0, 1])).loss
    loss.backward()
    torch.nn.functional.cross_entropy(model(images), torch.tensor([0, 1])).backward()
    for (leaf, ours), other in zip(model.named_parameters(), theirs.timm_model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, ours.grad, rtol=1e-5, atol=1e-6, msg=leaf)
    assert [*theirs.config.id2label.values()] == model.pretrained_cfg["label_names"]
    # transformers and timm make the same pixels from an image.
    image = Image.effect_noise((40, 30), 80).convert("RGB")
    pixels = transformers.AutoImageProcessor.from_pretrained(folder)(image)["pixel_values"][0]
    torch.testing.assert_close(pixels, create_transform(**resolve_model_data_config(model))(image), rtol=0, atol=0)


def test_save_a_model_of_another_training(tmp_path):
    """The image size differs from the size in the model's name, and the model is in training mode."""
    model = relvit.retrofit(timm.create_model("test_vit", num_classes=2, img_size=(32, 48)), rel_terms="b")
    save_model(model, tmp_path / "model", ["no", "yes"], "mit")
    again = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True).eval()
    images = torch.randn(2, 3, 32, 48)
    assert torch.equal(again(images), model(images))
    assert again.pretrained_cfg["label_names"] == ["no", "yes"]
    assert again.pretrained_cfg["license"] == "mit"
    with pytest.raises(ValueError, match="has 3 names; give 2, one for each class"):
        save_model(model, tmp_path / "model", ["a", "b", "c"])


@pytest.mark.parametrize("name", ["test_vit", "test_relvit"])
def test_a_model_made_with_a_size_has_the_size_in_its_description(name, tmp_path):
    """The registered size, 160 px, is not a multiple of the patch here."""
    options = {"num_classes": 2, "patch_size": 12, "pos_embed": "learn"}

    def build(img_size):
        model = timm.create_model(name, img_size=img_size, **options)
        return relvit.retrofit(model) if name == "test_vit" else model

    model = build((36, 60))
    save_model(model, tmp_path / "model", ["no", "yes"])
    loaded = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True).eval()
    assert tuple(resolve_model_data_config(loaded)["input_size"]) == (3, 36, 60)
    images = torch.randn(2, 3, 36, 60)
    assert torch.equal(loaded(images), model(images))
    # The embedding is resized to a larger grid, and to a grid with the same number of patches.
    for img_size in ((60, 96), (60, 36)):
        found = build(img_size)
        transfer_weights(found, Pretrained(str(tmp_path / "model")).weights())
        prefix = model.num_prefix_tokens if name == "test_vit" else 0
        assert model.pos_embed.shape[1] == prefix + 15
        grid = model.pos_embed[:, prefix:].unflatten(1, (3, 5)).permute(0, 3, 1, 2)
        size = [side // 12 for side in img_size]
        resized = torch.nn.functional.interpolate(grid, size, mode="bicubic", antialias=True).flatten(2).mT
        torch.testing.assert_close(found.pos_embed[:, prefix:], resized, rtol=0, atol=1e-6)


def test_a_model_that_does_not_take_the_size_of_its_description(tmp_path):
    model = timm.create_model("relvit_tiny", depth=1, num_classes=2)
    model.pretrained_cfg["input_size"] = (3, 161, 160)
    with pytest.raises(PublishError, match=r"\['input_size'\], which is \(3, 161, 160\): .*; set it to \(channels"):
        save_model(model, tmp_path / "model", ["no", "yes"])


@pytest.mark.parametrize("reach", ["stretch", "logn", "windows", "mirror"])
def test_a_reach_is_not_lost_unsaid(reach, tmp_path):
    """A reach changes no outputs at the size in training, so the comparison there would not notice that it is lost."""
    model = timm.create_model("test_relvit", num_classes=2, img_size=(32, 48), pos_embed="learn", depth=1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    with pytest.raises(PublishError, match=r"if the model has a reach, .* call relvit\.models\.set_reach\(model, 't"):
        save_model(set_reach(model, reach), tmp_path / "model", ["no", "yes"])
    assert not (tmp_path / "model").exists()
    save_model(set_reach(model, "trained"), tmp_path / "model", ["no", "yes"])


def test_save_a_model_of_half_precision(tmp_path):
    model = timm.create_model("test_relvit", num_classes=2, img_size=(32, 48)).bfloat16()
    save_model(model, tmp_path / "model", ["no", "yes"])
    again = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True).eval()
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.float()), name


@pytest.mark.slow
def test_a_light_process_of_timm_and_relvit_alone_computes_the_same(published, tmp_path):
    generator = torch.Generator().manual_seed(1)
    sizes = {name: data.get("img_size", [16, 24]) for name, (_, data) in CASES.items()}
    images = {str(published / name): torch.randn(2, 3, *sizes[name], generator=generator) for name in CASES}
    torch.save(images, tmp_path / "images.pt")
    subprocess.run([sys.executable, "-c", LOAD, tmp_path / "images.pt", tmp_path / "logits.pt"], check=True)
    logits = torch.load(tmp_path / "logits.pt")
    for name in CASES:
        clf = relvit.load(published / f"{name}.ckpt")
        with torch.no_grad():
            expected = clf.model(images[str(published / name)])
        # Convolutions in another memory format may add up in another order, and so round differently.
        tolerance = 1e-6 if clf.classifier.hparams.channels_last else 0
        torch.testing.assert_close(logits[str(published / name)], expected, rtol=0, atol=tolerance)
        assert expected.std() > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_the_folder_holds_a_card_a_description_and_weights(published, name):
    written = {path.name for path in (published / name).iterdir()}
    assert written == {"README.md", "config.json", "model.safetensors"}


@pytest.mark.parametrize("name", CASES)
def test_timm_the_description_and_the_card_name_the_classes(published, name):
    names = relvit.load(published / f"{name}.ckpt").class_names
    model = timm.create_model(f"local-dir:{published / name}", pretrained=True)
    assert list(model.pretrained_cfg["label_names"]) == names
    config = json.loads((published / name / "config.json").read_text())
    assert (config["label_names"], config["num_classes"]) == (names, 3)
    card = (published / name / "README.md").read_text(encoding="utf-8")
    assert [each for each in names if f"`{each}`" not in card] == []


def test_the_description_and_the_card_have_the_budget_of_native_images(published):
    config = json.loads((published / "native" / "config.json").read_text())
    expected = {"version": relvit.__version__, "img_size": [24, 24], "patch_size": [8, 8], "max_tokens": 12}
    assert config["relvit"] == expected
    card = (published / "native" / "README.md").read_text(encoding="utf-8")
    assert card.count("native shapes of up to 12 patches of 8 x 8 px") == 2
    assert "**Images:** native shapes of up to 12 patches of 8 x 8 px, 3 channels" in card


@pytest.mark.parametrize("name", [name for name in CASES if name != "native"])
def test_timm_gets_the_size_and_normalisation_of_the_training(published, name):
    model = timm.create_model(f"local-dir:{published / name}", pretrained=True)
    data = DEFAULT | CASES[name][1]
    expected = {"input_size": (3, *data["img_size"]), **{key: data[key] for key in OWN}, **BICUBIC}
    described = resolve_model_data_config(relvit.load(published / f"{name}.ckpt").model)
    assert described == expected
    # JSON turns tuples into lists, so compare as JSON.
    assert json.dumps(resolve_model_data_config(model)) == json.dumps(described)


@pytest.mark.parametrize("size", [(40, 60), (33, 91), (17, 16), (16, 24), (200, 31)])
@pytest.mark.parametrize("name", ["relvit", "imported", "timm"])
def test_timms_transform_makes_the_same_pixels(published, name, size):
    clf = relvit.load(published / f"{name}.ckpt")
    noise = torch.randint(0, 256, (*size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    image = Image.fromarray(noise.numpy())
    pixels = create_transform(**resolve_model_data_config(clf.model))(image)
    # `relvit predict` reads files by `file_transform`, for a checkpoint and for an exported file.
    files = ImagePathsData([], ["a", "b", "c"], clf.img_size, clf.mean, clf.std, clf.crop_pct)
    for ours in (clf.transform, files.file_transform):
        torch.testing.assert_close(pixels, ours(image), rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def grey(digits_run, tmp_path_factory):
    """A checkpoint for grey images, the model that timm loads after publishing with a licence, and the card."""
    folder, best = tmp_path_factory.mktemp("grey") / "digits", digits_run / "checkpoints" / "best.ckpt"
    publish_model(best, str(folder), license="mit")
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    return relvit.load(best), model, (folder / "README.md").read_text()


def test_grey_images_become_the_same_pixels_and_logits(grey):
    clf, model, _ = grey
    config = resolve_model_data_config(model)
    assert tuple(config["input_size"]) == (1, *clf.img_size)
    image = Image.fromarray(torch.arange(600).reshape(20, 30).remainder(256).to(torch.uint8).numpy())
    pixels = create_transform(**config)(image)
    torch.testing.assert_close(pixels, clf.transform(image), rtol=0, atol=1e-6)
    with torch.no_grad():
        assert torch.equal(model(pixels[None]), clf.model(pixels[None]))


def test_the_code_of_the_card_makes_images_grey(grey):
    assert 'load_rgb("photo.jpg").convert("L")' in grey[2]


def test_the_licence_is_in_the_card_and_in_timms_description(grey):
    _, model, card = grey
    assert "\nlicense: mit\n" in card
    assert "**Licence:** mit" in card
    assert model.pretrained_cfg["license"] == "mit"


def test_a_retrofitted_folder_to_start_a_training_from(published):
    folder = Pretrained(str(published / "retrofit"))
    kwargs = {"global_pool": "token"}
    assert folder.architecture() == ("test_vit", kwargs, RETROFIT)
    clf = relvit.load(published / "retrofit.ckpt")
    for name, weight in folder.weights().state.items():
        assert torch.equal(weight, clf.model.state_dict()[name])
    started = ImageClassifier(None, 3, 3, (16, 24), pretrained=str(published / "retrofit"))
    assert started.net.state_dict().keys() == clf.model.state_dict().keys()


def test_the_hub(best, tmp_path, monkeypatch, capsys):
    """A folder stands in for the hub."""

    def upload(api, *, repo_id, folder_path, commit_message):
        shutil.copytree(folder_path, tmp_path / repo_id)

    def download(repo_id, filename, **_):
        return str(tmp_path / repo_id / filename)

    monkeypatch.setattr(HfApi, "create_repo", lambda api, name, exist_ok: SimpleNamespace(repo_id=f"me/{name}"))
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    monkeypatch.setattr("timm.models._hub.hf_hub_download", download)
    assert main(["publish", str(best), "--to", "hf-hub:owls", "--license", "cc-by-4.0"]) == 0
    assert "timm.create_model('hf-hub:me/owls', pretrained=True)" in capsys.readouterr().out
    model, images = timm.create_model("hf-hub:me/owls", pretrained=True).eval(), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(model(images), relvit.load(best).model(images))
    text = (tmp_path / "me" / "owls" / "README.md").read_text()
    assert 'timm.create_model("hf-hub:me/owls", pretrained=True)' in text
    assert "# Model card for owls\n" in text


def test_mistakes(best, tmp_path, fails):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text('{"architecture": "bert"}')
    (tmp_path / "file").touch()
    for to, message in {
        tmp_path / "full": "is not empty and holds no model that relvit published: give a new folder",
        tmp_path / "file": "give a folder of this machine, or hf-hub:OWNER/NAME",
        "s3://bucket/model": "give a folder of this machine, or hf-hub:OWNER/NAME",
        "hf-hub:a/b/c": "'a/b/c'",
        "hf-hub:me/owls@main": "me/owls@main",
    }.items():
        assert message in fails(["publish", best, f"--to={to}"])
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["config.json"]
    assert "missing: --to; usage: relvit publish CKPT --to DIR|hf-hub:OWNER/NAME" in fails(["publish", best])


def test_a_full_disk_is_told_as_such(best, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("relvit.app.evaluation.deploy.timm_format.save_for_hf", full)
    with pytest.raises(OSError, match="No space left"):
        save_folder(relvit.load(best), str(tmp_path / "one"))


def test_what_timm_cannot_build_is_not_published(best, tmp_path):
    """A user's own position has no arguments that JSON can hold, and a model may differ from its description."""
    clf = relvit.load(best)
    mine = relvit.retrofit(timm.create_model("test_vit", num_classes=3), position=relvit.layers.SlopePosition2d)
    clf.classifier.net = mine
    with pytest.raises(
        PublishError,
        match=r"timm could not save the model and build it again: .*Model argument 'retrofit' is not serializable",
    ):
        save_folder(clf, str(tmp_path / "one"))
    clf = relvit.load(best)
    clf.model.register_forward_hook(lambda module, args, logits: logits + 1e-6)
    with pytest.raises(PublishError, match=r"from the files has outputs that differ by 1.0e-06"):
        save_folder(clf, str(tmp_path / "two"))


def test_arguments_of_another_type(tmp_path):
    model = timm.create_model("test_relvit", num_classes=3)
    with pytest.raises(TypeError, match=r"model is an OptimizedModule, which .*: give that one, model\._orig_mod"):
        save_model(torch.compile(model), tmp_path, ["a", "b", "c"])
    with pytest.raises(TypeError, match=r"model is a DataParallel, which wraps a model: give that one, model\.module"):
        save_model(torch.nn.DataParallel(model), tmp_path, ["a", "b", "c"])
    for names in ("cat", {0: "a", 1: "b", 2: "c"}):
        with pytest.raises(TypeError, match="class_names must be a list with the name of each class"):
            save_model(model, tmp_path, names)
    with pytest.raises(ValueError, match="class_names holds 'a' more than once"):
        save_model(model, tmp_path, ["a", "a", "b"])
    for call in (export_model, embed_folder):
        with pytest.raises(TypeError, match=r"predictor must be a Predictor, which relvit\.load returns, got Rel"):
            call(model, tmp_path / "a.onnx")
    assert list(tmp_path.iterdir()) == []
