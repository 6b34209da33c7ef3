"""Data modules and what they are made of: images from files, transforms, fixed splits."""

from relvit.data.base import ImageData
from relvit.data.cifar import CIFAR10Data, CIFAR100Data
from relvit.data.digits import DigitsData
from relvit.data.folder import ImageFolderData
from relvit.data.image_files import ImageFilesData
from relvit.data.image_list import ImageListData
from relvit.data.imagenet import ImageNetData
from relvit.data.images import UnreadableImageError, load_rgb
from relvit.data.mix import BatchMix
from relvit.data.readers import ReaderData
from relvit.data.sampling import TrainSampler
from relvit.data.transforms import Augment, eval_transform, parse_size, train_transform

__all__ = [
    "ImageData",
    "ImageFilesData",
    "DigitsData",
    "CIFAR10Data",
    "CIFAR100Data",
    "ImageNetData",
    "ImageFolderData",
    "ImageListData",
    "ReaderData",
    "UnreadableImageError",
    "load_rgb",
    "BatchMix",
    "TrainSampler",
    "Augment",
    "eval_transform",
    "parse_size",
    "train_transform",
]
