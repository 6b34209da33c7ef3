"""Data: Lightning data modules, image files and archives, transforms, samplers and loaders."""

from relvit.app.data.field import Fill
from relvit.app.data.images.decode import UnreadableImageError, load_rgb
from relvit.app.data.loading.sampler import TrainSampler
from relvit.app.data.loading.size_plan import SizePlan
from relvit.app.data.mixup import BatchMix
from relvit.app.data.modules.base import ImageData
from relvit.app.data.modules.cifar import CIFAR10Data, CIFAR100Data
from relvit.app.data.modules.dataset_data import DatasetData
from relvit.app.data.modules.digits import DigitsData
from relvit.app.data.modules.image_files import ImageFilesData
from relvit.app.data.modules.image_folder import ImageFolderData
from relvit.app.data.modules.image_list import ImageListData
from relvit.app.data.modules.imagenet import ImageNetData
from relvit.app.data.modules.readers import ReaderData
from relvit.app.data.transforms import Augment, SizeProtocol, eval_transform, parse_size, train_transform

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
