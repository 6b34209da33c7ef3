"""Grad-CAM compared with its formula and autograd's gradients; the model is unchanged afterwards."""

import pytest
import timm
import torch
import torch.nn.functional as F
from retrofit_cases import build, retrofitted
from vits import images, small

from relvit.app.evaluation.pictures import NotApplicableError, grad_cam

# pytorch_grad_cam needs OpenCV, which needs libraries of the system.
pytest.importorskip("pytorch_grad_cam", exc_type=ImportError)
PREFIX = {"class_token": True, "global_pool": "token", "reg_tokens": 2}
# The image has 3 x 5 patches.
IMAGE = images(24, 40)[0]


def by_formula(model, label, layer=-1):
    """The weights are mean gradients over patches; the weighted sum of channels is cut at zero, scaled and enlarged."""
    kept = []
    handle = model.blocks[layer].norm1.register_forward_hook(lambda _module, _given, out: kept.append(out))
    logit = model(IMAGE[None].to(next(model.parameters())))[0, label]
    handle.remove()
    (gradient,) = torch.autograd.grad(logit, kept)
    # Tokens of SAM have the shape (1, rows, columns, dim).
    features, gradient = (part.flatten(1, -2)[0, -15:].detach() for part in (kept[0], gradient))
    found = torch.zeros(3, 5)
    for row in range(3):
        for column in range(5):
            found[row, column] = features[row * 5 + column] @ gradient.mean(0)
    found = found.relu() - found.relu().min()
    enlarged = F.interpolate((found / found.max())[None, None], IMAGE.shape[-2:], mode="bilinear")[0, 0]
    return enlarged / enlarged.max()


@pytest.mark.parametrize("kind", ["relvit", "prefix", "aft", "lsh", "retrofitted", "eva", "timm", "sam"])
def test_formula(kind):
    if kind in ("retrofitted", "eva", "sam"):
        model = retrofitted(build({"retrofitted": "dinov2", "eva": "dinov3", "sam": "sam"}[kind])).float()
    elif kind == "timm":
        torch.manual_seed(0)
        model = timm.create_model(
            "vit_tiny_patch16_224", img_size=(24, 40), patch_size=8, embed_dim=12, depth=2, num_heads=2
        )
    else:
        name = {"aft": "test_relvit_aft", "lsh": "relvit_lsh_small"}.get(kind, "test_relvit")
        model = small(name, **(PREFIX if kind == "prefix" else {}))
    model.eval()
    with torch.no_grad():
        before, best = model(IMAGE[None]), int(model(IMAGE[None]).argmax())
    model.blocks[0].norm1.weight.grad = torch.ones_like(model.blocks[0].norm1.weight)
    found = grad_cam(model, IMAGE)
    assert torch.equal(found, grad_cam(model, IMAGE, best))
    for label, layer in ((best, -1), (0, 0)):
        found = grad_cam(model, IMAGE, label, layer)
        torch.testing.assert_close(found, by_formula(model, label, layer), rtol=0, atol=1e-4)
    # Outputs, hooks and gradients of the model are unchanged.
    assert torch.equal(model(IMAGE[None]), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    grads = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert grads == {"blocks.0.norm1.weight"}
    assert (model.blocks[0].norm1.weight.grad == 1).all()


def test_bfloat16_and_frozen_parameters():
    model = small(**PREFIX).eval()
    expected = grad_cam(model, IMAGE, 1)
    found = grad_cam(model.bfloat16().requires_grad_(False), IMAGE.bfloat16(), 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.15)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_what_is_refused():
    for options in ({"name": "relvit_universal_small"}, {"reversible": True}, {"name": "resnet"}):
        model = timm.create_model("test_resnet") if options.get("name") == "resnet" else small(**options)
        with pytest.raises(
            NotApplicableError, match=r"needs blocks with norm1, each called once for the image, .*: choose"
        ):
            grad_cam(model.eval(), IMAGE)
    model = small(**PREFIX)
    with pytest.raises(ValueError, match=r"in evaluation mode: call model.eval\(\)"):
        grad_cam(model, IMAGE)
    with pytest.raises(ValueError, match="layer is 3, the model has 3: give a number from 0 to 2"):
        grad_cam(model.eval(), IMAGE, layer=3)
    # Without the last attention the class token gets no gradient from the patches of the last block.
    model.blocks[-1].attn.proj.weight.data.zero_()
    with pytest.raises(NotApplicableError, match=r"reaches the patches at blocks.2.norm1 of .*: choose another layer"):
        grad_cam(model, IMAGE)
