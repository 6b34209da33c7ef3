"""`relvit export`: the model as a file that needs no relvit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relvit.app.cli.errors import UsageError
from relvit.app.cli.trainer.command_folder import SCORES
from relvit.app.data import ImageData
from relvit.app.data.registry import named_data_module
from relvit.app.evaluation import Predictor, Size, export_model
from relvit.app.evaluation.deploy import compare
from relvit.app.evaluation.deploy.onnx_and_pt2 import check_export
from relvit.app.evaluation.exported import ExportedClassifier
from relvit.app.utils.shown_text import counted, one_line
from relvit.models import Reach


def export(
    ckpt_path: str,
    *,
    output: str,
    img_size: Size | None = None,
    reach: Reach = "trained",
    int8: bool = False,
    aot: bool = False,
    calibration: str | None = None,
    data: str | None = None,
    data_args: Mapping[str, Any] | None = None,
) -> None:
    """Write an ONNX file or torch.export program, and compare its outputs at two image sizes.

    The file takes any number of normalised images, of any size that the model takes, with 2 to 256 patches on each
    side. The file also contains class names and transforms.

    Args:
        output: The file to write: its name ends in .onnx or .pt2 (torch.export).
        img_size: The image size in pixels, such as 288 or [256,384], for models that take only one size; by default as
            in training.
        int8: Quantise the weights of an .onnx to int8, and print the accuracy before and after on images of val.
        aot: Compile a .pt2 for the CPU by AOTInductor, which needs a C++ compiler and about a minute.
        calibration: With --int8, a folder of images similar to the training's images, which fix the ranges of
            activations. Without this option, the ranges are computed at run time.
    """
    check_export(output, int8, aot, calibration)
    if data is not None and not int8:
        raise UsageError("--data names the images on which the accuracy of --int8 is measured: leave --data out")
    data_type = named_data_module(data)
    predictor = Predictor(ckpt_path, img_size, reach)
    shapes = export_model(predictor, output, int8, aot, calibration, lambda step: print(f"{step} ...", flush=True))
    checked = " and ".join(" x ".join(map(str, shape)) for shape in shapes)
    before = ", before its weights were quantised" if int8 else ""
    print(f"{output} computes what the model does (checked with images {checked}{before}).", flush=True)
    if aot:
        print("It does not notice images of a wrong size, unless AOTI_RUNTIME_CHECK_INPUTS is 1.", flush=True)
    print("Class names and transforms are in it.", flush=True)
    if int8:
        print(_accuracy(predictor, output, data_type, data_args or {}), flush=True)


def _accuracy(
    predictor: Predictor, output: str, data_type: type[ImageData] | None, data_args: Mapping[str, Any]
) -> str:
    try:
        checkpoint = predictor.checkpoint.with_data(data_type, img_size=predictor.img_size)
        found = compare(predictor, ExportedClassifier(output), checkpoint.data_module(**data_args))
    except (ValueError, OSError) as error:
        return f"The accuracy that int8 costs was not measured: {one_line(error)}"
    what = SCORES[predictor.labels.score].capitalize()
    return (
        f"{what} on {counted(found.images, 'image')} of val: {found.model:.4f} before int8, {found.file:.4f} after; "
        f"the same prediction for {found.same:.2%}"
    )
