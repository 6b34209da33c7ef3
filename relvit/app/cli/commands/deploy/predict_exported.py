"""`relvit predict --model FILE.onnx`: predictions of an exported file, by onnxruntime."""

from __future__ import annotations

from lightning import Trainer

from relvit.app.cli.commands.predict import report
from relvit.app.cli.trainer.command_folder import explained_failures, new_folder
from relvit.app.data import parse_size
from relvit.app.data.images.file_datasets import OnError
from relvit.app.data.modules.paths import ImagePathsData
from relvit.app.evaluation import PredictionTable, Size
from relvit.app.evaluation.deploy import OnnxClassifier
from relvit.app.training import DataRecord
from relvit.app.training.callbacks.progress_bar import progress_callbacks
from relvit.utils.ranges import BatchSize, Workers


def predict_onnx(
    model: str,
    paths: list[str],
    *,
    img_size: Size | None = None,
    batch_size: BatchSize = 64,
    num_workers: Workers = 2,
    on_error: OnError = "skip",
    runs: str = "runs",
) -> None:
    """Write the classes of each image into predictions.csv, as `relvit predict` does by a checkpoint.

    Args:
        model: The file that relvit export wrote.
        paths: Image files, folders (with all below them) and patterns such as 'photos/*.jpg'.
        batch_size: The number of images in a batch.
        num_workers: The number of processes that read images.
        on_error: What to do about a file that cannot be read: error stops, skip goes on without it.
        runs: The folder in which a new folder is made for the predictions.
    """
    classifier = OnnxClassifier(model)
    arguments = classifier.data_arguments(None if img_size is None else parse_size(img_size))
    loading = {"batch_size": batch_size, "num_workers": num_workers, "on_error": on_error}
    data = ImagePathsData(paths, **arguments, **loading)
    with new_folder(runs, "predict") as folder:
        table = PredictionTable(folder / "predictions.csv", data.class_names)
        off = ("logger", "enable_checkpointing", "enable_model_summary")
        config = {"enable_progress_bar": None, "callbacks": [], **dict.fromkeys(off, False)}
        config["callbacks"] = [table, DataRecord(folder), *progress_callbacks(config, None, quiet=False)]
        trainer = Trainer(accelerator="cpu", devices=1, **config)
        with explained_failures("predict", trainer, folder):
            trainer.predict(classifier, data, return_predictions=False)
            report(table, folder)
