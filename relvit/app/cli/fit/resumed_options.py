"""Resume a training with `relvit fit --resume RUN` or `--ckpt_path`: which checkpoint, and which options may differ.

A resumed training may change its length, its devices and its speed, but not the model, the data or the optimisation. A
checkpoint holds the states of the optimiser, the schedule and the callbacks. An option is refused if these states would
override the option, or if the run's configuration would no longer describe the epochs that have been trained.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from relvit.app.cli.errors import UsageError
from relvit.app.cli.secrets import CLASSES
from relvit.app.cli.typed_words import Arguments
from relvit.app.training.checkpoints.checkpoint import NETWORK, Checkpoint
from relvit.app.training.checkpoints.exact_resume import begins_epoch_again
from relvit.app.training.checkpoints.file import EPOCH_NAME
from relvit.app.utils.files import check_writable, is_address
from relvit.app.utils.masks import MASK, mask_secrets
from relvit.app.utils.shown_text import counted, cut, without_secrets

# These options may change when a training is resumed. Batch size, accumulation and devices may change only within the
# limits of `Progress.check_layout` in `relvit.app.training.checkpoints.exact_resume`.
FREE = {
    *("save_every", "patience", "model.compile", "model.channels_last", "model.nonfinite"),
    "model.grad_checkpointing",
    *(f"data.{name}" for name in ("batch_size", "num_workers", "cache", "on_error", "download", "test", "predict")),
    *(f"trainer.{limit}_{unit}" for limit in ("min", "max") for unit in ("epochs", "steps")),
    *(f"trainer.{name}" for name in ("max_time", "accelerator", "devices", "num_nodes", "strategy", "precision")),
    *(f"trainer.{name}" for name in ("accumulate_grad_batches", "logger", "log_every_n_steps", "profiler")),
    *(f"trainer.{name}" for name in ("enable_progress_bar", "enable_model_summary", "num_sanity_val_steps")),
    *(f"trainer.{name}" for name in ("limit_test_batches", "deterministic", "benchmark", "inference_mode")),
    "trainer.detect_anomaly",
}
# The paths in these options may change, since files move. But no such option may be added or removed.
PLACES = {"data.root", "data.name", "data.train", "data.val", "model.teacher"}
# `REASONS` maps options, or groups of options, to the reasons why they may not change; options in `FREE` and `PLACES`
# may. The error gives the reason of the longest name in `REASONS` with which the option's name begins.
REASONS = {
    "": "a training that goes on stays as it was configured",
    "seed_everything": "order, augmentation and dropout follow from it",
    "model": "the recipe, the optimiser and the schedule of a training stay the same to its end",
    "data": "the images, and what is done to them, stay the same to the end of a training",
    "trainer.callbacks": "callbacks go on with the states that they had",
    "trainer.fast_dev_run": "a trial writes nothing and begins afresh",
}
# `changed_options` skips these options, since `Checkpoint.check_network` and `Checkpoint.check_data` compare them.
COMPARED_ELSEWHERE = {f"model.{name}" for name in (*NETWORK, "pretrained")} | {"data.class_names", "data.img_size"}


def resume_arguments(given: Arguments) -> Arguments:
    """Return all arguments: the run's configuration, the options on the command line, and the run's last checkpoint.

    Raises:
        UsageError: the value of `--resume` is a remote address, or is not a folder that contains `config.yaml`.
        UsageError: the folder does not contain `checkpoints/last.ckpt`.
        UsageError: one of `--config`, `--ckpt_path`, `--runs` and `--model.model` is given, too, although the run
            decides it.
    """
    run = given.values["resume"]
    if is_address(run):
        raise UsageError(f"--resume {run} is a remote address: give the run's folder on this machine")
    folder = Path(run)
    for name in ("config", "ckpt_path", "runs", "model.model"):
        if given.values.get(name) is not None:
            raise UsageError(f"--resume {folder} goes on with that run's own configuration: drop --{name}")
    if not folder.is_dir():
        raise UsageError(f"no run at {folder}: give a folder that relvit fit has made, such as runs/RUN")
    config, last = folder / "config.yaml", folder / "checkpoints" / "last.ckpt"
    if not config.is_file():
        raise UsageError(
            f"{folder} is not a run of relvit fit, as it has no config.yaml: give a folder such as runs/RUN"
        )
    if not last.is_file():
        start = f"relvit fit --config {config}"
        hint = f"begin again with {start}"
        if others := sorted(last.parent.glob("*.ckpt")):
            hint = f"go on in a new folder with {start} --ckpt_path {others[0]}, or {hint}"
        raise UsageError(f"{folder} has no {last.relative_to(folder)} to go on from: {hint}")
    check_writable(folder, f"go on in a new folder with relvit fit --config {config} --ckpt_path {last}")
    words = [word for word in given.words if not word.startswith("--resume=")]
    words = [f"--config={config}", *words, f"--ckpt_path={last}"]
    return given._replace(words=words, values=given.values | {"ckpt_path": str(last)})


def checkpoint_of_epoch_end(
    checkpoint: Checkpoint, same_run: bool, batch_size: int, accumulated: int, devices: int
) -> tuple[Path, str] | None:
    """Return the last epoch's checkpoint, and a message, if the present devices cannot resume within an epoch.

    Args:
        checkpoint: the checkpoint from which the training was to be resumed.
        same_run: whether the run of the checkpoint is resumed in its folder; otherwise a new run goes on from it.
        batch_size, accumulated, devices: the numbers of the resumed training, see `begins_epoch_again`.

    Raises:
        UsageError: batch size, accumulation or number of devices has changed within an epoch, and `same_run` is false
            or the run has no checkpoint of the last epoch's end.
        UsageError: batch size x accumulation x devices, the number of images in an optimiser step, has changed.
    """
    point = checkpoint.point()
    try:
        if point is None or not begins_epoch_again(point, batch_size, accumulated, devices):
            return None
    except ValueError as error:
        raise UsageError(f"{checkpoint.path}: {error}") from error
    _, *layout = point.layout
    names = ("--batch_size", "--trainer.accumulate_grad_batches", "--devices")
    as_before = " ".join(f"{name} {count}" for name, count in zip(names, layout, strict=True))
    other = Path(checkpoint.path).with_name(EPOCH_NAME)
    if not same_run or not other.is_file():
        hint = f", or give --ckpt_path {other}" if other.is_file() else ""
        raise UsageError(
            f"{checkpoint.path} is from within epoch {point.epoch + 1}, which must end with the batch size and devices "
            f"that it began with: give {as_before}{hint}"
        )
    steps = point.batch // layout[1]
    return other, (
        f"Within an epoch batch and devices stay, so the training goes on from the end of epoch {point.epoch} and "
        f"repeats {counted(steps, 'step')}; {as_before} would go on without repeating them."
    )


def fit_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of `fit` except those of model and data, in plain types, as checkpoints store them."""
    options = {name: _plain(config[name]) for name in ("seed_everything", "save_every", "patience", "trainer")}
    options["trainer"] |= {kind: mask_secrets(options["trainer"][kind]) for kind in CLASSES}
    return without_secrets(options)


def changed_options(
    path: str, trained: Mapping[str, Any], asked: Mapping[str, Any], given: Collection[str]
) -> list[str]:
    """Return the options that changed since a checkpoint, such as 'trainer.max_epochs 10 -> 20'.

    Args:
        path: the path of the checkpoint, for the message.
        trained: the options in the checkpoint: 'model', 'data' and the result of `fit_options`. An entry that the
            checkpoint lacks is not compared.
        asked: the options of the resumed training, under the same names.
        given: names of the options on the command line.

    Raises:
        UsageError: an option has changed, and `FREE` and `PLACES` do not allow the change.
    """
    before, now = (dict(_compared_options(options)) for options in (trained, asked))
    groups = {name.partition(".")[0] for name in before}
    changed = []
    for name in sorted({**before, **now}):
        was, wanted = before.get(name), now.get(name)
        # Skip options that are equal, that other functions compare, or whose group the checkpoint lacks. Also skip
        # secrets (`MASK`): a user may give a new token because the old one has expired.
        if was == wanted or MASK in (was, wanted) or name in COMPARED_ELSEWHERE or name.partition(".")[0] not in groups:
            continue
        before_text, now_text = ("null" if value is None else cut(value, 80) for value in (was, wanted))
        moved = name in PLACES and None not in (was, wanted)
        if name not in FREE and not moved:
            do = "drop that option" if name in given else f"give --{name} {before_text}"
            reason = REASONS[max((key for key in REASONS if f"{name}.".startswith(f"{key}.") or not key), key=len)]
            raise UsageError(
                f"{path} was trained with --{name} {before_text}, not {now_text}: {reason}; {do}, or "
                f"start another training from these weights with --model.pretrained {path}"
            )
        changed.append(f"{name} {before_text} -> {now_text}")
    return changed


def _compared_options(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield options by their names on the command line, with plain values; a class with its arguments is one value.

    Only the data module is split into its arguments; a callback, for example, is one value.
    """
    for key, value in options.items():
        name = f"{prefix}{key}"
        if name == "data":
            yield "data", value["class_path"]
            yield from _compared_options(value["init_args"], "data.")
        elif isinstance(value, Mapping) and value and "class_path" not in value:
            yield from _compared_options(value, f"{name}.")
        else:
            # Yield None for an empty mapping: both mean the same, so they must not count as a change.
            yield name, None if value == {} else _plain(value)


def _plain(value: Any) -> Any:
    if hasattr(value, "as_dict"):
        value = value.as_dict()
    elif isinstance(value, Enum):
        value = value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
