"""Figures show the numbers of the functions, with titles, axes, units and colour bars that are legible at half size."""

import numpy as np
import pytest
import torch
from vits import images, small

import relvit
from relvit.app.evaluation.pictures import KINDS, NotApplicableError, aft_windows, draw, effective_kernels, logit_parts
from relvit.app.plots import picture_of
from relvit.models.attention_maps import attention_rollout

pytestmark = pytest.mark.usefixtures("figures")

# The image has 3 x 5 patches.
IMAGE = images(24, 40)[0]
PICTURE = np.random.default_rng(0).integers(0, 255, (24, 40, 3), dtype=np.uint8)
MODEL = {"rel_terms": "kb", "class_token": True, "global_pool": "token", "reg_tokens": 1}


def model_for(kind):
    return small(
        "test_relvit_aft" if kind == "aft-windows" else "test_relvit", **({} if "aft" in kind else MODEL)
    ).eval()


def pictures(figure):
    """Return the arrays in all panels, without colour bars, from the first row on."""
    panels = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    return [np.asarray(axes.get_images()[0].get_array()) for axes in panels if axes.get_images()]


def hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_all_is_labelled_and_legible(kind):
    if kind == "cam":
        pytest.importorskip("pytorch_grad_cam")
    model = model_for(kind)
    before = model(IMAGE[None])
    # Without a layer, 'aft-windows' draws all layers; choose one, so that its figure has the layout of 'kernels'.
    layer = -1 if kind == "aft-windows" else None
    figure = draw(kind, model, IMAGE, PICTURE, layer=layer, class_names=["a$b", *"cdef"])
    figure.draw_without_rendering()
    assert len(figure.get_suptitle()) > 10
    bars = [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]
    panels = [axes for axes in figure.axes if axes not in bars]
    # Titles of tables explain the colours in words.
    assert bars or all(" to red " in axes.get_title() for axes in panels)
    for bar in bars:
        assert bar.get_ylabel() or bar.get_xlabel()
    assert any(axes.get_xlabel() for axes in panels)
    assert any(axes.get_ylabel() for axes in panels)
    texts = [figure._suptitle]
    for axes in figure.axes:
        texts += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels(), *axes.get_yticklabels()]
    assert min(text.get_fontsize() for text in texts if text.get_text()) * figure.dpi / 72 / 2 > 8
    # No text or axis extends beyond the figure.
    box, whole = figure.get_tightbbox(), figure.get_size_inches()
    assert min(box.x0, box.y0, whole[0] - box.x1, whole[1] - box.y1) > -0.05
    assert torch.equal(model(IMAGE[None]), before)
    assert hooks(model) == 0


def test_a_patch_has_a_frame_in_each_map_of_an_image(monkeypatch):
    monkeypatch.setitem(draw.__globals__, "grad_cam", lambda *_: torch.rand(2, 3))
    for kind in ("logits", "attention", "rollout", "cam"):
        figure = draw(kind, model_for(kind), IMAGE, PICTURE, patch=(1, 0))
        assert all(axes.patches for axes in figure.axes if axes.images and axes.get_label() != "<colorbar>"), kind


def test_tables_and_the_picture_do_not_depend_on_pytorchs_default_device():
    model, normalisation = model_for("tables"), ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    expected = [picture_of(IMAGE, *normalisation), *pictures(draw("tables", model, IMAGE))]
    with torch.device("meta"):
        found = [picture_of(IMAGE, *normalisation), *pictures(draw("tables", model, IMAGE))]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_kernels_and_windows():
    model, aft = model_for("kernels"), model_for("aft-windows")
    for figure, numbers in (
        (draw("kernels", model, IMAGE, patch=(2, 4)), effective_kernels(model, IMAGE, (2, 4))),
        (draw("aft-windows", aft, IMAGE), aft_windows(aft, (24, 40))),
    ):
        expected = [head.numpy() for kernel in numbers.values() for head in kernel]
        for found, head in zip(pictures(figure), expected, strict=True):
            np.testing.assert_array_equal(found, head)
    one = draw("kernels", model, IMAGE, layer=-1)
    assert len(pictures(one)) == 2
    assert one.axes[0].get_ylabel() == "blocks.2.attn\ndy (patches)"
    assert "mean query of all patches" in one.get_suptitle()
    # The vertical axis is dy, downwards, and the query is in the middle.
    assert one.axes[0].get_images()[0].get_extent() == [-4.5, 4.5, 2.5, -2.5]


@pytest.mark.parametrize("kind", ["kernels", "logits", "attention", "aft-windows"])
def test_one_head(kind):
    model = model_for(kind)
    drawn = draw(kind, model, IMAGE, PICTURE, head=1)
    every, one = pictures(draw(kind, model, IMAGE, PICTURE)), pictures(drawn)
    # Each row of maps begins with the image, followed by two heads, and `head=1` leaves out the first head.
    columns, first = (3, 1) if kind in ("logits", "attention") else (2, 0)
    kept = [picture for number, picture in enumerate(every) if number % columns != first]
    assert len(one) == len(kept)
    for found, expected in zip(one, kept, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert "head 1" in "".join(axes.get_title() for axes in drawn.axes)


def test_of_many_heads_those_of_the_widest_range():
    model = small("test_relvit_aft", embed_dim=48, num_heads=24).eval()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.gamma.copy_(torch.arange(24) % 2)
    figure = draw("aft-windows", model, IMAGE, layer=0)
    assert [axes.get_title() for axes in figure.axes[:12]] == [f"head {head}" for head in range(1, 24, 2)]
    assert "of 24 heads the 12 of the widest range" in figure.get_suptitle()


def test_logits():
    model = model_for("logits")
    figure = draw("logits", model, IMAGE, PICTURE, layer=0)
    parts = logit_parts(model, IMAGE, (1, 2), 0)
    total = torch.stack(list(parts.values())).sum(0)
    rows = [*parts.values(), total, total.softmax(-1)]
    found = pictures(figure)
    assert len(found) == len(rows) * 3
    for number, row in enumerate(rows):
        np.testing.assert_array_equal(found[3 * number], PICTURE)
        for head in (0, 1):
            np.testing.assert_array_equal(found[3 * number + 1 + head], row[head, 2:].view(3, 5).numpy())
    labels = [axes.get_ylabel() for axes in figure.axes if axes.get_label() == "<colorbar>"]
    assert labels == ["content (logit)", "term k (logit)", "bias b (logit)", "sum (logit)", "attention weight"]
    assert figure.get_suptitle() == "Logits of the query of patch (1, 2), layer 0, 3 x 5 patches"


@pytest.mark.parametrize("patch", [None, (0, 3)])
def test_attention_and_rollout(patch):
    token, pooled = model_for("attention"), small(rel_terms="k").eval()
    for model, prefix in ((token, 2), (pooled, 0)):
        weights = relvit.attention_maps(model, IMAGE[None]).weights[-1][0]
        rollout = attention_rollout(model, IMAGE[None])[0]
        if patch is not None:
            query, name = prefix + 3, "patch (0, 3)"
        else:
            query, name = (0, "the class token") if prefix else (slice(None), "the mean of all patches")
        figure = draw("attention", model, IMAGE, PICTURE, patch=patch)
        assert f"Attention weights of {name}, layer 2" in figure.get_suptitle()
        for head, found in enumerate(pictures(figure)[1:]):
            expected = weights[head, query, prefix:].view(-1, 3, 5).mean(0)
            np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)
        figure = draw("rollout", model, IMAGE, PICTURE, patch=patch)
        assert f"Attention rollout of {name}" in figure.get_suptitle()
        np.testing.assert_allclose(pictures(figure)[1], rollout[query, prefix:].view(-1, 3, 5).mean(0), rtol=1e-6)
    assert [frame.get_xy() for frame in figure.axes[0].patches] == ([] if patch is None else [(2.5, -0.5)])


@pytest.mark.parametrize(
    ("kind", "options", "error", "message"),
    [
        ("kernel", {}, ValueError, "kind is 'kernel'.*did you mean 'kernels'"),
        ("attention", {"patch": (3, 0)}, ValueError, r"patch \(3, 0\): give a row from 0 to 2"),
        ("kernels", {"layer": 3}, ValueError, "layer is 3, .* give a number from 0 to 2"),
        ("rollout", {"layer": 0}, NotApplicableError, "leave layer out"),
        ("tables", {"patch": (0, 0)}, NotApplicableError, "leave patch out"),
        *((kind, {"head": 0}, NotApplicableError, "leave head out") for kind in ("tables", "rollout", "cam")),
        *((kind, {"head": 2}, ValueError, "head is 2, .* from 0 to 1") for kind in ("kernels", "logits", "attention")),
    ],
)
def test_errors_of_arguments(kind, options, error, message):
    with pytest.raises(error, match=message):
        draw(kind, model_for(kind), IMAGE, **options)


@pytest.mark.parametrize("kind", ["attention", "rollout"])
def test_attention_of_a_model_without(kind):
    with pytest.raises(NotApplicableError, match="its AFTConv2d is attention-free"):
        draw(kind, model_for("aft-windows"), IMAGE)
