"""Training with Lightning: the classifier module, its schedule, checkpoints and callbacks."""

from relvit.training.averaging import WeightAverage
from relvit.training.callbacks import PredictionTable
from relvit.training.checkpoint import DescribeCheckpoint, load_classifier
from relvit.training.checkpoint_average import average_checkpoints
from relvit.training.checkpoint_file import read_checkpoint, write_checkpoint
from relvit.training.checkpoint_io import WholeCheckpoints
from relvit.training.classifier import ImageClassifier
from relvit.training.data_record import DataRecord
from relvit.training.distillation import Teacher, distillation_loss
from relvit.training.finite import NonFiniteLossError
from relvit.training.history import History
from relvit.training.loss import ClassificationLoss, soft_targets
from relvit.training.lr_finder import FindLearningRate
from relvit.training.optimisation import make_optimizer
from relvit.training.patience import Patience
from relvit.training.progress_bar import TrainingProgressBar
from relvit.training.progress_lines import EpochLines
from relvit.training.run_checkpoints import RunCheckpoints, StoppedBySignalError, ignore_stop_signals
from relvit.training.run_folder import RunLock, new_run_folder, remove_if_fruitless
from relvit.training.run_record import record_run
from relvit.training.schedule import warmup_cosine
from relvit.training.telemetry import Telemetry
from relvit.training.training_images import TrainingImages

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
    "DescribeCheckpoint",
    "read_checkpoint",
    "write_checkpoint",
    "average_checkpoints",
    "load_classifier",
    "History",
    "EpochLines",
    "TrainingProgressBar",
    "Patience",
    "RunCheckpoints",
    "StoppedBySignalError",
    "ignore_stop_signals",
    "WholeCheckpoints",
    "PredictionTable",
    "DataRecord",
    "RunLock",
    "record_run",
    "Telemetry",
    "TrainingImages",
    "new_run_folder",
    "remove_if_fruitless",
]
