"""Quantise exported ONNX files to int8 by onnxruntime, and compare a file with its model on images."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from relvit.app.data import ImageData
from relvit.app.data.batches import ImageBatch
from relvit.app.evaluation.predictor import Predictor
from relvit.app.training.base_classifier import BaseClassifier, run_batches

# An int8 file is compared with its model on at most this number of images, evenly spaced in val.
COMPARED = 2000


def quantise(
    source: str | os.PathLike[str], target: str | os.PathLike[str], calibration: Iterable[Tensor] | None = None
) -> None:
    """Write an ONNX file with the weights of its linear layers in int8, by onnxruntime's quantisation.

    Weights have a scale per output channel. Without calibration images the quantisation is dynamic: the range of each
    layer's inputs is measured at run time, as onnxruntime recommends for transformers. With calibration images the
    quantisation is static: for each layer, the largest number in its inputs over all these images fixes the scale, and
    the zero point is 0, as TensorRT requires. (TensorRT has no operators for dynamic quantisation.) Convolution,
    classifier, norms, softmax and products of activations stay as they are.

    Args:
        source: the file to read.
        target: the file to write.
        calibration: batches of images float32 (B, C, H, W); None: dynamic.

    Raises:
        ValueError: the model has no linear layers but the classifier.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic, quantize_static

    model = onnx.load(source)
    # Delete the recorded shapes of intermediate values: the exporter recorded them before it transposed weights, so
    # onnx would refuse them as wrong.
    del model.graph.value_info[:]
    # Choose only weights of two dimensions, because scales per channel need them; position tables, which are multiplied
    # in batches, have more dimensions.
    matrices = {weight.name for weight in model.graph.initializer if len(weight.dims) == 2}
    linear = [node.name for node in model.graph.node if node.op_type == "MatMul" and node.input[1] in matrices]
    # If this list were empty, onnxruntime would quantise all nodes, including convolutions.
    if not linear:
        raise ValueError(
            "int8 is for the weights of linear layers, and this model has none but its classifier: leave int8 out"
        )
    # Silence onnxruntime's advice to preprocess the model: a model with symbolic shapes needs no preprocessing.
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.WARNING))
    try:
        # Quantise weights to 7 bits instead of 8: processors without instructions for int8 add two products in 16 bits,
        # and with weights of 8 bits this sum may overflow.
        options = {"per_channel": True, "weight_type": QuantType.QInt8, "reduce_range": True}
        options |= {"nodes_to_quantize": linear}
        if calibration is None:
            quantize_dynamic(model, target, **options)
        else:
            feeds = ({"images": images.numpy()} for images in calibration)
            reader = SimpleNamespace(get_next=lambda: next(feeds, None))
            # Do not quantise the outputs of layers: rounding these 32-bit sums to 8 bits would lose accuracy.
            extra = {"ActivationSymmetric": True, "OpTypesToExcludeOutputQuantization": ["MatMul"]}
            quantize_static(model, target, reader, op_types_to_quantize=["MatMul"], extra_options=extra, **options)
    finally:
        logging.disable(disabled)


class Comparison(NamedTuple):
    """Results of a model and of its exported file on the same labelled images.

    Attributes:
        images: number of images.
        model: accuracy of the model; for a multi-label model, mean average precision.
        file: the same metric for the file.
        same: proportion of images for which model and file predict the same class (the same classes, if there are
            several labels).
    """

    images: int
    model: float
    file: float
    same: float


def compare(predictor: Predictor, exported: BaseClassifier, data: ImageData) -> Comparison:
    """Compare an exported file with its model on up to 2,000 images of val, evenly spaced.

    Raises:
        ValueError, OSError: there is no val, or an image of val cannot be read.
    """

    def of_both(images: ImageBatch) -> Tensor:
        return torch.stack((predictor.probabilities(images), exported.probabilities(images)), dim=1)

    count = len(data.dataset("val"))
    loader = data._loader("val", sampler=range(0, count, -(-count // COMPARED)))
    found, labels = (torch.cat(part) for part in zip(*run_batches(of_both, loader, data, "val"), strict=True))
    both = found.unbind(1)
    of = predictor.labels
    scores = [of.compute_score(of.keep(each, labels)) for each in both]
    ours, theirs = (of.classes(each, 1) for each in both)
    same = sum(set(one) == set(other) for one, other in zip(ours, theirs, strict=True)) / len(labels)
    return Comparison(len(labels), *scores, same)
