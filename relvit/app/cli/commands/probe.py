"""`relvit probe`: k-NN and linear probes of models' features, also random ones; checks what is compared."""

from __future__ import annotations

from functools import partial
from typing import Literal

from relvit.app.cli.errors import UsageError
from relvit.app.cli.outputs import output_files, print_table, write_rows
from relvit.app.data import ImageData, ImageFolderData
from relvit.app.evaluation import probe_models
from relvit.app.evaluation.standard_error import plus_minus
from relvit.app.evaluation.trust.feature_probes import NEIGHBOURS, SHARES, is_checkpoint
from relvit.app.plots import plot_probes
from relvit.app.plots.style import short_labels
from relvit.app.utils.devices import find_device
from relvit.app.utils.number_types import BatchSize, NonNegativeInt, PositiveInt, PositiveShare
from relvit.app.utils.progress import with_bar
from relvit.app.utils.shown_text import counted, without_secrets


def probe(
    models: list[str],
    *,
    root: str | None = None,
    data: ImageData | None = None,
    split: Literal["val", "test"] = "val",
    shares: tuple[PositiveShare, ...] = SHARES,
    k: PositiveInt = NEIGHBOURS,
    seed: NonNegativeInt = 0,
    random: bool = False,
    batch_size: BatchSize | None = None,
    device: str = "auto",
    output: str | None = None,
) -> None:
    """Evaluate the features of any models by k-NN and a linear classifier.

    Args:
        models: The checkpoints or names of relvit and timm models, such as runs/RUN/checkpoints/best.ckpt.
        root: The folder that holds train/CLASS/IMAGE; by default the data of the first model, which must be a
            checkpoint then.
        data: Another kind of data, with its options: --data NAME --data.OPTION VALUE. Options that are not given have
            the defaults of NAME, not the values of a checkpoint's training.
        split: The images to classify: val or test.
        shares: The shares of train's labels to learn from, such as 0.01 0.1 1.
        k: The number of neighbours, whose votes have the weight exp(cosine similarity / 0.07).
        seed: The seed that chooses the images of a share, and random weights.
        random: Give models that are given by name random weights instead of pretrained weights, as a baseline.
        batch_size: The number of images in a batch; by default the batch size of the data.
    """
    if root is not None and data is not None:
        raise UsageError("--root and --data both name the images: give one of them")
    if random and all(map(is_checkpoint, models)):
        raise UsageError("--random is for models given by name, and all of these are checkpoints: leave it out")
    targets = output_files(output, "probe")
    images = ImageFolderData(root) if root is not None else data
    options = shares, k, seed, not random, batch_size, find_device(device), with_bar
    rows, models = without_secrets([probe_models(models, images, split, *options), models])
    title = f"accuracy on {counted(rows[0]['images'], 'image')} of {split}"
    print(*(f"{number}  {model}" for number, model in enumerate(models, 1)), title, sep="\n", flush=True)
    cells = []
    for row in rows:
        numbers = str(models.index(row["model"]) + 1), str(row["features"]), f"{row['share']:g}", str(row["labels"])
        cells.append([*numbers, plus_minus(row, "knn"), plus_minus(row, "linear"), f"{row['C']:g}"])
    print_table(("model", "features", "share", "labels", f"{k}-NN", "linear", "C"), cells)
    for row in rows:
        if "linear_difference" in row:
            knn, linear = (plus_minus(row, f"{key}_difference", "{:+.4f}") for key in ("knn", "linear"))
            number = models.index(row["model"]) + 1
            print(f"{number} minus 1, on the same images, share {row['share']:g}: {k}-NN {knn}, linear {linear}")
    labels = short_labels([row["model"] for row in rows])
    for target in targets:
        write_rows(target, rows, partial(plot_probes, rows, labels, title=title))
