"""The report of a test: pictures on the sheet of mistakes, many classes; `tests/app/cli` tests its other files."""

import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from lightning import Callback, Trainer
from small_training import NoiseImages, SeveralLabels, build

from relvit.app.data import ImageFolderData
from relvit.app.evaluation import EvaluationReport
from relvit.app.evaluation import report as module
from relvit.app.training import load_classifier


@pytest.fixture
def sheets(monkeypatch):
    """Record the arguments of the sheets instead of drawing them."""
    found = []
    monkeypatch.setattr(module, "plot_sheet", lambda *args, **kwargs: found.append(args))
    return found


def run_test(classifier, data, *callbacks):
    trainer = Trainer(accelerator="cpu", callbacks=[*callbacks], logger=False, enable_progress_bar=False)
    trainer.test(classifier, data, verbose=False)


def test_the_most_confident_mistakes_as_the_model_saw_them_and_many_classes(tmp_path, monkeypatch, sheets):
    monkeypatch.setattr(module, "DENSE", 5)
    classifier, data = build(), NoiseImages(90)
    data.labels[data.labels == 1] = 0
    run_test(classifier, data, EvaluationReport(tmp_path))
    with torch.no_grad():
        confidence, predicted = classifier.eval()(data.images).softmax(-1).max(-1)
    wrong = torch.nonzero(predicted != data.labels)[:, 0]
    best = wrong[confidence[wrong].argsort(descending=True)][:25].tolist()
    assert len(wrong) > 30
    ((pictures, captions, target),) = sheets
    assert target == tmp_path / "mistakes.png"
    assert captions == [
        f"{i:05d}\ntrue: class {data.labels[i]}\n{confidence[i]:.1%} class {predicted[i]}" for i in best
    ]
    for picture, index in zip(pictures, best, strict=True):
        expected = (data.images[index] * 0.5 + 0.5).clamp(0, 1) * 255
        np.testing.assert_array_equal(picture, expected.round().permute(1, 2, 0).numpy().astype(np.uint8))
    assert len((tmp_path / "mistakes.csv").read_text().splitlines()) == len(wrong) + 1
    # The confusion matrix is written as the pairs of classes that occur, in order.
    pairs = sorted(Counter(zip(data.labels.tolist(), predicted.tolist(), strict=True)).items())
    written = [f"class {true},class {guess},{count}" for (true, guess), count in pairs]
    assert (tmp_path / "confusion.csv").read_text().splitlines() == ["true,predicted,count", *written]
    # The class without images has no recall.
    assert (tmp_path / "classes.csv").read_text().splitlines()[2].split(",")[:4:3] == ["class 1", ""]
    # The report removes its hooks from the classifier.
    assert not classifier._forward_hooks


# Without any readable picture there is no sheet and no error.
@pytest.mark.parametrize("kept", [2, 0])
def test_a_mistake_whose_file_has_gone_is_listed_without_a_picture(best, photos, tmp_path, sheets, kept):
    """All images are in the folder of another class, and most files are deleted between the test and the report."""
    names = ["cat", "dog", "owl"]
    for name, following in zip(names, [*names[1:], names[0]], strict=True):
        shutil.copytree(photos / "test" / name, tmp_path / "test" / following)

    class Remove(Callback):
        def on_test_epoch_end(self, trainer, pl_module):
            for number, file in enumerate(sorted(tmp_path.glob("test/*/*.jpg"))[kept:]):
                file.unlink() if number % 2 else file.write_bytes(b"no image")

    data = ImageFolderData(str(tmp_path), img_size=16, num_workers=0, class_names=names)
    data.evaluate_on("test")
    run_test(load_classifier(best), data, EvaluationReport(tmp_path), Remove())
    assert len((tmp_path / "mistakes.csv").read_text().splitlines()) == 1 + 18
    assert [len(pictures) for pictures, *_ in sheets] == [kept] * (kept > 0)


def test_images_without_labels_have_no_mean_f1_and_no_warning_of_numpy(tmp_path, sheets, recwarn):
    data, report = SeveralLabels(8), EvaluationReport(tmp_path)
    data.labels[:] = False
    run_test(build(multi_label=True), data, report)
    assert np.isnan(report.results["test/f1"])
    assert not [warning for warning in recwarn if warning.category is RuntimeWarning]
