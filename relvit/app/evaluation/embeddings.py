"""Compute features (embeddings) of all images in a folder, and write them to .npz, .csv or .parquet files."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from relvit.app.data.images.folders import image_files
from relvit.app.data.modules.image_folder import find_splits
from relvit.app.evaluation.predictor import Predictor, check_predictor
from relvit.app.training.base_classifier import run_batches
from relvit.app.utils.defaults import torch_defaults
from relvit.app.utils.exceptions import MissingPackageError
from relvit.app.utils.files import atomic_write, check_output, write_csv
from relvit.app.utils.shown_text import printable

FORMATS = (".npz", ".csv", ".parquet")


class Embeddings(NamedTuple):
    """Features of images.

    Attributes:
        paths: N files, sorted.
        classes: the class folder of each file, '' for a file without a class folder.
        features: float32 (N, num_features).
        unreadable: path and reason of the files that could not be read.
    """

    paths: list[str]
    classes: list[str]
    features: np.ndarray
    unreadable: dict[str, str]


@torch_defaults()
def embed_folder(
    predictor: Predictor,
    root: str | os.PathLike[str],
    batch_size: int = 32,
    num_workers: int = 0,
    progress: Callable[[Iterable[Any], int], Iterable[Any]] | None = None,
) -> Embeddings:
    """Compute features of all readable images below a folder, in the order of their paths.

    Args:
        predictor: see `relvit.load`.
        root: the folder. The class of an image is the first folder on its path below root, or below root's folder
            train, val or test.
        batch_size: images per batch.
        num_workers: processes that read images.
        progress: a function that takes the batches and their number and yields the batches, for example to show a
            progress bar.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: there are no images below the folder.
    """
    check_predictor(predictor)
    root = os.fspath(root)
    if not os.path.isdir(root):
        raise FileNotFoundError(f"root {root} is not a folder; give one with images")
    paths = image_files(root)
    if not paths:
        raise ValueError(f"no image below {root}: give a folder with images")
    # Look for the splits before the computation, since two folders with validation images are an error.
    splits = find_splits(root).values()
    unreadable: dict[str, str] = {}
    features, read = [torch.empty(0, predictor.num_features)], []
    batches: Iterable[Any] = predictor.batches(paths, batch_size, num_workers, unreadable)
    batches = batches if progress is None else progress(batches, math.ceil(len(paths) / batch_size))
    for rows, indices in run_batches(predictor.features, batches):
        features.append(rows)
        read += [paths[index] for index in indices.tolist()]
    return Embeddings(read, [_class(path, [*splits, root]) for path in read], torch.cat(features).numpy(), unreadable)


def _class(path: str, folders: list[str]) -> str:
    """Return the first folder of a file's path below the first of `folders` that holds the file, or ''."""
    folder = next(folder for folder in folders if Path(path).is_relative_to(folder))
    return Path(path).relative_to(folder).parts[0] if Path(path).parent != Path(folder) else ""


def check_format(output: str | os.PathLike[str]) -> None:
    """Check, before hours of work, that embeddings can be written to a file of this name.

    Raises:
        ValueError: the name does not end in .npz, .csv or .parquet.
        NotADirectoryError: a part of the path is a file.
        ModuleNotFoundError: the name ends in .parquet, and pyarrow is not installed.
    """
    if check_output(output, FORMATS) == ".parquet":
        _pyarrow()


def write_embeddings(embeddings: Embeddings, output: str | os.PathLike[str]) -> None:
    """Write embeddings in the format of the file's ending; `class` is left out if no image has a class.

    - .npz: arrays `path` (str), `class` (str), `features` (float32 (N, num_features)), without pickles;
    - .csv: columns path, class, 0, 1, ..., with nine digits, which float32 needs to be read back exactly;
    - .parquet: columns path, class, features (a list of float32 of fixed length).

    Raises:
        ValueError, NotADirectoryError, ModuleNotFoundError: see `check_format`.
    """
    check_format(output)
    columns: dict[str, list[str]] = {"path": [printable(path) for path in embeddings.paths]}
    if any(embeddings.classes):
        columns["class"] = [printable(name) for name in embeddings.classes]
    features = embeddings.features
    match Path(output).suffix:
        case ".npz":
            # Give the dtype, because NumPy makes an array of numbers from an empty list.
            texts = {name: np.array(values, np.str_) for name, values in columns.items()}
            # Given a name, `np.savez` would append .npz to the name of the temporary file, so give it an open file.
            with atomic_write(output) as part, open(part, "wb") as file:
                np.savez(file, **texts, features=features)
        case ".csv":
            lines = zip(*columns.values(), features, strict=True)
            # Convert one row at a time, because Python's numbers take eight times the memory of float32.
            rows = ([*texts, *(f"{number:.9g}" for number in row.tolist())] for *texts, row in lines)
            write_csv(output, [*columns, *map(str, range(features.shape[1]))], rows)
        case ".parquet":
            pa = _pyarrow()
            lists = pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1)), features.shape[1])
            with atomic_write(output) as part:
                pa.parquet.write_table(pa.table({**columns, "features": lists}), part)


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise MissingPackageError("a Parquet file", "pyarrow") from error
    return pyarrow
