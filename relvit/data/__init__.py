"""Data modules and what they are made of: images from files, transforms, fixed splits."""

from relvit.data.base import ImageData
from relvit.data.digits import DigitsData
from relvit.data.folder import ImageFolderData
from relvit.data.images import load_rgb
from relvit.data.mix import BatchMix
from relvit.data.transforms import Augment, eval_transform, parse_size, train_transform

__all__ = [
    "ImageData",
    "DigitsData",
    "ImageFolderData",
    "load_rgb",
    "BatchMix",
    "Augment",
    "eval_transform",
    "parse_size",
    "train_transform",
]
