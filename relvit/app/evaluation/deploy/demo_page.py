"""Page to try a classifier in the browser, by Gradio: classes and pictures of an image (see `pictures/draw.py`)."""

from __future__ import annotations

import html
import math
import re
import traceback
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import gradio as gr
import numpy as np
from fastapi import FastAPI, Request, Response
from gradio.utils import get_upload_folder
from PIL import Image, ImageDraw

from relvit.app.data import UnreadableImageError, load_rgb
from relvit.app.data.batches import images_of
from relvit.app.evaluation.deploy.demo_requests import OwnPageOnly
from relvit.app.evaluation.pictures import Kind, draw
from relvit.app.evaluation.pictures.draw import LABELS, OF_HEADS, first_kinds
from relvit.app.evaluation.predictor import Predictor
from relvit.app.plots import picture_of
from relvit.app.utils.exceptions import MissingPackageError
from relvit.app.utils.shown_text import one_line
from relvit.models import patch_grid

# The page refuses image sizes with more than this number of patches, because the attention weights of so many patches
# would take gigabytes.
MOST_PATCHES = 4096
# The picture that the user clicks on has this number of pixels on its longer side.
SIDE = 480
# A decoder that takes more than this number of seconds for one image is stopped, so that other images need not wait.
MAX_SECONDS = 20.0
HINT = "Drop an image, then click on a patch of it here."
# This Content-Security-Policy forbids the browser to send requests to other machines.
POLICY = (
    "default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"
)
# Without this style, Gradio would enlarge a figure of a single head to the width of the page.
CSS = ".figure img {width: auto !important; max-width: 100%; margin: auto}"


class View(NamedTuple):
    """Contents of the page: sentences, the framed picture, probabilities of classes, figures uint8 (H, W, 3)."""

    text: list[str]
    picture: Image.Image | None
    classes: dict[str, float] | None
    figures: dict[Kind, np.ndarray]


class Viewer:
    """Compute the results and pictures that the page shows for an image.

    Args:
        predictor: the classifier, at the image size of its training.
        max_pixels: largest number of pixels of an uploaded image, see `relvit.app.data.load_rgb`.
    """

    def __init__(self, predictor: Predictor, max_pixels: int) -> None:
        self.predictor = predictor
        self.max_pixels = max_pixels
        model = predictor.model
        embed = getattr(model, "patch_embed", getattr(model, "embeds", None))
        self.has_patches: bool = hasattr(embed, "dynamic_feat_size")
        self.patch_size: tuple[int, int] = embed.patch_size if self.has_patches else (16, 16)
        self.layers: int = len(getattr(model, "blocks", ())) or 1
        self.heads: int = max(getattr(layer, "num_heads", 0) for layer in model.modules())
        self.at_size: Callable[..., Predictor] = lru_cache(32)(predictor.at_size)

    def look(
        self,
        path: str,
        size: str = "",
        at: tuple[float, float] = (0.5, 0.5),
        kinds: Sequence[Kind] = (),
        layer: int | None = None,
        head: int | None = None,
    ) -> View:
        """Compute classes and pictures of an image file.

        Args:
            path: the file.
            size: see `img_size`; '': as in training.
            at: a point in the patch whose attention is drawn and which is framed, as shares of the height and width of
                the image that the model sees.
            kinds: the kinds of pictures to draw. For kinds, `layer` and `head` see
                `relvit.app.evaluation.pictures.draw`.

        Raises:
            ValueError: the image cannot be read or is too large, or the model or the page does not take `size`.
        """
        try:
            image = load_rgb(path, self.max_pixels, MAX_SECONDS)
        except UnreadableImageError as error:
            raise ValueError(f"this image cannot be read: {error.reason}") from error
        predictor = self.at_size(self.img_size(size, image) if size else None)
        best = predictor.predict(image, top=5)
        pixels, _ = next(predictor.batches([image]))
        seen = images_of(pixels)[0].to(predictor.device)
        small = picture_of(seen, predictor.mean, predictor.std, SIDE)
        grid, patch = (1, 1), (0, 0)
        text = f"The model sees {seen.shape[1]} x {seen.shape[2]} px, trained at {self.predictor.shape.words()}."
        if self.has_patches:
            grid = patch_grid(predictor.model, seen.shape[-2:])
            patch = min(int(at[0] * grid[0]), grid[0] - 1), min(int(at[1] * grid[1]), grid[1] - 1)
            text += f" Click on one of {grid[0]} x {grid[1]} patches; now row {patch[0]}, column {patch[1]}, from 0."
        classes = dict(zip(best.names, best.probabilities, strict=True))
        if predictor.thresholds is not None:
            least = dict(zip(predictor.class_names, predictor.thresholds, strict=True))
            classes = {f"{name} ✓" if share >= least[name] else name: share for name, share in classes.items()}
        view = View([text], _framed(small, grid, patch), classes, {})
        for kind in kinds:
            options = {"layer": None if kind == "rollout" else layer, "head": head if kind in OF_HEADS else None}
            options |= {"patch": None if kind == "tables" else patch, "class_names": predictor.class_names}
            options["probabilities"] = predictor.probabilities
            try:
                if not self.has_patches:
                    raise ValueError(f"{type(predictor.model).__name__} has no patches")
                figure = draw(kind, predictor.model, seen, small, **options)
            except (ValueError, MissingPackageError) as error:
                view.text.append(f"No {LABELS[kind]}: {one_line(error)}.")
                continue
            figure.canvas.draw()
            view.figures[kind] = np.asarray(figure.canvas.buffer_rgba())[..., :3]
        return view

    def img_size(self, size: str, image: Image.Image) -> tuple[int, int]:
        """Parse a size: 'H x W', or the longest side of a size with the image's shape in whole patches.

        If `size` is one number, it is the longest side; the other side follows from the image's height and width, and
        both sides are rounded to whole patches.

        Raises:
            ValueError: `size` is another text, or stands for more patches than the page takes.
        """
        match = re.fullmatch(r"(\d{1,5})(?:\s*[x×, ]\s*(\d{1,5}))?", size.strip())
        if match is None:
            raise ValueError(f"size {size!r}: give the longest side, such as 288, or height x width, such as 192 x 320")
        height, width = (int(part or match[1]) for part in match.groups())
        if match[2] is None:
            longest = max(image.size)
            height, width = (
                max(1, round(int(match[1]) * side / longest / patch)) * patch
                for side, patch in zip((image.height, image.width), self.patch_size, strict=True)
            )
        count = math.ceil(height / self.patch_size[0]) * math.ceil(width / self.patch_size[1])
        if count > MOST_PATCHES:
            raise ValueError(
                f"{height} x {width} px are {count:,} patches, and this page takes {MOST_PATCHES:,}: give a smaller "
                "size"
            )
        return height, width

    def sizes(self) -> list[tuple[str, str]]:
        """List sizes to choose from, each as label and text for `img_size`."""
        height, width = self.predictor.img_size
        own = [max(height, width) * share // 2 for share in (2, 3, 4)]
        fixed = [f"{h} x {w}" for h, w in ((height, 2 * width), (2 * height, width), (2 * height, 2 * width))]
        if not self.predictor.shape.fixed:
            # Offer no fixed shapes, because images keep their own shapes.
            fixed = []
        labels = [(f"{longest}, the shape of the image", str(longest)) for longest in own]
        return [(f"{self.predictor.shape.words()}, as in training", ""), *labels, *zip(fixed, fixed, strict=True)]


def _framed(picture: np.ndarray, grid: tuple[int, int], patch: tuple[int, int]) -> Image.Image:
    """Enlarge a picture by a whole number, and frame a patch."""
    image = Image.fromarray(picture)
    scale = max(1, SIDE // max(image.size))
    image = image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
    high, wide = image.height / grid[0], image.width / grid[1]
    box = (patch[1] * wide, patch[0] * high, (patch[1] + 1) * wide - 1, (patch[0] + 1) * high - 1)
    ImageDraw.Draw(image).rectangle(box, outline="red", width=3)
    return image


class Page(gr.Blocks):
    """Gradio's page, without Python's messages in the answers to requests that the page itself would not send."""

    async def process_api(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Compute the outputs of an event; raises a `gradio.Error` without details for a malformed one."""
        try:
            return await super().process_api(*args, **options)
        # The functions of the page catch all their errors, so only malformed values in the request can have caused this
        # error.
        except Exception as error:
            raise gr.Error("this page does not send such requests", print_exception=False) from error


def build_page(viewer: Viewer) -> gr.Blocks:
    """Build the page: an image, its size, what to draw; a click on the picture chooses the patch."""
    name = html.escape(viewer.predictor.classifier.hparams.model)

    def show(at: tuple[float, float], path: str | None, size: str | None, kinds: list[Kind], *which: Any) -> list[Any]:
        view = View([HINT], None, None, {})
        layer, head = (None if number == "all" else number for number in which)
        try:
            if path is not None:
                view = viewer.look(path, size or "", at, kinds, layer, head)
        except ValueError as error:
            view = View([f"Error: {one_line(error)}"], None, None, {})
        # After any error the page shows no results, because a user would think that old results are new. Messages of
        # unexpected errors may contain paths of this machine, so show them only in the terminal.
        except Exception:
            traceback.print_exc()
            view = View(["Error: the page failed; the terminal that it runs in says why"], None, None, {})
        drawn = [gr.Image(view.figures.get(kind), visible=kind in view.figures) for kind in LABELS]
        text, *missing = (f"<p>{html.escape(line)}</p>" for line in view.text)
        shape = None if view.picture is None else (view.picture.height, view.picture.width)
        return [shape, text, view.picture, view.classes, "".join(missing), *drawn]

    # Do not make the displayed picture an input of the event: Gradio would then decode any file that a request names.
    def click(event: gr.SelectData, shape: tuple[int, int], *choices: Any) -> list[Any]:
        x, y = map(float, event.index)
        at = min(max(y / shape[0], 0.0), 1.0), min(max(x / shape[1], 0.0), 1.0)
        return [at, *show(at, *choices)]

    with Page(title=f"relvit: {name}", analytics_enabled=False, delete_cache=(300, 1800)) as page:
        gr.Markdown(f"# {name}")
        at, shape = gr.State((0.5, 0.5)), gr.State()
        image = {"interactive": False, "show_label": False, "format": "png"}
        with gr.Row():
            with gr.Column(min_width=280):
                upload = gr.Image(label="Image", type="filepath", image_mode=None, sources="upload", height=240)
                # Gradio's own `preprocess` would decode the image before `load_rgb` checks the number of pixels.
                upload.preprocess = lambda payload: payload and payload.path
                info = "Or another: the longest side, or height x width."
                size = gr.Dropdown(viewer.sizes(), value="", label="Size", info=info, allow_custom_value=True)
            with gr.Column(min_width=280):
                text = gr.HTML(f"<p>{HINT}</p>", elem_id="text")
                seen = gr.Image(type="pil", elem_id="seen", buttons=[], **image)
            classes = gr.Label(label="Classes", elem_id="classes", show_heading=False, min_width=280)
        with gr.Row():
            names = [(label, kind) for kind, label in LABELS.items()]
            kinds = gr.CheckboxGroup(
                names, value=first_kinds(viewer.predictor.model), label="Show", scale=4, min_width=280
            )
            layer = gr.Dropdown(["all", *range(viewer.layers)], value=viewer.layers - 1, label="Layer", min_width=120)
            head = gr.Dropdown(["all", *range(viewer.heads)], value="all", label="Head", min_width=120)
        missing = gr.HTML(elem_id="missing")
        drawn = [
            gr.Image(visible=False, elem_id=kind, elem_classes="figure", buttons=["fullscreen"], **image)
            for kind in LABELS
        ]
        choices, outputs = [upload, size, kinds, layer, head], [shape, text, seen, classes, missing, *drawn]
        options = {"concurrency_id": "model", "trigger_mode": "always_last", "api_visibility": "private"}
        gr.on([choice.change for choice in choices], show, [at, *choices], outputs, **options)
        seen.select(click, [shape, *choices], [at, *outputs], **options)
    # Let the page count as running, because Gradio otherwise does not check that each file in a request was uploaded.
    page.has_launched = page.is_running = True
    return page


def build_app(viewer: Viewer, max_mb: float, host: str = "127.0.0.1", max_total_mb: float = 1000) -> FastAPI:
    """Build the application that serves the page; the browser asks no other machine for anything.

    Args:
        viewer: the object that computes the results and pictures on the page.
        max_mb: largest size of an uploaded file, in units of 2^20 bytes.
        host: the address that the server listens at, see `OwnPageOnly`.
        max_total_mb: largest total size of the files that the page holds at a time, in the same units.
    """
    app = FastAPI(openapi_url=None)

    @app.middleware("http")
    async def offline(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await call_next(request)
        response.headers["Content-Security-Policy"] = POLICY
        return response

    options = {
        "css": CSS,
        "max_file_size": int(max_mb * 2**20),
        "run_history": False,
        "ssr_mode": False,
        "footer_links": [],
    }
    most_bytes = int(max_total_mb * 2**20)
    app.add_middleware(OwnPageOnly, host=host, uploads=get_upload_folder(), most_bytes=most_bytes)
    return gr.mount_gradio_app(app, build_page(viewer), path="/", **options)
