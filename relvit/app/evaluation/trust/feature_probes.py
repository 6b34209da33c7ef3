"""Probe the features of any model by k nearest neighbours and by logistic regression, at several shares of labels."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import timm
import torch
from torch import nn

from relvit.app.data import ImageData
from relvit.app.data.at_size import at_size
from relvit.app.data.shape import ImageShape
from relvit.app.data.split import stratified_split
from relvit.app.evaluation.evaluate_sizes import check_each_once
from relvit.app.evaluation.standard_error import paired_difference, with_errors
from relvit.app.models import model_arguments
from relvit.app.training import Checkpoint, classifier_of
from relvit.app.training.base_classifier import finite_features, run_batches
from relvit.app.training.checkpoints.checkpoint import Transforms
from relvit.app.training.checkpoints.pretrained import Pretrained
from relvit.app.utils.defaults import torch_defaults
from relvit.app.utils.number_types import PositiveInt, PositiveShare, check_ranges
from relvit.app.utils.remote import suffix_of
from relvit.app.utils.shown_text import counted

# By default, probes learn from these shares of the labels, and 20 nearest neighbours vote, as in DINO's evaluation.
SHARES, NEIGHBOURS = (0.01, 0.1, 1.0), 20
# The linear probe tries these inverse strengths of weight decay, and takes the best one on this share of the labels,
# which is held out.
STRENGTHS, HELD_OUT = tuple(10.0**exponent for exponent in range(-4, 3)), 0.2
# A neighbour with the cosine similarity s has the weight exp(s / TEMPERATURE), as in DINO's evaluation.
TEMPERATURE = 0.07


@torch_defaults()
def probe_models(
    models: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    data: ImageData | None = None,
    split: Literal["val", "test"] = "val",
    shares: Sequence[PositiveShare] = SHARES,
    k: PositiveInt = NEIGHBOURS,
    seed: int = 0,
    pretrained: bool = True,
    batch_size: int | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[Iterable[Any], int, str], Iterable[Any]] | None = None,
) -> list[dict[str, Any]]:
    """Evaluate the features of models with simple classifiers that learn from a share of train's labels.

    Features are the pooled inputs of the classifier, as `relvit embed` writes them, computed without augmentation at
    the model's own image size and normalisation. See `knn_right` and `linear_right`.

    Args:
        models: one or several checkpoints of `relvit fit`, names of relvit or timm models, 'local-dir:...' and
            'hf-hub:...'.
        data: the images; None: the images of the first model's training, if that model is a checkpoint.
        split: the images to classify.
        shares: shares of the labels of train. Each class keeps its proportion, and at least one image; a larger share
            contains the images of the smaller shares.
        k: number of neighbours.
        seed: another seed chooses other images for each share, and gives other random weights.
        pretrained: whether a model given by name gets its pretrained weights; otherwise its weights are random, as a
            baseline.
        batch_size: images per batch; None: the batch size of the data.
        device: the device of the models.
        progress: a function that takes the batches, their number and a description, and yields the batches.

    Returns:
        A row for each model and share: 'model', 'features' (their length), 'share', 'labels' (number of labels of
        train), 'split', 'images' (number of images of the split), 'knn' and 'linear' (top-1 accuracies), 'knn_se' and
        'linear_se' (their standard errors, see `accuracy_error`), 'C' (of the linear probe). Rows of every further
        model also have 'knn_difference' and 'linear_difference', the differences to the first model, with their
        standard errors ('..._se', see `paired_difference`).

    Raises:
        FileNotFoundError, ValueError: a model or a folder of images is missing or cannot be read.
        ValueError: `pretrained` is true, and there are no pretrained weights of a model; or `data` is None, and the
            first model is not a checkpoint.
        ValueError: a share is not in 0 < x <= 1, or `k` is below 1; or no model or no share is given, or one twice.
        ValueError: the data have no images of the split, or have several labels per image; or a checkpoint takes
            another number of channels than the images have.
    """
    check_ranges(probe_models, locals())
    models = [models] if isinstance(models, str | os.PathLike) else models
    check_each_once("model", list(map(os.fspath, models)))
    check_each_once("share", shares)
    if data is None:
        name = os.fspath(models[0])
        if not is_checkpoint(name):
            _check_name(name)
            raise ValueError(f"{name} is not a checkpoint, so its data are not known: give --root DIR or --data NAME")
        data = Checkpoint.read(name).data_module()
    if data.multi_label:
        raise ValueError("probes need one label for each image: give data without multi_label, or label_separator")
    # Build the dataset here, with the transform of `data`. The copies of `data` below have the normalisation and crop
    # of each model, and share the datasets of `data`, which would otherwise keep the transform of the first model.
    data.prepare_data()
    data.dataset(split)
    rows: list[dict[str, Any]] = []
    # `of_first` says for each share of labels and each probe ('knn' or 'linear') whether the probe on the first model's
    # features classifies each test image right. The results of other models are compared with it.
    of_first: dict[tuple[float, str], np.ndarray] = {}
    # Load all models first, since the features of one model may take hours, and the name of another be misspelt.
    loaded = []
    for model in models:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            loaded.append(_load(model, data, pretrained))
    for model, (net, transforms) in zip(models, loaded, strict=True):
        own = copy.copy(data)
        own.batch_size = batch_size or data.batch_size
        own.crop_pct, own.shape = transforms.crop_pct, ImageShape(data.img_size)
        own.normalise_by(transforms.mean, transforms.std)
        net.to(device)
        train, evaluated = (at_size(own, transforms.img_size, part) for part in ("train", split))
        dataset = train.dataset("train")
        # If a user's dataset has no `targets`, read its labels together with its images, one by one.
        known = hasattr(dataset, "targets")
        targets = np.asarray(dataset.targets if known else [dataset[index][1] for index in range(len(dataset))])
        indices = choose_labels(targets, max(shares), seed)
        loaders = {"train": train._loader("train", sampler=indices.tolist()), split: evaluated.test_dataloader()}
        found = []
        for (part, loader), images in zip(loaders.items(), (train, evaluated), strict=True):
            batches = loader if progress is None else progress(loader, len(loader), f"{Path(model).name}: {part}")
            step = partial(finite_features, net, device=device)
            parts = zip(*run_batches(step, batches, images, part), strict=True)
            found += [torch.cat(rows).numpy() for rows in parts]
        net.cpu()
        # Loaders keep their workers alive, and the probes need no more images.
        del loaders, loader, batches
        features, labels, queries, truth = found
        if unreadable := train.unreadable.get("train"):
            indices = indices[[str(dataset.samples[index][0]) not in unreadable for index in indices]]
        for share in sorted(shares):
            chosen = np.isin(indices, choose_labels(targets, share, seed))
            known = features[chosen], labels[chosen]
            with warnings.catch_warnings():
                # With few images per class, scikit-learn wrongly warns that labels may be targets of a regression, so
                # ignore it.
                warnings.filterwarnings("ignore", message="The number of unique classes is greater than 50%")
                linear, strength = linear_right(*known, queries, truth, seed)
                right = {"knn": knn_right(*known, queries, truth, k), "linear": linear}
            row = {"model": os.fspath(model), "features": features.shape[1], "share": share, "labels": len(known[1])}
            row |= {"split": split, "images": len(truth)}
            row |= with_errors({name: float(each.mean()) for name, each in right.items()}, len(truth))
            for name, each in right.items():
                first = of_first.setdefault((share, name), each)
                if first is not each and len(first) == len(each):
                    row[f"{name}_difference"], row[f"{name}_difference_se"] = paired_difference(first, each)
            rows.append(row | {"C": strength})
    return rows


def choose_labels(labels: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Choose a share of each class's images, at least one: sorted indices. A larger share holds the smaller ones."""
    order = np.random.default_rng(seed).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    of_class = np.split(order, np.unique(labels[order], return_index=True)[1][1:])
    return np.sort(np.concatenate([own[: max(1, round(share * len(own)))] for own in of_class]))


def knn_right(features: np.ndarray, labels: np.ndarray, queries: np.ndarray, truth: np.ndarray, k: int) -> np.ndarray:
    """Classify by votes of the k neighbours with the largest cosine similarity s; a vote has the weight exp(s / 0.07).

    Source: Wu et al. 2018 (arXiv 1805.01978, section 3.4); the default k = 20 comes from DINO (Caron et al. 2021, arXiv
    2104.14294, appendix F). If there are fewer labels than k, all of them vote.

    Args:
        features: (N, width), with labels (N,).
        queries: (M, width), M further features, with their classes, truth (M,).
        k: number of neighbours.

    Returns:
        (M,) booleans, whether each query is classified right.
    """
    # Importing scikit-learn takes a second, so import it only here.
    from sklearn.neighbors import KNeighborsClassifier

    # The distance is 1 - s, so the weight of a vote is exp(s / 0.07) times a factor that is the same for all votes.
    options = {"metric": "cosine", "algorithm": "brute", "weights": lambda distance: np.exp(-distance / TEMPERATURE)}
    neighbours = KNeighborsClassifier(min(k, len(labels)), **options)
    return neighbours.fit(features, labels).predict(queries) == truth


def linear_right(
    features: np.ndarray, labels: np.ndarray, queries: np.ndarray, truth: np.ndarray, seed: int
) -> tuple[np.ndarray, float]:
    """Classify with scikit-learn's logistic regression (L-BFGS) of standardised features.

    A fifth of the labels is held out to choose the inverse strength C of the weight decay: of the values 10^-4, 10^-3,
    ..., 10^2 the one with the best accuracy on this fifth, or the smallest of several best ones. The regression then
    learns from all labels. With one label per class nothing can be held out, and C is 1.

    Args:
        features: (N, width), with labels (N,).
        queries: (M, width), M further features, with their classes, truth (M,).
        seed: another seed puts another fifth of the labels aside.

    Returns:
        (M,) booleans, whether each query is classified right, and C.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def fit(strength: float, part: Any) -> Any:
        model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=1000))
        with warnings.catch_warnings():
            # With weak weight decay, 1000 steps may not converge to the last digit. A probe need not be so exact, so
            # ignore the warning.
            warnings.simplefilter("ignore", ConvergenceWarning)
            return model.fit(features[part], labels[part])

    best = 1.0
    if np.unique(labels, return_counts=True)[1].max() > 1:
        names = [str(index) for index in range(len(labels))]
        larger, smaller = stratified_split(names, labels.tolist(), HELD_OUT, seed, "the labels")
        scores = [fit(strength, larger).score(features[smaller], labels[smaller]) for strength in STRENGTHS]
        best = STRENGTHS[int(np.argmax(scores))]
    return fit(best, slice(None)).predict(queries) == truth, best


def is_checkpoint(name: str) -> bool:
    """Return whether a name means a file, or a folder, where `Checkpoint.read` says which file is meant."""
    return suffix_of(name) == ".ckpt" or (os.path.isdir(name) and not timm.is_model(name))


def _check_name(name: str) -> None:
    """Refuse the name of a model that timm does not have, with the nearest name; prefixes such as 'hf-hub:' pass."""
    if ":" not in name:
        model_arguments(name)


def _load(model: str | os.PathLike[str], data: ImageData, pretrained: bool) -> tuple[nn.Module, Transforms]:
    """Load a model for evaluation, with the steps from an image to its input."""
    name = os.fspath(model)
    if is_checkpoint(name):
        checkpoint = Checkpoint.read(name)
        if (channels := checkpoint.argument("in_chans")) != data.in_chans:
            raise ValueError(
                f"{name} takes images of {counted(channels, 'channel')}, the data have {data.in_chans}: give data "
                f"with {channels}"
            )
        return classifier_of(checkpoint).net, checkpoint.transforms()
    _check_name(name)
    if ":" not in name and pretrained and not timm.is_model_pretrained(name):
        raise ValueError(f"there are no pretrained weights of {name}: give --random for random ones")
    net = Pretrained(name).timm_model(pretrained, in_chans=data.in_chans).eval()
    config = timm.data.resolve_model_data_config(net)
    # timm's mean and standard deviation are for three channels; for another number of channels, use the mean and
    # standard deviation of the data.
    known = config if len(config["mean"]) == data.in_chans else {"mean": data.mean, "std": data.std}
    return net, Transforms(config["input_size"][1:], known["mean"], known["std"], config["crop_pct"])
