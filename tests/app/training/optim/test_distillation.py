"""Distillation compared with DeiT's formulas, computed image by image."""

import math

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from small_training import KWARGS, NAMES, VIT, Noise, NoiseImages, SeveralLabels, build, train, train_and_save
from timm.models import save_for_hf

from relvit.app.training import ImageClassifier, load_classifier
from relvit.app.training.optim.distillation import Teacher, distillation_loss

MEAN, STD = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
THEIR_MEAN, THEIR_STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A folder of timm: a ViT with another normalisation than the data's, large logits and reversed classes."""
    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(3)
    net = timm.create_model("vit_tiny_patch16_224", img_size=(8, 12), num_classes=7, **VIT).eval()
    torch.nn.init.normal_(net.head.weight, std=3.0)
    net.pretrained_cfg |= {"mean": THEIR_MEAN, "std": THEIR_STD, "input_size": (3, 8, 12)}
    save_for_hf(net, folder, model_config={"label_names": NAMES[::-1]}, model_args=VIT | {"img_size": [8, 12]})
    return str(folder), net


def softmax(row):
    exps = [math.exp(value - max(row)) for value in row]
    return [value / sum(exps) for value in exps]


@pytest.mark.parametrize(("kind", "weight", "temperature"), [("hard", 0.5, 3.0), ("soft", 0.1, 1.5)])
def test_the_loss_is_that_of_the_paper(kind, weight, temperature):
    generator = torch.Generator().manual_seed(0)
    student, teacher = (3 * torch.randn(5, 4, generator=generator) for _ in range(2))
    distances = []
    for ours, theirs in zip(student.tolist(), teacher.tolist(), strict=True):
        if kind == "hard":
            distances.append(-math.log(softmax(ours)[theirs.index(max(theirs))]))
        else:
            p, q = (softmax([value / temperature for value in row]) for row in (theirs, ours))
            distances.append(temperature**2 * sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
    expected = (1 - weight) * 0.7 + weight * sum(distances) / 5
    given = distillation_loss(torch.tensor(0.7), student, teacher, kind, weight, temperature)
    assert float(given) == pytest.approx(expected, rel=1e-5)


def test_the_teacher_sees_its_own_normalisation_and_answers_in_our_order(teacher):
    folder, net = teacher
    pixels = torch.rand(2, 3, 8, 12)
    ours, theirs = (
        (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
        for mean, std in ((MEAN, STD), (THEIR_MEAN, THEIR_STD))
    )
    logits = Teacher(folder, 7, (8, 12), NAMES, MEAN, STD)(ours)
    torch.testing.assert_close(logits, net(theirs).flip(1).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (torch.tensor(MEAN), np.array(STD))])
def test_the_normalisation_of_own_data_may_be_numbers_or_arrays(mean, std, teacher):
    data = Noise()
    data.mean, data.std = mean, std
    module = build(teacher=teacher[0], class_names=NAMES, warmup_epochs=0)
    train(module, data, max_steps=1, limit_val_batches=0)
    ours, spread = (torch.as_tensor(value).float().expand(3).tolist() for value in (mean, std))
    expected = Teacher(teacher[0], 7, (8, 12), NAMES, ours, spread)(data.images)
    torch.testing.assert_close(module.teacher(data.images), expected)


def test_the_start_says_that_a_teacher_names_no_classes(teacher, tmp_path, capsys):
    """Such as timm's own weights: whether their classes are in the order of the data is not known."""
    for label_names, said in ((NAMES, 0), (None, 1)):
        named = {"model_config": {"label_names": label_names}} if label_names else {}
        folder = str(tmp_path / str(said))
        save_for_hf(teacher[1], folder, model_args=VIT | {"img_size": [8, 12]}, **named)
        module = ImageClassifier("test_relvit", 7, 3, (8, 12), NAMES, KWARGS, warmup_epochs=0, teacher=folder)
        train(module, NoiseImages(4), max_steps=1)
        note = f"the teacher {folder} does not name its classes, so its outputs are taken to be 'class 0', 'class 1'"
        assert capsys.readouterr().out.count(note) == said


def test_the_data_name_the_classes_where_the_student_does_not(teacher):
    data = NoiseImages(8, mean=MEAN, std=STD)
    module = ImageClassifier("test_relvit", 7, 3, (8, 12), None, KWARGS, warmup_epochs=0, teacher=teacher[0])
    train(module, data, max_steps=1)
    expected = Teacher(teacher[0], 7, (8, 12), NAMES, MEAN, STD)(data.images)
    torch.testing.assert_close(module.teacher(data.images), expected)


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        ({"train_sizes": [(8, 12), (12, 12)]}, r"cannot take images of 12 x 12 px \(.*\): give other"),
        ({"img_size": (10, 14)}, "image height 10 is not a multiple of the patch size 4: give other sizes"),
    ],
)
def test_a_teacher_that_does_not_take_the_images_is_refused_at_the_start(images, reason, teacher):
    student = ImageClassifier("test_relvit", 7, 3, (8, 12), NAMES, KWARGS | {"patch_size": 2}, teacher=teacher[0])
    with pytest.raises(ValueError, match=f"the teacher .*teacher.* does not fit the images, as .*{reason}"):
        train(student, NoiseImages(8, **images), max_steps=1)


def test_a_teacher_of_grey_images_or_of_several_labels_is_refused_at_the_start(tmp_path):
    grey = VIT | {"img_size": [8, 12], "in_chans": 1}
    net = timm.create_model("vit_tiny_patch16_224", num_classes=7, **grey)
    net.pretrained_cfg |= {"mean": (0.5,), "std": (0.5,), "input_size": (1, 8, 12)}
    save_for_hf(net, tmp_path / "grey", model_args=grey)
    train_and_save(tmp_path / "a.ckpt", build(multi_label=True, warmup_epochs=0), SeveralLabels(8), max_steps=1)
    about = {"label_names": NAMES, "relvit": {"thresholds": [0.5] * 7}}
    save_for_hf(load_classifier(tmp_path / "a.ckpt").net, tmp_path / "published", model_config=about)
    for name, reason in (
        ("grey", "was trained with in_chans 1, the data have 3"),
        ("a.ckpt", "of several labels"),
        ("published", "of several labels"),
    ):
        with pytest.raises(ValueError, match=f"the teacher .*{name} .*{reason}"):
            train(build(teacher=str(tmp_path / name)), NoiseImages(8), max_steps=1)


@pytest.mark.parametrize(
    ("student", "freeze_epochs"),
    [("test_relvit", 0), ("deit_tiny_distilled_patch16_224", 0), ("deit_tiny_distilled_patch16_224", 1)],
)
def test_training_steps_hold_the_distillation_loss_of_the_student(student, freeze_epochs, teacher, tmp_path):
    kwargs = KWARGS if student == "test_relvit" else VIT
    options = {"teacher": teacher[0], "distill": "soft", "distill_weight": 0.3, "distill_temperature": 2.0}
    options["freeze_epochs"] = freeze_epochs
    module = ImageClassifier(student, 7, 3, (8, 12), NAMES, kwargs, warmup_epochs=0, **options)
    seen, step = [], module.training_step

    def record(batch, batch_idx):
        with torch.no_grad():
            outputs = module.net(batch[0])
        seen.append((batch, outputs, step(batch, batch_idx)))
        return seen[-1][2]

    module.training_step = record
    data = NoiseImages(16, mean=MEAN, std=STD)
    train_and_save(tmp_path / "x.ckpt", module, data, max_steps=2)
    asked = Teacher(teacher[0], 7, (8, 12), NAMES, MEAN, STD)
    for (images, labels), outputs, loss in seen:
        main, distilled = outputs if isinstance(outputs, tuple) else (outputs, outputs)
        assert isinstance(outputs, tuple) == (student != "test_relvit")
        base = torch.nn.functional.cross_entropy(main, labels, label_smoothing=0.1)
        expected = distillation_loss(base, distilled, asked(images), "soft", 0.3, 2.0)
        torch.testing.assert_close(loss.detach(), expected)
    assert not any("teacher" in name for name in module.state_dict())
    # The checkpoint can be used without the teacher.
    images = data.images[:3]
    torch.testing.assert_close(load_classifier(tmp_path / "x.ckpt")(images), module.eval()(images))


def test_teachers_of_other_classes_or_of_no_model_are_refused(teacher, tmp_path):
    with pytest.raises(ValueError, match=r"'class 6'.* than the 5 here"):
        Teacher(teacher[0], 5, (8, 12), NAMES[:5])
    save_file(teacher[1].state_dict(), tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"a.safetensors .*; elsewhere take a checkpoint of relvit fit"):
        Teacher(str(tmp_path / "a.safetensors"), 7)
