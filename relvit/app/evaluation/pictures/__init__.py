"""Draw what a model has learned: position tables, kernels, parts of logits, rollout and Grad-CAM; and their numbers."""

from relvit.app.evaluation.pictures.draw import KINDS, Kind, draw
from relvit.app.evaluation.pictures.grad_cam import grad_cam
from relvit.app.evaluation.pictures.positions import (
    NotApplicableError,
    aft_windows,
    effective_kernels,
    logit_parts,
    position_tables,
)

__all__ = [
    "KINDS",
    "Kind",
    "NotApplicableError",
    "aft_windows",
    "draw",
    "effective_kernels",
    "grad_cam",
    "logit_parts",
    "position_tables",
]
