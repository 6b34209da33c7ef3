"""The report of a test: the pictures on the sheet of mistakes, and many classes; `tests/cli` has its other files."""

import shutil

import numpy as np
import torch
from lightning import Trainer
from small_training import NoiseImages, build

from relvit.data import ImageFolderData
from relvit.evaluation import EvaluationReport
from relvit.evaluation import report as module
from relvit.evaluation.outcomes import OneLabelOutcomes


def test_the_sheet_shows_the_most_confident_mistakes_as_the_model_saw_them(tmp_path, monkeypatch):
    sheets = []
    monkeypatch.setattr(module, "plot_sheet", lambda *args, **kwargs: sheets.append(args))
    classifier, data = build(), NoiseImages(90)
    report = EvaluationReport(tmp_path)
    trainer = Trainer(accelerator="cpu", callbacks=[report], logger=False, enable_progress_bar=False)
    trainer.test(classifier, data, verbose=False)
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
    # nothing stays on the classifier
    assert not classifier._forward_hooks


def test_a_mistake_whose_file_has_gone_is_listed_without_a_picture(photos, tmp_path, monkeypatch):
    sheets = []
    monkeypatch.setattr(module, "plot_sheet", lambda *args, **kwargs: sheets.append(args))
    root = shutil.copytree(photos / "test", tmp_path / "test").parent
    data = ImageFolderData(str(root), img_size=16, num_workers=0, class_names=["cat", "dog", "owl"])
    data.evaluate_on("test")
    data.dataset("test")
    (root / "test" / "cat" / "0.jpg").unlink()
    (root / "test" / "cat" / "1.jpg").write_bytes(b"no image")
    report, outcomes = EvaluationReport(tmp_path), np.array([[0, 0, 0], [1, 2, 1], [0.9, 0.8, 0.7]])
    report._outcomes = OneLabelOutcomes()
    report._write_mistakes(outcomes, [0, 1, 2], data)
    ((pictures, captions, _),) = sheets
    assert (len(pictures), captions) == (1, ["2.jpg\ntrue: cat\n70.0% dog"])
    assert len((tmp_path / "mistakes.csv").read_text().splitlines()) == 1 + 3
    # Without any picture, there is no sheet, and no error.
    report._write_mistakes(outcomes[:, :2], [0, 1], data)
    assert len(sheets) == 1


def test_many_classes_are_written_as_pairs(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "DENSE", 5)
    report = EvaluationReport(tmp_path)
    labels, predicted = np.array([0, 0, 0, 6, 3]), np.array([0, 2, 2, 6, 3])
    report._outcomes = OneLabelOutcomes()
    report._write_classes(np.stack((labels, predicted, np.full(5, 0.5))), [f"class {i}" for i in range(7)])
    pairs = ["class 0,class 0,1", "class 0,class 2,2", "class 3,class 3,1", "class 6,class 6,1"]
    assert (tmp_path / "confusion.csv").read_text().splitlines() == ["true,predicted,count", *pairs]
    assert (tmp_path / "classes.csv").read_text().splitlines()[2] == "class 1,0,,,"
