"""ONNX files that are made without relvit."""

import json

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def save(path, nodes, weights, given, computed, **properties):
    """Write an ONNX file; weights are given by name, input and output by name and shape."""
    given, computed = (helper.make_tensor_value_info(name, TensorProto.FLOAT, of) for name, of in (given, computed))
    weights = [numpy_helper.from_array(weight, name) for name, weight in weights.items()]
    made = helper.make_graph(nodes, "graph", [given], [computed], weights)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    helper.set_model_props(model, properties)
    onnx.save(model, path)
    return path


DESCRIPTION = {
    "class_names": ["cat", "dog", "owl"],
    "input": ["batch", 3, "8*height_in_patches", "8*width_in_patches"],
    "img_size": [16, 16],
    "crop_pct": 0.9,
    "mean": [0.5, 0.5, 0.5],
    "std": [0.2, 0.2, 0.2],
}


def classifier_of(path, description=DESCRIPTION, nodes=(), weights=None):
    """Write an .onnx that averages over the pixels, with a description (JSON text, or a value to write as JSON).

    The outputs are increased by `extra`, which `nodes` compute or which is one of the weights.
    """
    mean = helper.make_node("ReduceMean", ["images", "axes"], ["mean"], keepdims=0)
    nodes = [*nodes, mean, helper.make_node("Add", ["mean", "extra"], ["logits"])]
    weights = {"axes": np.array([2, 3]), **({"extra": np.zeros(3, np.float32)} if weights is None else weights)}
    text = description if isinstance(description, str) else json.dumps(description)
    properties = {} if description is None else {"relvit": text}
    sides = ("images", ["n", 3, "h", "w"]), ("logits", ["n", 3])
    return save(path, nodes, weights, *sides, **properties)
