"""Model card of a published model: how to load it, results, curve over sizes, preprocessing, recipe, licence."""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning import Trainer
from timm.models._hub import generate_readme

from relvit.app.data.modules.image_files import ImageFilesData
from relvit.app.data.registry import imported_data_module
from relvit.app.evaluation.predictor import Predictor
from relvit.app.evaluation.standard_error import plus_minus
from relvit.app.training import Checkpoint, ImageClassifier
from relvit.app.training.checkpoints.checkpoint import OF_THE_DATA
from relvit.app.utils.files import parse_json
from relvit.app.utils.shown_text import counted, one_line, without_secrets
from relvit.version import __version__

# A card lists at most this number of class names; config.json lists all names.
SHOWN = 50
# `COLUMNS` maps the name of each value in a row of results to the title and the number format of its column.
COLUMNS = {
    "protocol": ("protocol", "{}"),
    "reach": ("reach", "{}"),
    "split": ("split", "{}"),
    "images": ("images", "{}"),
    "acc1": ("accuracy", "{:.4f}"),
    "acc5": ("top-5", "{:.4f}"),
    "map": ("mAP", "{:.4f}"),
    "f1": ("mean F1", "{:.4f}"),
    "calibration_error": ("calibration error", "{:.4f}"),
    "macs": ("MACs", "{:.3g}"),
}
# The recipe leaves out these options of the data, because other parts of the card show them, or because they do not
# change the trained model.
ELSEWHERE = ("class_names", "num_workers", "mean", "std")
# The recipe contains these options of Lightning's Trainer.
TRAINER = ("max_epochs", "max_steps", "devices", "num_nodes", "precision", "accumulate_grad_batches")
TRAINER += ("gradient_clip_val", "gradient_clip_algorithm")
USAGE = """\
```python
import timm, torch
from relvit.app.data import load_rgb  # importing relvit registers its models with timm

model = timm.create_model("{name}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
image = transform(load_rgb("photo.jpg"){grey})
with torch.inference_mode():
    probabilities = {logits}.{activation}[0]
{prediction}
```

It needs the Python package relvit[train], {version} or newer; for the model alone, relvit is enough.
`load_rgb` reads files as in the training: orientation, transparency on white, 16 bits.
"""
ONE_LABEL = """\
label = model.pretrained_cfg["label_names"][probabilities.argmax()]
print(label, float(probabilities.max()))"""
SEVERAL_LABELS = """\
# Each class has the threshold with the best F1 on validation images.
thresholds = {thresholds}
for label, probability, threshold in zip(model.pretrained_cfg["label_names"], probabilities.tolist(), thresholds):
    if probability >= threshold:
        print(label, probability)"""
ANY_SHAPE = """
The model was trained on images of their own shapes: {words}.
timm's transform, above, makes all images {size} instead.
"""


def model_card(
    predictor: Predictor, name: str, license: str | None = None, curve: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Return the text of a README.md in Markdown, with the metadata that the Hugging Face hub reads.

    Args:
        predictor: the model.
        name: the name that `timm.create_model` takes.
        license: identifier of the licence of the weights; None: the card says that no licence is given.
        curve: the model's results by image size, as `relvit.app.evaluation.evaluate_sizes` returns them, for a table of
            the accuracy by size; without rows the card has no such table.
    """
    checkpoint, hparams = predictor.checkpoint, predictor.classifier.hparams
    names = [f"`{each}`" for each in predictor.class_names[:SHOWN]]
    if more := len(predictor.class_names) - len(names):
        names.append(f"and {more} more in config.json")
    size = " x ".join(map(str, predictor.model.pretrained_cfg["input_size"][1:]))
    added = "" if hparams.retrofit is None else " with relative positions by `relvit.retrofit`"
    details: dict[str, Any] = {
        "Architecture": f"`{hparams.model}`{added}",
        "Parameters": f"{sum(parameter.numel() for parameter in predictor.model.parameters()):,}",
        "Classes": f"{len(predictor.class_names)}: {', '.join(names)}",
        "Images": f"{size} pixels, {counted(len(predictor.mean), 'channel')}",
        "Preprocessing": f"resized (bicubic) and cropped to {predictor.crop_pct:g} of the side; normalised by mean "
        f"{_rounded(predictor.mean)} and standard deviation {_rounded(predictor.std)}",
        "Licence": license or "not given: ask the authors before you use the weights",
    }
    if hparams.ema_decay is not None:
        details["Weights"] = "moving average of the training"
    if averaged := len(checkpoint.average_of):
        details["Weights"] = f"mean of the weights of {averaged} checkpoints"
    if started := " and ".join(f"`{_without_folders(source)}`" for source in checkpoint.sources):
        details["Pretrained"] = f"the training started from {started}, whose licence applies as well"
    details["Trained with"] = ", ".join(f"{package} {version}" for package, version in checkpoint.versions.items())
    details["Results"] = _results(checkpoint) or "not given"
    logits, temperature = "model(image[None])", predictor.classifier.temperature
    thresholds = predictor.thresholds
    if temperature != 1:
        details["Calibration"] = (
            f"divide the logits by the temperature {temperature:g}, which the weights do not contain"
        )
        logits = f"({logits} / {temperature!r})"
    card = {
        "tags": ["image-classification", "timm", "relvit"],
        "license": license or "unknown",
        "description": "An image classifier trained with relvit: Vision Transformers with relative positions in 2D.",
        "details": details,
        "usage": USAGE.format(
            name=name,
            version=__version__,
            logits=logits,
            grey='.convert("L")' if len(predictor.mean) == 1 else "",
            activation=predictor.labels.activation,
            prediction=ONE_LABEL if thresholds is None else SEVERAL_LABELS.format(thresholds=thresholds),
        ),
    }
    if not predictor.shape.fixed:
        words = predictor.shape.words()
        details["Images"] = f"{words}, {details['Images'].partition(', ')[2]}"
        card["usage"] += ANY_SHAPE.format(words=words, size=size)
    text = generate_readme(card, name.rpartition(":")[2].rpartition("/")[2])
    if curve:
        text += f"\n## Accuracy by image size\n\n{_table(curve)}\n"
    if averaged:
        # An average of checkpoints has no recipe, because their trainings may have had different options.
        return text
    recipe = yaml.safe_dump(_recipe(checkpoint), sort_keys=False)
    introduction = "Options of `relvit fit`; all others but folders and workers had their defaults:"
    if not checkpoint.fit:
        introduction = "Options of `ImageClassifier` that are not its defaults; those of the Trainer are not known:"
    return f"{text}\n## Recipe\n\n{introduction}\n\n```yaml\n{recipe}```\n"


def read_curve(ckpt_path: str, curve: str | os.PathLike[str] | None = None) -> list[dict[str, Any]]:
    """Read the rows of a checkpoint from a JSON file of `relvit resolutions`.

    Args:
        ckpt_path: the checkpoint.
        curve: the file; None: `resolutions.json` in the folder of the checkpoint's run, if there is such a file that
            was written after the checkpoint, since a training that is resumed replaces the checkpoint.

    Raises:
        FileNotFoundError, ValueError: `curve` is given, but there is no such file, or it has no rows of this
            checkpoint.
    """
    path = Path(ckpt_path).parent.parent / "resolutions.json" if curve is None else Path(curve)
    if curve is None and not (path.is_file() and path.stat().st_mtime >= Path(ckpt_path).stat().st_mtime):
        return []
    if not path.exists():
        raise FileNotFoundError(f"no file {path}: give the one that relvit resolutions --output FILE.json wrote")
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the file that relvit resolutions --output FILE.json wrote")
    try:
        rows = parse_json(path.read_text(encoding="utf-8"))
        own = Path(ckpt_path).resolve()
        found = [row for row in rows if row["height"] and row["width"] and Path(row["checkpoint"]).resolve() == own]
        if found or curve is None:
            return found
    except (ValueError, TypeError, KeyError) as error:
        reason = (
            one_line(error) if isinstance(error, ValueError) else "it is not a list of rows with a checkpoint and size"
        )
        cure = f"write it again by relvit resolutions {shlex.quote(str(ckpt_path))} --sizes SIZE ... --output "
        cure += shlex.quote(str(path)) + (", or remove it" if curve is None else "")
        raise ValueError(f"{path} is not a JSON file of relvit resolutions ({reason}): {cure}") from error
    raise ValueError(f"{path} has no results of {ckpt_path}: relvit resolutions CKPT --sizes ... --output FILE.json")


def missing_parts(
    checkpoint: Checkpoint, license: str | None = None, curve: Sequence[Mapping[str, Any]] = ()
) -> list[str]:
    """List what the model card of a checkpoint lacks, each with the way to add it; arguments as of `model_card`."""
    missing = []
    if license is None:
        missing.append("the licence of the weights: publish with --license NAME, such as apache-2.0")
    if not _results(checkpoint):
        missing.append("results: publish best.ckpt in the folder of its run, where summary.json has them")
    if not curve:
        command = f"relvit resolutions {shlex.quote(checkpoint.path)} --sizes SIZE ... --output curve.json"
        missing.append(f"accuracy by image size: {command}, then publish with --curve curve.json")
    return missing


def _results(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read the metrics of the best checkpoint, calibrated or not, from the summary of its run.

    Raises:
        ValueError: the summary cannot be read.
    """
    path = Path(checkpoint.path)
    summary = path.parent.parent / "summary.json"
    # best_calibrated.ckpt has the weights of best.ckpt, but a temperature or other thresholds. Losses and calibration
    # errors depend on the temperature, and F1 depends on the thresholds. Only accuracies and average precisions in
    # summary.json are valid for both checkpoints, because they depend on the order of the logits alone.
    of_order = ("val/acc", "test/acc", "val/map", "test/map")
    kept = {"best.ckpt": ("val/", "test/"), "best_calibrated.ckpt": of_order}.get(path.name)
    if kept is None or not summary.is_file():
        return {}
    try:
        values = parse_json(summary.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{summary} is damaged ({one_line(error)}): restore it, or remove it") from error
    # A resumed training replaces the summary only at its end, but the best checkpoint earlier, so the summary may be of
    # an earlier best checkpoint.
    if checkpoint.epoch is None or values.get("best_epoch") != checkpoint.epoch + 1:
        return {}
    counts = {name: value for name, value in values.items() if name.endswith("/images")}
    metrics = [name for name in values if name.startswith(kept) and name not in counts and not name.endswith("_se")]
    return {name: plus_minus(values, name) for name in metrics} | counts


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = {key: column for key, column in COLUMNS.items() if key in rows[0]}
    lines = ["| size | " + " | ".join(title for title, _ in columns.values()) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        values = [plus_minus(row, key, text) for key, (_, text) in columns.items()]
        lines.append(f"| {row['height']} x {row['width']} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def _recipe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the options of a training that are not defaults, without classes and folders of the machine."""
    data, fit = checkpoint.data, checkpoint.fit
    network = _not_default(checkpoint.model, _defaults(ImageClassifier))
    network = {name: value for name, value in network.items() if name not in OF_THE_DATA}
    for name in ("pretrained", "teacher"):
        if name in network:
            network[name] = _without_folders(network[name])
    # Without `fit` the checkpoint is from a training in Python, which does not record the Trainer's options, so the
    # recipe has only the network.
    if not fit:
        return network
    # The recipe has only the options that all data modules for image files share, because other options could show
    # where the images are stored. The recipe also has the separator of labels: if a list has several labels per image,
    # a training needs it.
    defaults = (imported_data_module(data["class_path"]) or ImageFilesData).argument_defaults()
    known = (*ImageFilesData.argument_names(), "label_separator")
    shared = [name for name in defaults if name in known and name not in ELSEWHERE]
    images = _not_default(data["init_args"], {name: defaults[name] for name in shared})
    if checkpoint.shape().fixed:
        images.pop("patch_size", None)
    trainer = _not_default(fit.get("trainer") or {}, {name: _defaults(Trainer)[name] for name in TRAINER})
    # Lightning records its default precision as "32-true", so the recipe leaves this value out.
    trainer = {name: value for name, value in trainer.items() if value not in (None, "32-true")}
    return {
        "seed_everything": fit.get("seed_everything"),
        "trainer": trainer,
        "model": network,
        "data": {"class_path": data["class_path"], "init_args": images},
    }


def _defaults(cls: type) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(cls).parameters.items()}


def _not_default(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that differ from their defaults; a default size may be one number for both sides."""
    known = {name: value for name, value in values.items() if name in defaults}
    return {name: value for name, value in known.items() if value not in (defaults[name], [defaults[name]] * 2)}


def _without_folders(name: str) -> str:
    return name if name.startswith("hf-hub:") else without_secrets(name).rpartition("/")[2]


def _rounded(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
