"""Image files decoded once, into memory."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

from relvit.data.files.images import UnreadableImageError, load_rgb
from relvit.data.loading.memory import Failure, ImagesInMemory, MemoryImages, OwnSizeImages
from relvit.utils.memory import available_memory

_SHARE = 0.8  # of the available memory: the model and the loaders need some, too
_FILES = 256  # files that a process or thread gets at a time, at most
_BYTES = 2**25  # what they may come to when decoded, but for a single one
# Of small images most of the work is Python's, which threads do one after the other. Large ones take longer to hand
# over from another process than to decode.
_SMALL = 3 * 128 * 128
_UNKNOWN = (0, 0)  # size by a header that cannot be read

Size = tuple[int, int]
Progress = Callable[[Iterable[Any], int, str], Iterable[Any]]


class ImagesToDecode(NamedTuple):
    """The images of a split: path and label of each, and the transform from a PIL image to a tensor."""

    samples: Sequence[tuple[str, int]]
    transform: v2.Compose


def decode_into_memory(
    splits: Mapping[str, ImagesToDecode],
    packed_size: Size,
    skip: bool,
    copies: int = 1,
    progress: Progress | None = None,
) -> dict[str, ImagesInMemory]:
    """Decode all images by :func:`relvit.data.load_rgb`, in parallel.

    A split whose images all have the packed size becomes `MemoryImages`, four bytes a pixel; any other `OwnSizeImages`,
    three bytes a pixel.

    Args:
        splits: The images by split.
        packed_size: Height and width at which packed images are of use.
        skip: Whether a file that cannot be read is noted in the result, or raised.
        copies: Processes of this machine that do the same; they divide its memory and its cores.
        progress: Called with results as they come, their number and what is done; gives them on.

    Raises:
        ValueError: By the sizes in the files' headers the images need more than four fifths of the available memory;
            nothing has been decoded.
        UnreadableImageError: A file cannot be read, and is not to be skipped.
    """
    # Before the other processes of this machine begin to take theirs.
    available = available_memory()
    reader = _Reader(max(1, _cores() // copies), skip, progress or _unchanged)
    paths = {split: [path for path, _ in images.samples] for split, images in splits.items()}
    sizes = {split: reader.header_sizes(some, f"reading sizes of {split}") for split, some in paths.items()}
    packed = {split: set(some) - {_UNKNOWN} == {packed_size} for split, some in sizes.items()}
    needed = sum((4 if packed[split] else 3) * sum(map(_area, some)) for split, some in sizes.items())
    if available is not None and needed * copies > _SHARE * available:
        each = f", in each of {copies} processes" if copies > 1 else ""
        raise ValueError(
            f"cache: the {sum(map(len, sizes.values())):,} images of {' and '.join(splits)} take {in_units(needed)} "
            f"when decoded{each}; {in_units(available)} of memory are available, {_SHARE:.0%} of which may be used: "
            "read them from the disk each time (--data.cache false), or store them smaller"
        )

    decoded: dict[str, ImagesInMemory] = {}
    for split, (samples, transform) in splits.items():
        rest = [label for _, label in samples], transform
        what = f"decoding {split}"
        images = _pack(reader.images(paths[split], sizes[split], what), packed_size, *rest) if packed[split] else None
        # An image may have another size than its header says, for one if it lies on its side.
        decoded[split] = images or _join(reader.images(paths[split], sizes[split], what), sizes[split], *rest)
    return decoded


def in_units(amount: int) -> str:
    """Bytes in a unit of memory, such as '183.1 MiB'."""
    return f"{amount / 2**30:,.1f} GiB" if amount >= 2**30 else f"{amount / 2**20:.1f} MiB"


def _pack(
    images: Iterable[np.ndarray | Failure], size: Size, targets: list[int], transform: v2.Compose
) -> MemoryImages | None:
    """None if one has another size."""
    pixels, unreadable = np.zeros((len(targets), *size, 4), np.uint8), {}
    for index, image in enumerate(images):
        if isinstance(image, Failure):
            unreadable[index] = image
        elif image.shape[:2] != size:
            return None
        else:
            pixels[index, ..., :3] = image
    return MemoryImages(torch.from_numpy(pixels).view(torch.int32).squeeze(-1), targets, transform, unreadable)


def _join(
    images: Iterable[np.ndarray | Failure], expected: Sequence[Size], targets: list[int], transform: v2.Compose
) -> OwnSizeImages:
    pixels, unreadable = np.empty(3 * sum(map(_area, expected)), np.uint8), {}
    sizes, end = torch.zeros(len(targets), 2, dtype=torch.int64), 0
    for index, image in enumerate(images):
        if isinstance(image, Failure):
            unreadable[index] = image
            continue
        start, end = end, end + image.size
        if end > len(pixels):
            pixels = np.concatenate((pixels[:start], np.empty(end - start, np.uint8)))
        pixels[start:end] = image.reshape(-1)
        sizes[index] = torch.tensor(image.shape[:2])
    return OwnSizeImages(torch.from_numpy(pixels), sizes, targets, transform, unreadable)


class _Reader:
    """Reads files in parallel, in their order."""

    def __init__(self, workers: int, skip: bool, progress: Progress) -> None:
        self.workers = workers
        self.skip = skip
        self.progress = progress

    def header_sizes(self, paths: Sequence[str], what: str) -> list[Size]:
        """Height and width by the header of each file, _UNKNOWN where it has none that can be read."""
        found = self._each(_header_size, _parts(paths, [_UNKNOWN] * len(paths)), ProcessPoolExecutor)
        return list(self.progress(found, len(paths), what))

    def images(self, paths: Sequence[str], sizes: Sequence[Size], what: str) -> Iterator[np.ndarray | Failure]:
        """The pixels of each image, uint8 (H, W, 3), or why there are none."""
        small = 3 * sum(map(_area, sizes)) <= _SMALL * len(sizes)
        found = self._each(_pixels, _parts(paths, sizes), ProcessPoolExecutor if small else ThreadPoolExecutor)
        for image in self.progress(found, len(paths), what):
            if isinstance(image, Failure) and not self.skip:
                raise UnreadableImageError(*image)
            yield image

    def _each(self, function: Callable[[str], Any], parts: Sequence[Sequence[str]], kind: type[Executor]) -> Iterator:
        workers = min(self.workers, len(parts))
        if workers <= 1:
            for part in parts:
                yield from map(function, part)
            return
        waiting: deque = deque()
        with kind(workers) as pool:
            try:
                for part in parts:
                    waiting.append(pool.submit(_of_part, function, part))
                    # No more than so many: if the first is slow, the others must not fill the memory.
                    if len(waiting) > 2 * workers:
                        yield from waiting.popleft().result()
                while waiting:
                    yield from waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()


def _header_size(path: str) -> Size:
    try:
        with Image.open(path) as image:
            return image.height, image.width
    # Whatever is wrong with it is found, and said, when it is decoded.
    except Exception:
        return _UNKNOWN


def _pixels(path: str) -> np.ndarray | Failure:
    try:
        return np.asarray(load_rgb(path))
    except UnreadableImageError as error:
        return Failure(str(error), error.path, error.reason)


def _of_part(function: Callable[[str], Any], part: Sequence[str]) -> list[Any]:
    return [function(path) for path in part]


def _parts(paths: Sequence[str], sizes: Sequence[Size]) -> list[list[str]]:
    """The paths in parts, so that several can be read at once."""
    parts: list[list[str]] = []
    amount = 0
    for path, size in zip(paths, sizes, strict=True):
        amount += 3 * _area(size)
        if not parts or len(parts[-1]) == _FILES or amount > _BYTES:
            parts.append([])
            amount = 3 * _area(size)
        parts[-1].append(path)
    return parts


def _area(size: Size) -> int:
    return size[0] * size[1]


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _unchanged(items: Iterable[Any], total: int, what: str) -> Iterable[Any]:
    return items
