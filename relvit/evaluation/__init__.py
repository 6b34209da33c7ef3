"""Use and evaluate trained models: predictions, features, test reports, accuracy by image size, export."""

from relvit.evaluation.costs import count_macs, peak_memory
from relvit.evaluation.deploy import ExportError, PublishError, export_model, publish_model, save_model
from relvit.evaluation.embeddings import Embeddings, embed_folder, write_embeddings
from relvit.evaluation.mirror import MirrorAverage
from relvit.evaluation.outcomes import ClassMetrics, calibration_error, class_metrics, confusion_matrix
from relvit.evaluation.predictor import Prediction, Predictor
from relvit.evaluation.report import EvaluationReport
from relvit.evaluation.resolutions import PROTOCOLS, Size, evaluate_size, evaluate_sizes
from relvit.evaluation.trust.calibration import (
    Calibration,
    CalibrationError,
    ChosenThresholds,
    calibrate,
    fit_temperature,
)
from relvit.evaluation.trust.probe import probe_models
from relvit.evaluation.trust.robustness import Corruptions, RestrictedClasses, evaluate_corruptions

__all__ = [
    "Predictor",
    "Prediction",
    "Embeddings",
    "embed_folder",
    "write_embeddings",
    "export_model",
    "ExportError",
    "publish_model",
    "save_model",
    "PublishError",
    "MirrorAverage",
    "RestrictedClasses",
    "Corruptions",
    "evaluate_corruptions",
    "EvaluationReport",
    "ClassMetrics",
    "class_metrics",
    "confusion_matrix",
    "calibration_error",
    "calibrate",
    "Calibration",
    "CalibrationError",
    "ChosenThresholds",
    "fit_temperature",
    "probe_models",
    "evaluate_sizes",
    "evaluate_size",
    "count_macs",
    "peak_memory",
    "PROTOCOLS",
    "Size",
]
