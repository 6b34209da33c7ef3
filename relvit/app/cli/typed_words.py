"""Read the words of a command line: short names, names of other libraries (`--gpus`), positional arguments, lists.

`mistakes.py` explains the words that are refused.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from jsonargparse import Namespace

from relvit.app.cli.config_text import load_config
from relvit.app.cli.errors import UsageError
from relvit.app.cli.option_types import accepts, item_type, takes_one
from relvit.app.cli.shipped_configs import shipped_configs
from relvit.app.utils.files import is_exported

# `OF_TRAINER` maps short names of options to full names for all commands that run a Trainer; `fit` also has `OF_FIT`.
OF_TRAINER: dict[str, str] = {name: f"data.{name}" for name in ("root", "img_size", "batch_size", "num_workers")}
OF_TRAINER |= {name: f"trainer.{name}" for name in ("devices", "accelerator", "precision")}
OF_FIT: dict[str, str] = {"model": "model.model", "lr": "model.lr", "pretrained": "model.pretrained"}
OF_FIT |= {"epochs": "trainer.max_epochs", "logger": "trainer.logger"}
# Configurations name the class of the data by `class_path`, and jsonargparse takes this as an option, too.
_CLASS = {"data.class_path": "data"}
# `--logger` takes these short names. `tensorboard` is the default (null): relvit itself writes a TensorBoard log. `csv`
# means no log besides metrics.csv, which relvit always writes.
LOGGERS: dict[str, str] = {"wandb": "WandbLogger", "mlflow": "MLFlowLogger", "tensorboard": "null", "csv": "false"}
LETTERS: dict[str, str] = {"h": "help", "c": "config", "q": "quiet"}
ALONE: tuple[str, ...] = ("help", "help-all", "print_config")
# Help and errors name these values of `--precision`. Lightning also takes numbers, whose meaning has changed, and
# formats that need further packages.
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")
# `fit --model` takes the name of a model, or a file of the model's options whose name ends in one of these suffixes.
FILES: tuple[str, ...] = (".yaml", ".yml", ".json")

# `_ELSEWHERE` maps the last part of an option's name to the names by which users of timm, ultralytics, Lightning and
# Hugging Face know this option. A name that belongs to several options stands for the option that the command has.
_ELSEWHERE = {
    "lr": "lr_base initial_lr init_lr lr_init learning_rate lr0 base_lr",
    "min_lr": "lr_min lr_final final_lr lr_end end_lr min_learning_rate lrf eta_min",
    "max_epochs": "num_epochs n_epochs num_train_epochs train_epochs",
    "max_steps": "iterations iters num_steps steps total_steps",
    "batch_size": "bsz train_bs batch_per_gpu samples_per_gpu batch bs per_device_train_batch_size "
    "per_device_eval_batch_size train_batch_size eval_batch_size",
    "num_workers": "workers dataloader_num_workers threads n_threads num_threads",
    "img_size": "imgsz image_size size resolution input_size resize crop_size",
    "devices": "gpu_ids device_ids gpus gpu num_gpus n_gpu",
    "device": "gpus gpu cuda cpu mps accelerator",
    "accelerator": "cuda cpu mps tpu",
    "precision": "dtype torch_dtype model_dtype amp_dtype use_amp native_amp fp32 float16 bfloat16 amp fp16 bf16 half "
    "mixed_precision",
    "paths": "source input inputs image images imgs path image_dir images_dir folder dir directory",
    "root": "path data_dir data_path data_root train_dir train_set train image_dir images_dir dataset_path folder dir "
    "directory",
    "data": "dataset",
    "images": "image imgs source input inputs",
    "to": "output_dir save_dir out output",
    "output": "out output_dir save_dir out_dir outdir output_file save_path",
    "runs": "output output_dir save_dir out_dir outdir project log_dir run_dir experiment",
    "opt": "optimizer optim",
    "opt_kwargs": "momentum betas opt_eps opt_betas",
    "in_chans": "channels num_channels n_channels in_channels",
    "model": "model_type arch architecture backbone model_name model_name_or_path",
    "pretrained": "from_pretrained init_checkpoint initial_checkpoint weights checkpoint_path finetune init_weights",
    "resume": "resume_from resume_from_checkpoint",
    "ckpt_path": "checkpoint ckpt weights resume_from_checkpoint",
    "weight_decay": "wd",
    "warmup_epochs": "warmup warmup_steps warmup_ratio epochs_warmup",
    "schedule": "scheduler lr_scheduler lr_scheduler_type sched cos_lr",
    "freeze_epochs": "freeze freeze_backbone frozen_epochs",
    "patience": "patience_epochs early_stopping_rounds early_stopping early_stop early_stopping_patience "
    "early_stop_patience",
    "seed_everything": "data_seed random_seed seed_value random_state seed",
    "label_smoothing": "smoothing label_smoothing_factor",
    "mixup": "mixup_alpha",
    "cutmix": "cutmix_alpha",
    "augment": "augmentation aug aa auto_augment autoaugment transform transforms rand_augment",
    "random_erasing": "reprob erasing",
    "color_jitter": "color jitter",
    "ema_decay": "ema model_ema model_ema_decay",
    "gradient_clip_val": "clip_grad grad_clip gradient_clip max_grad_norm clip",
    "accumulate_grad_batches": "accum grad_accum accumulate grad_accum_steps gradient_accumulation_steps",
    "layer_decay": "llrd layer_wise_decay backbone_lr lr_backbone",
    "val_fraction": "val_split val_ratio val_size validation_split val_percent",
    "save_every": "save_freq save_interval save_steps save_period save_strategy",
    "check_val_every_n_epoch": "val_every val_freq eval_freq eval_every_n_epochs validation_freq eval_strategy "
    "evaluation_strategy eval_interval val_interval eval_every",
    "lr_base_batch": "lr_base_size nbs",
    "loss": "criterion loss_fn",
    "class_weights": "class_weight",
    "logger": "log report_to",
    "limit_train_batches": "max_batches fraction",
    "mirror": "tta augment_test flip augment",
    "mix_prob": "mixup_prob cutmix_prob",
    "lr_find": "find_lr lr_finder auto_lr_find",
    "limit_val_batches": "limit_val",
    "limit_test_batches": "limit_test max_batches",
    "processes": "workers num_workers jobs n_jobs nproc num_proc",
    "cache": "cache_ram cache_images",
    "distill": "distillation distillation_type distill_type",
    "distill_weight": "distillation_alpha",
    "distill_temperature": "distillation_tau",
    "teacher": "distill_from teacher_model",
    "int8": "quantize quantization",
}
# Only a training uses these options. Commands that take a trained model know them, too, because they belong to the
# Trainer or to the data; these commands refuse them, and messages do not suggest them there.
ONLY_IN_TRAINING = {
    *("trainer.max_epochs", "trainer.min_epochs", "trainer.max_steps", "trainer.min_steps", "trainer.max_time"),
    *("trainer.limit_train_batches", "trainer.accumulate_grad_batches", "trainer.gradient_clip_val"),
    *("trainer.gradient_clip_algorithm", "trainer.check_val_every_n_epoch", "trainer.val_check_interval"),
    *("trainer.num_sanity_val_steps", "data.augment", "data.color_jitter", "data.random_erasing", "data.balance"),
    *("data.repeats", "data.train_sizes", "data.size_schedule", "data.cache"),
}
# These words may stand in a typed name without changing its meaning: `use_mixup` means `mixup`.
EMPTY_WORDS = {"use", "enable", "auto", "rate", "value", "type", "training", "per", "gpu"}
# These options of other libraries resemble options of relvit but mean something else: suggest nothing for them.
_NOWHERE = "eta mode runner ipus train_bn warmup_lr warmup_bias_lr warmup_momentum train_size stratify stratified"
SYNONYMS: dict[str, list[str]] = {
    other: [own for own, others in _ELSEWHERE.items() if other in others.split()]
    for other in " ".join([*_ELSEWHERE.values(), _NOWHERE]).split()
}
_DROPOUT = "it is an argument of the model: --model.model_kwargs.drop_rate or --model.model_kwargs.drop_path_rate"
_FOLDS = "K-fold cross-validation is a recipe of the documentation, in 'Your own data and training in Python'"
_CLASSES = "the classes are found in the data"
_LIST = "a CSV list of images is --data ImageListData --data.train FILE"
# `fit` has no options of these names, but users may try them: the texts say what to do instead.
INSTEAD: dict[str, str] = {
    **dict.fromkeys(("kfold", "k_fold", "folds", "fold", "n_folds", "cv", "cross_val", "cross_validation"), _FOLDS),
    **dict.fromkeys(
        ("nc", "num_classes", "num_labels", "labels", "classes", "names", "class_num", "num_class"), _CLASSES
    ),
    **dict.fromkeys(("dropout", "drop_path", "stochastic_depth"), _DROPOUT),
    **dict.fromkeys(("csv", "csv_file", "train_csv", "annotations"), _LIST),
    **{
        other: f"it is an argument of the model: --model.model_kwargs.{own}"
        for own, others in {
            "patch_size": ("patch_size", "patch"),
            "depth": ("num_layers", "n_layers", "layers", "num_hidden_layers"),
            "num_heads": ("n_heads", "heads", "nheads"),
            "embed_dim": ("d_model", "hidden_size", "hidden_dim"),
        }.items()
        for other in others
    },
    **dict.fromkeys(("wandb", "use_wandb"), "give --logger wandb"),
    **dict.fromkeys(("tensorboard",), "the TensorBoard log is written without an option"),
    "model.name": "the model is chosen by --model NAME (in configurations by model.model)",
    **dict.fromkeys(("name", "run_name", "exp_name"), "a run's folder is named by its time and model, below --runs"),
}


# These commands lack these options, which similar commands have: the texts say what to do instead.
_NO_BAR = "--trainer.enable_progress_bar false hides the progress bar"
_NO_STDERR = "the progress bar is written to standard error, which 2>/dev/null hides"
_LIMITED = {"validate": "val", "test": "test", "predict": "predict"}
MISSING: dict[tuple[str, str], str] = {
    **{
        (command, f"trainer.limit_{part}_batches"): f"{command} has --trainer.limit_{own}_batches instead"
        for command, own in _LIMITED.items()
        for part in {*_LIMITED.values()} - {own}
    },
    **{(command, "quiet"): _NO_BAR for command in ("validate", "test", "predict")},
    **{(command, "quiet"): _NO_STDERR for command in ("resolutions", "calibrate", "embed", "probe", "check-data")},
    ("validate", "split"): "validate uses the images of val; to use others: relvit test --split SPLIT",
    ("validate", "runs"): "validate prints its results and writes no file; to get a report: relvit test --runs DIR",
    ("validate", "sizes"): "validate takes one --img_size; for several: relvit resolutions CKPT --sizes 160 224",
    ("test", "sizes"): "test takes one --img_size; for several: relvit resolutions CKPT --sizes 160 224",
    ("resolutions", "img_size"): "resolutions takes one or several --sizes, such as --sizes 160 224 '[192,256]'",
    ("predict", "split"): "predict takes images without labels; name their folder instead, such as photos/val",
}


class Arguments(NamedTuple):
    """The options of a command line, by the names that the command's parser knows.

    Attributes:
        words: one word for each option: '--name=value', or '--name' if the option has no value.
        values: the last value of each option; a list if the option takes several positional arguments.
        typed: maps the parser's name of an option to the name that the user typed, if they differ.
    """

    words: list[str]
    values: dict[str, Any]
    typed: Mapping[str, str]

    def lists(self) -> Namespace:
        """Return the options whose values are lists; they are not words, because paths may hold any character.

        As a word, a list would be a text such as '[a,b]', in which a path with a comma would be read as two paths.
        """
        return Namespace({name: value for name, value in self.values.items() if isinstance(value, list)})

    def as_typed(self, message: str) -> str:
        """Return a message with the names of options that the user gave."""
        for name, given in self.typed.items():
            message = re.sub(rf"(?<![\w.-])--{re.escape(name)}(?![\w.])", f"--{given}", message)
        return message


def short_names(command: str, function: Callable[..., Any]) -> dict[str, str]:
    """Return the short and other names of a command's options, each with the name that the parser knows."""
    own = parameters(function)
    if "evaluation" in own or "training" in own:
        return _CLASS | OF_TRAINER | {"fit": OF_FIT, "predict": {"on_error": "data.on_error"}}.get(command, {})
    names = {"model.model": "model"} if command == "explain" else _CLASS if "data" in own else {}
    # If `--data` is parsed as a data module, `--data.NAME` is an option of the module. In all other commands,
    # `--data.NAME` stands for the command's own option NAME, if there is one.
    with_options = type_hints(function).get("data", str | None) != str | None
    return names if with_options else names | {f"data.{name}": name for name in own}


def parts(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return the functions whose arguments are the options of a command: `main` of its module, then its function.

    `main` has the options that must be known before the other options are parsed, such as the run to resume.
    """
    main = getattr(inspect.getmodule(function), "main", None)
    return [function] if main is None else [main, function]


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a command; `given` is not an option."""
    found = {name: each for part in parts(function) for name, each in inspect.signature(part).parameters.items()}
    return {name: each for name, each in found.items() if name != "given"}


def type_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of a command's parameters."""
    hints = {name: hint for part in parts(function) for name, hint in get_type_hints(part).items()}
    return {name: hints[name] for name in parameters(function)}


def positionals(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the options that positional arguments set, with their types: the parameters before the `*`.

    Commands that run a Trainer have an object as their first parameter, which a user cannot type. In place of
    `evaluation`, which is built from a checkpoint, the user types the checkpoint's path, `ckpt_path`; in place of
    `training`, the object of `fit`, the user types nothing.
    """
    hints, owned = type_hints(function), parameters(function).items()
    before = [name for name, parameter in owned if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    found = {name: hints[name] for name in before if name != "training"}
    return {"ckpt_path": str, **found} if found.pop("evaluation", None) else found


def read_arguments(command: str, function: Callable[..., Any], words: Sequence[str]) -> Arguments:
    """Name the options and the positional arguments of a command line as the parser does.

    In the result, files of options (`--config`, `--model FILE`) come first, so that the command line's options override
    them. Options of the data come last, because the parser knows them only after `--data NAME`.

    Raises:
        UsageError: there are too many positional arguments, an option has two values under two names, a list is given
            twice, or an option belongs to another command, such as an option that only a training uses.
    """
    short, places = short_names(command, function), positionals(function)
    bare: list[str] = []
    named: list[tuple[str, Any]] = []
    typed: dict[str, str] = {}
    texts: dict[str, dict[str, str]] = {}
    of_training: list[str] = []
    hints = type_hints(function)
    for name, value in _split(words, {name: hint for name, hint in hints.items() if name not in places}):
        if name is None:
            bare.append(value)
            continue
        if reason := MISSING.get((command, name)):
            raise UsageError(f"--{name}: {reason}")
        is_file = name == "model" and (value is None or value.endswith(FILES) or value.startswith("{"))
        own = name if command == "fit" and is_file else short.get(name, name)
        if own == "model" and "ckpt_path" in places and value and (value.endswith(".ckpt") or is_exported(value)):
            own = "ckpt_path"
        if own in ONLY_IN_TRAINING and not places.keys().isdisjoint(("ckpt_path", "models")):
            of_training.append(name)
        if own != name:
            typed[own] = name
        if value is not None:
            value = _meant(command, own, value)
            if own in texts and item_type(hints.get(own)) and (own in places or not takes_one(hints[own])):
                raise UsageError(f"--{name} is given twice: give all its values in one list, as --{name} '[A,B]'")
            texts.setdefault(own, {})[name] = value
        if value is not None and item_type(places.get(own)) is not None and not takes_one(places[own]):
            value = load_config(value) if accepts(list[str], value) else [value]
        named.append((own, value))
    for given in texts.values():
        if len(set(given.values())) > 1:
            both = " and ".join(f"--{name} {text}" for name, text in given.items())
            raise UsageError(f"{both} are two values for one option: give one of them")
    values = dict(named)
    # A user's data module may have options of these names with another meaning, so do not refuse them there.
    of_user = "." in str(values.get("data", "")).removeprefix("relvit.app.data.")
    for name in of_training:
        if not (of_user and name.startswith("data.")):
            raise UsageError(f"--{name} is for a training, and {command} does not train: leave it out")
    others = ("data", "config", "resume", "ckpt_path")
    if command == "fit" and "data.root" in values and values.keys().isdisjoint(others):
        named.insert(0, ("data", "ImageFolderData"))
    named += _named(command, function, bare, values).items()
    named.sort(key=lambda option: (option[0] != "config", option[0] != "model", option[0].startswith("data.")))
    words = [f"--{name}" if value is None else f"--{name}={value}" for name, value in named if type(value) is not list]
    return Arguments(words, dict(named), typed)


def _split(words: Sequence[str], hints: Mapping[str, Any]) -> Iterator[tuple[str | None, str | None]]:
    """Yield the name and the value of each option; None for the name of a positional argument, or a missing value.

    An option with the type bool needs no value. An option with the type list takes all following values that have the
    type of its items.
    """
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if word == "--":
            yield from ((None, rest) for rest in waiting)
            return
        if not _is_option(word):
            yield None, word
            continue
        name, equals, value = word.lstrip("-").partition("=")
        name = name if word.startswith("--") else LETTERS.get(name, name)
        # A shell replaces `~` by the home folder at the start of a word, but not in `--runs=~/runs`.
        value = os.path.expanduser(value) if value.startswith("~/") else value
        hint, follows = hints.get(name), bool(waiting) and not _is_option(waiting[0])
        if hint is bool and not equals:
            yield name, waiting.pop(0) if follows and waiting[0].lower() in ("true", "false") else "true"
        elif item_type(hint) is not None and not takes_one(hint) and (equals or follows):
            several = [value if equals else waiting.pop(0)]
            while not equals and waiting and not _is_option(waiting[0]) and accepts(item_type(hint), waiting[0]):
                several.append(waiting.pop(0))
            alone = len(several) == 1 and several[0].startswith("[")
            yield name, several[0] if alone else f"[{','.join(several)}]"
        elif equals or (follows and name not in ALONE):
            yield name, value if equals else waiting.pop(0)
        else:
            yield name, None


def _is_option(word: str) -> bool:
    # Words such as -1 are negative numbers, and not names of options.
    return re.match(r"-[^\d.\s]", word) is not None


def _meant(command: str, name: str, value: str) -> str:
    """Replace a run by its best checkpoint, a configuration's name by its file, and a logger's name by its class."""
    if name in ("model.pretrained", "model.teacher") or (name in ("ckpt_path", "model") and command != "fit"):
        return best_of_run(value)
    if name == "config":
        shipped = shipped_configs().get(value)
        return str(shipped) if shipped and not Path(value).is_file() else value
    return LOGGERS.get(value, value) if name == "trainer.logger" else value


def best_of_run(given: str) -> str:
    """Return the best checkpoint of a run where its folder is given; anything else is returned as it is."""
    best = os.path.join(given, "checkpoints", "best.ckpt")
    return best if os.path.isfile(best) else given


def _named(
    command: str, function: Callable[..., Any], bare: Sequence[str], given: Mapping[str, object]
) -> dict[str, Any]:
    """Name the positional arguments: each goes to the first option that was not given by its name."""
    hints, found = positionals(function), {}
    rest = [best_of_run(word) for word in bare]
    for name in (name for name in hints if name not in given and rest):
        if item_type(hints[name]) is not None and (len(rest) > 1 or not takes_one(hints[name])):
            found[name], rest = rest, []
        else:
            found[name] = rest.pop(0)
    if rest:
        named = [f"--{name}" for name in hints if name in given]
        hint = f": {' and '.join(named)} given already" if named else _instead(command, function, rest[0], given)
        raise UsageError(f"unexpected argument {rest[0]!r}{hint}; relvit {command} --help lists the options")
    return found


def _instead(command: str, function: Callable[..., Any], word: str, given: Mapping[str, object]) -> str:
    """Name the option to which a value without a name likely belongs: a required one, or the folder of the images."""
    options = parameters(function)
    needed = [name for name, each in options.items() if each.kind is each.KEYWORD_ONLY and each.default is each.empty]
    needed = [name for name in needed if name not in given]
    root = short_names(command, function).get("root", "root")
    if needed:
        return f" (did you mean --{needed[0]} {word}?)"
    if root not in given and (root != "root" or root in options) and os.path.isdir(word):
        # Only this error needs the module, whose import would make each start of the command slower.
        from relvit.app.data.modules.image_folder import find_splits

        # A root holds the folders of the splits. If the user gives one of these (photos/test), name the root (photos).
        holder = os.path.dirname(os.path.normpath(word)) or "."
        split = not find_splits(word) and any(os.path.samefile(word, each) for each in find_splits(holder).values())
        return f" (for images in a folder: --root {holder if split else word})"
    if re.fullmatch(r"[\d.]+", word):
        return ": several values of an option are a list in brackets, such as --img_size '[64,96]'"
    return ": each value follows the name of its option"
