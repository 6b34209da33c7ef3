"""Training with Lightning: the classifier module, its schedule, checkpoints and callbacks."""

from relvit.app.training.callbacks.early_stopping import Patience
from relvit.app.training.callbacks.history import History
from relvit.app.training.callbacks.progress_bar import EpochLines, TrainingProgressBar
from relvit.app.training.callbacks.telemetry import Telemetry
from relvit.app.training.callbacks.training_images import TrainingImages
from relvit.app.training.checkpoints.callback import RunCheckpoints, StoppedBySignalError, ignore_stop_signals
from relvit.app.training.checkpoints.checkpoint import Checkpoint
from relvit.app.training.checkpoints.checkpoint_averaging import average_checkpoints
from relvit.app.training.checkpoints.file import AtomicCheckpointIO, read_checkpoint, write_checkpoint
from relvit.app.training.checkpoints.load import classifier_of, load_classifier
from relvit.app.training.class_metrics import multi_label_metrics
from relvit.app.training.classifier import ImageClassifier
from relvit.app.training.labels import Labels, OneLabel, SeveralLabels
from relvit.app.training.optim.distillation import Teacher, distillation_loss
from relvit.app.training.optim.ema import WeightAverage
from relvit.app.training.optim.gradients import NonFiniteLossError
from relvit.app.training.optim.loss import ClassificationLoss, soft_targets
from relvit.app.training.optim.lr_finder import FindLearningRate
from relvit.app.training.optim.optimizer import make_optimizer
from relvit.app.training.optim.schedule import warmup_cosine
from relvit.app.training.run.data_record import DataRecord
from relvit.app.training.run.record import record_run
from relvit.app.training.run.run_folder import RunLock, new_run_folder, remove_if_empty

__all__ = [
    "ImageClassifier",
    "NonFiniteLossError",
    "ClassificationLoss",
    "soft_targets",
    "Teacher",
    "distillation_loss",
    "WeightAverage",
    "make_optimizer",
    "FindLearningRate",
    "warmup_cosine",
    "Checkpoint",
    "read_checkpoint",
    "write_checkpoint",
    "average_checkpoints",
    "Labels",
    "OneLabel",
    "SeveralLabels",
    "multi_label_metrics",
    "classifier_of",
    "load_classifier",
    "History",
    "EpochLines",
    "TrainingProgressBar",
    "Patience",
    "RunCheckpoints",
    "StoppedBySignalError",
    "ignore_stop_signals",
    "AtomicCheckpointIO",
    "DataRecord",
    "RunLock",
    "record_run",
    "Telemetry",
    "TrainingImages",
    "new_run_folder",
    "remove_if_empty",
]
