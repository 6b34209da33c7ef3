"""`relvit publish`: folders that timm loads in a process of its own, with the same logits, images and classes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
import yaml
from huggingface_hub import HfApi
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

import relvit
from relvit.app.cli import main
from relvit.app.data.modules.paths import ImagePathsData
from relvit.app.evaluation.deploy import PublishError, publish_model, save_model
from relvit.app.evaluation.deploy.publish import save_folder
from relvit.app.training import ImageClassifier
from relvit.app.training.checkpoints.pretrained import Pretrained

# timm's configurations have other values.
OWN = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.25), "crop_pct": 0.8}
RETROFIT = {"abs_pos": "drop", "max_distance": [1, 2]}
TINY = {"patch_size": 8, "embed_dim": 12, "depth": 2}
# name -> changed arguments of the model and of the data; the size is not square, and of the native ones the largest
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
    """Write a checkpoint like another, of random weights, and of others as the average."""
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
    """A folder for each case, beside its checkpoint."""
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
    # `Trainer` trains by this loss.
    loss = theirs(images, labels=torch.tensor([0, 1])).loss
    loss.backward()
    torch.nn.functional.cross_entropy(model(images), torch.tensor([0, 1])).backward()
    for (leaf, ours), other in zip(model.named_parameters(), theirs.timm_model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, ours.grad, rtol=1e-5, atol=1e-6, msg=leaf)
    assert [*theirs.config.id2label.values()] == model.pretrained_cfg["label_names"]
    # An image file becomes the same pixels.
    image = Image.effect_noise((40, 30), 80).convert("RGB")
    pixels = transformers.AutoImageProcessor.from_pretrained(folder)(image)["pixel_values"][0]
    torch.testing.assert_close(pixels, create_transform(**resolve_model_data_config(model))(image), rtol=0, atol=0)


def test_save_a_model_of_another_training(tmp_path):
    """Its size is not that of its name, and it is in training."""
    model = relvit.retrofit(timm.create_model("test_vit", num_classes=2, img_size=(32, 48)), rel_terms="b")
    save_model(model, tmp_path / "model", ["no", "yes"], "mit")
    again = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True).eval()
    images = torch.randn(2, 3, 32, 48)
    assert torch.equal(again(images), model(images))
    assert again.pretrained_cfg["label_names"] == ["no", "yes"]
    assert again.pretrained_cfg["license"] == "mit"
    with pytest.raises(ValueError, match="has 3 names, and the model has 2 classes"):
        save_model(model, tmp_path / "model", ["a", "b", "c"])


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
        # Convolutions of another memory format may add up in another order.
        tolerance = 1e-6 if clf.classifier.hparams.channels_last else 0
        torch.testing.assert_close(logits[str(published / name)], expected, rtol=0, atol=tolerance)
        assert expected.std() > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_images_and_classes(published, name):
    clf = relvit.load(published / f"{name}.ckpt")
    model = timm.create_model(f"local-dir:{published / name}", pretrained=True)
    assert list(model.pretrained_cfg["label_names"]) == clf.class_names
    config = json.loads((published / name / "config.json").read_text())
    assert config["label_names"] == clf.class_names
    assert config["num_classes"] == 3
    written = {path.name for path in (published / name).iterdir()}
    assert written == {"README.md", "config.json", "model.safetensors"}
    text = (published / name / "README.md").read_text(encoding="utf-8")
    for each in clf.class_names:
        assert f"`{each}`" in text
    if name == "native":
        assert config["relvit"] == {"version": relvit.__version__, "patch_size": [8, 8], "max_tokens": 12}
        assert text.count("native shapes of up to 12 patches of 8 x 8 px") == 2
        assert "**Images:** native shapes of up to 12 patches of 8 x 8 px, 3 channels" in text
        return
    described = resolve_model_data_config(clf.model)
    data = DEFAULT | CASES[name][1]
    assert described == {"input_size": (3, *data["img_size"]), **{key: data[key] for key in OWN}, **BICUBIC}
    # JSON has lists for tuples.
    assert json.dumps(resolve_model_data_config(model)) == json.dumps(described)
    # `relvit predict` reads files in this way, with a checkpoint and with an exported file.
    files = ImagePathsData([], ["a", "b", "c"], clf.img_size, clf.mean, clf.std, clf.crop_pct)
    transform = create_transform(**described)
    for size in ((40, 60), (33, 91), (17, 16), (16, 24), (200, 31)):
        noise = torch.randint(0, 256, (*size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        image = Image.fromarray(noise.numpy())
        for ours in (clf.transform, files.file_transform):
            torch.testing.assert_close(transform(image), ours(image), rtol=0, atol=1e-6)


def test_grey_images(digits_run, tmp_path):
    best = digits_run / "checkpoints" / "best.ckpt"
    publish_model(best, str(tmp_path / "digits"), license="mit")
    clf, model = relvit.load(best), timm.create_model(f"local-dir:{tmp_path / 'digits'}", pretrained=True).eval()
    config = resolve_model_data_config(model)
    assert tuple(config["input_size"]) == (1, *clf.img_size)
    image = Image.fromarray(torch.arange(600).reshape(20, 30).remainder(256).to(torch.uint8).numpy())
    pixels = create_transform(**config)(image)
    torch.testing.assert_close(pixels, clf.transform(image), rtol=0, atol=1e-6)
    with torch.no_grad():
        assert torch.equal(model(pixels[None]), clf.model(pixels[None]))
    text = (tmp_path / "digits" / "README.md").read_text()
    assert 'load_rgb("photo.jpg").convert("L")' in text
    assert "\nlicense: mit\n" in text
    assert "**Licence:** mit" in text
    assert model.pretrained_cfg["license"] == "mit"


def test_the_command_and_the_card(run, photos, tmp_path, monkeypatch, capsys, fails):
    """The card has results, a table of sizes and a recipe that trains, and its code runs unchanged."""
    folder, best = tmp_path / "run", tmp_path / "run" / "checkpoints" / "best.ckpt"
    shutil.copytree(run, folder)
    assert main(["resolutions", str(best), "--sizes", "16", "24", f"--root={photos}", f"--output={folder}"]) == 0
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main(["publish", str(best), "--to", "owls"]) == 0
    out = capsys.readouterr().out
    assert "timm.create_model('local-dir:owls', pretrained=True)" in out
    assert out.endswith(
        "The model card lacks:\n  the licence of the weights: publish with --license NAME, such as apache-2.0\n"
    )
    assert len({path.stat().st_mode for path in Path("owls").iterdir()}) == 1, "whom the files are for"
    text = Path("owls/README.md").read_text()
    summary = json.loads((folder / "summary.json").read_text())
    assert f"- test/acc1: {summary['test/acc1']:.4f} ± {summary['test/acc1_se']:.4f}\n" in text
    assert "_se" not in text
    assert f"- val/images: {len(list((photos / 'val').rglob('*.jpg')))}" in text
    header, _, first, second = text.partition("by image size\n\n")[2].splitlines()[:4]
    assert header == "| size | protocol | reach | images | accuracy | calibration error | MACs |"
    rows = json.loads((folder / "resolutions.json").read_text())
    for line, size, row in zip((first, second), (16, 24), rows, strict=True):
        figures = f"{row['acc1']:.4f} ± {row['acc1_se']:.4f} | {row['calibration_error']:.4f}"
        assert line.startswith(f"| {size} x {size} | crop | trained | 18 | {figures} |")
    assert "license: unknown" in text
    assert "**Licence:** not given" in text
    # Nothing of this machine.
    assert str(tmp_path) not in text
    assert str(photos) not in text
    Path("recipe.yaml").write_text(text.partition("```yaml\n")[2].partition("```")[0])
    recipe = yaml.safe_load(Path("recipe.yaml").read_text())
    assert recipe["model"]["lr"] == 5e-3
    assert recipe["data"]["init_args"] == {"img_size": [16, 16], "batch_size": 8}
    assert recipe["trainer"] == {"max_epochs": 4}
    options = ["--config=recipe.yaml", f"--data.root={photos}", "--trainer.fast_dev_run=true", "--data.num_workers=0"]
    assert main(["fit", *options, "--trainer.accelerator=cpu"]) == 0
    shutil.copy(photos / "test" / "owl" / "0.jpg", "photo.jpg")
    capsys.readouterr()
    exec(text.partition("```python\n")[2].partition("```")[0], {})
    name, probability = capsys.readouterr().out.split()
    found = relvit.load(best).predict("photo.jpg")
    assert (name, float(probability)) == (found.name, pytest.approx(found.probability, abs=1e-6))
    # Calibrated: the accuracies stay, the losses do not.
    content = torch.load(best, weights_only=True)
    content["relvit"]["temperature"] = 0.4321
    content["relvit"]["data"]["init_args"] |= {"cache": True, "crop_pct": 0.8}
    torch.save(content, best.with_name("best_calibrated.ckpt"))
    assert main(["publish", str(best.with_name("best_calibrated.ckpt")), "--to=calibrated"]) == 0
    text = Path("calibrated/README.md").read_text()
    recipe = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    assert recipe["data"]["init_args"] == {"img_size": [16, 16], "crop_pct": 0.8, "cache": True, "batch_size": 8}
    assert f"- test/acc1: {summary['test/acc1']:.4f}" in text
    assert "test/loss" not in text
    # Another one in its place; results are those of best.ckpt alone.
    torch.save(content, "other.ckpt")
    capsys.readouterr()
    assert main(["publish", "other.ckpt", "--to=owls"]) == 0
    licence, results, curve = capsys.readouterr().out.partition("The model card lacks:\n")[2].splitlines()
    assert licence.startswith("  the licence of the weights: ")
    assert results.startswith("  results: publish best.ckpt in the folder of its run, ")
    expected = (
        "relvit resolutions other.ckpt --sizes SIZE ... --output curve.json, then publish with --curve curve.json"
    )
    assert curve == f"  accuracy by image size: {expected}"
    text = Path("owls/README.md").read_text()
    assert "by image size" not in text
    assert "**Results:** not given" in text
    assert json.loads(Path("owls/config.json").read_text())["relvit"]["temperature"] == 0.4321
    capsys.readouterr()
    exec(text.partition("```python\n")[2].partition("```")[0], {})
    calibrated = relvit.load("other.ckpt").predict("photo.jpg").probability
    assert float(capsys.readouterr().out.split()[1]) == pytest.approx(calibrated, abs=1e-6)
    assert calibrated > found.probability + 1e-3
    message = fails(["publish", "other.ckpt", "--to=owls", "--curve=run/resolutions.json"])
    assert "run/resolutions.json has no figures of other.ckpt" in message
    # The remedy in the message works.
    assert main(["resolutions", "other.ckpt", "--sizes=16", f"--root={photos}", "--output=curve.json"]) == 0
    capsys.readouterr()
    assert main(["publish", "other.ckpt", "--to=owls", "--curve=curve.json", "--license=mit"]) == 0
    assert capsys.readouterr().out.partition("lacks:\n")[2].splitlines() == [results]
    # All of it.
    assert main(["publish", str(best), "--to=owls", "--license=mit"]) == 0
    assert "lacks" not in capsys.readouterr().out


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
    """A folder takes the place of the hub."""

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


def test_what_timm_cannot_build_is_not_published(best, tmp_path):
    """A position of a user's own has no plain arguments; another model than that of the description differs."""
    clf = relvit.load(best)
    mine = relvit.retrofit(timm.create_model("test_vit", num_classes=3), position=relvit.layers.SlopePosition2d)
    clf.classifier.net = mine
    with pytest.raises(PublishError, match="Model argument 'retrofit' is not serializable"):
        save_folder(clf, str(tmp_path / "one"))
    clf = relvit.load(best)
    clf.model.register_forward_hook(lambda module, args, logits: logits + 1e-6)
    with pytest.raises(PublishError, match=r"the published model's outputs differ by 1.0e-06"):
        save_folder(clf, str(tmp_path / "two"))
