"""Attention maps of models compared with timm's unfused attention and with brute force; models that are refused."""

from threading import Event, Thread, current_thread

import numpy as np
import pytest
import timm
import torch
from retrofit_cases import build, retrofitted
from timm.utils import AttentionExtract
from timm_versions import since
from vits import bias_for, images, small, twins

import relvit
from relvit.layers import RelativeAttention
from relvit.models.attention_maps import attention_rollout, logit_inputs


def timms(model, x, attn_mask=None):
    """Return the weights that timm's unfused attention gives to `attn_drop`."""
    found, handles = [], []
    for block in model.blocks:
        block.attn.fused_attn = False
        keep = block.attn.attn_drop.register_forward_hook(lambda _module, _given, out: found.append(out))
        handles.append(keep)
    with torch.no_grad():
        model.forward_features(x, **({} if attn_mask is None else {"attn_mask": attn_mask}))
    for block, handle in zip(model.blocks, handles, strict=True):
        block.attn.fused_attn = True
        handle.remove()
    return found


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def check(maps, expected, grid, prefix, atol=1e-6):
    assert (maps.grid, maps.prefix) == (grid, prefix)
    assert len(maps.weights) == len(expected)
    for weights, want in zip(maps.weights, expected, strict=True):
        assert weights.dtype == torch.float32
        torch.testing.assert_close(weights.double(), want, rtol=0, atol=atol)
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


@pytest.mark.parametrize(
    "case", ["dinov2", "deit distilled", "qk_norm", "eva", "eva02", "rope mixed", "dinov3", "grouped", "naflex"]
)
def test_models_of_timm_before_and_after_a_retrofit(case):
    if case == "rope mixed":
        # At other sizes, older versions of timm multiply single by double precision, which fails.
        since("1.0.31")
    model, x = build(case), images(dtype=torch.float64)
    before = model(x)
    expected = timms(model, x)
    prefix = expected[0].shape[-1] - 6
    check(relvit.attention_maps(model, x), expected, (3, 2), prefix)
    # Tables of zeros do not change the weights.
    changed = retrofitted(model, trained=False)
    check(relvit.attention_maps(changed, x), expected, (3, 2), prefix)
    larger = relvit.attention_maps(retrofitted(model, rel_terms="qkvb"), images(32, 40, dtype=torch.float64))
    assert (larger.grid, larger.prefix) == ((4, 5), prefix)
    assert {tuple(weights.shape[-2:]) for weights in larger.weights} == {(prefix + 20, prefix + 20)}
    for one in (model, changed):
        assert hooks(one) == 0
        torch.testing.assert_close(one(x), before, rtol=0, atol=1e-10)
    assert all(block.attn.fused_attn for block in model.blocks)


@pytest.mark.parametrize(
    "options",
    [{"class_token": True, "global_pool": "token", "reg_tokens": 3, "pos_embed": "learn"}, {"dynamic_img_pad": True}],
    ids=str,
)
def test_slopes_are_timms_attention_with_a_mask(options):
    model, plain = twins(**options)
    x = images(16, 40, dtype=torch.float64)
    expected = timms(plain, x, bias_for(plain, x))
    check(relvit.attention_maps(model, x), expected, (2, 5), plain.num_prefix_tokens)


def test_chosen_layers():
    model, x = small().eval(), images()
    whole = relvit.attention_maps(model, x).weights
    found = relvit.attention_maps(model, x, layers=[-1, 0]).weights
    assert [torch.equal(one, other) for one, other in zip(found, (whole[2], whole[0]), strict=True)] == [True, True]
    with pytest.raises(ValueError, match="layers holds 3, the model has 3 blocks: give numbers from 0 to 2"):
        relvit.attention_maps(model, x, layers=[0, 3])


@pytest.mark.slow
def test_compiled_and_checkpointing_models():
    model, x = small(depth=1).eval(), images()
    expected = relvit.attention_maps(model, x)
    model.set_grad_checkpointing()
    outer = torch.compile(model, backend="eager")
    model.compile(backend="eager")
    # The first call compiles the model.
    for one in (model, outer):
        before = one(x)
        torch.testing.assert_close(relvit.attention_maps(one, x).weights, expected.weights)
        assert torch.equal(one(x), before)


@pytest.mark.parametrize("case", ["relvit", "dinov2"])
def test_blocks_that_share_an_attention_have_the_weights_of_their_own_runs(case):
    model, x = small().eval() if case == "relvit" else build(case).float(), images()
    first, last = model.blocks[0].attn, model.blocks[-1].attn
    last.load_state_dict(first.state_dict())
    expected, rollout = relvit.attention_maps(model, x).weights, attention_rollout(model, x)
    assert (expected[0] - expected[-1]).abs().max() > 1e-3
    model.blocks[-1].attn = first
    maps = relvit.attention_maps(model, x, [-1, *range(len(model.blocks))]).weights
    torch.testing.assert_close(maps, [expected[-1], *expected], rtol=0, atol=0)
    torch.testing.assert_close(attention_rollout(model, x), rollout, rtol=0, atol=0)


def test_a_failing_model_is_left_as_it_was():
    model = build("dinov2")
    with pytest.raises(AssertionError):
        relvit.attention_maps(model, images(40, 40, dtype=torch.float64))
    assert hooks(model) == 0
    assert all(block.attn.fused_attn for block in model.blocks)


@pytest.mark.parametrize("name", ["test_relvit", "test_vit"])
def test_another_thread_that_runs_the_model_leaves_the_maps_alone(name):
    model = timm.create_model(name).eval()
    x, other = torch.randn(2, 1, 3, 160, 160).unbind()
    expected = relvit.attention_maps(model, x).weights

    def run_elsewhere(*_):
        # The hook runs in both threads, and the second thread must not start a third one.
        handle.remove()
        thread = Thread(target=model, args=(other,))
        thread.start()
        thread.join()

    handle = model.norm.register_forward_pre_hook(run_elsewhere)
    torch.testing.assert_close(relvit.attention_maps(model, x).weights, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["test_relvit", "test_vit"])
def test_two_threads_compute_maps_of_one_model_at_once(name):
    model = timm.create_model(name).eval()
    x, other = torch.randn(2, 1, 3, 160, 160).unbind()
    expected = relvit.attention_maps(model, other).weights
    found, first_is_done, second_runs = [], Event(), Event()
    second = Thread(target=lambda: found.extend(relvit.attention_maps(model, other).weights))

    def meet(*_):
        if current_thread() is second:
            second_runs.set()
            first_is_done.wait()
        else:
            second.start()
            # If the second thread waits for the first one, it does not get here, so stop waiting after half a second.
            second_runs.wait(0.5)

    model.patch_embed.register_forward_pre_hook(meet)
    relvit.attention_maps(model, x)
    first_is_done.set()
    second.join()
    # Both threads change PyTorch's stance, and restore it: the process compiles as before.
    assert torch._dynamo.eval_frame._stance.stance == "default"
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Silent(RelativeAttention):
    """Attention whose own `forward` does not return or record weights."""

    def forward(self, x, grid, attn_mask=None, is_causal=False):
        return x


def test_a_model_within_another_is_named():
    with pytest.raises(TypeError, match=r"Sequential: it has no `blocks`, model\[0\] has: give this part; it takes"):
        relvit.attention_maps(torch.nn.Sequential(timm.create_model("test_vit")), torch.randn(1, 3, 160, 160))


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("test_relvit_aft", {}, "AFTVisionTransformer has no attention weights: its AFTConv2d is attention-free"),
        (
            "test_resnet",
            {},
            "ResNet: it has no `blocks`; it takes models with `blocks`.* 'timm.*.EvaAttention'",
        ),
        ("cait_xxs24_224", {"depth": 1}, "blocks.0.attn is a timm.models.cait.TalkingHeadAttn; it takes"),
        ("vit_small_patch16_18x2_224", {"depth": 1}, r"blocks.0 is a timm\.models\..*\.ParallelThingsBlock"),
    ],
)
def test_models_that_are_refused(name, arguments, why):
    model = timm.create_model(name, **arguments).eval()
    with pytest.raises(TypeError, match=why):
        relvit.attention_maps(model, images())


@pytest.mark.parametrize("name", ["beit", "relpos", "sam"])
def test_the_advice_to_retrofit_a_model_works(name):
    model, x = build(name), images(40, 56, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"blocks.0.attn is a timm.*ttention: call relvit.retrofit\(model\) first"):
        relvit.attention_maps(model, x)
    model = relvit.retrofit(model)
    if name == "sam":
        for call in (relvit.attention_maps, attention_rollout):
            with pytest.raises(
                ValueError, match=r"Sam with windows have no .*: attention_maps takes layers=\[1\], which"
            ):
                call(model, x)
    layers = [1] if name == "sam" else None
    assert relvit.attention_maps(model, x, layers).weights[0].isfinite().all()


def test_the_stages_of_swin_are_no_models():
    with pytest.raises(TypeError, match="RetrofittedSwin: it has no `blocks`, as its blocks stand in stages, which"):
        relvit.attention_maps(relvit.retrofit(build("swin")), images())


def test_arguments_that_are_refused():
    model, x = small(), images()
    with pytest.raises(TypeError, match=r"layers must be a list of indices of blocks, such as \[-1\], got int"):
        relvit.attention_maps(small().eval(), x, -1)
    with pytest.raises(ValueError, match=r"in evaluation mode: call model.eval\(\)"):
        relvit.attention_maps(model.train(), x)
    with pytest.raises(ValueError, match=r"images must be \(B, in_chans, height, width\), got shape \(3, 24, 16\)"):
        relvit.attention_maps(model.eval(), x[0])
    for call in (relvit.attention_maps, attention_rollout, logit_inputs):
        with pytest.raises(TypeError, match=r"images must be a tensor .*, images of one size, got dict"):
            call(model, {"patches": x})
    model.blocks[1].attn.__class__ = Silent
    with pytest.raises(TypeError, match=r"the forward of blocks.1.attn, a .*\.Silent, shows no weights"):
        relvit.attention_maps(model, x)


@pytest.mark.parametrize("kind", ["relvit", "retrofitted"])
def test_timms_attention_extract_by_hooks(kind):
    model = small().eval() if kind == "relvit" else retrofitted(build("dinov3")).float()
    x = images()
    expected = relvit.attention_maps(model, x).weights
    with torch.no_grad():
        found = AttentionExtract(model, method="hook")(x)
    assert list(found) == [f"blocks.{index}.attn.attn_drop" for index in range(len(expected))]
    for weights, want in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(weights, want)


@pytest.mark.parametrize("case", ["relvit", "dinov3", "naflex"])
def test_rollout_is_a_product_of_matrices(case):
    if case == "relvit":
        model = small(class_token=True, global_pool="token", reg_tokens=2).double().eval()
    else:
        model = retrofitted(build(case))
    x = images(16, 40, dtype=torch.float64)
    before, maps = model(x), relvit.attention_maps(model, x)
    found = attention_rollout(model, x)
    for sample in range(2):
        product = np.eye(maps.prefix + 10)
        for weights in maps.weights:
            layer = np.zeros_like(product)
            for head in weights[sample].double().numpy():
                layer += head / weights.shape[1]
            product = (0.5 * layer + 0.5 * np.eye(len(product))) @ product
        np.testing.assert_allclose(found[sample].numpy(), product, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.sum(-1), torch.ones_like(found[..., 0]))
    assert hooks(model) == 0
    assert torch.equal(model(x), before)


def test_rollout_that_would_be_of_another_model():
    for options, why in (({"reversible": True}, "reversible blocks have two streams"), ({}, "its block is repeated")):
        model = small("test_relvit" if options else "relvit_universal_small", **options).eval()
        with pytest.raises(ValueError, match=f"there is no attention rollout of .*: .*{why}"):
            attention_rollout(model, images())
