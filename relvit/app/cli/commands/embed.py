"""`relvit embed`: features of all images below a folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from relvit.app.cli.errors import UsageError
from relvit.app.evaluation import Predictor, Size, embed_folder, write_embeddings
from relvit.app.evaluation.embeddings import check_format
from relvit.app.training.run.data_record import none_readable, unreadable_sentence
from relvit.app.utils.devices import find_device
from relvit.app.utils.files import write_csv
from relvit.app.utils.number_types import BatchSize, Workers
from relvit.app.utils.progress import with_bar
from relvit.app.utils.shown_text import counted, printable
from relvit.models import Reach


def embed(
    ckpt_path: str,
    root: str,
    *,
    output: str,
    img_size: Size | None = None,
    batch_size: BatchSize = 64,
    num_workers: Workers = 2,
    device: str = "auto",
    reach: Reach = "trained",
) -> None:
    """Write the features of all images below a folder.

    Features are the input of the last layer, the classifier. Files that cannot be read are left out and listed in a CSV
    file beside the output.

    Args:
        root: The folder whose images are read, with all folders below it.
        output: The file to write: its name ends in .npz, .csv or .parquet.
        batch_size: The number of images in a batch.
        num_workers: The number of processes that read images; 0 reads them in the main process.
    """
    check_format(output)
    predictor = Predictor(ckpt_path, img_size, reach).to(find_device(device))
    found = embed_folder(predictor, root, batch_size, num_workers, partial(with_bar, what="embedding"))
    listed = Path(output).with_suffix(".unreadable.csv")
    if found.unreadable:
        rows = [(printable(path), reason) for path, reason in sorted(found.unreadable.items())]
        write_csv(listed, ("path", "reason"), rows)
        print(f"{unreadable_sentence('predict', len(rows))} {listed} says why.")
    else:
        # Remove the list of unreadable files that an earlier command may have written for the same output.
        listed.unlink(missing_ok=True)
    if not found.paths:
        raise UsageError(none_readable(found.unreadable))
    write_embeddings(found, output)
    count, length = found.features.shape
    print(f"{counted(count, 'image')}, {counted(length, 'feature')} each, in {output}", flush=True)
