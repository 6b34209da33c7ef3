"""Compare runtimes of a trained model with PyTorch: `python tools/speed/runtimes.py CKPT` (docs/elsewhere/runtimes.md).

For each runtime that is installed, the tool prints the largest difference of the logits from PyTorch's at three sizes
and shapes, relative to the largest logit, and the time of one image of the first size. Then it prints the operators of
the Core ML program, which would run on macOS alone, and the operators of the ONNX file that TensorRT lacks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import timeit
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import relvit
from relvit.app.evaluation import export_model

Run = Callable[[Tensor], Tensor]
# The three images have these numbers of rows and columns of patches.
SHAPES = ((14, 14), (10, 17), (5, 3))
LARGEST = 20
# The support matrix of onnx-tensorrt release/10.1-GA (docs/operators.md, opset 9 to 20) has a Y for these operators and
# for the dtypes that exported files use. It has Clip for floating point alone, but the importer of that release takes
# int64, too.
# fmt: off
TENSORRT = {
    "Add", "Cast", "Clip", "Concat", "Constant", "ConstantOfShape", "Conv", "Cos", "DequantizeLinear", "Div",
    "Equal", "Exp", "Expand", "Gather", "GatherElements", "Gelu", "Gemm", "Identity", "LayerNormalization", "Log",
    "MatMul", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Pad", "Pow", "QuantizeLinear", "Range", "ReduceMean",
    "ReduceSum", "Reshape", "ScatterElements", "Shape", "Sigmoid", "Sin", "Slice", "Softmax", "Split", "Sqrt",
    "Squeeze", "Sub", "Tanh", "Transpose", "Unsqueeze", "Where"
}
# fmt: on
# According to the matrix, the input of an operator with this index has to be an initializer.
INITIALIZERS = {"Slice": 3, "Squeeze": 1, "Unsqueeze": 1, "Pad": 3, "ReduceMean": 1, "ReduceSum": 1}


def onnxruntime(path: Path) -> Run:
    """Run an .onnx by onnxruntime, on one thread."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


def openvino(path: Path) -> Run:
    """Run an .onnx by OpenVINO, on one thread; without the hint it computes in bfloat16 where the processor can."""
    import openvino as ov

    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = ov.Core().compile_model(path, "CPU", options)
    return lambda images: torch.from_numpy(compiled(images.numpy())[0].copy())


def executorch(model: nn.Module, path: Path, largest: int = LARGEST) -> Run:
    """Write a .pte for one image of any size up to `largest` patches a side, by XNNPACK, and run it.

    ExecuTorch allocates the memory of the largest image when it loads the program.
    """
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    patch = model.patch_embed.patch_size
    sides = {2: patch[0] * torch.export.Dim("rows", min=2, max=largest)}
    sides |= {3: patch[1] * torch.export.Dim("cols", min=2, max=largest)}
    image = torch.randn(1, model.in_chans, 5 * patch[0], 7 * patch[1])
    program = torch.export.export(model, (image,), dynamic_shapes=(sides,))
    path.write_bytes(to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch().buffer)
    method = Runtime.get().load_program(path).load_method("forward")
    return lambda images: method.execute([images])[0]


def coreml(model: nn.Module, images: Tensor) -> Any:
    """Convert a model to a Core ML program for images of one size, and return it; it runs on macOS alone.

    coremltools 9.0 does not know aten.alias, and pads integers, here the indices of table entries, as float32.
    """
    import coremltools
    from coremltools.converters.mil import Builder
    from coremltools.converters.mil.frontend.torch.ops import pad as pad_floats
    from coremltools.converters.mil.frontend.torch.torch_op_registry import register_torch_op
    from coremltools.converters.mil.mil import types

    def alias(context: Any, node: Any) -> None:
        context.add(context[node.inputs[0]], node.name)

    def pad(context: Any, node: Any) -> None:
        pad_floats(context, node)
        if not types.is_float(context[node.inputs[0]].dtype):
            padded = Builder.cast(x=context[node.name], dtype="int32")
            context.add(padded, node.name, override=True)

    register_torch_op(override=True)(alias)
    register_torch_op(torch_alias=["constant_pad_nd"], override=True)(pad)
    program = torch.export.export(model, (images,)).run_decompositions({})
    return coremltools.convert(program, minimum_deployment_target=coremltools.target.iOS18)


def coreml_operators(converted: Any) -> Counter[str]:
    """Count the operators of a converted Core ML program, without its constants."""
    functions = converted._mil_program.functions.values()
    names = (operator.op_type for function in functions for operator in function.operations)
    return Counter(name for name in names if name != "const")


def tensorrt_lacks(path: Path) -> list[str]:
    """Return the parts of an .onnx file that the support matrix of onnx-tensorrt 10.1 lacks."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    (opset,) = (each.version for each in model.opset_import if not each.domain)
    lacks = [] if 9 <= opset <= 20 else [f"opset {opset}"]
    known = {weight.name for weight in model.graph.initializer}
    known |= {node.output[0] for node in model.graph.node if node.op_type == "Constant"}
    for node in model.graph.node:
        name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        if name not in TENSORRT:
            lacks.append(name)
        place = INITIALIZERS.get(name, len(node.input))
        if place < len(node.input) and node.input[place] and node.input[place] not in known:
            lacks.append(f"{name} with axes that are computed")
    return sorted(set(lacks))


def difference(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, relative to the largest number wanted; infinity where a number is NaN."""
    # `max` would skip NaN.
    return float(((found - wanted).abs().max() / wanted.abs().max()).nan_to_num(torch.inf))


def milliseconds(run: Run, images: Tensor, rounds: int) -> float:
    """Return the median time of a call; the first call does not count."""
    seconds = timeit.repeat(lambda: run(images), number=1, repeat=rounds + 1)
    return 1e3 * statistics.median(seconds[1:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print; return 1 if a runtime differs by more than 1e-4."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("ckpt_path")
    parser.add_argument("--rounds", type=int, default=20, help="calls that are timed")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        predictor = relvit.load(given.ckpt_path)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    model: nn.Module = predictor.model
    patch, chans = model.patch_embed.patch_size, len(predictor.mean)
    generator = torch.Generator().manual_seed(0)
    images = [torch.randn(1, chans, rows * patch[0], cols * patch[1], generator=generator) for rows, cols in SHAPES]
    run_torch = torch.no_grad()(model)
    wanted = [run_torch(each) for each in images]
    print("| runtime | " + " | ".join(f"{h} x {w} px" for *_, h, w in (each.shape for each in images)) + " | ms |")
    worst = 0.0
    with TemporaryDirectory() as folder:
        onnx_file = Path(folder) / "model.onnx"
        export_model(predictor, onnx_file)
        runtimes: dict[str, Callable[[], Run]] = {
            "torch": lambda: run_torch,
            "onnxruntime": lambda: onnxruntime(onnx_file),
            "openvino": lambda: openvino(onnx_file),
            "executorch": lambda: executorch(model, Path(folder) / "model.pte"),
        }
        for name, build in runtimes.items():
            try:
                run = build()
            except ModuleNotFoundError as error:
                print(f"| {name} | not installed: {error.name} |")
                continue
            errors = [difference(run(each), logits) for each, logits in zip(images, wanted, strict=True)]
            worst = max(worst, *errors)
            took = milliseconds(run, images[0], given.rounds)
            print(f"| {name} {metadata.version(name)} | " + " | ".join(f"{e:.1e}" for e in errors) + f" | {took:.1f} |")
        print("TensorRT (matrix of onnx-tensorrt 10.1) lacks:", ", ".join(tensorrt_lacks(onnx_file)) or "nothing")
        try:
            counts = coreml_operators(coreml(model, images[0]))
            print("Core ML operators:", ", ".join(f"{name} {count}" for name, count in counts.most_common()))
        except ModuleNotFoundError as error:
            print(f"Core ML: not installed: {error.name}")
    return int(not worst <= 1e-4)


if __name__ == "__main__":
    sys.exit(main())
