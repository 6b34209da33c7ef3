"""The description in an exported file: class names, and the steps from an image to the model's input, as JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relvit.app.training.labels import are_thresholds
from relvit.app.utils.files import parse_json
from relvit.app.utils.nested_values import check_bounds
from relvit.app.utils.shown_text import one_line

if TYPE_CHECKING:
    from relvit.app.evaluation.predictor import Predictor

# This is the name of the description in the metadata of an .onnx file, or of a .pt2 file that AOTInductor has compiled.
KEY = "relvit"
# This is the name of the description among the extra files in a .pt2 file that `torch.export.save` has written.
EXTRA_FILE = f"{KEY}.json"


def describe(predictor: Predictor, sides: Sequence[str | int]) -> str:
    """Describe a model as JSON: all that `relvit predict` needs besides the computation in the file.

    Args:
        predictor: the model.
        sides: height and width of the images that the file takes, each a number of pixels or a text such as
            '16*height_in_patches'.
    """
    found: dict[str, Any] = {
        "class_names": predictor.class_names,
        "input": ["batch", len(predictor.mean), *sides],
        **predictor.shape.record(),
        "reach": predictor.reach,
        "interpolation": "bicubic",
        "mean": predictor.mean,
        "std": predictor.std,
    }
    found |= predictor.labels.record()
    if predictor.shape.fixed:
        found["crop_pct"] = predictor.crop_pct
    return json.dumps(found)


def read_description(path: Path, metadata: Mapping[str, str], classes: int) -> dict[str, Any]:
    """Read the description of an exported file and check it, as the file may come from anywhere.

    Args:
        path: the file.
        metadata: the texts in the file, by name.
        classes: the number of logits per image.

    Raises:
        ValueError: there is no description, or a part of it is missing or wrong.
    """
    if KEY not in metadata:
        raise ValueError(
            f"{path} has no class names in it: relvit export CKPT --output {path} writes a file that has them"
        )
    try:
        found = parse_json(metadata[KEY])
    except ValueError as error:
        raise ValueError(f"{path} was not written by relvit export, or is damaged: {one_line(error)}") from error
    check_bounds(found, str(path))
    if wrong := _wrong_part(found, classes):
        raise ValueError(
            f"{path} was not written by relvit export: {wrong} is missing or has a wrong value; write it anew by "
            f"relvit export CKPT --output {path}"
        )
    return found


def _wrong_part(found: Any, classes: int) -> str | None:
    """Return the name of the first part that has another form than `describe` gives it."""
    if not isinstance(found, dict):
        return "its description"
    names, image, mean, std = (found.get(name) for name in ("class_names", "input", "mean", "std"))
    if not (isinstance(names, list) and len(names) == classes and all(isinstance(name, str) for name in names)):
        return "class_names"
    if not (isinstance(image, list) and len(image) == 4 and all(map(_is_side, image[2:]))):
        return "input"
    if not (_are_numbers(mean) and len(mean) == image[1]):
        return "mean"
    if not (_are_numbers(std) and len(std) == len(mean) and min(std) > 0):
        return "std"
    if "thresholds" in found and not are_thresholds(found["thresholds"], len(names)):
        return "thresholds"
    ok = {"img_size": _are_two_counts(found.get("img_size"))}
    if "max_tokens" in found:
        ok |= {"max_tokens": _is_count(found["max_tokens"]), "patch_size": _are_two_counts(found.get("patch_size"))}
    else:
        crop_pct = found.get("crop_pct")
        ok["crop_pct"] = _are_shares([crop_pct]) and crop_pct > 0
    return next((name for name, right in ok.items() if not right), None)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _are_two_counts(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_count, value))


def _is_side(value: Any) -> bool:
    return _is_count(value) or (isinstance(value, str) and re.fullmatch(r"[1-9]\d{0,4}\*\w+", value) is not None)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, int | float) and not isinstance(each, bool) and math.isfinite(each) for each in value
    )


def _are_shares(value: Any) -> bool:
    return _are_numbers(value) and all(0 <= each <= 1 for each in value)
