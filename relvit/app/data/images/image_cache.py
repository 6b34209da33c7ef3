"""Image cache in memory: decode image files once, in threads, and serve images or batches of them from memory."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from torchvision.transforms import v2

from relvit.app.data.images.decode import UnreadableImageError, load_rgb, open_image
from relvit.app.data.images.file_datasets import LabelledFiles
from relvit.app.data.transforms import BatchTransform
from relvit.app.utils.devices import available_memory, cores

# The images may take this share of the available memory; the rest is for the model and the loaders.
_MEMORY_SHARE = 0.8
_UNKNOWN = (0, 0)  # This size stands for an image whose header cannot be read.

Size = tuple[int, int]
Progress = Callable[[Iterable[Any], int, str], Iterable[Any]]


class Failure(NamedTuple):
    """Arguments of the UnreadableImageError of a file."""

    message: str
    path: str
    reason: str


class ImagesInMemory(Dataset[Any]):
    """Decoded images. Items are ``(image, target)``, float32 (C, H, W).

    Args:
        targets: The target of each image: a label, bool (num_classes,) for several labels, or a name.
        transform: The transform from a PIL image to a tensor.
        unreadable: Key: the index of an image that could not be decoded. Value: the arguments of its
            UnreadableImageError.
    """

    def __init__(
        self,
        targets: Sequence[int] | Sequence[str],
        transform: v2.Compose,
        unreadable: Mapping[int, Failure] | None = None,
    ) -> None:
        self.targets = targets
        self.transform = transform
        self.unreadable: dict[int, Failure] = dict(unreadable or {})

    @abstractmethod
    def values(self, index: int) -> np.ndarray:
        """Pixels of one image, uint8 (H, W, 3) or, of grey images, (H, W)."""

    def check(self, index: int) -> None:
        """Raise an UnreadableImageError if this image could not be decoded."""
        if index in self.unreadable:
            raise UnreadableImageError(*self.unreadable[index])

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int | str]:
        target = self.targets[index]
        self.check(index)
        return self.transform(Image.fromarray(self.values(index))), target


class StackedImages(ImagesInMemory):
    """Images of one size: pixels uint8 (N, H, W, 3) or, of grey images, (N, H, W)."""

    def __init__(self, pixels: Tensor, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pixels = pixels

    def values(self, index: int) -> np.ndarray:
        return self.pixels[index].numpy()

    def at_once(self) -> "InMemoryBatches | None":
        """Return the batches, transformed at once; None for grey images, or where no `BatchTransform` is equivalent."""
        size, colour = tuple(self.pixels.shape[1:3]), self.pixels.ndim == 4
        transform = BatchTransform.like(self.transform, size) if colour else None
        return None if transform is None else InMemoryBatches(self, transform)


class AnySizeImages(ImagesInMemory):
    """Colour images of any sizes: pixels uint8, one image after the other, and the images' sizes int64 (N, 2).

    One tensor holds the pixels of all images, so that DataLoader workers share the pixels instead of copying them,
    however many images there are.
    """

    def __init__(self, pixels: Tensor, sizes: Tensor, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pixels = pixels
        self.sizes = sizes
        self.ends: Tensor = (3 * sizes.prod(1)).cumsum(0)

    def values(self, index: int) -> np.ndarray:
        height, width = self.sizes[index].tolist()
        end = int(self.ends[index])
        return self.pixels[end - 3 * height * width : end].view(height, width, 3).numpy()


class InMemoryBatches(Dataset[Any]):
    """Batches of images of one size, transformed at once, for a DataLoader with `identity_collate`."""

    def __init__(self, images: StackedImages, transform: BatchTransform) -> None:
        self.images = images
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> int:
        """Return the index of an image that has been decoded, or raise its UnreadableImageError."""
        self.images.check(index)
        return index

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor | list[str]]:
        """Make a batch: images float32 (B, 3, H, W), and labels int64 (B,) or bool (B, num_classes), or names."""
        targets = [self.images.targets[index] for index in indices]
        return self.transform(self.images.pixels[torch.as_tensor(indices)]), default_collate(targets)


def decode_into_memory(
    splits: Mapping[str, LabelledFiles],
    one_size: Size,
    skip: bool,
    copies: int = 1,
    progress: Progress | None = None,
) -> dict[str, ImagesInMemory]:
    """Decode all images by :func:`relvit.app.data.load_rgb`, in threads.

    A split whose images all have `one_size` becomes `StackedImages`; all other splits become `AnySizeImages`.

    Args:
        splits: The files of each split, by its name.
        one_size: Height and width; if all images of a split have this size, they are stacked, so batches of them can be
            transformed at once.
        skip: Whether a file that cannot be read is only recorded in the result. Otherwise the file raises an error.
        copies: Number of processes that decode these images on this machine, and so share its memory and cores.
        progress: A function that shows progress: it takes the iterable of results, their number and a description, and
            yields the results.

    Raises:
        ValueError: According to the files' headers the images need more than four fifths of the available memory.
            Nothing was decoded.
        UnreadableImageError: A file cannot be read, and `skip` is False.
    """
    # Measure the memory now, before the other processes on this machine begin to allocate memory for their images.
    available = available_memory()
    threads = max(1, cores() // copies)
    progress = progress or (lambda items, total, what: items)
    paths = {split: [path for path, _ in files.samples] for split, files in splits.items()}
    sizes: dict[str, list[Size]] = {}
    for split, some in paths.items():
        found = _in_threads(_header_size, some, threads)
        sizes[split] = list(progress(found, len(some), f"reading sizes of {split}"))
    needed = sum(3 * sum(map(_area, some)) for some in sizes.values())
    if available is not None and needed * copies > _MEMORY_SHARE * available:
        each = f", in each of {copies} processes" if copies > 1 else ""
        raise ValueError(
            f"cache: the {sum(map(len, sizes.values())):,} images of {' and '.join(splits)} take {in_units(needed)} "
            f"when decoded{each}; {in_units(available)} of memory are available, {_MEMORY_SHARE:.0%} of which may be "
            "used: read them from the disk each time (--data.cache false), or store them smaller"
        )
    decoded: dict[str, ImagesInMemory] = {}
    for split, files in splits.items():
        images = _in_threads(_pixels, paths[split], threads)
        images = progress(images, len(paths[split]), f"decoding {split}")
        decoded[split] = _in_memory(images, sizes[split], one_size, files, skip)
    return decoded


def in_units(amount: int) -> str:
    """Format bytes in a unit of memory, such as '183.1 MiB'."""
    return f"{amount / 2**30:,.1f} GiB" if amount >= 2**30 else f"{amount / 2**20:.1f} MiB"


def _in_memory(
    images: Iterable[np.ndarray | Failure], expected: Sequence[Size], one_size: Size, files: LabelledFiles, skip: bool
) -> ImagesInMemory:
    # A black image of the size `blank` takes the place of an image that cannot be read, so that images of one size can
    # still be stacked.
    blank = one_size if set(expected) - {_UNKNOWN} == {one_size} else _UNKNOWN
    total = sum(_area(blank if size == _UNKNOWN else size) for size in expected)
    pixels, end = np.empty(3 * total, np.uint8), 0
    sizes, unreadable = torch.zeros(len(expected), 2, dtype=torch.int64), {}
    for index, image in enumerate(images):
        if isinstance(image, Failure):
            if not skip:
                raise UnreadableImageError(*image)
            unreadable[index], image = image, np.zeros((*blank, 3), np.uint8)
        start, end = end, end + image.size
        if end > len(pixels):
            pixels = np.concatenate((pixels[:start], np.empty(end - start, np.uint8)))
        pixels[start:end] = image.reshape(-1)
        sizes[index] = torch.tensor(image.shape[:2])
    rest = files.targets, files.transform, unreadable
    # An EXIF orientation may exchange height and width of the header, so compare the decoded sizes.
    if (sizes == torch.tensor(one_size)).all():
        return StackedImages(torch.from_numpy(pixels).view(len(sizes), *one_size, 3), *rest)
    return AnySizeImages(torch.from_numpy(pixels), sizes, *rest)


def _in_threads(function: Callable[[str], Any], paths: Sequence[str], threads: int) -> Iterator[Any]:
    """Yield the results of a function for the paths in their order."""
    # Read the files in chunks: otherwise, while a large file is decoded, the results of all later files could fill the
    # memory.
    chunk = 8 * threads
    with ThreadPoolExecutor(threads) as pool:
        for first in range(0, len(paths), chunk):
            yield from pool.map(function, paths[first : first + chunk])


def _header_size(path: str) -> Size:
    """Read the height and the width in the header of a file; _UNKNOWN where it cannot be read."""
    try:
        with open_image(path) as image:
            return image.height, image.width
    # Ignore the error, because decoding the file later raises and reports it again.
    except Exception:
        return _UNKNOWN


def _pixels(path: str) -> np.ndarray | Failure:
    """Decode a file to uint8 (H, W, 3)."""
    try:
        return np.asarray(load_rgb(path))
    except UnreadableImageError as error:
        return Failure(str(error), error.path, error.reason)


def _area(size: Size) -> int:
    return size[0] * size[1]
