"""Wrong arguments of classifier, loss, optimiser and strategy: each error names the argument and the remedy."""

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from small_training import HALTING, Noise, NoiseImages, SeveralLabels, build, train, train_and_save
from torch.utils.data import DataLoader, TensorDataset

from relvit.app.training import ClassificationLoss, load_classifier, make_optimizer
from relvit.app.training.optim.freeze import Backbone
from relvit.app.training.optim.strategy import check_strategy


def loss(**arguments):
    ClassificationLoss(7, **arguments)


def optimizer(**arguments):
    make_optimizer(torch.nn.Linear(2, 3), **{"opt": "adamw", "lr": 0.001, "weight_decay": 0.05, **arguments})


def fit(data=None, max_epochs=1, **arguments):
    train(build(**arguments), data, max_epochs=max_epochs)


class Balanced(Noise):
    class_weights = torch.ones(7)


class TooFew(Noise):
    class_weights = torch.ones(1)


class OfOneSide(Noise):
    img_size = 9


class TwoMeans(Noise):
    mean, std = (0.5, 0.5), 0.5


class Joined(SeveralLabels):
    def __init__(self):
        super().__init__(8)
        self.class_names = [*"abcdef", "g;h"]


@pytest.mark.parametrize(
    ("door", "arguments", "named"),
    [
        (build, {"class_names": ["a"]}, ["class_names", "num_classes is 7"]),
        (build, {"min_lr": 0.1, "lr": 0.01}, ["min_lr <= lr"]),
        (build, {"label_smoothing": 1.0}, ["label_smoothing", "x < 1"]),
        (build, {"lr_base_batch": 0}, ["lr_base_batch", "1 or more"]),
        (build, {"ema_decay": 1.0}, ["ema_decay", "x < 1"]),
        (build, {"freeze_epochs": -1}, ["freeze_epochs", "0 or more"]),
        (build, {"mixup": -1.0}, ["mixup", "0 or more"]),
        (build, {"mix_prob": 1.5, "mixup": 1.0}, ["mix_prob", "x <= 1"]),
        (build, {"distill_weight": 0.0, "teacher": "x"}, ["distill_weight", "0 < x"]),
        (build, HALTING | {"ponder_weight": -1.0}, ["ponder_weight", "0 or more"]),
        (build, {"compile": "inducter"}, ["compile", "did you mean 'inductor'"]),
        (build, {"compile": "max-autotune"}, ["'max-autotune': give True, False or one of ", "'inductor'", "'eager'"]),
        (build, {"loss": "bec"}, ["loss", "'bce'"]),
        (build, {"opt": "adamv"}, ["'adamv'", "'adam"]),
        (build, {"nonfinite": "skp"}, ["nonfinite", "'skip'"]),
        (build, {"distill": "softly", "teacher": "x"}, ["distill", "'soft'"]),
        # These arguments have no effect without another one.
        (build, {"mix_prob": 0.5}, ["mix_prob", "mixup or cutmix"]),
        (build, {"mix_switch_prob": 0.1, "cutmix": 1.0}, ["mix_switch_prob", "mixup and cutmix"]),
        (build, {"distill": "soft"}, ["distill", "teacher"]),
        (build, {"distill_temperature": 2.0, "teacher": "x"}, ["distill_temperature", "'soft'"]),
        (build, {"ponder_weight": 0.5}, ["ponder_weight", "a model that halts"]),
        (build, {"model": "test_relvit_universal", "ponder_warmup_epochs": 0}, ["ponder_warmup_epochs", "halting"]),
        # These arguments contradict each other.
        (build, {"multi_label": True, "teacher": "x"}, ["teacher", "multi_label"]),
        (build, {"loss": "asl"}, ["'asl'", "multi_label"]),
        (build, {"multi_label": True, "class_names": [*"abcdef", "g;h"]}, ["class name 'g;h'", "rename it"]),
        (loss, {"threshold": 0.1}, ["bce_threshold", "'bce'"]),
        (
            loss,
            {"kind": "bce", "smoothing": 0.14, "threshold": 0.01},
            ["bce_threshold", "num_classes = 0.02, or", "below 1, got 0.01"],
        ),
        (loss, {"class_weights": [1.0]}, ["class_weights", "give 7"]),
        (loss, {"class_weights": [0.0] * 7}, ["class_weights", "positive"]),
        (optimizer, {"opt": "lars2"}, ["'lars2'", "'lars'"]),
        (optimizer, {"opt": "adahessian"}, ["'adahessian'", "second derivatives"]),
        (optimizer, {"opt": "sgd", "opt_kwargs": {"momemtum": 0.9}}, ["'momemtum'", "'momentum'"]),
        (optimizer, {"opt_kwargs": {"lr": 1.0}}, ["opt_kwargs", "'lr'"]),
        (optimizer, {"layer_decay": 1.5}, ["layer_decay", "0 < x <= 1"]),
        (optimizer, {"position_lr_scale": 10}, ["position_lr_scale 10", "Linear", "retrofit"]),
        (
            build,
            {"model_kwargs": {"rel_terms": ""}, "position_lr_scale": 0.5},
            ["position_lr_scale 0.5", "no relative positions", "retrofit"],
        ),
        (lambda: Backbone(torch.nn.Linear(2, 3)), {}, ["freeze_epochs", "classifier"]),
        # These strategies divide the weights among devices.
        (check_strategy, {"strategy": FSDPStrategy()}, ["FSDPStrategy cannot train here", "--trainer.strategy ddp"]),
        (check_strategy, {"strategy": ModelParallelStrategy()}, ["ModelParallelStrategy cannot train here"]),
        (check_strategy, {"strategy": "fsdp_cpu_offload"}, ["fsdp_cpu_offload cannot train here"]),
        # These arguments do not fit the data, or the trainer.
        (
            fit,
            {"data": NoiseImages(8), "multi_label": True},
            ["multi_label True", "the data have one", "on the command line: --data.label_separator"],
        ),
        (fit, {"data": SeveralLabels(8)}, ["multi_label False", "the data have several"]),
        (fit, {"data": Joined(), "multi_label": True}, ["class name 'g;h'", "rename it"]),
        (fit, {"data": TwoMeans()}, ["mean of the data has 2 numbers for images of 3 channels"]),
        (fit, {"data": OfOneSide()}, ["9", "not a multiple of the patch size 4"]),
        (fit, {"data": TooFew(), "loss": "bce"}, ["class_weights holds 1 number; give 7"]),
        (fit, {"data": Balanced(), "class_weights": [1.0] * 7}, ["balance='loss'", "class_weights"]),
        (fit, {"lr": 0.01, "min_lr": 0.005, "lr_base_batch": 16}, ["min_lr", "0.0025", "such as 0, or a larger lr"]),
        (fit, {"max_epochs": -1}, ["--trainer.max_epochs"]),
    ],
)
def test_errors_name_the_argument_and_the_remedy(door, arguments, named):
    with pytest.raises(ValueError, match=r".") as error:
        door(**arguments)
    assert not [part for part in named if part not in str(error.value)], error.value


@pytest.mark.parametrize("strategy", ["auto", "ddp_find_unused_parameters_true", DDPStrategy()])
def test_other_strategies_train(strategy):
    check_strategy(strategy)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the package may be there")
def test_optimisers_of_gpu_packages_report_what_they_need(tmp_path):
    with pytest.raises(ValueError, match="'fusedadam' cannot be used here"):
        fit(opt="fusedadam", opt_kwargs={"betas": [0.9, 0.95]})
    # A checkpoint of such a training can be used without the package.
    train_and_save(tmp_path / "a.ckpt", build(), max_steps=1)
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    content["relvit"]["model"] |= {"opt": "fusedadam", "opt_kwargs": {"betas": [0.9, 0.95]}}
    torch.save(content, tmp_path / "a.ckpt")
    assert load_classifier(tmp_path / "a.ckpt").hparams.opt == "fusedadam"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": "1e-3"}, "^lr must be a number, got '1e-3'"),
        ({"class_weights": {"a": 1.0}}, "^class_weights must be numbers, got {'a': 1.0}"),
        ({"class_names": "a cat a"}, r"^class_names must be a list .*\['cat', 'dog'\], got 'a cat a'"),
        ({"class_names": dict(enumerate("abcdefg"))}, "^class_names must be a list .*, got {0: 'a', "),
        ({"retrofit": True}, "^retrofit must hold arguments of relvit.retrofit by name, .* got True"),
        ({"model": torch.nn.Identity()}, "^a model is given by its name, such as 'relvit_small', got an Identity"),
    ],
)
def test_arguments_of_another_type(arguments, message):
    with pytest.raises(TypeError, match=message):
        build(**arguments)


def test_a_training_without_batches():
    with pytest.raises(ValueError, match="limit_train_batches is 0, so there is nothing to train on: give 1 or more"):
        train(build(), max_epochs=1, limit_train_batches=0)


def test_a_dataset_in_place_of_a_loader():
    images = TensorDataset(torch.randn(8, 3, 8, 12), torch.zeros(8, dtype=torch.long))
    with pytest.raises(ValueError, match="come from a dataset, TensorDataset: give a loader, such as DataLoader"):
        train(build(), images, max_epochs=1)


@pytest.mark.parametrize("label", [-1, 7])
def test_a_label_without_a_class(label):
    images = TensorDataset(torch.randn(8, 3, 8, 12), torch.full((8,), label))
    with pytest.raises(ValueError, match=f"labels must be from 0 to 6, .* got labels from {label} to {label}"):
        train(build(), DataLoader(images, 4), max_epochs=1)


@pytest.mark.parametrize(
    "changed",
    [
        {"opt": "sgd"},
        {"opt_kwargs": {"eps": 0.1}},
        {"lr": 0.5},
        {"lr_base_batch": 8},
        {"weight_decay": 0.0},
        {"layer_decay": 0.5},
        {"position_lr_scale": 3.0},
    ],
)
def test_a_resume_with_another_optimiser(changed, tmp_path):
    train_and_save(tmp_path / "a.ckpt", build(), max_epochs=1)
    ((name, given),) = changed.items()
    with pytest.raises(ValueError, match=f"was trained with {name} .*, not {given}, .*: give {name} "):
        train(build(**changed), ckpt_path=tmp_path / "a.ckpt", max_epochs=2)
