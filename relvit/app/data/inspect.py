"""Check a dataset before training (`relvit check-data`): unreadable images, counts, sizes and duplicates."""

import hashlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from relvit.app.data.class_labels import class_counts, label_text
from relvit.app.data.images.decode import ImageSource, UnreadableImageError, load_rgb
from relvit.app.data.modules.base import ImageData, Split
from relvit.app.data.modules.image_files import ImageFilesData
from relvit.app.utils.devices import cores
from relvit.app.utils.number_types import PositiveInt, check_ranges

_CHUNK = 32  # Each process gets at most this number of files at a time.


class Inspected(NamedTuple):
    """Size in pixels and hash of the decoded pixels of one file, or why it cannot be read."""

    height: int = 0
    width: int = 0
    digest: str = ""
    reason: str = ""


def inspect_image(source: ImageSource) -> Inspected:
    """Decode one file completely.

    The hash is computed from the decoded pixels. So lossless copies in another format, or with other metadata, have the
    same hash.
    """
    try:
        image = load_rgb(source)
    except UnreadableImageError as error:
        return Inspected(reason=error.reason)
    digest = hashlib.blake2b(f"{image.width}x{image.height}".encode() + image.tobytes(), digest_size=16)
    return Inspected(image.height, image.width, digest.hexdigest())


def check_data(
    data: ImageData, processes: PositiveInt | None = None, progress: Callable[[Iterable, int], Iterable] | None = None
) -> dict[str, Any]:
    """Decode all images of train, val and test in parallel, and report on them.

    If a part of train is held out for validation, that part is reported as val.

    Args:
        data: A data module of image files.
        processes: Number of processes that decode images; None: one for each core.
        progress: A function that shows progress: it takes the iterable of results and their number, and yields the
            results.

    Returns:
        Plain types, fit for JSON:

        - 'splits': for each split 'images', 'classes' (the number of images of each class), 'height' and 'width' (each
          'min', 'median' and 'max' of the readable images, in pixels; None if no image is readable)
        - 'bad': 'split', 'path' and 'reason' of each file that cannot be read
        - 'duplicates_classes': groups of images with equal pixels under different classes; for each image 'split',
          'class' and 'path'
        - 'duplicates_across': groups of images with equal pixels in several splits, under any classes
        - 'duplicates_within': groups of images with equal pixels in one split, under one class

    Raises:
        ValueError: The data have no image files or no labelled split, or the number of processes is below one.
    """
    check_ranges(check_data, {"processes": processes})
    if not isinstance(data, ImageFilesData):
        raise ValueError(f"{type(data).__name__} has no image files: give data with a file for each image")
    splits: list[Split] = [split for split in ("train", "val", "test") if data.missing(split) is None]
    if not splits:
        raise ValueError(f"{data.place} has no labelled images in train, val or test: give data that has some")
    samples = {split: data.samples(split) for split in splits}
    paths = [path for of_split in samples.values() for path, _ in of_split]
    results = _inspect_all(paths, processes or cores())
    inspected = iter(list(results if progress is None else progress(results, len(paths))))

    report: dict[str, Any] = {"splits": {}, "bad": []}
    groups: dict[str, list[dict[str, str]]] = defaultdict(list)
    for split, of_split in samples.items():
        good = []
        for (path, label), seen in zip(of_split, inspected, strict=False):
            if seen.reason:
                report["bad"].append({"split": split, "path": str(path), "reason": seen.reason})
                continue
            good.append(seen)
            name = label_text(label, data.class_names)
            groups[seen.digest].append({"split": split, "class": name, "path": str(path)})
        report["splits"][split] = {
            "images": len(of_split),
            "classes": class_counts((label for _, label in of_split), data.class_names),
            "height": _spread([seen.height for seen in good]),
            "width": _spread([seen.width for seen in good]),
        }
    equal = [group for group in groups.values() if len(group) > 1]
    report["duplicates_classes"] = [group for group in equal if _several(group, "class")]
    report["duplicates_across"] = [group for group in equal if _several(group, "split")]
    within = [group for group in equal if not _several(group, "class") and not _several(group, "split")]
    return report | {"duplicates_within": within}


def _inspect_all(paths: list[ImageSource], processes: int) -> Iterator[Inspected]:
    """Inspect the files in this number of processes; yield the results in the order of the paths."""
    if processes == 1:
        yield from map(inspect_image, paths)
        return
    with ProcessPoolExecutor(min(processes, len(paths))) as pool:
        yield from pool.map(inspect_image, paths, chunksize=min(_CHUNK, -(-len(paths) // processes)))


def _several(group: list[dict[str, str]], key: str) -> bool:
    return len({image[key] for image in group}) > 1


def _spread(values: list[int]) -> dict[str, float] | None:
    if not values:
        return None
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}
