"""`relvit show`: pictures of what a model has learned, and of what it does with images."""

from __future__ import annotations

from itertools import chain, count
from pathlib import Path

import torch

from relvit.app.cli.errors import UsageError
from relvit.app.data.batches import images_of
from relvit.app.data.images.decode import IMAGE_ENDINGS
from relvit.app.data.images.folders import find_images
from relvit.app.evaluation import Predictor, Size
from relvit.app.evaluation.pictures import KINDS, Kind, NotApplicableError, draw
from relvit.app.evaluation.pictures.draw import OF_THE_MODEL
from relvit.app.plots import all_zero, picture_of
from relvit.app.plots.style import save_figure
from relvit.app.utils.devices import find_device
from relvit.app.utils.exceptions import MissingPackageError
from relvit.app.utils.files import check_writable
from relvit.app.utils.shown_text import visible
from relvit.models import Reach

# Larger images are reduced for a figure, so that no side has more than this number of pixels.
SIDE = 400


def show(
    ckpt_path: str,
    images: list[str] | None = None,
    *,
    kind: list[Kind] | None = None,
    patch: tuple[int, int] | None = None,
    layer: int | None = None,
    img_size: Size | None = None,
    reach: Reach = "trained",
    output: str = "pictures",
    device: str = "auto",
) -> None:
    """Draw what a model has learned: position tables, attention, Grad-CAM.

    Each kind of picture is a PNG; kinds that need an image have one PNG for each image. No picture is overwritten: if
    there already is a tables.png or photo-attention.png, the name of the new picture gets a number.

    Args:
        images: Image files, folders and patterns; without images, only tables and aft-windows are drawn.
        kind: What to draw, one or several of tables, kernels, logits, attention, rollout, cam (Grad-CAM) and
            aft-windows; by default all kinds that apply to the model.
        patch: The row and the column, counted from 0, of the patch whose query is shown; by default the mean of all
            patches or the class token, for logits the patch in the middle.
        layer: The number of the layer, counted from 0; by default all layers, for logits, attention and cam the last
            layer.
        output: The folder to write to, beside pictures that are already there.
    """
    if output.lower().endswith(IMAGE_ENDINGS) and not Path(output).is_dir():
        raise UsageError(f"output {output} is the name of an image: give a folder, in which each picture has a name")
    check_writable(Path(output))
    chosen = list(KINDS if kind is None else dict.fromkeys(kind))
    paths = find_images(images or [])
    if not paths and (needs := [name for name in kind or () if name not in OF_THE_MODEL]):
        raise UsageError(f"--kind {needs[0]} needs an image: relvit show CKPT IMAGE --kind {needs[0]}")
    others = [name for name in chosen if name not in OF_THE_MODEL]
    if paths and not others:
        raise UsageError(f"--kind {chosen[0]} shows the model alone, not {images[0]}: leave the images or --kind out")
    predictor = Predictor(ckpt_path, img_size, reach).to(find_device(device))
    options = {"patch": patch, "layer": layer, "class_names": predictor.class_names}
    options["probabilities"] = predictor.probabilities
    blank = torch.zeros(len(predictor.mean), *predictor.img_size)
    # Read an image only when it is drawn, because a folder may hold more images than fit into memory.
    read = ((f"{Path(path).stem}-", images_of(next(predictor.batches([path]))[0])[0], others) for path in paths)
    folder, left_out, written = Path(output), {}, 0
    for start, image, kinds in chain([("", blank, [name for name in chosen if name in OF_THE_MODEL])], read):
        picture = picture_of(image, predictor.mean, predictor.std, SIDE)
        for name in kinds:
            try:
                figure = draw(name, predictor.model, image.to(predictor.device), picture, **options)
            except (NotApplicableError, MissingPackageError) as error:
                left_out[name] = str(error)
                continue
            folder.mkdir(parents=True, exist_ok=True)
            target = _unused(folder / f"{start}{name}.png")
            save_figure(figure, target)
            print(visible(str(target)) + (": all its numbers are 0" if all_zero(figure) else ""), flush=True)
            written += 1
    if kind is not None and left_out:
        raise UsageError("; ".join(f"{name}: {reason}" for name, reason in left_out.items()))
    for name, reason in left_out.items():
        print(f"left out: {name}: {visible(reason)}", flush=True)
    if not written:
        raise UsageError(
            "no picture was drawn: " + ("the lines above say why" if paths else "give an image, relvit show CKPT IMAGE")
        )


def _unused(path: Path) -> Path:
    """Return the path itself if there is no such file yet, otherwise the first free path with a number added."""
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in count(2))
    return next(each for each in chain([path], numbered) if not each.exists())
