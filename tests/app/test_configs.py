"""Every shipped configuration is a whole experiment that the real signatures accept, and its header is true."""

import re
from pathlib import Path

import pytest
import timm
import torch
import yaml
from cifar_archive import make_archive
from photos import write_photos
from PIL import Image
from scripts import load
from torchvision.datasets import CIFAR10, CIFAR100

from relvit.app.cli import main
from relvit.app.cli.shipped_configs import shipped_configs
from relvit.app.data import CIFAR10Data, CIFAR100Data, ImageFolderData
from relvit.app.data.images.image_cache import InMemoryBatches

ROOT = Path(__file__).parents[2]
BY_NAME = shipped_configs()
CONFIGS = [BY_NAME[name] for name in sorted(BY_NAME)]
# These configurations are given after another configuration, to change its devices; the numbers are devices and
# machines.
DEVICES = {"multi_gpu": (8, 1), "multi_node": (8, 2)}
ADDITIONS = {*DEVICES, "bands", "lsh", "reversible", "universal"}
RECIPES = [path for path in CONFIGS if path.stem not in {*ADDITIONS, "retrofit"}]
ON_A_CPU = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.precision=32-true"]
# With batches of four images, learning rates that scale with the batch fall below the default of `min_lr`.
TINY_BATCH = ["--data.batch_size=4", "--model.min_lr=0"]
FAST = ["--trainer.fast_dev_run=true", "--trainer.enable_progress_bar=false", "--data.num_workers=0", *TINY_BATCH]
SMALL = {"embed_dim": 16, "depth": 2, "num_heads": 2}


def header(path):
    """The comment at the top, as one text."""
    lines = path.read_text().splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines[:end])


def field(path, name):
    """Return the text after a name in a header, up to the next name or paragraph."""
    found = re.search(rf"^{name}: (.*?)(?=^\w+: |\n\n|\Z)", header(path), re.DOTALL | re.MULTILINE)
    assert found, f"{path.name}: no '{name}:' in its header"
    return found[1].replace("\n", " ").strip()


@pytest.fixture(scope="module")
def wordnet(tmp_path_factory):
    """A folder like ImageNet's, with three classes."""
    root = write_photos(tmp_path_factory.mktemp("imagenet"), splits=("train", "val"), count=4)
    for split in ("train", "val"):
        for number, folder in enumerate(sorted((root / split).iterdir())):
            folder.rename(folder.with_name(f"n0000000{number}"))
    return root


def tiny(path, tmp_path, monkeypatch, photos, wordnet, run):
    """Return flags that make a recipe small, and give it tiny data of its kind."""
    config = yaml.safe_load(path.read_text())
    # LookHere has four directions, and each needs a head.
    heads = {"num_heads": 4} if "lookhere" in config["model"].get("model_kwargs", {}).get("position", "") else {}
    flags = [f"--model.model_kwargs.{name}={value}" for name, value in (SMALL | heads).items()]
    data = config["data"]["class_path"].rpartition(".")[2]
    if data in ("ImageNetData", "ImageFolderData"):
        if "pretrained" in config["model"]:
            source = f"--model.pretrained={run / 'checkpoints' / 'best.ckpt'}"
            # Without a checkpoint of a large model, use the small checkpoint, whose attention has the same width, depth
            # and MLP ratio.
            flags = [*flags, source, "--model.model_kwargs.mlp_ratio=3"] if data == "ImageNetData" else [source]
        return [*flags, f"--data.root={wordnet if data == 'ImageNetData' else photos}", "--data.img_size=32"]
    if data.startswith("CIFAR"):
        kind, own, labels, files = {
            "CIFAR10Data": (CIFAR10, CIFAR10Data, "labels", ["data_batch_1", "data_batch_2", "test_batch"]),
            "CIFAR100Data": (CIFAR100, CIFAR100Data, "fine_labels", ["train", "test"]),
        }[data]
        # With a hundred classes each class would have too few images to hold some out.
        make_archive(monkeypatch, tmp_path, kind, labels, files, own.classes[:10])
        return [*flags, f"--data.root={tmp_path}"]
    assert data == "DigitsData"
    return flags


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_options_exist(path, capsys):
    data = [] if "data" in yaml.safe_load(path.read_text()) else ["--data=DigitsData"]
    assert main(["fit", f"--config={path}", *data, "--print_config"]) == 0, capsys.readouterr().err
    given, taken = yaml.safe_load(path.read_text()), yaml.safe_load(capsys.readouterr().out)
    for group in ("model", "trainer"):
        for name, value in given.get(group, {}).items():
            assert taken[group][name] == value


# These are one configuration for each kind of data, and the configuration with unusual weights. All other
# configurations are marked slow, because there are many.
DAILY = ("digits", "cifar10_aft", "folder", "finetune_aft")


@pytest.mark.parametrize(
    "path",
    [path if path.stem in DAILY else pytest.param(path, marks=pytest.mark.slow) for path in RECIPES],
    ids=lambda path: path.stem,
)
def test_recipes_run_on_tiny_data(path, tmp_path, monkeypatch, photos, wordnet, run, capsys):
    flags = tiny(path, tmp_path, monkeypatch, photos, wordnet, run)
    assert main(["fit", f"--config={path}", *ON_A_CPU, *FAST, *flags]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "effective batch 4 (4 x 1 x 1" in out
    pretrained = re.search(r"^pretrained: .*$", out, re.MULTILINE)
    assert bool(pretrained) == ("pretrained" in yaml.safe_load(path.read_text())["model"])
    if path.stem == "finetune_aft":
        assert "in part: the values of blocks.*.attn.qkv.weight (2)" in pretrained[0]


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("cifar10", CIFAR10Data),
        pytest.param("cifar10_small", CIFAR10Data, marks=pytest.mark.slow),
        pytest.param("cifar100", CIFAR100Data, marks=pytest.mark.slow),
    ],
)
def test_recipes_of_cifar_run_on_class_folders(name, own, tmp_path, monkeypatch, capsys):
    """The command in the header trains on class folders with CIFAR's size, normalisation and batch augmentation."""
    for split, count in (("train", 4), ("test", 1)):
        for label in ("cat", "dog"):
            (tmp_path / split / label).mkdir(parents=True)
            for number in range(count):
                Image.effect_noise((32, 32), 64).convert("RGB").save(tmp_path / split / label / f"{number}.jpg")
    path = BY_NAME[name]
    command = re.search(r"^ *relvit (fit .*--data ImageFolderData.*)$", header(path), re.MULTILINE)[1].split()
    command = [{"DIR": str(tmp_path), name: str(path)}.get(word, word) for word in command]
    made = []
    make_loader = ImageFolderData._loader

    def recorded(data, split, **arguments):
        loader = make_loader(data, split, **arguments)
        made.append((data, split, type(getattr(loader.dataset, "dataset", loader.dataset))))
        return loader

    monkeypatch.setattr(ImageFolderData, "_loader", recorded)
    flags = [f"--model.model_kwargs.{key}={value}" for key, value in SMALL.items()]
    assert main([*command, *ON_A_CPU, *FAST, *flags]) == 0, capsys.readouterr().err
    assert "8 images of train and val in memory" in capsys.readouterr().out
    assert {split: kind for _, split, kind in made} == {"train": InMemoryBatches, "val": InMemoryBatches}
    kept = ("img_size", "crop_pct", "mean", "std", "augment")
    assert [getattr(made[0][0], field) for field in kept] == [getattr(own(), field) for field in kept]


@pytest.mark.parametrize(
    ("attention", "free"), [("cifar10", "cifar10_aft"), ("imagenet_deit_small", "imagenet_aft_conv_small")]
)
def test_models_without_attention_are_of_the_same_size_and_trained_alike(attention, free):
    recipes = [yaml.safe_load(BY_NAME[name].read_text()) for name in (attention, free)]
    kwargs = [recipe["model"].pop("model_kwargs") for recipe in recipes]
    with torch.device("meta"):
        models = [
            timm.create_model(recipe["model"].pop("model"), **given)
            for recipe, given in zip(recipes, kwargs, strict=True)
        ]
    assert recipes[0] == recipes[1]
    # AFT has no relative attention, so the arguments of relative positions differ.
    of_positions = ("rel_init_std", "max_distance", "pos_embed")
    assert {name: value for name, value in kwargs[0].items() if name not in of_positions} == kwargs[1]
    sizes = [
        {name: tensor.shape for name, tensor in model.state_dict().items() if not re.search(r"attn\.|pos_embed", name)}
        for model in models
    ]
    assert sizes[0] == sizes[1]


def test_the_small_recipe_is_the_long_training_of_the_study():
    study, recipe = load("study"), yaml.safe_load(BY_NAME["cifar10_small"].read_text())
    model = study.MODELS["kv-2-learned-start-0.1"]
    options = dict(option[2:].split("=", 1) for option in study.OPTIONS.split() if "=" in option)
    options = {key: yaml.safe_load(value) for key, value in options.items()}
    built = {"rel_init_std": 0.1, **recipe["model"].pop("model_kwargs")}
    assert recipe["model"].pop("model") == model.name
    assert built == model.arguments
    shared = ("lr", "weight_decay", "warmup_epochs", "label_smoothing")
    assert {key: float(options[f"model.{key}"]) for key in shared} == recipe["model"]
    of_data = ("img_size", "crop_pct", "mean", "std", "augment", "batch_size", "num_workers")
    assert {key: options[f"data.{key}"] for key in of_data} == {
        key: recipe["data"]["init_args"][key] for key in of_data
    }
    assert recipe["trainer"]["max_epochs"] == study.RECIPES["long"].epochs
    assert recipe["trainer"]["gradient_clip_val"] == options["trainer.gradient_clip_val"]


def test_a_retrofit_stands_behind_the_pretrained_weights_of_finetune(photos, capsys):
    command = ["fit", "--config=finetune", "--config=retrofit", f"--data.root={photos}", "--print_config"]
    assert main(command) == 0, capsys.readouterr().err
    taken = yaml.safe_load(capsys.readouterr().out)["model"]
    assert taken["pretrained"] == yaml.safe_load(BY_NAME["finetune"].read_text())["model"]["pretrained"]
    assert (taken["retrofit"], taken["position_lr_scale"]) == ({"rel_terms": "kv", "max_distance": 4}, 10.0)


@pytest.mark.parametrize("name", sorted(ADDITIONS))
def test_additions_work_behind_any_recipe(name, wordnet, capsys):
    recipe = BY_NAME["imagenet_deit_small"]
    flags = [f"--model.model_kwargs.{key}={value}" for key, value in SMALL.items()]
    flags += [f"--data.root={wordnet}", "--data.img_size=32", "--trainer.num_nodes=1"]
    command = ["fit", f"--config={recipe}", f"--config={name}", *ON_A_CPU, *FAST, *flags]
    assert main([*command, "--trainer.strategy=auto"]) == 0, capsys.readouterr().err
    given = yaml.safe_load(BY_NAME[name].read_text())
    if name in DEVICES:
        assert (given["trainer"]["devices"], given["trainer"]["num_nodes"]) == DEVICES[name]
    else:
        assert f"{given['model']['model']} (" in capsys.readouterr().out


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_headers_say_command_hardware_time_and_where_a_score_comes_from(path):
    text = header(path)
    commands = re.sub(r" \\\n\s*", " ", text)
    assert re.search(rf"^\s+(srun )?relvit fit .*--config {path.stem}\b", commands, re.MULTILINE)
    assert field(path, "Hardware")
    assert field(path, "Time")
    score = field(path, "Score")
    measured, _, published = score.partition("Published")
    assert "arXiv" in published or not re.search(r"\d\d\.\d|0\.\d\d", published)
    if re.search(r"\d\d\.\d|0\.\d\d", measured):
        assert re.search(r"by `|by the (first|second) command", measured), (
            f"{path.name}: where does the score come from?"
        )
        for script in re.findall(r"`python (\S+?)[ `]", measured):
            assert (ROOT / script).is_file()
    else:
        assert "not run" in score


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_files_that_headers_name_exist(path):
    for name in re.findall(r"\b(?:relvit|configs|tools|tests)/[\w/]+\.\w+", header(path)):
        assert (ROOT / name).is_file(), f"{path.name} names {name}"


def test_the_docs_list_them_all():
    page = (ROOT / "docs" / "options.md").read_text()
    assert [path.stem for path in CONFIGS if f"`{path.stem}`" not in page] == []
