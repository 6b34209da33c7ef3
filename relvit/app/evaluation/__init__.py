"""Use and evaluate trained models: predictions, features, test reports, accuracy by image size, export."""

from relvit.app.evaluation.costs import count_macs, peak_memory
from relvit.app.evaluation.deploy import ExportError, PublishError, export_model, publish_model, save_model
from relvit.app.evaluation.embeddings import Embeddings, embed_folder, write_embeddings
from relvit.app.evaluation.evaluate_sizes import PROTOCOLS, Size, evaluate_size, evaluate_sizes
from relvit.app.evaluation.prediction_table import PredictionTable
from relvit.app.evaluation.predictor import Prediction, Predictor
from relvit.app.evaluation.report import EvaluationReport
from relvit.app.evaluation.trust.calibration import (
    Calibration,
    CalibrationError,
    ChosenThresholds,
    calibrate,
    fit_temperature,
)
from relvit.app.evaluation.trust.feature_probes import probe_models
from relvit.app.evaluation.trust.robustness import Corruptions, absent_classes, evaluate_corruptions
from relvit.app.training.class_metrics import ClassMetrics, calibration_error, class_metrics, confusion_matrix

__all__ = [
    "Predictor",
    "Prediction",
    "PredictionTable",
    "Embeddings",
    "embed_folder",
    "write_embeddings",
    "export_model",
    "ExportError",
    "publish_model",
    "save_model",
    "PublishError",
    "absent_classes",
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
