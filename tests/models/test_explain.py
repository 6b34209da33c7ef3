"""Plans of layers: the backend that runs, the width of the vectors of 'fused', parameters counted by hand, refusals."""

from functools import partial
from importlib.util import find_spec

import pytest
import timm
import torch
from draws import draw_case
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only
from vits import FAMILIES, SMALL, images, small

import relvit
from relvit.models import set_reach
from relvit.ops import attention, choose
from relvit.utils.old_torch import BUILDS_KERNELS


def test_plans_of_a_model():
    model = small(rel_terms="kvb", max_distance=2, class_token=True)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    plans = relvit.explain(model, (40, 24))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [plan.layer for plan in plans] == [f"blocks.{number}.attn" for number in range(3)]
    plan = plans[0]
    assert (plan.position, plan.terms, plan.backend) == ("RelativePosition2d", "kvb", "lean")
    # The vectors have 6 channels, and one more for each of 5 rows and 3 columns of patches.
    assert plan.width == (6, 6 + 5 + 3)
    assert plan.parameters == 2 * 2 * 5 * 6 + 2 * 2 * 5
    assert "augmented output" in plan.keeps
    assert "recomputes each tile" in relvit.explain(model, (240, 240))[0].keeps


def test_channels_count_and_no_position_has_no_name():
    (plan, *_) = relvit.explain(small(rel_terms="k", prefix_bias=True, class_token=True))
    # The bias between class token and patches has two channels, and the grid is 3 x 2.
    assert (plan.terms, plan.width) == ("kc", (6, 6 + 3 + 2 + 2))
    (plan, *_) = relvit.explain(small(position="pape"))
    assert (plan.position, plan.terms, plan.width) == ("ParabolicPosition2d", "c", (6, 6 + 6))
    model = small()
    model.blocks[0].attn.position = None
    assert relvit.explain(model)[0][1:3] == ("", "")


@pytest.mark.parametrize(
    ("options", "backends"),
    [
        ({}, ("lean", "lean")),
        ({"layout": "joint"}, ("gathered", "gathered")),
        ({"rel_terms": ""}, ("fused", "fused")),
        ({"backend": "triton"}, ("triton", "triton")),
        # Vectors of 6 channels and 260 rows are too wide for the fused kernels; the device 'cuda' need not exist.
        ({"img_size": (2080, 8)}, ("tiled", "triton" if BUILDS_KERNELS and find_spec("triton") else "tiled")),
        ({"img_size": (2080, 8), "rel_terms": "qkv"}, ("tiled", "tiled")),
    ],
)
def test_the_choice_of_a_device_that_is_not_there(options, backends):
    model = small(**options)
    for device, backend in zip(("cpu", "cuda"), backends, strict=True):
        plans = relvit.explain(model, device=device)
        assert {plan.backend for plan in plans} == {backend}
        assert all(plan.reason != "" for plan in plans)


def test_the_choice_is_that_of_tensors_on_the_device():
    """Fake tensors are on a device that need not exist."""
    *tensors, grid = draw_case(4, 5)
    q, k, v, terms = tree_map_only(torch.Tensor, torch.Tensor.float, tensors)
    expected = choose(q, k, v, terms, grid, device="cuda")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        there = tree_map_only(torch.Tensor, lambda one: mode.from_tensor(one).to("cuda:0"), (q, k, v, terms))
        assert there[0].device.type == "cuda"
        assert choose(*there, grid) == expected
    assert expected.backend == "lean"


def rotary():
    """Make timm's Eva after a retrofit, which rotates queries and keys."""
    options = {"patch_size": 8, "embed_dim": 16, "num_heads": 2, "depth": 1, "use_rot_pos_emb": True}
    return relvit.retrofit(timm.create_model("eva02_tiny_patch14_224", img_size=32, **options), rel_terms="k")


@pytest.mark.parametrize(
    "made",
    [
        small,
        partial(small, layout="joint"),
        partial(small, rel_terms=""),
        partial(small, backend="gathered"),
        partial(small, rope="axial", embed_dim=16),
        rotary,
        lambda: set_reach(small(), "windows", 16),
    ],
    ids=["tables", "joint layout", "no terms", "backend by name", "rotary", "retrofitted rotary", "windows"],
)
def test_the_backend_is_the_one_that_runs(made, monkeypatch):
    model, ran = made(), []
    for name, module in attention.BACKENDS.items():
        run = module.relative_attention

        def recorded(*args, name=name, run=run, **kwargs):
            ran.append(name)
            return run(*args, **kwargs)

        monkeypatch.setattr(module, "relative_attention", recorded)
    # Layers call this backend directly with their projection.
    attend = attention.lean.attend
    monkeypatch.setattr(attention.lean, "attend", lambda *args: ran.append("lean") or attend(*args))
    model(images(*model.patch_embed.img_size))
    assert {plan.backend for plan in relvit.explain(model)} == set(ran)


def test_a_backend_chosen_by_name_is_the_reason():
    model = small()
    model.blocks[1].attn.backend = "fused"
    assert [plan.reason == "chosen by name" for plan in relvit.explain(model)] == [False, True, False]


@pytest.mark.parametrize("name", FAMILIES)
def test_other_families(name):
    """A plan counts the parameters of the position, or of the whole mixer if it takes no position."""
    model = timm.create_model(name, **SMALL)
    mixer, plan = model.blocks[0].attn, relvit.explain(model)[0]
    counted = getattr(mixer, "position", mixer).parameters()
    assert (plan.layer, plan.parameters) == ("blocks.0.attn", sum(parameter.numel() for parameter in counted))


@pytest.mark.filterwarnings("ignore")
def test_quantised_models():
    """In PyTorch's quantised layers `weight` is a method and not a parameter."""
    model = small()
    quantised = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    assert relvit.explain(quantised) == relvit.explain(model)


def test_retrofitted_models_and_what_has_no_plan():
    vit = timm.create_model("test_vit", img_size=32, patch_size=8, num_classes=5)
    with pytest.raises(
        ValueError, match=r"VisionTransformer has no layers of relvit: .*, or make your own mixer a subclass"
    ):
        relvit.explain(vit)
    assert {plan.terms for plan in relvit.explain(relvit.retrofit(vit, rel_terms="q"))} == {"q"}
    # At its own size a retrofitted model leaves out the pixels beyond the last whole patch, as timm's does.
    cropped = relvit.retrofit(timm.create_model("test_vit", img_size=(36, 33), patch_size=8))
    assert relvit.explain(cropped)[0].layer == "blocks.0.attn"
    naflex = timm.create_model("naflexvit_base_patch16_gap", embed_dim=16, depth=1, num_heads=2, num_classes=5)
    assert [plan.layer for plan in relvit.explain(relvit.retrofit(naflex), (32, 48))] == ["blocks.0.attn"]
    with pytest.raises(ValueError, match="RetrofittedNaFlexVit has no image size of its own: give img_size"):
        relvit.explain(naflex)
    with pytest.raises(ValueError, match=r"Sequential has no patch_embed, .*: explain model\[1\], which has one"):
        relvit.explain(torch.nn.Sequential(torch.nn.Identity(), small()))
    with pytest.raises(ValueError, match="image height 20 is not a multiple of the patch size 8"):
        relvit.explain(small(), 20)
