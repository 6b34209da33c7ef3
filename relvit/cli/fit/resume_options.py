"""What may change where a training goes on: how long it lasts, where and how fast it runs; not what is trained.

A checkpoint brings the optimiser, the schedule's place and the callbacks' states along. An option that they would
override, or that would make the run's configuration untrue for the epochs that are done, is refused by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from relvit.cli.aliases import option
from relvit.cli.errors import UsageError
from relvit.training.checkpoints.checkpoint import NETWORK

# Options that take effect from the checkpoint on. Batch size, accumulation and devices may change as far as
# `relvit.training.checkpoints.resume.check_layout` allows.
FREE = {
    *("save_every", "patience"),
    *(f"model.{name}" for name in ("compile", "channels_last", "nonfinite")),
    *(f"data.{name}" for name in ("batch_size", "num_workers", "cache", "on_error", "download", "test", "predict")),
    *("trainer.max_epochs", "trainer.min_epochs", "trainer.max_steps", "trainer.min_steps", "trainer.max_time"),
    *("trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.strategy", "trainer.precision"),
    *("trainer.accumulate_grad_batches", "trainer.logger", "trainer.log_every_n_steps", "trainer.profiler"),
    *("trainer.enable_progress_bar", "trainer.enable_model_summary", "trainer.num_sanity_val_steps"),
    *("trainer.limit_test_batches", "trainer.deterministic", "trainer.benchmark", "trainer.inference_mode"),
    "trainer.detect_anomaly",
}
# Files that may have moved, but neither appear nor disappear.
PLACES = {"data.root", "data.name", "data.train", "data.val", "model.teacher"}
# Whatever is in neither is refused. Why: the reason of the longest name that an option begins with.
REASONS = {
    "": "a training that goes on stays as it was configured",
    "seed_everything": "order, augmentation and dropout follow from it",
    "model": "the recipe of a training stays the same to its end",
    **dict.fromkeys(
        (f"model.{name}" for name in ("lr", "lr_base_batch", "opt", "opt_kwargs", "weight_decay", "layer_decay")),
        "the optimiser goes on as it was",
    ),
    "model.warmup_epochs": "the schedule goes on as it began",
    "model.min_lr": "the schedule goes on as it began",
    "data": "the images, and what is done to them, stay the same to the end of a training",
    "trainer.callbacks": "callbacks go on with the states that they had",
    "trainer.fast_dev_run": "a trial writes nothing and begins afresh",
    "trainer.default_root_dir": "the files are in the run's folder",
}
# What `check_same_network` and `check_same_data` compare.
COMPARED_ELSEWHERE = {f"model.{name}" for name in (*NETWORK, "pretrained")} | {"data.class_names", "data.img_size"}


def fit_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a fit beside those of model and data, in plain types, as its checkpoints hold them."""
    return {name: _plain(config[name]) for name in ("seed_everything", "save_every", "patience", "trainer")}


def changed_options(
    path: str, trained: Mapping[str, Any], asked: Mapping[str, Any], arguments: Sequence[str]
) -> list[str]:
    """The options that changed since a checkpoint, such as 'trainer.max_epochs 10 -> 20'.

    Args:
        path: where the checkpoint is, for the message.
        trained: options of its training: 'model', 'data' and those of `fit_options`; none is compared that it lacks.
        asked: those of the training that goes on.
        arguments: of the command line.

    Raises:
        UsageError: an option changed that must not.
    """
    before, now = (dict(_leaves(options)) for options in (trained, asked))
    groups = {name.partition(".")[0] for name in before}
    changed = []
    for name in sorted({**before, **now}):
        was, wanted = before.get(name), now.get(name)
        if was == wanted or name in COMPARED_ELSEWHERE or name.partition(".")[0] not in groups:
            continue
        moved = name in PLACES and None not in (was, wanted)
        if name not in FREE and not moved:
            given = option(arguments, f"--{name}") is not None
            do = "drop that option" if given else f"give --{name} {_short(was)}"
            raise UsageError(
                f"{path} was trained with --{name} {_short(was)}, not {_short(wanted)}: {_reason(name)}; {do}, or "
                f"start another training from these weights with --model.pretrained {path}"
            )
        changed.append(f"{name} {_short(was)} -> {_short(wanted)}")
    return changed


def _leaves(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names as on the command line, and plain values; those of classes as a whole."""
    for key, value in options.items():
        name = f"{prefix}{key}"
        if name == "data":
            yield "data", value["class_path"]
            yield from _leaves(value["init_args"], "data.")
        elif isinstance(value, Mapping) and value and "class_path" not in value:
            yield from _leaves(value, f"{name}.")
        else:
            # No arguments are as good as none.
            yield name, None if value == {} else _plain(value)


def _plain(value: Any) -> Any:
    if hasattr(value, "as_dict"):
        value = value.as_dict()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def _reason(name: str) -> str:
    fitting = [key for key in REASONS if not key or name == key or name.startswith(f"{key}.")]
    return REASONS[max(fitting, key=len)]


def _short(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
