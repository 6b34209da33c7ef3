"""Publish trained models for timm and Hugging Face, and export them to ONNX and PyTorch's .pt2."""

from relvit.app.evaluation.deploy.int8 import compare, quantise
from relvit.app.evaluation.deploy.onnx_and_pt2 import ExportError, export_model
from relvit.app.evaluation.deploy.timm_format import PublishError, publish_model, save_model

__all__ = [
    "ExportError",
    "PublishError",
    "compare",
    "export_model",
    "publish_model",
    "quantise",
    "save_model",
]
