"""Exported ONNX files: run by onnxruntime, quantised to int8, and compared with their model on images."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from lightning import LightningModule
from torch import Tensor

from relvit.app.data import ImageData
from relvit.app.data.batches import ImageBatch, images_of
from relvit.app.data.shape import shape_of
from relvit.app.evaluation.deploy.exported_description import read_description
from relvit.app.evaluation.predictor import Predictor
from relvit.app.training.labels import Labels, labels_of
from relvit.utils.memory import available_memory
from relvit.utils.messages import MissingPackageError, one_line

# Images on which an int8 file is compared with its model, evenly spaced in val.
COMPARED = 2000


class OnnxClassifier(LightningModule):
    """A classifier that `relvit export` wrote, run by onnxruntime on the CPU; PyTorch only prepares the images.

    Args:
        path: the .onnx file.

    Attributes:
        description: class names, the steps from an image to the model's input, and the sizes that the file takes, see
            `read_description`.
        labels: whether images have one label or several.

    Raises:
        FileNotFoundError, ValueError: the file is missing, or `relvit export` did not write it.
        ModuleNotFoundError: onnxruntime is not installed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        try:
            import onnxruntime
        except ModuleNotFoundError as error:
            raise MissingPackageError("ONNX", error.name) from error
        path = Path(path)
        if path.suffix != ".onnx":
            raise ValueError(
                f"{path}: relvit predict runs .onnx files; a .pt2 file is for PyTorch itself (torch.export.load)"
            )
        if not path.is_file():
            raise FileNotFoundError(f"no file {path}: relvit export CKPT --output {path} writes one")
        try:
            self.session: Any = onnxruntime.InferenceSession(path, _options(), providers=["CPUExecutionProvider"])
            sides = {each.name: each.shape for each in (*self.session.get_inputs(), *self.session.get_outputs())}
            if list(sides) != ["images", "logits"] or len(sides["logits"]) != 2:
                raise ValueError(f"it computes {list(sides)}, not (B, classes) logits of images")
            metadata = self.session.get_modelmeta().custom_metadata_map
        # onnxruntime raises exceptions of its own for broken files.
        except Exception as error:
            raise ValueError(f"{path} is no file of relvit export: {one_line(error)}") from error
        self.path: Path = path
        self.description: dict[str, Any] = read_description(path, metadata, sides["logits"][1])
        self.inputs: Sequence[str | int] = self.description["input"][2:]
        self.labels: Labels = labels_of(self.description.get("thresholds"))

    def data_arguments(self, img_size: tuple[int, int] | None = None) -> dict[str, Any]:
        """Return the arguments of `ImagePathsData` by which images are prepared.

        Args:
            img_size: (height, width); None: as in the training.

        Raises:
            ValueError: a size that the file does not take.
        """
        about = self.description
        found = {name: about[name] for name in ("class_names", "mean", "std")}
        shape = shape_of(about)
        if not shape.fixed:
            if img_size is not None:
                raise ValueError("the model takes images of their own shapes: leave out img_size")
            return found | shape.arguments() | {"crop_pct": 1.0}
        size = img_size or shape.img_size
        for side, allowed in zip(size, self.inputs, strict=True):
            # Such a side is written '16*height_in_patches'.
            patch = int(allowed.partition("*")[0]) if isinstance(allowed, str) else 0
            if side != allowed and (not patch or side % patch or side < 2 * patch):
                takes = f"multiples of {patch} from {2 * patch} on" if patch else f"{allowed} pixels alone"
                raise ValueError(f"img_size {list(size)}: the file takes sides of {takes}")
        return found | {"img_size": size, "crop_pct": about["crop_pct"]}

    def forward(self, images: ImageBatch) -> Tensor:
        """Compute logits (B, classes) of images (B, C, H, W), or of images of any shapes, one after the other.

        Raises:
            ValueError: onnxruntime cannot compute them, for lack of memory for one.
        """
        if isinstance(images, dict):
            return torch.cat([self(image[None]) for image in images_of(images)])
        try:
            return torch.from_numpy(self.session.run(["logits"], {"images": images.numpy()})[0])
        except Exception as error:
            raise ValueError(f"{self.path} cannot be computed: {one_line(error)}") from error

    def predict_step(self, batch: tuple[ImageBatch, list[str]], batch_idx: int) -> dict[str, Any]:
        """Return the names of the images and (B, classes) probabilities; none for an empty batch."""
        images, names = batch
        return {"names": list(names), "probabilities": self.labels.probabilities(self(images))}


@cache
def _options() -> Any:
    """Return options of onnxruntime's sessions, which together take no more memory than is available now.

    A small file may compute tensors of any size.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    # Errors become exceptions, and warnings are about graphs, which the user has not written.
    options.log_severity_level = 4
    if (available := available_memory()) is not None:
        memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
        ort.create_and_register_allocator(memory, ort.OrtArenaCfg({"max_mem": available}))
        options.add_session_config_entry("session.use_env_allocators", "1")
    return options


def quantise(
    source: str | os.PathLike[str], target: str | os.PathLike[str], calibration: Iterable[Tensor] | None = None
) -> None:
    """Write an ONNX file with the weights of its linear layers in int8, by onnxruntime's quantisation.

    Weights have a scale per output channel. Without calibration images the quantisation is dynamic: activations are
    quantised while the file runs, each by its own range, as onnxruntime recommends for transformers. With them it is
    static: the scale of what a layer takes is that of the largest number among all these images, and the zero is zero,
    as TensorRT wants it, which knows no operator of the dynamic kind. Convolution, classifier, norms, softmax and
    products of activations stay as they are.

    Args:
        source: the file to read.
        target: the file to write.
        calibration: batches of images float32 (B, C, H, W); None: dynamic.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic, quantize_static

    model = onnx.load(source)
    # The exporter wrote these shapes before it transposed weights, so that onnx finds them wrong.
    del model.graph.value_info[:]
    # Scales per channel need two dimensions, and position tables, which are multiplied in batches, have more.
    matrices = {weight.name for weight in model.graph.initializer if len(weight.dims) == 2}
    linear = [node.name for node in model.graph.node if node.op_type == "MatMul" and node.input[1] in matrices]
    # onnxruntime would recommend a preparation that symbolic shapes do not need.
    logging.disable(logging.WARNING)
    try:
        # Weights get 7 of the 8 bits: processors without instructions for int8 add two products in 16 bits, which
        # overflow with all 8.
        options = {"per_channel": True, "weight_type": QuantType.QInt8, "reduce_range": True}
        options |= {"nodes_to_quantize": linear}
        if calibration is None:
            quantize_dynamic(model, target, **options)
        else:
            feeds = ({"images": images.numpy()} for images in calibration)
            reader = SimpleNamespace(get_next=lambda: next(feeds, None))
            # Results of a layer are sums in 32 bits, which nothing rounds.
            extra = {"ActivationSymmetric": True, "OpTypesToExcludeOutputQuantization": ["MatMul"]}
            quantize_static(model, target, reader, op_types_to_quantize=["MatMul"], extra_options=extra, **options)
    finally:
        logging.disable(logging.NOTSET)


class Comparison(NamedTuple):
    """A model and its exported file on the same images with labels.

    Attributes:
        images: number of images.
        model: accuracy of the model; of a multi-label model mean average precision.
        file: that of the file.
        same: proportion of images to which both give the same class; of multi-label ones all the same classes.
    """

    images: int
    model: float
    file: float
    same: float


def compare(predictor: Predictor, exported: OnnxClassifier, data: ImageData) -> Comparison:
    """Compare an exported file with its model on up to 2,000 images of val, evenly spaced.

    Raises:
        ValueError, OSError: there is no val, or an image of it cannot be read.
    """
    count = len(data.dataset("val"))
    rows = []
    for images, labels in data._loader("val", sampler=range(0, count, -(-count // COMPARED))):
        if len(labels):
            theirs = predictor.labels.probabilities(exported(images))
            rows.append((labels, predictor.probabilities(images), theirs))
    labels, *both = (torch.cat(column) for column in zip(*rows, strict=True))
    of = predictor.labels
    scores = [of.compute_score(of.keep(each, labels)) for each in both]
    ours, theirs = (of.classes(each, 1) for each in both)
    same = sum(set(one) == set(other) for one, other in zip(ours, theirs, strict=True)) / len(labels)
    return Comparison(len(labels), *scores, same)
