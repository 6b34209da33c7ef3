"""Data: Lightning data modules, image files and archives, transforms, samplers and loaders."""

from relvit.data.field import Fill
from relvit.data.images.decode import UnreadableImageError, load_rgb
from relvit.data.loading.sampler import TrainSampler
from relvit.data.loading.sizes import SizePlan
from relvit.data.mixup import BatchMix
from relvit.data.modules.base import ImageData
from relvit.data.modules.cifar import CIFAR10Data, CIFAR100Data
from relvit.data.modules.datasets import DatasetData
from relvit.data.modules.digits import DigitsData
from relvit.data.modules.folder import ImageFolderData
from relvit.data.modules.image_files import ImageFilesData
from relvit.data.modules.image_list import ImageListData
from relvit.data.modules.imagenet import ImageNetData
from relvit.data.modules.readers import ReaderData
from relvit.data.transforms import Augment, SizeProtocol, eval_transform, parse_size, train_transform

__all__ = [
    "ImageData",
    "ImageFilesData",
    "DatasetData",
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
    "SizePlan",
    "Augment",
    "SizeProtocol",
    "Fill",
    "eval_transform",
    "parse_size",
    "train_transform",
]
