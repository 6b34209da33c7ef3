"""Multi-label metrics compared with scikit-learn and brute force; thresholds in checkpoints and resumed trainings."""

import tracemalloc

import numpy as np
import pytest
import sklearn.metrics
import torch
from lightning.pytorch.callbacks import LambdaCallback
from small_training import SeveralLabels, assert_close, build, record_steps, train
from torch._subclasses.fake_tensor import FakeTensorMode

from relvit.app.training import load_classifier
from relvit.app.training.checkpoints.upgrades import KEY
from relvit.app.training.class_metrics import MultiLabelScores, multi_label_metrics
from relvit.app.training.labels import OneLabel
from relvit.app.training.labels import SeveralLabels as Several


@pytest.fixture
def scored():
    """Return probabilities with many ties, and labels; the last class has no images, the one before it all images."""
    generator = np.random.default_rng(0)
    labels = generator.random((60, 6)) < [0.5, 0.3, 0.1, 0.05, 2, -1]
    scores = np.clip(0.3 * labels + 0.7 * generator.random((60, 6)), 0, 1)
    scores[:, 1] = scores[:, 1].round(1)
    return scores, labels


def test_tensors_and_labels_as_numbers_have_the_metrics_of_arrays(scored):
    scores, labels = scored
    found = multi_label_metrics(torch.from_numpy(scores), torch.from_numpy(labels).float())
    for values, expected in zip(found, multi_label_metrics(scores, labels), strict=True):
        np.testing.assert_array_equal(values, expected)


def test_average_precision_and_given_thresholds_are_those_of_scikit_learn(scored):
    scores, labels = scored
    thresholds = np.array([0.5, 0.6, 0.2, 0.9, 0.1, 0.5])
    found = multi_label_metrics(scores, labels, thresholds)
    predicted = scores >= thresholds
    options = {"zero_division": np.nan, "average": None}
    expected = sklearn.metrics.precision_recall_fscore_support(labels, predicted, **options)
    precision, recall, f1, count = expected
    np.testing.assert_array_equal(found.count, count)
    for name, values in {"precision": precision, "recall": recall, "f1": f1}.items():
        np.testing.assert_allclose(getattr(found, name), values, err_msg=name)
    average = [sklearn.metrics.average_precision_score(labels[:, c], scores[:, c]) for c in range(5)]
    np.testing.assert_allclose(found.average_precision, [*average, np.nan], rtol=1e-12)
    np.testing.assert_array_equal(found.threshold, thresholds)
    assert found.means() == pytest.approx({"map": np.mean(average), "f1": f1[:5].mean()})


def test_a_class_without_images_keeps_its_threshold_in_a_calibration(scored):
    """`relvit calibrate --split test` set the threshold that val had chosen to 0.5."""
    scores, labels = scored
    before = Several([0.25] * 6)
    kept = before.keep(torch.from_numpy(scores), torch.from_numpy(labels))
    assert before.fitted(kept).thresholds == [*multi_label_metrics(scores, labels).threshold[:5], 0.25]


def test_no_other_threshold_has_a_better_f1(scored):
    scores, labels = scored
    found = multi_label_metrics(scores, labels)
    assert found.threshold[5] == 0.5
    for c in range(5):
        # Thresholds are tried from high to low, and the first of several equally good thresholds is chosen.
        others = np.unique(scores[:, c])[::-1]
        f1 = [sklearn.metrics.f1_score(labels[:, c], scores[:, c] >= t) for t in others]
        best = int(np.argmax(f1))
        assert found.f1[c] == pytest.approx(max(f1))
        assert found.threshold[c] == pytest.approx((others[best] + [*others, 0][best + 1]) / 2)


def test_the_metric_of_batches_is_that_of_all_images(scored):
    scores, labels = (torch.from_numpy(values) for values in scored)
    metric, logits = MultiLabelScores(), scores.logit().float()
    for part in (slice(0, 25), slice(25, 25), slice(25, 60)):
        metric.update(logits[part], labels[part])
    # The labels of an empty batch have only one dimension.
    metric.update(logits[:0], torch.empty(0, dtype=torch.long))
    expected = multi_label_metrics(logits.sigmoid().numpy(), labels.numpy())
    assert metric.compute() == pytest.approx(expected.means())
    np.testing.assert_array_equal(metric.classes.threshold, expected.threshold)
    assert np.isnan(list(MultiLabelScores().compute().values())).all()


def test_the_metric_takes_no_memory_of_a_gpu():
    """A validation of many images and thousands of classes would otherwise fill the memory of the GPU."""
    metric = MultiLabelScores()
    with FakeTensorMode():
        metric.update(torch.empty(4, 3, device="cuda"), torch.ones(4, 3, device="cuda", dtype=torch.bool))
    assert {state.device.type for state in (*metric.probabilities, *metric.labels)} == {"cpu"}


def test_the_metrics_need_no_second_copy_of_the_probabilities():
    probabilities = np.random.default_rng(0).random((2000, 200), dtype=np.float32)
    tracemalloc.start()
    multi_label_metrics(probabilities, probabilities > 0.7)
    assert tracemalloc.get_traced_memory()[1] < 1.5 * probabilities.nbytes
    tracemalloc.stop()


def test_classes_above_their_thresholds():
    probabilities = torch.tensor([[0.25, 0.9, 0.6], [0.1, 0.1, 0.1], [0.7, 0.4, 0.7]])
    assert Several([0.25, 0.5, 0.65]).classes(probabilities, 1) == [[1, 0], [], [0, 2]]
    # The difference between threshold and probability is too small for single precision.
    assert Several([float(probabilities[0, 0]) + 1e-9, 1.0, 1.0]).classes(probabilities, 1) == [[], [], [0]]


def test_only_the_probabilities_of_predicted_classes_become_numbers_of_python(monkeypatch):
    made, sizes, tensor, tolist = [], [], torch.tensor, torch.Tensor.tolist
    monkeypatch.setattr(torch, "tensor", lambda *args, **options: (made.append(args), tensor(*args, **options))[1])
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: (sizes.append(self.numel()), tolist(self))[1])
    names = [f"class {number}" for number in range(1000)]
    probabilities = torch.linspace(0, 0.999, 1000).repeat(4, 1)
    several = Several([0.9985] * 1000).predicted(probabilities, names)
    assert several == [[("class 999", pytest.approx(0.999))]] * 4
    assert len(made) == 1
    assert [found[0] for found in OneLabel().predicted(probabilities, names)] == [row[0] for row in several]
    assert sum(sizes) < 100


def test_labels_in_whole_numbers_are_smoothed_and_mixed_as_bool_labels():
    trained = []
    for dtype in (torch.bool, torch.int64):
        data, module = SeveralLabels(8), build(multi_label=True, warmup_epochs=0, mixup=0.8)
        data.labels = data.labels.to(dtype)
        train(module, data, max_epochs=1)
        trained.append(module.net.state_dict())
    assert_close(*trained)


def test_thresholds_and_resume(tmp_path):
    """A training that is resumed within an epoch, after a validation, ends like the training without interruption."""

    def fit(name, ckpt_path=None):
        module = build(multi_label=True, loss="asl", warmup_epochs=0, model_kwargs={"drop_rate": 0.1}, mixup=0.8)
        steps, data = [], SeveralLabels(23)
        record_steps(module, lambda batch, index: steps.append(index))
        callbacks = [LambdaCallback(on_train_batch_end=save)]
        trainer = train(module, data, ckpt_path, callbacks=callbacks, max_epochs=2, val_check_interval=2)
        trainer.save_checkpoint(tmp_path / name)
        return module, data, trainer, steps

    def save(trainer, *_):
        if trainer.global_step == 3 and not (tmp_path / "part.ckpt").exists():
            trainer.save_checkpoint(tmp_path / "part.ckpt")

    module, data, trainer, steps = fit("whole.ckpt")
    resumed, _, _, fewer = fit("again.ckpt", tmp_path / "part.ckpt")
    assert len(fewer) == len(steps) - 3 > 0
    whole, again, part = (
        torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("whole", "again", "part")
    )
    for name, value in whole["state_dict"].items():
        assert torch.equal(again["state_dict"][name], value), name
    assert again[KEY]["thresholds"] == whole[KEY]["thresholds"] == module.thresholds == resumed.thresholds
    assert part[KEY]["thresholds"] != module.thresholds
    # The checkpoint holds the thresholds of the best F1 on val, and Lightning has logged the metrics at these
    # thresholds.
    classifier = load_classifier(tmp_path / "whole.ckpt")
    with torch.no_grad():
        probabilities = classifier(data.images).sigmoid().numpy()
    expected = multi_label_metrics(probabilities, data.labels.numpy())
    np.testing.assert_allclose(classifier.thresholds, expected.threshold, rtol=1e-6)
    metrics = {name: float(trainer.callback_metrics[f"val/{name}"]) for name in ("map", "f1")}
    assert metrics == pytest.approx(expected.means(), rel=1e-6)
    assert "train/map" not in trainer.callback_metrics
    tested = trainer.test(module, data, verbose=False)[0]
    assert tested["test/f1"] == pytest.approx(metrics["f1"], rel=1e-6)
    loss_of_val = torch.nn.functional.binary_cross_entropy(torch.from_numpy(probabilities), data.labels.float())
    assert tested["test/loss"] == pytest.approx(float(loss_of_val), rel=1e-5)
    for wrong in ([0.5] * 6, [0.5] * 6 + [2.0], [0.5] * 6 + [None], "0.5"):
        whole[KEY]["thresholds"] = wrong
        torch.save(whole, tmp_path / "wrong.ckpt")
        with pytest.raises(ValueError, match=r"relvit\.thresholds is missing or has a wrong value"):
            load_classifier(tmp_path / "wrong.ckpt")
