"""`relvit export`: the model as a file that needs no relvit."""

from __future__ import annotations

from pathlib import Path

from relvit.evaluation import Predictor, Size, export_model
from relvit.evaluation.export import check_export
from relvit.models import Reach


def export(ckpt_path: str, output: str, img_size: Size | None = None, reach: Reach = "trained") -> None:
    """Write the model to a file, and compare what the file computes with the model at two sizes of images.

    It takes any number of normalised images of any size that the model takes. A JSON file beside it holds class names
    and transforms.

    Args:
        ckpt_path: The checkpoint to use, such as runs/RUN/checkpoints/best.ckpt.
        output: The file to write: its name ends in .onnx or .pt2 (torch.export).
        img_size: The size of a model that takes only one, such as 288 or [256,384]; None means as in training.
        reach: How attention works at other sizes than in training: trained, stretch, logn, stretch-logn, windows or
            bands.
    """
    check_export(output)
    shapes = export_model(Predictor(ckpt_path, img_size, reach), output)
    checked = " and ".join(" x ".join(map(str, shape)) for shape in shapes)
    print(f"{output} computes what the model does (checked with images {checked}).", flush=True)
    print(f"Class names and transforms: {Path(output).with_suffix('.json')}", flush=True)
