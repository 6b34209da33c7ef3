"""Fine-tuning through the command line: from a checkpoint, and from weights of timm, on other classes and sizes."""

import shutil
from pathlib import Path

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
    """Other classes than those of `photos`, and other sizes of images; no test images."""
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


def test_from_a_checkpoint_to_other_classes_and_on_from_there(best, animals, tmp_path, capsys, fails):
    source = Path(shutil.copy(best, tmp_path / "source.ckpt"))
    still = ("--model.freeze_epochs=1", "--data.img_size=[24,16]", "--model.warmup_epochs=0")
    folder = fit(animals, tmp_path / "runs", f"--model.pretrained={source}", *still)
    count = len(read_checkpoint(source)["state_dict"])
    line = f"pretrained: {count - 2} of {count} tensors from {source}; new: head.weight, head.bias\n"
    assert line in capsys.readouterr().out
    started = summary(folder)["pretrained"]
    assert started["new"] == ["head.weight", "head.bias"]
    assert (started["loaded"], started["resized"], started["skipped"]) == (count - 2, [], [])
    config = yaml.safe_load((folder / "config.yaml").read_text())["model"]
    assert config["model"] == "test_relvit"
    assert config["model_kwargs"] == {"patch_size": 8, "embed_dim": 16, "depth": 2, "max_distance": 2}
    # All but the classifier was frozen: still what the source has.
    best = folder / "checkpoints" / "best.ckpt"
    before, after = read_checkpoint(source)["state_dict"], load_classifier(best).state_dict()
    assert after["net.head.weight"].shape == (4, 16)
    assert all(torch.equal(after[name], before[name]) for name in before if "head" not in name)

    # The file is not needed any more: to predict, to evaluate, to train on.
    source.unlink()
    evaluate("predict", best, tmp_path / "p", f"--data.root={animals}")
    assert main(["validate", f"--ckpt_path={best}", *QUIET]) == 0
    last = f"--ckpt_path={folder / 'checkpoints' / 'last.ckpt'}"
    on = [f"--runs={tmp_path / 'on'}", last, "--trainer.max_epochs=2"]
    assert main(["fit", f"--config={folder / 'config.yaml'}", *on]) == 0
    assert "pretrained:" not in capsys.readouterr().out
    folder = only(tmp_path / "on")
    assert read_checkpoint(folder / "checkpoints" / "last.ckpt")["epoch"] == 1
    assert "pretrained" not in summary(folder)
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


def test_from_a_folder_of_timm_retrofitted_with_its_normalisation(animals, tmp_path, capsys):
    """Images are normalised as the weights know them, unless told otherwise."""
    kwargs = {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, **kwargs)
    save_for_hf(vit, tmp_path / "vit", model_args=kwargs | {"img_size": 32})
    pretrained = f"--model.pretrained={tmp_path / 'vit'}"
    still = ("--model.lr=0", "--model.min_lr=0", "--model.retrofit.rel_terms=k", "--model.retrofit.max_distance=1")
    folder = fit(animals, tmp_path / "runs", pretrained, *still)
    out = capsys.readouterr().out
    line = f"pretrained: 30 of 36 tensors from local-dir:{tmp_path / 'vit'}; resized: pos_embed; new: "
    assert f"{line}blocks.*.attn.position.key_rows (2), blocks.*.attn.position.key_cols (2), head.weight, head" in out
    assert "Note: the images are normalised" not in out
    theirs = "mean [0.5, 0.5, 0.5] and std [0.5, 0.5, 0.5], the pretrained weights'"
    assert f"images normalised by {theirs}\n" in out
    config = yaml.safe_load((folder / "config.yaml").read_text())["data"]["init_args"]
    assert config["mean"] == config["std"] == [0.5] * 3
    best = folder / "checkpoints" / "best.ckpt"
    assert read_checkpoint(best)["relvit"]["data"]["init_args"]["std"] == [0.5] * 3
    net = load_classifier(best).net
    assert torch.equal(net.blocks[1].attn.qkv.weight, vit.blocks[1].attn.qkv.weight)
    assert net.blocks[1].attn.position.rel_terms == "k"
    # The values themselves: black and white are -1 and 1, in training, predictions and what goes on.
    Image.new("RGB", (16, 16), (255, 0, 255)).save(tmp_path / "image.png")
    assert relvit.load(best).transform(Image.open(tmp_path / "image.png"))[:, 0, 0].tolist() == [1, -1, 1]
    assert main(["fit", f"--resume={folder}", "--trainer.max_epochs=2"]) == 0
    theirs = "mean [0.5, 0.5, 0.5] and std [0.5, 0.5, 0.5], the checkpoint's"
    assert f"images normalised by {theirs}\n" in capsys.readouterr().out
    last = folder / "checkpoints" / "last.ckpt"
    assert read_checkpoint(last)["relvit"]["data"]["init_args"]["mean"] == [0.5] * 3

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
        (["--model.pretrained=test_relvit"], "there are no pretrained weights of test_relvit"),
        (["--model.pretrained={}", "--model.model=test_relvit"], "give the architecture that the weights are of"),
    ],
)
def test_mistakes(arguments, message, best, animals, tmp_path, fails):
    common = ["fit", "--data=ImageFolderData", f"--data.root={animals}", f"--runs={tmp_path}", *COMMON]
    assert message in fails([*common, *(argument.format(best) for argument in arguments), "--data.img_size=32"])
    assert list(tmp_path.iterdir()) == []
