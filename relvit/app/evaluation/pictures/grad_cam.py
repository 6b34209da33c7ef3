"""Grad-CAM by the library `grad-cam`: which patches raise the score of a class."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from relvit.app.evaluation.pictures.positions import NotApplicableError, chosen_layer
from relvit.app.utils.exceptions import MissingPackageError
from relvit.models import lack, patch_grid
from relvit.utils.eagerly import eagerly


def grad_cam(model: nn.Module, image: Tensor, label: int | None = None, layer: int = -1) -> Tensor:
    """Compute Grad-CAM of one image at the input of a block's attention.

    Each channel of this input is weighted by the mean, over the patches, of the gradient of the class's logit; the
    weighted channels are summed, and negative sums become zero. The library then subtracts the lowest number and
    divides by the highest, so 0 does not always mean that a patch has no effect. Neither the model nor its parameters'
    gradients change.
    Source: Selvaraju et al. 2017 (arXiv 1610.02391), section 3, computed by `pytorch_grad_cam.GradCAM`.

    Args:
        model: a relvit model, or a Vision Transformer of timm with `blocks[...].norm1`, in evaluation mode.
        image: (in_chans, height, width) as the model takes it, normalised.
        label: number of the class; None: the class with the highest logit.
        layer: index of the block; negative ones count from the last block.

    Returns:
        float32 (height, width) in 0..1, on the CPU: the lowest number is 0 and the highest 1, or all are 0 if all are
        equal.

    Raises:
        MissingPackageError: the package `grad-cam` is not installed.
        NotApplicableError: the model has no blocks with `norm1`, a block runs several times or on parts of the image,
            or its patches get no gradient.
        ValueError: the model is in training mode, or does not have this `layer`.
    """
    try:
        from pytorch_grad_cam import GradCAM
        from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
    except ModuleNotFoundError as error:
        raise MissingPackageError("Grad-CAM", "pytorch_grad_cam") from error
    name = type(model).__name__
    norms = {f"blocks.{i}": getattr(block, "norm1", None) for i, block in enumerate(getattr(model, "blocks", ()))}
    if lack(model, "hooks") or not norms or None in norms.values():
        raise NotApplicableError(
            f"Grad-CAM needs blocks with norm1, each called once for the image, and {name} has none: "
            "choose another kind"
        )
    where = chosen_layer(list(norms), layer)
    if model.training:
        raise ValueError("pictures need a model in evaluation mode: call model.eval()")
    rows, columns = patch_grid(model, image.shape[-2:])

    def reshape_transform(tokens: Tensor) -> Tensor:
        """(1, N, dim) with prefix tokens first, or SAM's (1, rows, columns, dim) -> (1, dim, rows, columns)."""
        tokens = tokens.flatten(1, -2)
        patches = tokens[:, tokens.shape[1] - rows * columns :]
        return patches.float().transpose(1, 2).unflatten(2, (rows, columns))

    if label is None:
        with torch.no_grad():
            label = int(model(image[None]).argmax())
    # The library clears the parameters' gradients, so store them here and restore them below. Until then no parameter
    # requires a gradient, so that the library computes no new ones.
    parameters = [(parameter, parameter.requires_grad, parameter.grad) for parameter in model.parameters()]
    cam = GradCAM(model, [norms[where]], reshape_transform)
    try:
        for parameter, _, _ in parameters:
            parameter.requires_grad_(False)
        with torch.enable_grad(), eagerly():
            found = cam(image[None].detach().clone().requires_grad_(), [ClassifierOutputTarget(label)])
        if not any(gradient.any() for gradient in cam.activations_and_grads.gradients):
            raise NotApplicableError(
                f"no gradient of the class reaches the patches at {where}.norm1 of {name}: choose another layer"
            )
    finally:
        cam.activations_and_grads.release()
        for parameter, requires_grad, gradient in parameters:
            parameter.requires_grad_(requires_grad).grad = gradient
    return torch.from_numpy(found[0])
