"""What a trained model does: predictions and features in Python, accuracy over image sizes."""

from relvit.evaluation.mirror import MirrorAverage
from relvit.evaluation.predictor import Prediction, Predictor
from relvit.evaluation.resolutions import Size, evaluate_sizes

__all__ = ["Predictor", "Prediction", "MirrorAverage", "evaluate_sizes", "Size"]
