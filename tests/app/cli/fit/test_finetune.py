"""Fine-tuning on the command line: from checkpoints and from timm's weights, on other classes and image sizes."""

import contextlib
import io
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import timm
import torch
import yaml
from command_line import QUIET, evaluate, only, summary
from photos import TINY
from PIL import Image
from timm.models import save_for_hf

import relvit
from relvit.app.cli import main
from relvit.app.training import load_classifier, read_checkpoint

COMMON = [argument for argument in TINY if not argument.startswith("--model.")]
COLOURS = {"ape": (220, 220, 30), "cat": (200, 40, 40), "emu": (30, 220, 220), "yak": (120, 30, 160)}


@pytest.fixture(scope="module")
def animals(tmp_path_factory) -> Path:
    """A folder with other classes and image sizes than `photos`, without test images."""
    root, generator = tmp_path_factory.mktemp("animals"), np.random.default_rng(1)
    for split in ("train", "val"):
        for name, colour in COLOURS.items():
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(5):
                shape = (*generator.integers(14, 60, 2), 3)
                pixels = np.clip(generator.normal(colour, 40, shape), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


def fit(root, runs, *extra):
    arguments = ["fit", "--data=ImageFolderData", f"--data.root={root}", f"--runs={runs}", *COMMON, *extra]
    assert main([*arguments, "--trainer.max_epochs=1"]) == 0
    return only(runs)


class Tuned(NamedTuple):
    """A fine-tuning: its folder, its output, the path of its source (deleted since), and the source's tensors."""

    folder: Path
    out: str
    source: Path
    before: dict


@pytest.fixture(scope="module")
def tuned(best, animals, tmp_path_factory):
    """A fine-tuning of a checkpoint on other classes, in which only the classifier is trained."""
    place = tmp_path_factory.mktemp("tuned")
    source = Path(shutil.copy(best, place / "source.ckpt"))
    still = ("--model.freeze_epochs=1", "--data.img_size=[24,16]", "--model.warmup_epochs=0")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        folder = fit(animals, place / "runs", f"--model.pretrained={source}", *still)
    before = read_checkpoint(source)["state_dict"]
    source.unlink()
    return Tuned(folder, out.getvalue(), source, before)


def test_the_start_and_the_summary_say_what_was_loaded(tuned):
    folder, out, source, before = tuned
    count = len(before)
    assert f"pretrained: {count - 2} of {count} tensors from {source}; new: head.weight, head.bias\n" in out
    started = summary(folder)["pretrained"]
    assert started["new"] == ["head.weight", "head.bias"]
    assert (started["loaded"], started["resized"], started["skipped"]) == (count - 2, [], [])


def test_the_configuration_names_the_model_of_the_source(tuned):
    config = yaml.safe_load((tuned.folder / "config.yaml").read_text())["model"]
    assert config["model"] == "test_relvit"
    assert config["model_kwargs"] == {"patch_size": 8, "embed_dim": 16, "depth": 2, "max_distance": 2}


def test_what_was_frozen_is_what_the_source_has(tuned):
    before, after = tuned.before, load_classifier(tuned.folder / "checkpoints" / "best.ckpt").state_dict()
    assert after["net.head.weight"].shape == (4, 16)
    assert all(torch.equal(after[name], before[name]) for name in before if "head" not in name)


def test_predictions_and_evaluations_do_not_need_the_source(tuned, animals, tmp_path):
    best = tuned.folder / "checkpoints" / "best.ckpt"
    evaluate("predict", best, tmp_path / "p", f"--data.root={animals}")
    assert main(["validate", f"--ckpt_path={best}", *QUIET]) == 0


def test_a_training_goes_on_without_the_source(tuned, tmp_path, capsys):
    folder = tuned.folder
    last = f"--ckpt_path={folder / 'checkpoints' / 'last.ckpt'}"
    on = [f"--runs={tmp_path / 'on'}", last, "--trainer.max_epochs=2"]
    assert main(["fit", f"--config={folder / 'config.yaml'}", *on]) == 0
    assert "pretrained:" not in capsys.readouterr().out
    folder = only(tmp_path / "on")
    assert read_checkpoint(folder / "checkpoints" / "last.ckpt")["epoch"] == 1
    assert "pretrained" not in summary(folder)


def test_validate_takes_no_other_source(tuned, fails):
    last = f"--ckpt_path={tuned.folder / 'checkpoints' / 'last.ckpt'}"
    assert "was trained with pretrained" in fails(["validate", last, "--model.pretrained=other.ckpt", *QUIET])


def test_the_same_classes_listed_in_another_order_keep_the_classifier(best, photos, tmp_path, capsys):
    table = tmp_path / "list.csv"
    rows = [f"{path},{path.parent.name},{path.parts[-3]}" for path in sorted(photos.rglob("*.jpg"))]
    table.write_text("\n".join(["path,label,split", *rows]) + "\n")
    arguments = ["fit", "--data=ImageListData", f"--data.train={table}", "--data.class_names=[owl,cat,dog]"]
    arguments += [f"--model.pretrained={best}", "--model.lr=0", "--model.min_lr=0", f"--runs={tmp_path / 'runs'}"]
    capsys.readouterr()
    assert main([*arguments, *COMMON, "--trainer.max_epochs=1"]) == 0
    assert "the classifier's rows in the order of the classes here" in capsys.readouterr().out
    trained, source = map(load_classifier, (only(tmp_path / "runs") / "checkpoints" / "best.ckpt", best))
    assert torch.equal(trained.net.head.weight, source.net.head.weight[[2, 0, 1]])


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """A model of timm with its own normalisation, and the folder that timm saved."""
    kwargs = {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, **kwargs)
    folder = tmp_path_factory.mktemp("saved") / "vit"
    save_for_hf(vit, folder, model_args=kwargs | {"img_size": 32})
    return vit, folder


@pytest.fixture(scope="module")
def retrofitted(vit, animals, tmp_path_factory):
    """A run that starts from timm's folder with a retrofit, at a learning rate of 0, and its output."""
    still = ("--model.lr=0", "--model.min_lr=0", "--model.retrofit.rel_terms=k", "--model.retrofit.max_distance=1")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        folder = fit(animals, tmp_path_factory.mktemp("runs"), f"--model.pretrained={vit[1]}", *still)
    return folder, out.getvalue()


def test_a_folder_of_timm_is_loaded_into_a_retrofitted_model(vit, retrofitted):
    folder, out = retrofitted
    line = f"pretrained: 30 of 36 tensors from local-dir:{vit[1]}; resized: pos_embed; new: "
    assert f"{line}blocks.*.attn.position.key_rows (2), blocks.*.attn.position.key_cols (2), head.weight, head" in out
    net = load_classifier(folder / "checkpoints" / "best.ckpt").net
    assert torch.equal(net.blocks[1].attn.qkv.weight, vit[0].blocks[1].attn.qkv.weight)
    assert net.blocks[1].attn.position.rel_terms == "k"


def test_images_are_normalised_as_the_weights_know_them(retrofitted, tmp_path):
    folder, out = retrofitted
    assert "Note: the images are normalised" not in out
    theirs = "mean [0.5, 0.5, 0.5] and std [0.5, 0.5, 0.5], the pretrained weights'"
    assert f"images normalised by {theirs}\n" in out
    config = yaml.safe_load((folder / "config.yaml").read_text())["data"]["init_args"]
    assert config["mean"] == config["std"] == [0.5] * 3
    best = folder / "checkpoints" / "best.ckpt"
    assert read_checkpoint(best)["relvit"]["data"]["init_args"]["std"] == [0.5] * 3
    # With this mean and standard deviation, the pixel values 0 and 255 become -1 and 1.
    Image.new("RGB", (16, 16), (255, 0, 255)).save(tmp_path / "image.png")
    assert relvit.load(best).transform(Image.open(tmp_path / "image.png"))[:, 0, 0].tolist() == [1, -1, 1]


def test_a_resumed_training_keeps_the_normalisation(retrofitted, capsys):
    folder, _ = retrofitted
    assert main(["fit", f"--resume={folder}", "--trainer.max_epochs=2"]) == 0
    theirs = "mean [0.5, 0.5, 0.5] and std [0.5, 0.5, 0.5], the checkpoint's"
    assert f"images normalised by {theirs}\n" in capsys.readouterr().out
    last = folder / "checkpoints" / "last.ckpt"
    assert read_checkpoint(last)["relvit"]["data"]["init_args"]["mean"] == [0.5] * 3


def test_the_start_says_where_the_normalisation_is_from(vit, animals, capsys):
    pretrained = f"--model.pretrained={vit[1]}"
    trial = ["fit", "--data=ImageFolderData", f"--data.root={animals}", *COMMON, "--trainer.fast_dev_run=true"]
    assert main([*trial, pretrained, "--data.mean=[0.4,0.4,0.4]"]) == 0
    out = capsys.readouterr().out
    assert "images normalised by mean [0.4, 0.4, 0.4], as given; std [0.5, 0.5, 0.5], the pretrained weights'" in out
    note = "Note: the images are normalised by mean [0.4,0.4,0.4], those of the pretrained weights were by --data"
    assert note in out
    assert main([*trial, "--model.model=test_relvit", "--model.model_kwargs.patch_size=8"]) == 0
    assert "std [0.229, 0.224, 0.225], the default of ImageFolderData" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.pretrained=none.ckpt"], "no weights at none.ckpt"),
        (["--model.pretrained=vit_tiny_patch16_22"], "(did you mean 'vit_tiny_patch16_224'?)"),
        (["--model.pretrained=test_relvit"], "timm has no pretrained weights for test_relvit"),
        (["--model.pretrained={}", "--model.model=test_relvit"], "build the model that the weights were trained in"),
    ],
)
def test_mistakes(arguments, message, best, animals, tmp_path, fails):
    common = ["fit", "--data=ImageFolderData", f"--data.root={animals}", f"--runs={tmp_path}", *COMMON]
    assert message in fails([*common, *(argument.format(best) for argument in arguments), "--data.img_size=32"])
    assert list(tmp_path.iterdir()) == []
