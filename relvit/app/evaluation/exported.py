"""Classifiers in exported files, used like checkpoints: .onnx by onnxruntime, .pt2 by PyTorch, on the CPU."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from relvit.app.data.batches import ImageBatch, images_of
from relvit.app.data.shape import shape_of
from relvit.app.evaluation.exported_description import EXTRA_FILE, KEY, read_description
from relvit.app.training import Checkpoint
from relvit.app.training.base_classifier import BaseClassifier
from relvit.app.training.classifier_checks import check_labels
from relvit.app.training.labels import labels_of
from relvit.app.utils.devices import available_memory
from relvit.app.utils.exceptions import MissingPackageError
from relvit.app.utils.files import is_address, not_for_exported
from relvit.app.utils.shown_text import one_line
from relvit.models import Reach


class _Opened(NamedTuple):
    """An open file: the function from images to logits (B, classes), the texts in the file, the number of classes."""

    run: Callable[[Tensor], Tensor]
    metadata: Mapping[str, str]
    classes: int


class _CompiledError(ValueError):
    """The file is compiled: it holds machine code, which relvit does not run."""


class ExportedClassifier(BaseClassifier):
    """A classifier in a file of `relvit export`; it only computes logits, on the CPU.

    PyTorch reads a .pt2 file with `torch.export.load`, which may run code that the file contains, so only open files
    that you trust.

    Args:
        path: The .onnx or .pt2 file.

    Attributes:
        description: See `read_description`.
        checkpoint: The description as a `Checkpoint` without weights.

    Raises:
        FileNotFoundError, ValueError: The file is missing, or `relvit export` did not write it.
        ModuleNotFoundError: onnxruntime is not installed.
    """

    net = pretrained = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path: Path = Path(path)
        if is_address(path):
            raise ValueError(f"an exported file must be on this machine: download {path}, then give its path")
        if not self.path.is_file():
            raise FileNotFoundError(f"no file {path}: relvit export CKPT --output {path} writes one")
        try:
            opened = OPEN[self.path.suffix](self.path)
        except ModuleNotFoundError as error:
            raise MissingPackageError("ONNX", error.name) from error
        except _CompiledError:
            raise
        # onnxruntime and PyTorch raise exceptions of any type for broken files, so catch all of them.
        except Exception as error:
            reason = one_line(error)
            if "external data" in reason.casefold():
                data = f"{self.path.name}.data"
                reason += f"; the weights of a large .onnx lie beside it, by relvit export in {data}: copy them, too"
            raise ValueError(f"cannot open {path}: {reason}") from error
        self.run: Callable[[Tensor], Tensor] = opened.run
        self.description: dict[str, Any] = read_description(self.path, opened.metadata, opened.classes)
        self.checkpoint: Checkpoint = _as_checkpoint(self.path, self.description)
        self.save_hyperparameters(self.checkpoint.model)
        self.create_metrics(labels_of(self.checkpoint.thresholds), opened.classes, False, {})

    def forward(self, images: ImageBatch) -> Tensor:
        """Compute logits (B, classes) of images (B, C, H, W), or of images of any shapes, one after the other.

        Raises:
            ValueError: The computation in the file fails, for example for lack of memory.
        """
        if isinstance(images, dict):
            return torch.cat([self(image[None]) for image in images_of(images)])
        try:
            return self.run(images.cpu()).to(images.device)
        except Exception as error:
            raise ValueError(f"{self.path} cannot be computed: {one_line(error)}") from error

    def setup(self, stage: str) -> None:
        """Check the data."""
        data = self.trainer.datamodule
        check_labels(data, self.hparams, self.thresholds is not None, stage)
        if data.shape.fixed:
            self.check_size(data.img_size)

    @property
    def evaluated(self) -> NoReturn:
        """Raise ValueError, because an exported file has no model."""
        raise ValueError(not_for_exported(self.path))

    def set_reach(self, reach: Reach, checkpoint: Checkpoint) -> None:
        """Refuse any reach but 'trained'."""
        if reach != "trained":
            raise ValueError(
                f"reach {reach!r} must be chosen when {self.path} is written: relvit export --reach {reach}"
            )

    def check_size(self, img_size: tuple[int, int]) -> None:
        """Refuse a size (height, width) that the file does not take."""
        for axis, side, allowed in zip(("height", "width"), img_size, self.description["input"][2:], strict=True):
            # A side of any number of patches is described by a text, such as '16*height_in_patches' for patches of 16
            # pixels, so read the patch from the text.
            patch = int(allowed.partition("*")[0]) if isinstance(allowed, str) else 0
            if side != allowed and (not patch or side % patch or side < 2 * patch):
                takes = f"a multiple of {patch}, at least {2 * patch}" if patch else f"{allowed}"
                raise ValueError(f"img_size is {list(img_size)}; for {self.path} the {axis} must be {takes} pixels")


def _as_checkpoint(path: Path, about: Mapping[str, Any]) -> Checkpoint:
    """Describe the classifier as a checkpoint whose data module is unknown."""
    shape = shape_of(about)
    images = {name: about[name] for name in ("class_names", "mean", "std")}
    images |= shape.arguments() | {"crop_pct": about.get("crop_pct", 1.0)}
    model = {"model": path.name, "num_classes": len(about["class_names"]), "class_names": about["class_names"]}
    model |= {"in_chans": len(about["mean"]), "img_size": shape.img_size}
    data = {"class_path": "", "init_args": {}}
    return Checkpoint(str(path), model, data, {}, {}, {}, thresholds=about.get("thresholds"), images=images)


def _open_onnx(path: Path) -> _Opened:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, _options(), providers=["CPUExecutionProvider"])
    sides = {each.name: each.shape for each in (*session.get_inputs(), *session.get_outputs())}
    if list(sides) != ["images", "logits"] or len(sides["logits"]) != 2:
        raise ValueError(f"it has {list(sides)}, not images and (B, classes) logits: give a file of relvit export")

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])

    return _Opened(run, session.get_modelmeta().custom_metadata_map, sides["logits"][1])


def _open_program(path: Path) -> _Opened:
    with zipfile.ZipFile(path) as archive:
        if any(name.endswith(".so") for name in archive.namelist()):
            raise _CompiledError(
                f"{path} was compiled by relvit export --aot, so only torch._inductor.aoti_load_package or C++ can "
                "load it: give the checkpoint, or a .pt2 that was exported without --aot"
            )
    found = {EXTRA_FILE: ""}
    program = torch.export.load(path, extra_files=found)
    (logits,) = program.graph_module.graph.output_node().args[0]
    metadata = {KEY: found[EXTRA_FILE]} if found[EXTRA_FILE] else {}
    module = program.module()
    # Hide the module in a lambda: as an attribute of a LightningModule it would be a submodule, whose methods `train`
    # and `eval` Lightning would call, but the module of an exported program refuses these calls.
    return _Opened(lambda images: module(images), metadata, logits.meta["val"].shape[-1])


OPEN: dict[str, Callable[[Path], _Opened]] = {".onnx": _open_onnx, ".pt2": _open_program}


@cache
def _options() -> Any:
    """Return options of onnxruntime's sessions that limit their memory to the memory that is available now.

    The limit is needed because even a small file may compute tensors of any size.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    # Do not print messages: errors are raised as exceptions, and warnings are about the graph, which the user has not
    # written.
    options.log_severity_level = 4
    if (available := available_memory()) is not None:
        memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
        ort.create_and_register_allocator(memory, ort.OrtArenaCfg({"max_mem": available}))
        options.add_session_config_entry("session.use_env_allocators", "1")
    return options
