"""What a trained model does: accuracy over image sizes."""

from relvit.evaluation.resolutions import Size, evaluate_sizes

__all__ = ["evaluate_sizes", "Size"]
