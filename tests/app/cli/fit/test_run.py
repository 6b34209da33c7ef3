"""Training, evaluating and predicting on the command line, with class folders and with the digits."""

import json
import re
import shutil

import pytest
import torch
import yaml
from command_line import QUIET, by_hand, fit, only, printed, summary
from photos import CLASSES, TINY
from PIL import Image

from relvit.app.cli import main
from relvit.app.data import ImageFolderData
from relvit.app.plots import read_metrics
from relvit.app.training import load_classifier, read_checkpoint


def test_a_run_leaves_everything_in_its_folder(run, photos):
    files = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    wanted = {
        "config.yaml",
        "metrics.csv",
        "curves.png",
        "positions.png",
        "training_images.png",
        "summary.json",
        "checkpoints/best.ckpt",
        "checkpoints/last.ckpt",
    }
    assert wanted <= files
    assert any(name.startswith("tensorboard/events") for name in files)
    with Image.open(run / "curves.png") as figure:
        assert figure.width > 500
    columns = read_metrics(run / "metrics.csv")
    assert {"train/loss", "train/acc1", "val/loss", "val/acc1", "lr"} <= set(columns)
    assert [epoch for epoch, _ in columns["val/acc1"]] == [0, 1, 2, 3]
    assert columns["train/loss"][-1][1] < columns["train/loss"][0][1]
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["model"] == "test_relvit"
    assert config["data"]["init_args"]["root"] == str(photos)


def test_the_checkpoint_knows_classes_and_normalisation_and_needs_no_pickle(run, best):
    content = torch.load(best, weights_only=True)
    assert content["relvit"]["model"]["class_names"] == list(CLASSES)
    assert content["relvit"]["data"]["init_args"]["mean"] == [0.485, 0.456, 0.406]
    assert content["relvit"]["data"]["init_args"]["img_size"] == [16, 16]
    # `last.ckpt` is from the last epoch, even if another epoch was the best.
    assert torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["epoch"] == 3


def test_the_summary_is_the_best_checkpoints_test_accuracy(run, best, photos):
    results, data = summary(run), ImageFolderData(str(photos), img_size=16, num_workers=0)
    accuracy, loss = by_hand(load_classifier(best), data.dataset("test"))
    assert results["test/acc1"] == pytest.approx(accuracy)
    assert results["test/loss"] == pytest.approx(loss, rel=1e-4)
    assert results["val/acc1"] == pytest.approx(max(v for _, v in read_metrics(run / "metrics.csv")["val/acc1"]))


@pytest.mark.parametrize("size", ["16", "[16,40]"])
def test_validate_needs_only_the_checkpoint_and_takes_other_sizes(best, photos, size, capsys):
    assert main(["validate", str(best), f"--data.img_size={size}", *QUIET]) == 0
    out = capsys.readouterr().out
    data = ImageFolderData(str(photos), img_size=json.loads(size), num_workers=0)
    accuracy, loss = by_hand(load_classifier(best), data.dataset("val"))
    assert printed("val/acc1", out) == pytest.approx(accuracy)
    assert printed("val/loss", out) == pytest.approx(loss, rel=1e-4)
    error = (accuracy * (1 - accuracy) / 18) ** 0.5
    shown = {"16": "16 x 16", "[16,40]": "16 x 40"}[size]
    line = (
        f"18 images of val at {shown} px, accuracy {accuracy:.4f} ± {error:.4f}; always the commonest class: 0.3333\n"
    )
    assert line in out


def test_a_limit_of_batches_leaves_no_baseline_of_all_images(best, capsys):
    """The first batch has eight images, six cats and two dogs, and 0.3333 would be of all 18 images."""
    assert main(["validate", str(best), "--trainer.limit_val_batches=1", *QUIET]) == 0
    out = capsys.readouterr().out
    assert "8 images of val at 16 x 16 px, accuracy " in out
    assert "commonest class" not in out


@pytest.mark.parametrize("command", ["validate", "test"])
def test_of_named_images_without_a_val_the_output_says_that_val_is_a_part(command, best, photos, tmp_path, capsys):
    split = ["--split=val", f"--runs={tmp_path / 'runs'}"] if command == "test" else []
    root = shutil.copytree(photos / "test", tmp_path / "new")
    data = ImageFolderData(str(root), img_size=16)
    for place, count, is_part in ((root, len(data.held_out()), True), (photos, 18, False)):
        assert main([command, str(best), f"--root={place}", *split, *QUIET]) == 0
        out = capsys.readouterr().out
        assert f"{count} images of val at" in out
        assert (f"so val is a part of them, the {count} that a training holds out" in out) == is_part


def test_test_and_another_place_of_the_data(best, photos, tmp_path, capsys):
    moved = shutil.copytree(photos, tmp_path / "moved")
    # Classes are found by name, so a class without test images does not shift the labels of the other classes.
    shutil.rmtree(moved / "test" / "cat")
    shutil.rmtree(moved / "train")
    assert main(["test", str(best), f"--data.root={moved}", f"--runs={tmp_path}", *QUIET]) == 0
    data = ImageFolderData(str(moved), img_size=16, num_workers=0, class_names=list(CLASSES))
    accuracy, _ = by_hand(load_classifier(best), data.dataset("test"))
    assert printed("test/acc1", capsys.readouterr().out) == pytest.approx(accuracy)


def test_of_two_epochs_of_one_accuracy_the_one_of_the_lower_loss_is_the_best(photos, tmp_path):
    folder = fit(photos, tmp_path, "--trainer.max_epochs=6", "--model.lr=5e-3", "--model.warmup_epochs=0")
    columns = read_metrics(folder / "metrics.csv")
    accuracies, losses = ([value for _, value in columns[name]] for name in ("val/acc1", "val/loss"))
    first, wanted = accuracies.index(max(accuracies)), max(range(6), key=lambda i: (accuracies[i], -losses[i]))
    # This test needs two epochs of the best accuracy, of which the later one has the lower loss.
    assert first < wanted
    assert read_checkpoint(folder / "checkpoints" / "best.ckpt")["epoch"] == wanted


def test_the_saved_config_trains_the_same_again_in_another_folder(run, tmp_path):
    assert main(["fit", f"--config={run / 'config.yaml'}", f"--runs={tmp_path}"]) == 0
    assert read_metrics(only(tmp_path) / "metrics.csv")["val/loss"] == read_metrics(run / "metrics.csv")["val/loss"]


def test_a_training_that_ends_before_its_first_validation_says_what_it_leaves(photos, tmp_path, capsys):
    last = only(fit(photos, tmp_path, "--trainer.max_steps=1") / "checkpoints")
    assert f"no best checkpoint; its last one is {last}." in capsys.readouterr().out


def test_the_summary_counts_the_images_that_were_evaluated(photos, tmp_path):
    """timm's model has no position tables to draw, and the CSV logger writes only the table."""
    model = ["--model.model=test_vit", "--model.model_kwargs={patch_size: 8, embed_dim: 16, depth: 1}"]
    limits = [f"--trainer.limit_{split}_batches=1" for split in ("val", "test")]
    folder = fit(photos, tmp_path, *model, "--data.batch_size=2", *limits, "--trainer.logger=csv")
    assert (folder / "metrics.csv").is_file()
    assert not (folder / "tensorboard").exists()
    assert not (folder / "positions.png").exists()
    results = summary(folder)
    assert (results["val/images"], results["test/images"]) == (2, 2)
    accuracy = results["test/acc1"]
    assert results["test/acc1_se"] == pytest.approx((accuracy * (1 - accuracy) / 2) ** 0.5)


def test_a_broken_test_image_does_not_hide_the_result_of_the_training(photos, tmp_path, capsys):
    broken = shutil.copytree(photos, tmp_path / "photos")
    next((broken / "test").glob("*/*")).write_text("no image")
    arguments = ["fit", "--data=ImageFolderData", f"--data.root={broken}", f"--runs={tmp_path / 'runs'}", *TINY]
    assert main([*arguments, "--trainer.max_epochs=1"]) == 2
    out, error = capsys.readouterr()
    assert "Best validation accuracy: " in out
    assert "--data.on_error skip" in error


def test_digits_train_without_any_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny = [a for a in TINY if not a.startswith(("--data.img_size", "--model.model_kwargs.patch_size"))]
    arguments = ["fit", "--data=DigitsData", *tiny, "--model.model_kwargs.patch_size=2", "--trainer.max_epochs=1"]
    assert main([*arguments, "--data.batch_size=64"]) == 0
    out = capsys.readouterr().out
    assert "test_relvit (0.0" in out
    assert "10 classes, 8 x 8 px x 1" in out
    line = r"Best validation accuracy: 0\.\d{4} ± 0\.0\d{3} \(images: \d+\), epoch 1; always .*: 0\.1\d{3}\n"
    assert re.search(line, out)
    line = r"Test accuracy of that checkpoint: 0\.\d{4} ± 0\.0\d{3} \(images: \d+\), top-5 [\d.]{6} ± .*: 0\.1028\n"
    assert re.search(line, out)


@pytest.mark.parametrize("made", [(), ("runs",), ("runs/deep", "runs")])
def test_what_is_refused_leaves_no_folder_but_those_that_were_there(made, photos, tmp_path, fails):
    runs = tmp_path / "runs" / "deep"
    for folder in made[:1]:
        (tmp_path / folder).mkdir(parents=True)
    arguments = ["fit", "--data=ImageFolderData", f"--data.root={photos}", f"--runs={runs}", *TINY]
    fails([*arguments, "--save_every=0"])
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == set(made)
