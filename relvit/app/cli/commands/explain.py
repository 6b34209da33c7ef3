"""`relvit explain`: print, as Markdown or for a terminal, what a model's attention layers compute, and how."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from relvit.app.cli.errors import UsageError
from relvit.app.data import parse_size
from relvit.app.evaluation import Size
from relvit.app.models import build_model
from relvit.app.training import Checkpoint, classifier_of
from relvit.app.training.checkpoints.file import FOLDER, HUB, is_published
from relvit.app.training.checkpoints.pretrained import Pretrained
from relvit.app.utils.files import EXPORTED
from relvit.app.utils.remote import suffix_of
from relvit.layers import LayerPlan
from relvit.models import explain as explain_model

PLACES = {"cpu": "the CPU", "cuda": "CUDA"}
HEADER = (
    "layers",
    "position",
    "terms",
    "backend",
    "why",
    "head width (in fused)",
    "kept for backward",
    "parameters each",
)


def explain(
    model: str,
    *,
    img_size: Size | None = None,
    model_kwargs: dict[str, Any] | None = None,
    retrofit: dict[str, Any] | None = None,
    device: str | None = None,
) -> None:
    """Print what a model's attention layers compute, which backend, and why.

    The table has the positions, the backend, the width of a head, and the tensors that training keeps. Below the table
    are the backends that the same layers would take on CUDA. A terminal shows one kind of layer below the other; a file
    or pipe gets a Markdown table.

    Args:
        model: The name of a model, such as relvit_small, or of a timm model with `--retrofit {}`; a checkpoint; or a
            published folder or hf-hub:OWNER/NAME.
        img_size: The size of the images in pixels, such as 384 or [256,384]; by default the model's size.
        model_kwargs: Further arguments of the model's class, such as '{rel_terms: k}'.
        retrofit: Arguments of `relvit.retrofit` for a timm model; {} for the defaults.
        device: The kind of device, cpu or cuda (a GPU of compute capability 8.0 or newer), for the whole table; this
            machine needs no GPU.
    """
    if suffix_of(model) in (".ckpt", *EXPORTED):
        if model_kwargs is not None or retrofit is not None:
            raise UsageError(f"{model} is a checkpoint with its own arguments: leave out --model_kwargs and --retrofit")
        net = classifier_of(Checkpoint.read(model)).net
    elif model.startswith((HUB, FOLDER)) or is_published(Path(model)):
        if model_kwargs is not None or retrofit is not None:
            raise UsageError(f"{model} is published with its own arguments: leave out --model_kwargs and --retrofit")
        source = Pretrained(model)
        name, *arguments = source.architecture()
        channels, *size = source.weights().input_size or (3,)
        net = build_model(name, 10, channels, size or None, *arguments)
    else:
        # What `explain` reports depends neither on the weights nor on the number of classes, so use random weights and
        # 10 classes.
        net = build_model(model, 10, model_kwargs=model_kwargs, retrofit=retrofit)
    plans = explain_model(net, img_size, device=device or "cpu")
    height, width = net.patch_embed.img_size if img_size is None else parse_size(img_size)
    print(
        f"{model} at {height} x {width} pixels, as it would train on {PLACES[device or 'cpu']} in float32:\n",
        flush=True,
    )
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        print(as_table(plans), flush=True)
    else:
        # Eight columns do not fit into a terminal, so a terminal gets a small table for each kind of layer.
        for row in as_rows(plans):
            table = Table.grid(padding=(0, 2, 0, 0))
            for name, cell in zip(HEADER, row, strict=True):
                table.add_row(name, cell)
            console.print(table)
            console.print()
    if device is None:
        print("\nOn CUDA these would be:\n")
        for layers, _, _, backend, reason, *_ in as_rows(explain_model(net, img_size, device="cuda")):
            line = f"- {layers}: {f'backend {backend}, ' if backend != '-' else ''}{reason}"
            console.print(line, soft_wrap=not console.is_terminal)


def as_rows(plans: Sequence[LayerPlan]) -> list[list[str]]:
    """Format plans as the cells of a table with the columns `HEADER`, layers with the same plan in one row."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for plan in plans:
        groups.setdefault(plan[1:], []).append(plan.layer)
    rows = []
    for plan, layers in groups.items():
        position, terms, backend, reason, width, keeps, parameters = plan
        names = layers[0] if len(layers) == 1 else f"{layers[0]} ... {layers[-1]} ({len(layers)})"
        cells = (names, position, terms, backend, reason, f"{width[0]} ({width[1]})", keeps, f"{parameters:,}")
        rows.append([str(cell) or "-" for cell in cells])
    return rows


def as_table(plans: Sequence[LayerPlan]) -> str:
    """Format plans as a Markdown table, layers with the same plan in one row."""
    rows = [f"| {' | '.join(row)} |" for row in (HEADER, *as_rows(plans))]
    return "\n".join([rows[0], f"|{'---|' * len(HEADER)}", *rows[1:]])
