"""Options of `fit` for the training: callbacks, the learning-rate finder, averages of weights, two processes."""

import re
import shutil

import pytest
import torch
import yaml
from command_line import by_hand, fit, only, printed, summary
from photos import TINY
from processes import Ranks, as_torchrun

from relvit.app.cli import main
from relvit.app.data import ImageFolderData
from relvit.app.plots import read_metrics
from relvit.app.training import load_classifier, read_checkpoint


def of_best(folder, root, split):
    """Compute accuracy and mean cross-entropy of the best checkpoint, image by image."""
    data = ImageFolderData(str(root), img_size=16, num_workers=0)
    return by_hand(load_classifier(folder / "checkpoints" / "best.ckpt"), data.dataset(split))


def test_lightnings_callbacks_by_a_configuration_and_an_option(photos, tmp_path, monkeypatch):
    """EarlyStopping ends the training; ModelCheckpoint writes to a remote address, to which `--runs` cannot write."""
    monkeypatch.chdir(tmp_path)
    stop = {"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss", "stopping_threshold": 99}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": [stop]}}))
    callback = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.dirpath=memory://kept"]
    options = ["--config=config.yaml", *callback, "--trainer.callbacks.filename=x", "--trainer.max_epochs=3"]
    folder = fit(photos, tmp_path / "runs", *options)
    # Every loss is below the threshold, so the training ends after the first epoch.
    assert len(read_metrics(folder / "metrics.csv")["val/acc1"]) == 1
    kept, last = (read_checkpoint(path) for path in ("memory://kept/x.ckpt", folder / "checkpoints" / "last.ckpt"))
    assert all(torch.equal(tensor, kept["state_dict"][name]) for name, tensor in last["state_dict"].items())
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "runs"}


@pytest.mark.slow
def test_the_last_epochs_kept_and_averaged(photos, tmp_path, capsys):
    keep = ("ModelCheckpoint", ".monitor=epoch", ".mode=max", ".save_top_k=2")
    flags = [f"--trainer.callbacks{'+=' if i == 0 else ''}{text}" for i, text in enumerate(keep)]
    folder = fit(photos, tmp_path / "runs", "--trainer.max_epochs=3", "--model.warmup_epochs=0", *flags)
    # relvit's own callback chooses the best checkpoint, not the user's `ModelCheckpoint`.
    accuracies = [value for _, value in read_metrics(folder / "metrics.csv")["val/acc1"]]
    assert summary(folder)["val/acc1"] == pytest.approx(max(accuracies))
    assert f"relvit validate {folder / 'checkpoints' / 'best.ckpt'} " in capsys.readouterr().out
    paths = sorted((folder / "checkpoints").glob("epoch=*.ckpt"))
    assert [path.name for path in paths] == ["epoch=1-step=6.ckpt", "epoch=2-step=9.ckpt"]
    output = tmp_path / "mean.ckpt"
    assert main(["average", f"--ckpt_paths=[{paths[0]},{paths[1]}]", f"--output={output}"]) == 0
    mean, *parts = (load_classifier(path).net.head.weight for path in (output, *paths))
    torch.testing.assert_close(mean, (parts[0] + parts[1]) / 2)


@pytest.mark.slow
def test_learning_rate_finder(photos, tmp_path, capsys, recwarn):
    flags = ("--lr_find=true", "--model.warmup_epochs=0", "--model.min_lr=0")
    folder = fit(photos, tmp_path / "runs", *flags, "--model.lr_base_batch=16", "--trainer.accumulate_grad_batches=2")
    out, err = capsys.readouterr()
    found = re.search(r"learning rate found: (\S+), as --model.lr (\S+)", out)
    assert "Finding best" not in out + err  # The progress bar is off.
    # The search loads a temporary checkpoint, which must not cause a warning about the images.
    assert not [warning for warning in recwarn if "which images" in str(warning.message)]
    results = summary(folder)
    assert results["effective_batch"] == 16
    assert results["lr"] == pytest.approx(float(found[1]), rel=0.01) == pytest.approx(float(found[2]), rel=0.01)
    remembered = read_checkpoint(folder / "checkpoints" / "best.ckpt")["relvit"]["model"]
    assert remembered["lr"] == pytest.approx(results["lr"])
    # The run's configuration and checkpoint have the learning rate that was found, and repeat the training.
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["lr_find"] is False
    assert config["model"]["lr"] == remembered["lr"]
    assert main(["fit", f"--config={folder / 'config.yaml'}", f"--runs={tmp_path / 'again'}"]) == 0
    assert "learning rate found" not in capsys.readouterr().out
    again = only(tmp_path / "again")
    for name in ("lr", "train/loss", "val/loss"):
        assert read_metrics(again / "metrics.csv")[name] == read_metrics(folder / "metrics.csv")[name]


@pytest.mark.slow
def test_a_whole_recipe_by_flags_and_its_averaged_checkpoint(photos, tmp_path, capsys):
    flags = {
        "opt": "lamb",
        "opt_kwargs.eps": "1e-5",
        "layer_decay": "0.8",
        "loss": "bce",
        "bce_threshold": "0.2",
        "class_weights": "[1,2,0.5]",
        "mixup": "0.8",
        "cutmix": "1",
        "ema_decay": "0.9",
        "freeze_epochs": "1",
        "channels_last": "true",
        "model_kwargs.drop_path_rate": "0.1",
        "lr": "5e-3",
        "warmup_epochs": "1",
    }
    arguments = [f"--model.{name}={value}" for name, value in flags.items()]
    folder = fit(photos, tmp_path, *arguments, "--trainer.max_epochs=3", "--trainer.precision=bf16-mixed")
    best = folder / "checkpoints" / "best.ckpt"
    # The Trainer evaluates in bfloat16, `of_best` in float32, so the results differ a little.
    assert summary(folder)["test/loss"] == pytest.approx(of_best(folder, photos, "test")[1], rel=0.02)
    raw = torch.load(best, weights_only=True)
    assert not torch.equal(raw["state_dict"]["net.head.weight"], raw["ema_state_dict"]["net.head.weight"])
    used = load_classifier(best).state_dict()
    assert all(torch.equal(value, raw["ema_state_dict"][name]) for name, value in used.items())
    assert "train/acc1_mixed" in read_metrics(folder / "metrics.csv")
    capsys.readouterr()
    assert main(["validate", f"--ckpt_path={best}", "--trainer.accelerator=cpu"]) == 0
    found = printed("val/loss", capsys.readouterr().out)
    assert found == pytest.approx(of_best(folder, photos, "val")[1], rel=1e-4)


@pytest.mark.slow
def test_two_processes_train_in_one_folder_and_count_every_image_once(photos, tmp_path):
    root, runs = shutil.copytree(photos, tmp_path / "photos"), tmp_path / "runs"
    for split in ("val", "test"):
        # The 17 remaining images cannot be divided equally between two processes.
        (root / split / "owl" / "5.jpg").unlink()
    arguments = ["fit", "--data=ImageFolderData", f"--data.root={root}", f"--runs={runs}", *TINY]
    arguments += ["--trainer.max_epochs=1", "--model.warmup_epochs=0", "--model.lr_base_batch=8", "--model.lr=1e-3"]
    ranks = Ranks(arguments, tmp_path, as_torchrun())
    assert ranks.finish() == [0, 0], ranks.text()[-3000:]
    out = ranks.text()
    line = (
        "effective batch 16 (8 x 1 x 2: batch, accumulation, devices), learning rate 0.002 (0.001 x 16 / 8), steps 1,"
    )
    assert out.count(line) == 1
    assert out.count("Test accuracy of that checkpoint") == 1
    folder = only(runs)
    assert {"config.yaml", "metrics.csv", "summary.json", "checkpoints"} <= {path.name for path in folder.iterdir()}
    results, (accuracy, loss) = summary(folder), of_best(folder, root, "test")
    assert results["test/acc1"] == pytest.approx(accuracy)
    assert results["test/loss"] == pytest.approx(loss, rel=1e-4)
    assert results["val/acc1"] == pytest.approx(of_best(folder, root, "val")[0])
