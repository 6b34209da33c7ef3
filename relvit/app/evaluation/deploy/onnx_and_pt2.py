"""Export a trained classifier to ONNX or PyTorch's .pt2, which need no relvit; compare the file's outputs with it."""

from __future__ import annotations

import io
import math
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from timm.models.naflexvit import NaFlexVit
from torch import Tensor, nn

from relvit.app.data.batches import images_of
from relvit.app.data.images.folders import find_images
from relvit.app.evaluation.deploy.int8 import quantise
from relvit.app.evaluation.exported_description import EXTRA_FILE, KEY, describe
from relvit.app.evaluation.predictor import Predictor, check_predictor
from relvit.app.models import patch_size_of
from relvit.app.utils.defaults import torch_defaults
from relvit.app.utils.exceptions import MissingPackageError
from relvit.app.utils.files import EXPORTED, check_output, disk_errors_name, move_complete
from relvit.app.utils.shown_text import size_text
from relvit.layers import AnySizePatchEmbed, whole_patches
from relvit.models import lack

# An exported file takes images with sides of at most this number of patches.
MOST = 256
# The logits of the file and of the model may differ by at most this number, relative to the largest logit.
TOLERANCE = 1e-4
# Static quantisation measures the ranges of the layers' inputs on at most this number of images.
CALIBRATED = 256


class ExportError(RuntimeError):
    """The exported file does not compute what the model computes."""


@torch_defaults()
def export_model(
    predictor: Predictor,
    output: str | os.PathLike[str],
    int8: bool = False,
    aot: bool = False,
    calibration: str | None = None,
    tell: Callable[[str], object] = lambda step: None,
) -> list[tuple[int, ...]]:
    """Write the model to a file, read the file back and compare it with the model.

    The file takes normalised images float32 (B, C, H, W), as `predictor.transform` makes each of them, and gives logits
    (B, classes), divided by the temperature of a calibrated checkpoint. The batch may have 1 to 4,096 images. If the
    model takes any size, height and width may each be 2 to 256 patches, otherwise images have the size
    `predictor.img_size`. The file fails at other sizes (but see `aot`).

    The file also holds JSON with class names, the steps from an image to the model's input and, for a multi-label model
    (whose probabilities are the sigmoid of the logits), the thresholds of the classes:

    - .onnx: metadata entry 'relvit'
    - .pt2 without `aot`: extra file 'relvit.json', see `extra_files` of `torch.export.load`
    - .pt2 with `aot`: metadata entry 'relvit', see `get_metadata` of the loaded model

    The weights of an .onnx above 2 GB are in a second file with the same name and .data at its end.

    Args:
        predictor: see `relvit.load`; it is moved to the CPU.
        output: a file that ends in .onnx (needs onnx, onnxscript and onnxruntime) or .pt2 (which `torch.export.load`
            reads). Its folder is created if it does not exist.
        int8: for .onnx, whether to quantise the weights of the linear layers after the comparison, see `quantise`.
        aot: for .pt2, whether AOTInductor compiles the model for this machine's kind of CPU.
            `torch._inductor.aoti_load_package` then loads the file; C++ can load it, too. The compiled model refuses
            images of wrong sizes only if the environment variable AOTI_RUNTIME_CHECK_INPUTS is 1.
        calibration: with `int8`, a folder, file or pattern of images similar to the training's images; up to 256 of
            them fix the ranges of the layers' inputs (static quantisation); None: the ranges are measured at run time
            (dynamic).
        tell: function that is called with a description of each step before the step begins.

    Returns:
        The shapes of the images on which file and model were compared.

    Raises:
        ValueError: `output` ends neither in .onnx nor in .pt2; `int8` is given without .onnx, or `aot` is given without
            .pt2.
        ValueError: `int8` is given, and the model has no linear layers but the classifier.
        ValueError: `calibration` is given without `int8`, or contains no image that can be read.
        ValueError: `aot` is given, and there is no C++ compiler.
        ValueError: the predictor's reach is 'windows'; or a side of its `img_size` is not two whole patches or more,
            although the model takes any size.
        NotADirectoryError: a part of the path is a file.
        ModuleNotFoundError: for .onnx, its packages are missing.
        ExportError: the logits of the file differ from the model's logits.
    """
    check_predictor(predictor)
    output = Path(output)
    check_export(output, int8, aot, calibration)
    if predictor.reach == "windows":
        raise ValueError(
            "reach 'windows' cannot be exported, since the image decides how many windows there are: take another reach"
        )
    # Tracing fixes the backend of the attention. So trace on the CPU, because its backends run on every device.
    net, temperature = predictor.to("cpu").model, predictor.classifier.temperature
    shapes, dynamic = _shapes(predictor)
    patch = _patch_to_check(net) if output.suffix == ".onnx" else None
    if patch is not None or temperature != 1:
        net = _Exported(net, patch, temperature).eval()
    images = torch.randn(shapes[0], generator=torch.Generator().manual_seed(0))
    write = _onnx if output.suffix == ".onnx" else _package if aot else _program
    sides = [str(dynamic[i]) if i in dynamic else shapes[0][i] for i in (2, 3)]
    output.parent.mkdir(parents=True, exist_ok=True)
    # An .onnx contains the name of the file with its weights, so write it under its final name in a temporary folder.
    with (
        TemporaryDirectory(prefix=".export-", dir=output.parent) as folder,
        disk_errors_name(output, Path(folder)),
    ):
        part = Path(folder) / output.name
        how = "into an ONNX graph" if output.suffix == ".onnx" else "and compiling it" if aot else "by torch.export"
        tell(f"Tracing the model {how}, which may take a minute")
        run = write(net, images, dynamic, part, describe(predictor, sides))
        tell("Comparing the file with the model")
        for shape in shapes:
            images = torch.randn(shape, generator=torch.Generator().manual_seed(1))
            with torch.no_grad():
                expected, found = net(images), run(images)
            error = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
            if found.shape != expected.shape or not error <= TOLERANCE:
                raise ExportError(
                    f"for images {shape} the exported model's outputs differ from the model's by {error:.1e}, at most "
                    f"{TOLERANCE:.0e} is allowed: no file is written"
                )
        if int8:
            tell("Quantising the weights")
            exact, part = part, Path(folder) / "int8" / output.name
            part.parent.mkdir()
            quantise(exact, part, None if calibration is None else _calibration(predictor, calibration))
        if (data := part.with_name(f"{output.name}.data")).exists():
            # Remove an older .onnx first, which must not be read with the new weights. Move the new .onnx last, because
            # it needs the new weights.
            output.unlink(missing_ok=True)
            move_complete(data, output.with_name(data.name))
        move_complete(part, output)
    return shapes


def check_export(
    output: str | os.PathLike[str], int8: bool = False, aot: bool = False, calibration: str | None = None
) -> None:
    """Check beforehand that a model can be written to a file of this name; errors as in `export_model`."""
    suffix = check_output(output, EXPORTED)
    for option, given, needed in (("int8", int8, ".onnx"), ("aot", aot, ".pt2")):
        if given and suffix != needed:
            raise ValueError(f"{option} is for files that end in {needed}, got {output}: leave {option} out")
    if calibration is not None:
        if not int8:
            add = "add int8, or " if suffix == ".onnx" else ""
            raise ValueError(
                f"calibration images are for int8, for files that end in .onnx: {add}leave calibration out"
            )
        find_images([calibration])
    if aot:
        # Import the compiler only here, because other exports do not need it.
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise ValueError("aot needs a C++ compiler, and there is none: install g++ or clang") from error
    if suffix == ".onnx":
        # These imports only check that the packages are installed, so ruff's rule F401 (unused imports) is ignored.
        try:
            import onnx  # noqa: F401
            import onnxruntime  # noqa: F401
            import onnxscript  # noqa: F401
        except ModuleNotFoundError as error:
            raise MissingPackageError("ONNX", error.name) from error


def _calibration(predictor: Predictor, paths: str) -> Iterator[Tensor]:
    """Yield images (1, C, H, W) as the model takes them, evenly spaced among the images that `paths` names."""
    files = find_images([paths])
    for pixels, _ in predictor.batches(files[:: -(-len(files) // CALIBRATED)]):
        yield from (image[None] for image in images_of(pixels))


def _shapes(predictor: Predictor) -> tuple[list[tuple[int, ...]], dict[int, Any]]:
    """Return the shapes of images to trace and compare with, and the dimensions that may vary, by their index."""
    net, (height, width), channels = predictor.model, predictor.img_size, len(predictor.mean)
    dynamic: dict[int, Any] = {0: torch.export.Dim("batch", min=1, max=4096)}
    # Blocks with windows compute a number of windows from the image's size. From this number `torch.export` derives
    # conditions that other sizes fail, so the exported file of such a model takes images of one size.
    in_windows = any(getattr(layer, "block_window", None) for layer in net.modules())
    if in_windows or lack(net, "sizes") or not _takes_any_size(net):
        return [(2, channels, height, width), (3, channels, height, width)], dynamic
    patch = patch_size_of(net)
    if any(side % p or side < 2 * p for side, p in zip((height, width), patch, strict=True)):
        whole = [max(2, math.ceil(side / p)) * p for side, p in zip((height, width), patch, strict=True)]
        raise ValueError(
            f"img_size {[height, width]}: a file takes two whole patches of {patch[0]} x {patch[1]} pixels or more on "
            f"each side; give another (--img_size {shlex.quote(size_text(whole))})"
        )
    for position, (name, side) in enumerate(zip(("height", "width"), patch, strict=True), start=2):
        dynamic[position] = side * torch.export.Dim(f"{name}_in_patches", min=2, max=MOST)
    # Trace with a height that differs from the width: otherwise the graph would demand that they are equal.
    return [(2, channels, height + patch[0], width + 3 * patch[1]), (1, channels, height, width)], dynamic


def _takes_any_size(net: nn.Module) -> bool:
    return isinstance(net, NaFlexVit) or getattr(net, "dynamic_img_size", False)


class _Exported(nn.Module):
    """A model whose graph refuses images that do not divide into patches, and divides logits by the temperature."""

    def __init__(self, net: nn.Module, patch: tuple[int, int] | None, temperature: float) -> None:
        super().__init__()
        self.net = net
        self.patch = patch
        self.temperature = temperature

    def forward(self, images: Tensor) -> Tensor:
        if self.patch is not None:
            images = whole_patches(images, self.patch)
        logits = self.net(images)
        return logits if self.temperature == 1 else logits / self.temperature


def _patch_to_check(net: nn.Module) -> tuple[int, int] | None:
    """Return the patch of a model that takes any size, but whose ONNX graph would not refuse incomplete patches."""
    embed = getattr(net, "patch_embed", None)
    checks = isinstance(embed, AnySizePatchEmbed) or getattr(embed, "dynamic_img_pad", False)
    return patch_size_of(net) if _takes_any_size(net) and not checks else None


def _program(
    net: nn.Module, images: Tensor, dynamic: dict[int, Any], output: Path, description: str
) -> Callable[[Tensor], Tensor]:
    program = torch.export.export(net, (images,), dynamic_shapes=(dynamic,))
    # Remove the source line that PyTorch records for each value, since it contains folder names of this machine.
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)
    # Write the file into memory first, because PyTorch's own writer ends the process if the disk is full.
    content = io.BytesIO()
    torch.export.save(program, content, extra_files={EXTRA_FILE: description})
    output.write_bytes(content.getbuffer())
    return torch.export.load(output).module()


def _package(
    net: nn.Module, images: Tensor, dynamic: dict[int, Any], output: Path, description: str
) -> Callable[[Tensor], Tensor]:
    # Import the compiler only here, because other exports do not need it.
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    program = torch.export.export(net, (images,), dynamic_shapes=(dynamic,))
    options = {"aot_inductor.metadata": {KEY: description}}
    return aoti_load_package(aoti_compile_and_package(program, package_path=str(output), inductor_configs=options))


def _onnx(
    net: nn.Module, images: Tensor, dynamic: dict[int, Any], output: Path, description: str
) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    names = {"input_names": ["images"], "output_names": ["logits"]}
    program = torch.onnx.export(net, (images,), dynamic_shapes=(dynamic,), dynamo=True, verbose=False, **names)
    program.model.metadata_props[KEY] = description
    for node in program.model.graph.all_nodes():
        node.metadata_props.pop("pkg.torch.onnx.stack_trace", None)
    program.save(output)
    session = onnxruntime.InferenceSession(output, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])
