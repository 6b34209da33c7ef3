"""Unreadable files are skipped: which images remain, how they are counted, and the list of skipped files."""

import json
import re
import shutil
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from command_line import QUIET, fit, only, rows
from grey_folders import GREY, data_of, make, spoil
from photos import TINY
from PIL import Image
from torch._utils import ExceptionWrapper

from relvit.app.cli import main
from relvit.app.data import ImageFolderData, UnreadableImageError, load_rgb
from relvit.app.training import DataRecord, load_classifier


def test_the_error_comes_out_of_a_worker(tmp_path):
    (tmp_path / "a.jpg").touch()
    with pytest.raises(UnreadableImageError) as caught:
        load_rgb(tmp_path / "a.jpg")
    # A DataLoader worker passes errors on in this form.
    handed_on = ExceptionWrapper((type(caught.value), caught.value, caught.tb))
    with pytest.raises(UnreadableImageError, match=r"a\.jpg: the file is empty"):
        handed_on.reraise()


@pytest.mark.parametrize("workers", [0, 2])
def test_training_batches_stay_full_and_labels_right(tmp_path, workers):
    data = data_of(make(tmp_path, train=4, val=1), on_error="skip", batch_size=4, num_workers=workers)
    bad = [tmp_path / "train" / "ant" / "001.png", tmp_path / "train" / "cat" / "003.png"]
    spoil(*bad)
    labels = []
    for images, batch in data.train_dataloader():
        assert len(images) == 4
        assert (images[:, 0, 0, 0] * 255).round().tolist() == [GREY[data.class_names[label]] for label in batch]
        labels += batch.tolist()
    # The next image replaces ant 001. Cat 003 is the last image, so the first image, an ant, replaces it.
    assert Counter(labels) == {0: 5, 1: 4, 2: 3}
    assert set(data.unreadable["train"]) == {str(path) for path in bad}
    assert set(data.unreadable["train"].values()) == {"it is not an image, or of an unknown format"}


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_evaluation_leaves_out_what_cannot_be_read(tmp_path, batch_size):
    root = make(tmp_path, train=1, val=2, test=2)
    data = data_of(root, on_error="skip", batch_size=batch_size)
    bad = [tmp_path / "val" / "bee" / "000.png", tmp_path / "val" / "bee" / "001.png"]
    spoil(*bad)
    found = [((images[:, 0, 0, 0] * 255).round(), labels) for images, labels in data.val_dataloader()]
    greys, labels = (torch.cat(column).tolist() for column in zip(*found, strict=True))
    assert (greys, labels) == ([10, 10, 200, 200], [0, 0, 2, 2])
    assert set(data.unreadable["val"]) == {str(path) for path in bad}
    shutil.rmtree(tmp_path / "test")
    data = data_of(root, on_error="skip", batch_size=batch_size)
    names = [name for _, names in data.predict_dataloader() for name in names]
    assert names == [f"{root}/val/{name}/00{i}.png" for name in ("ant", "cat") for i in (0, 1)]
    assert set(data.unreadable["predict"]) == {str(path) for path in bad}


@pytest.mark.parametrize("cache", [False, True])
def test_several_devices_get_equally_many_batches(tmp_path, cache):
    """All images of the first device (numbers 0 and 2 of each class) are broken, so it gets empty batches."""
    root = make(tmp_path, train=1, val={"ant": 4, "bee": 4})
    spoil(*(tmp_path / "val" / name / f"00{i}.png" for name in ("ant", "bee") for i in (0, 2)))
    counts = []
    for rank in (0, 1):
        data = data_of(root, on_error="skip", cache=cache, img_size=(4, 6), batch_size=3)
        data.trainer = SimpleNamespace(world_size=2, num_devices=2, global_rank=rank, progress_bar_callback=None)
        data.setup("fit")
        counts.append([len(labels) for _, labels in data.val_dataloader()])
        assert len(data.unreadable["val"]) == (4 if rank == 0 else 0)
    assert counts == [[0, 0], [3, 1]]


@pytest.mark.parametrize("cache", [False, True])
def test_nothing_can_be_read(tmp_path, cache):
    data = data_of(make(tmp_path, train=2, val=1), on_error="skip", cache=cache)
    spoil(*tmp_path.rglob("*.png"))
    with pytest.raises(
        ValueError,
        match=r"none of 6 training images can be read; the first tried is .*00\d\.png: it is n.*check-data",
    ):
        list(data.train_dataloader())
    assert list(data.val_dataloader()) == []


def test_other_mistakes_are_not_skipped(tmp_path):
    data = data_of(make(tmp_path, train=2, val=1), on_error="skip")
    data.dataset("train").transform = lambda image: 1 / 0
    with pytest.raises(ZeroDivisionError):
        list(data.train_dataloader())
    with pytest.raises(ValueError, match=r"on_error is 'ignore'; allowed are 'error', 'skip'"):
        data_of(str(tmp_path), on_error="ignore")


@pytest.fixture(scope="module")
def skipping(photos, tmp_path_factory):
    """Train on a folder with three broken files and without val; return the folder of images and the run's folder."""
    root = shutil.copytree(photos, tmp_path_factory.mktemp("broken") / "photos")
    shutil.rmtree(root / "val")
    spoil(root / "train" / "cat" / "0.jpg", root / "train" / "owl" / "5.jpg", root / "test" / "dog" / "1.jpg")
    options = ["--data.on_error=skip", "--data.val_fraction=0.34", "--data.batch_size=2"]
    return root, fit(root, tmp_path_factory.mktemp("runs"), *options)


def test_a_run_lists_what_it_skipped_and_put_aside(skipping, run):
    root, folder = skipping
    # The random split puts each broken training file into train or val.
    found = {row["path"]: row for row in rows(folder / "unreadable.csv")}
    assert set(found) == {f"{root}/train/cat/0.jpg", f"{root}/train/owl/5.jpg", f"{root}/test/dog/1.jpg"}
    assert found[f"{root}/test/dog/1.jpg"]["split"] == "test"
    assert all("broken" in row["reason"] or "not an image" in row["reason"] for row in found.values())
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["unreadable"] == dict(Counter(row["split"] for row in found.values()))

    data = ImageFolderData(str(root), val_fraction=0.34)
    held_out = [path for path, _ in data.dataset("val").samples]
    assert [str(root / row["path"]) for row in rows(folder / "val_split.csv")] == held_out
    assert [row["label"] for row in rows(folder / "val_split.csv")] == ["cat"] * 2 + ["dog"] * 2 + ["owl"] * 2
    # `run` was trained with a val folder and without broken files.
    assert not {"val_split.csv", "unreadable.csv"} & {path.name for path in run.iterdir()}
    assert "unreadable" not in json.loads((run / "summary.json").read_text())


def test_a_skipped_image_is_reported_once(tmp_path, capsys):
    data = data_of(make(tmp_path, train=2, test=2), on_error="skip")
    trainer = SimpleNamespace(datamodule=data, world_size=1, is_global_zero=True)
    record = DataRecord(None)
    data.unreadable["train"] = {"a.jpg": "broken"}
    record.teardown(trainer, None, "fit")
    # The test after the training finds no further broken file.
    data.unreadable["test"] = {}
    record.teardown(trainer, None, "test")
    assert capsys.readouterr().out.count("1 image of train could not be read; other images") == 1
    data.unreadable["test"]["b.jpg"] = "broken"
    record.teardown(trainer, None, "test")
    out = capsys.readouterr().out
    assert "1 image of test could not be read and was left out." in out
    assert "a.jpg" not in out
    assert "of train" not in out
    assert record.counts == {"train": 1, "test": 1}


def test_metrics_do_not_count_what_was_skipped(skipping, tmp_path, capsys):
    root, folder = skipping
    best = folder / "checkpoints" / "best.ckpt"
    assert main(["test", f"--ckpt_path={best}", f"--runs={tmp_path}", *QUIET]) == 0
    tested = only(tmp_path)
    assert f"1 image of test could not be read and was left out. {tested / 'unreadable.csv'}" in capsys.readouterr().out
    assert [row["path"] for row in rows(tested / "unreadable.csv")] == [f"{root}/test/dog/1.jpg"]
    classifier = load_classifier(best)
    data = ImageFolderData(str(root), img_size=16, num_workers=0)
    transform, losses = data.eval_transform, []
    for path, label in data.dataset("test").samples:
        if not path.endswith("dog/1.jpg"):
            logits = classifier(transform(Image.open(path).convert("RGB"))[None])[0].detach()
            losses.append(float(torch.nn.functional.cross_entropy(logits, torch.tensor(label))))
    assert len(losses) == 17
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["test/loss"] == pytest.approx(sum(losses) / 17, rel=1e-4)


def test_numbers_of_images_and_standard_errors_leave_out_what_was_skipped(skipping, tmp_path, capsys, fails):
    root, folder = skipping
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["test/images"] == 17
    assert summary["test/acc1_se"] == pytest.approx((summary["test/acc1"] * (1 - summary["test/acc1"]) / 17) ** 0.5)
    assert summary["val/images"] == 6 - summary["unreadable"].get("val", 0)
    shutil.copytree(root / "test", tmp_path / "val")
    given = ["validate", f"--ckpt_path={folder / 'checkpoints' / 'best.ckpt'}", f"--data.root={tmp_path}", *QUIET]
    assert main(given) == 0
    # Six of the 17 images are in the most frequent class.
    assert re.search(r"\n17 images of val at 16 x 16 px, accuracy .*class: 0\.3529\n", capsys.readouterr().out)
    assert main([*given, "--trainer.limit_val_batches=3"]) == 0
    assert "\n6 images of val at" in capsys.readouterr().out
    assert "--trainer.limit_val_batches 0 leaves no image to validate: give" in fails(
        [*given, "--trainer.limit_val_batches=0"]
    )


def test_a_validation_without_a_readable_image_is_an_error(skipping, tmp_path, fails):
    shutil.copytree(skipping[0] / "test", tmp_path / "val")
    spoil(*tmp_path.rglob("*.jpg"))
    best = skipping[1] / "checkpoints" / "best.ckpt"
    assert "none of the images of val could be read" in fails(["validate", best, f"--data.root={tmp_path}", *QUIET])


def test_so_is_it_in_a_training(photos, tmp_path, fails):
    """Without any readable image the score would be 0 in each epoch, and the first checkpoint would be the best."""
    root = shutil.copytree(photos, tmp_path / "photos")
    for image in (root / "val").rglob("*.jpg"):
        image.write_bytes(b"x")
    options = [f"--data.root={root}", "--data.on_error=skip", f"--runs={tmp_path / 'runs'}"]
    message = fails(["fit", "--data=ImageFolderData", *options, *TINY, "--trainer.max_epochs=1"])
    assert "none of the images of val could be read: relvit check-data says why" in message


def test_validate_and_predict_report_it(skipping, tmp_path, capsys):
    root, folder = skipping
    shutil.copytree(root / "test", tmp_path / "photos" / "val")
    best = folder / "checkpoints" / "best.ckpt"
    assert main(["validate", f"--ckpt_path={best}", f"--data.root={tmp_path / 'photos'}", *QUIET]) == 0
    skipped = f"{tmp_path / 'photos'}/val/dog/1.jpg"
    assert f"1 image of val could not be read and was left out.\n  {skipped}: " in capsys.readouterr().out
    assert main(["predict", f"--ckpt_path={best}", f"--runs={tmp_path / 'runs'}", *QUIET]) == 0
    predictions = only(tmp_path / "runs")
    assert len(rows(predictions / "predictions.csv")) == 17
    assert [row["path"] for row in rows(predictions / "unreadable.csv")] == [f"{root}/test/dog/1.jpg"]
