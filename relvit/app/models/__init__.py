"""Any model of timm by name, built with checked arguments; the image sizes that a model takes."""

from relvit.app.models.image_size import at_image_size, check_image_size, patch_size_of, run_once
from relvit.app.models.model_factory import build_model, check_model_size, described_model, model_arguments

__all__ = [
    "at_image_size",
    "build_model",
    "check_image_size",
    "check_model_size",
    "described_model",
    "model_arguments",
    "patch_size_of",
    "run_once",
]
