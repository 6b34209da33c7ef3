"""Mistyped options: the hint names the option that the user meant, or there is no hint."""

import re
from functools import cache

import pytest
from lightning import Trainer

import relvit_start
from relvit.app.cli.functions import function_of
from relvit.app.cli.mistakes import explain
from relvit.app.cli.option_types import in_words
from relvit.app.cli.parser import Parser
from relvit.app.data import ImageData
from relvit.app.models.model_names import nearest_model
from relvit.app.training import ImageClassifier
from relvit.utils.messages import nearest
from relvit_start import COMMANDS

# Each command has typed options, and for each of them the option in the hint, or None if a hint would be a guess.
MISTAKES = {
    "fit": {
        "train_set": "--root", "channels": None, "resize": "--img_size", "cpu": "--accelerator",
        "learningrate": "--lr", "learning-rate": "--lr", "lr0": "--lr", "base_lr": "--lr", "lrate": None,
        "epoch": "--epochs", "num_epochs": "--epochs", "num_train_epochs": "--epochs", "maxepochs": "--epochs",
        "batch": "--batch_size", "batchsize": "--batch_size", "batch-size": "--batch_size",
        "per_device_train_batch_size": "--batch_size", "imgsz": "--img_size", "image-size": "--img_size",
        "imgsize": "--img_size", "workers": "--num_workers", "arch": "--model", "modle": "--model",
        "wd": "--model.weight_decay", "weight-decay": "--model.weight_decay", "weightdecay": "--model.weight_decay",
        "optimizer": "--model.opt", "optimiser": "--model.opt", "freeze": "--model.freeze_epochs",
        "freeze_backbone": "--model.freeze_epochs", "warmup": "--model.warmup_epochs", "scheduler": "--model.schedule",
        "smoothing": "--model.label_smoothing", "ema": "--model.ema_decay", "clip_grad": "--trainer.gradient_clip_val",
        "gradient_accumulation_steps": "--trainer.accumulate_grad_batches", "data_dir": "--root", "rot": "--root",
        "output_dir": "--runs", "seed": "--seed_everything", "val_split": "--data.val_fraction",
        "pretraind": "--pretrained",
        "weights": "--pretrained", "resme": "--resume", "gpus": "--devices", "device": "--devices",
        "fp16": "--precision",
        "auto_augment": "--data.augment", "model.learning_rate": "--lr", "trainer.max_epoch": "--trainer.max_epochs",
        "trainer.lr": "--lr", "model.dropot": None, "color": "--data.color_jitter", "subset": None, "metric": None,
        "save_strategy": "--save_every", "labels": None, "ratio": None,
        "eval_strategy": "--trainer.check_val_every_n_epoch",
        "gradient_checkpointing": None, "checkpoint_hist": None, "model_ema_force_cpu": None, "no_wandb": None,
        "fraction": "--trainer.limit_train_batches", "nbs": "--model.lr_base_batch", "resume_training": "--resume",
        "early_stop_patience": "--patience", "num_workers_per_gpu": "--num_workers", "flip": None, "folder": "--root",
        "train": "--root", "steps": "--trainer.max_steps", "epochs_warmup": "--model.warmup_epochs",
        "backbone_lr": "--model.layer_decay", "data_root": "--root",
        "eta": None, "sgd": None, "mode": None, "runner": None, "ipus": None, "train_bn": None, "warmup_lr": None,
        "no_pretrained": None, "lr_final": "--model.min_lr", "lr-base": "--lr", "train_bs": "--batch_size",
        "dtype": "--precision", "native-amp": "--precision", "model_type": "--model", "decay": None, "wds": None,
        "mixup_mode": None, "cutmix_minmax": None, "cutmix_prob": "--model.mix_prob", "epoch-repeats": None,
        "layer-decay-min-scale": None, "data_seed": "--seed_everything", "device_modules": None, "split": None,
        "distillation_alpha": "--model.distill_weight", "label_smooth": "--model.label_smoothing",
        "optimizer_lr": None, "lr_factor": None, "train_size": None, "stratify": None, "freeze_bn": None,
        "weigth_decay": "--model.weight_decay",
        "btach_size": "--batch_size", "class_wts": None, "num_wokers": "--num_workers",
        "weight_decay_rate": "--model.weight_decay", "find_lr": "--lr_find", "limit_val": "--trainer.limit_val_batches",
        "crop_size": "--img_size", "eta_min": "--model.min_lr", "llrd": "--model.layer_decay",
        "jitter": "--data.color_jitter", "loss_fn": "--model.loss", "reprob": "--data.random_erasing",
        "iters": "--trainer.max_steps", "experiment": "--runs", "lr_gamma": None,
        "model_kwargs.depth": "--model.model_kwargs.depth", "retrofit.rel_terms": "--model.retrofit.rel_terms",
        "model.model_kwarg.num_heads": "--model.model_kwargs.num_heads", "model.schedul.depth": None,
        "es_patience": None, "rrc_scale": None, "dist": None, "augs": None, "aspect_ratio": None, "kd_alpha": None,
    },
    "test": {"max_batches": "--trainer.limit_test_batches", "epochs": None, "lr": None, "batch": "--batch_size"},
    "predict": {
        "augment": "--mirror", "imgs": "--paths", "folder": "--paths", "source": "--paths", "classes": None,
        "topk": None, "conf": None, "color_jitter": None,
    },
    "check-data": {"workers": "--processes", "folder": "--root", "fix": None},
    "resolutions": {"imgsz": None, "resolution": None, "size": "--sizes", "batch": "--batch_size"},
    "calibrate": {"imgsz": None, "out": "--output"},
    "export": {"ouput": "--output", "out": "--output", "imgsz": "--img_size", "half": None, "batch": None},
    "show": {
        "image": "--images", "layers": "--layer", "head": None, "colormap": None, "cuda": "--device", "maps": None
    },
    "embed": {"batch": "--batch_size", "pool": None, "save_dir": "--output", "imgs": None},
    "publish": {"token": None, "repo": None, "licence": "--license", "private": None},
    "demo": {"share": None, "prot": "--port", "server_name": None},
    "probe": {"neighbours": None, "reg": None}, "explain": {"memory": None, "json": None},
}  # fmt: skip
OF_A_TRAINER = ("fit", "test", "predict")


@cache
def parser(command):
    made = Parser()
    made.add_options_of(function_of(COMMANDS[command][0], command))
    if command in OF_A_TRAINER:
        made.add_subclass_arguments(ImageData, "data", fail_untyped=False)
        for cls, name in ((ImageClassifier, "model"), (Trainer, "trainer")):
            made.add_class_arguments(cls, name, fail_untyped=False)
        made.add_argument("--seed_everything", type=int)
    return made


@pytest.mark.parametrize("command", MISTAKES)
def test_a_hint_is_what_was_meant(command):
    words = ["--data=ImageFolderData", "--data.root=x"] if command in OF_A_TRAINER else []
    for typed, meant in MISTAKES[command].items():
        message = explain(parser(command), [*words, f"--{typed}=1"], None, Exception())
        assert message.startswith(f"unknown option --{typed}"), message
        assert not message.endswith(typed), "it says what to do"
        hint = re.search(r"did you mean '(.*?)'", message)
        assert (hint and hint[1]) == meant, message


@pytest.mark.parametrize(
    ("typed", "instead"),
    [
        ("kfold", "'Your own data and training in Python'"),
        ("n-folds", "'Your own data and training in Python'"),
        ("num_classes", "found in the data"),
        ("class_num", "found in the data"),
        ("dropout", "--model.model_kwargs.drop_rate"),
        ("rel_terms", "--model.model_kwargs.rel_terms"),
        ("position", "--model.model_kwargs.position"),
        ("wandb", "--logger wandb"),
        ("csv", "--data ImageListData"),
        ("patch_size", "--model.model_kwargs.patch_size"),
        ("model.patch", "--model.model_kwargs.patch_size"),
        ("num_layers", "--model.model_kwargs.depth"),
        ("hidden_size", "--model.model_kwargs.embed_dim"),
        ("patch", "--model.model_kwargs.patch_size"),
    ],
)
def test_what_has_no_option_of_its_own_is_answered(typed, instead):
    message = explain(parser("fit"), ["--data=ImageFolderData", "--data.root=x", f"--{typed}=1"], None, Exception())
    assert "did you mean '--r" not in message
    assert instead is None or instead in message


def test_the_commands_own_option_is_nearer_than_a_name_of_another_library():
    given = ["--data=ImageListData", "--data.train=a.csv", "--data.trian=b.csv"]
    assert "did you mean '--data.train'?" in explain(parser("fit"), given, None, Exception())


def test_a_list_without_brackets_is_shown_with_brackets():
    given = ["--data=ImageFolderData", "--data.root=x", "--model.class_weights=1,2"]
    message = explain(parser("fit"), given, None, Exception())
    assert message == "--model.class_weights must be a list in brackets, '[1,2]', got 1,2"


def test_names_that_only_share_letters_are_not_near():
    for typed, allowed in {
        "wasps": ["ants", "bees"],
        "freeze": ["resume", "root"],
        "learningrate": ["nonfinite"],
        "kfold": ["model"],
        "rotate": ["root"],
        "seed": ["test"],
        "lr": ["k"],
    }.items():
        assert nearest(typed, allowed) is None, typed
    assert nearest("deit_small", ["davit_small", "deit_small_patch16_224"]) == "deit_small_patch16_224"
    assert nearest("relvit_xs", ["relvit_base", "relvit_tiny"]) is None
    for typed, meant in {
        "Cat": "cat",
        "crop_flip": "crop-flip",
        "tset": "test",
        "FolderData": "ImageFolderData",
    }.items():
        assert nearest(typed, [meant, "another"]) == meant
    assert (
        nearest("vit_small_patch16", ["vit_small_patch8_224", "vit_small_patch16_224.x"]) == "vit_small_patch16_224.x"
    )
    assert in_words(tuple[float, ...]) == "values, each a number"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("train", "fit"),
        ("trian", "fit"),
        ("finetune", "fit"),
        ("evalaute", "test"),
        ("predcit", "predict"),
        ("inference", "predict"),
        ("check_data", "check-data"),
        ("checkdata", "check-data"),
        ("resolution", "resolutions"),
        ("visualize", "show"),
        ("deploy", None),
        ("list", None),
        ("runs/RUN", None),
        ("cross-validate", None),
        ("detect", None),
        ("gradcam", "show"),
    ],
)
def test_unknown_commands(typed, meant):
    message = relvit_start.unknown_command(typed)
    assert ("did you mean" in message) == (meant is not None), message
    assert meant is None or f"(did you mean {meant!r}?)" in message


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("vit_base", "vit_base_patch16_224"),
        ("deit_small", "deit_small_patch16_224"),
        ("relvit-small", "relvit_small"),
        ("resnet-50", "resnet50"),
        ("relvit_xs", None),
        ("swin_v2_t", None),
        ("yolov8n-cls", None),
    ],
)
def test_models(typed, meant):
    assert nearest_model(typed) == meant


def test_names_that_are_numbers_need_quotes():
    given = ["--data=ImageListData", "--data.train=a.csv", "--data.class_names=[1,2]"]
    message = explain(parser("fit"), given, None, Exception())
    assert message == (
        "--data.class_names must be values, each text, got [1,2]: put each text in quotes, such as ['1','2']"
    )
