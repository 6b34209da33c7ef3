"""Training with Lightning: the classifier module, its schedule, checkpoints and callbacks."""

from relvit.training.averaging import WeightAverage
from relvit.training.callbacks import PredictionTable, TrainingCurves
from relvit.training.checkpoint import DescribeCheckpoint, load_classifier
from relvit.training.checkpoint_average import average_checkpoints
from relvit.training.checkpoint_file import read_checkpoint, write_checkpoint
from relvit.training.classifier import ImageClassifier, NonFiniteLossError
from relvit.training.data_record import DataRecord
from relvit.training.distillation import Teacher, distillation_loss
from relvit.training.loss import ClassificationLoss, soft_targets
from relvit.training.lr_finder import FindLearningRate
from relvit.training.optimisation import make_optimizer
from relvit.training.run_folder import new_run_folder, remove_if_fruitless
from relvit.training.schedule import warmup_cosine

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
    "TrainingCurves",
    "PredictionTable",
    "DataRecord",
    "new_run_folder",
    "remove_if_fruitless",
]
