"""Every data module by its name on the command line: `fit`, then the commands that `fit` suggests."""

import shlex

import pytest
from cifar_archive import make_archive
from command_line import QUIET, evaluate, only, rows
from photos import CLASSES, TINY
from torchvision.datasets import CIFAR10

from relvit.app.cli import main
from relvit.app.data import CIFAR10Data


def fit_and_follow(arguments, runs, capsys):
    """Fit for an epoch, then run the commands that `fit` suggests; return the folders of the run and of the prediction.

    Leave out FOLDER_OF_IMAGES, so that `predict` uses the images of the data module.
    """
    assert main(["fit", *arguments, f"--runs={runs}", *TINY, "--trainer.max_epochs=1"]) == 0
    folder = only(runs)
    for line in [line for line in capsys.readouterr().out.splitlines() if line.startswith("  relvit ")]:
        command = [word for word in shlex.split(line)[1:] if word != "FOLDER_OF_IMAGES"]
        limit = ["--accelerator=cpu"] if command[0] == "resolutions" else QUIET
        more = [f"--runs={runs}"] if command[0] == "predict" else []
        assert main([*command, *limit, *more]) == 0, line
    (predictions,) = set(runs.iterdir()) - {folder}
    return folder, predictions


def test_cifar(tmp_path, photos, monkeypatch, capsys):
    files = ["data_batch_1", "data_batch_2", "test_batch"]
    make_archive(monkeypatch, tmp_path, CIFAR10, "labels", files, CIFAR10Data.classes)
    arguments = ["--data=CIFAR10Data", f"--data.root={tmp_path}", "--data.download=false", "--data.repeats=2"]
    folder, predictions = fit_and_follow(arguments, tmp_path / "runs", capsys)
    assert [row["path"][:17] for row in rows(folder / "val_split.csv")] == ["cifar10/train/000"] * 10
    assert [row["path"] for row in rows(predictions / "predictions.csv")] == [
        f"cifar10/test/{i:05d}" for i in range(20)
    ]
    # The same checkpoint also predicts images in a user's folder.
    images = ["--data=ImageFolderData", f"--data.root={photos / 'test' / 'cat'}"]
    own = evaluate("predict", folder / "checkpoints" / "best.ckpt", tmp_path / "own", *images)
    found = rows(own / "predictions.csv")
    assert [row["path"] for row in found] == [f"{photos}/test/cat/{i}.jpg" for i in range(6)]
    assert {row["class"] for row in found} <= set(CIFAR10Data.classes)


def test_lists(tmp_path, photos):
    for split in ("train", "test"):
        lines = [f"{split}/{name}/{i}.jpg,{name}" for name in CLASSES for i in range(6)]
        (tmp_path / f"{split}.csv").write_text("\n".join(["path,label", *lines]) + "\n")
    arguments = ["--data=ImageListData", f"--data.root={photos}", "--data.balance=sampler", "--data.augment=deit"]
    arguments += [f"--data.{split}={tmp_path / split}.csv" for split in ("train", "test")]
    assert main(["fit", *arguments, f"--runs={tmp_path / 'runs'}", *TINY, "--trainer.max_epochs=1"]) == 0
    folder = only(tmp_path / "runs")
    put_aside = rows(folder / "val_split.csv")
    assert [row["label"] for row in put_aside] == list(CLASSES)
    assert all((photos / row["path"]).is_file() for row in put_aside)
    best = folder / "checkpoints" / "best.ckpt"
    assert len(rows(evaluate("predict", best, tmp_path / "p", photos / "val") / "predictions.csv")) == 18


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--data=CIFAR10Data", "--data.on_error=skip"],
            "unknown option --data.on_error: 'ImageFolderData', 'ImageListData', 'ImageNetData', 'ReaderData' have it; "
            "name the data by --data NAME",
        ),
        (["--data=DigitsData", "--data.train=a.csv"], "unknown option --data.train: 'ImageListData' has it; name"),
        (["--data=DigitsData", "--data.repeat=2"], "unknown option --data.repeat (did you mean '--data.repeats'?)"),
        (["--data=ImageListData", "--data.train=none.csv"], "none.csv; give a CSV, TSV or Parquet file"),
        (["--data=CIFAR100Data", "--data.download=false", "--data.root=nowhere"], "no CIFAR-100 in "),
    ],
)
def test_mistakes(arguments, message, fails):
    assert message in fails(["fit", *arguments, *QUIET])
