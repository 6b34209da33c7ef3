"""The contract of positions, mixers and depths: traced by torch.fx or checkpointed, models compute the same."""

from functools import partial

import pytest
import timm
import torch
from timm.models import create_feature_extractor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from vits import FAMILIES, assert_same, images, small

import relvit
from relvit.models.depth import lack

# Attention is one node of the traced graph, so one position of each kind is enough.
PARTS = {
    "tables": {"class_token": True, "reg_tokens": 2, "pos_embed": "learn", "init_values": 0.1},
    "chunked": {"mlp_chunk": 4},
    "joint tables": {"rel_terms": "qkvb", "layout": "joint", "pos_embed": "axial-sum"},
    "xl": {"position": "xl", "class_token": True, "pos_embed": "axial"},
    "fire": {"position": "fire"},
    "pape": {"position": "pape", "class_token": True},
    "rope mixed": {"rope": "mixed", "embed_dim": 16, "rel_terms": "kb", "class_token": True, "prefix_bias": True},
    "lsh": {"name": "test_relvit_lsh", "patch_size": 4, "bucket_size": 2, "attn_drop_rate": 0.1},
    "conv": {"name": "test_relvit_aft", "kernel_size": (3, 5)},
    "full": {"name": "test_relvit_aft", "mixer": "full", "bias_dim": 5, "reg_tokens": 1},
    "local": {"name": "test_relvit_aft", "mixer": "local", "bias_dim": 5, "window": (1, 2)},
    "simple": {"name": "test_relvit_aft", "mixer": "simple"},
    "reversible": {"reversible": True, "rel_terms": "kb"},
    "universal": {"name": "test_relvit_universal", "class_token": True, "halting": ""},
    "halting": {"name": "test_relvit_universal", "class_token": True, "halting": "act"},
}
NAMED = {part.get("name") for part in PARTS.values()}
PARTS |= {name: {"name": name} for name in FAMILIES if name not in NAMED}


@pytest.mark.parametrize("part", PARTS)
def test_symbolic_tracing_has_the_same_outputs_and_gradients(part):
    model = small(**{"depth": 2, **PARTS[part]}).eval()
    # Outputs may differ by rounding: graphs compute all tokens in all steps, but models only those that have not
    # halted; reversible blocks recompute their inputs; graphs compute the MLP without chunks.
    atol = {"universal": 1e-5, "halting": 1e-5, "reversible": 1e-6, "chunked": 1e-6}.get(part, 0)
    traced = create_feature_extractor(model, ["head"])
    assert_same(traced(images(16, 40))["head"], model(images(16, 40)), atol)
    expected, got = model(images()), traced(images())["head"]
    assert_same(got, expected, atol)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(expected.square().sum(), [model.get_parameter(name) for name in names])
    of_traced = torch.autograd.grad(got.square().sum(), [traced.get_parameter(name) for name in names])
    assert_same(of_traced, grads, atol)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("part", PARTS)
def test_jit_traces_serve_other_sizes_and_have_the_same_gradients(part):
    model = small(**{"depth": 2, **PARTS[part]}).double().eval()
    traced = torch.jit.trace(model, images(dtype=torch.float64), check_trace=False)
    x, parameters = images(16, 40, dtype=torch.float64), [p for p in model.parameters() if p.requires_grad]
    if part == "lsh":
        # The graph's number of buckets follows the size of the example image.
        x = images(dtype=torch.float64)
    expected, got = model(x), traced(x)
    assert_same(got, expected, 1e-6)
    assert_same(*(torch.autograd.grad(out.square().sum(), parameters) for out in (got, expected)), 1e-5)


@pytest.mark.parametrize("part", PARTS)
def test_checkpointing_changes_neither_outputs_nor_gradients(part):
    """Every parameter has a gradient, also if patches are dropped."""
    model = small(**PARTS[part], patch_drop_rate=0.5, proj_drop_rate=0.1).double().train()
    if lack(model, "checkpointing"):
        with pytest.raises(ValueError, match="already"):
            model.set_grad_checkpointing()
        return
    x, results = images(32, 24, dtype=torch.float64), []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        assert model.grad_checkpointing is enable
        torch.manual_seed(3)
        out, intermediates = model.forward_intermediates(x, output_fmt="NLC")
        loss = model.forward_head(out).square().sum() + intermediates[0].square().sum()
        results.append([out, *torch.autograd.grad(loss, list(model.parameters()))])
    for (name, _), grad in zip(model.named_parameters(), results[0][1:], strict=True):
        assert grad.isfinite().all(), name
        # FIRE's threshold has no effect on images that are larger than the threshold, so it may get no gradient.
        assert grad.any() or name.endswith("threshold"), name
    assert_same(*results)


@pytest.mark.parametrize(
    ("columns", "options"), [(5, {}), (6, {"rel_terms": "b", "layout": "joint"}), (7, {"position": "cpb"})], ids=str
)
def test_selective_checkpointing_of_a_size_that_is_computed_for_the_first_time(columns, options):
    """Its forward makes the indices of the size, and its backward finds them, and must take the tensors of forward."""
    model, x = small(**options), images(72, 8 * columns)
    contexts = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    outputs = checkpoint(model, x, use_reentrant=False, context_fn=contexts), model(x)
    got, expected = (torch.autograd.grad(out.square().sum(), list(model.parameters())) for out in outputs)
    assert_same(got, expected, atol=0)


@pytest.mark.parametrize("part", PARTS)
def test_a_batch_without_images_has_no_outputs_and_gradients_of_zero(part):
    """timm's models also accept an empty batch, for example the crops of an image in which nothing was detected."""
    model = small(**{"depth": 2, **PARTS[part]}).train()
    out = model(images(16, 40, batch=0))
    assert out.shape == (0, 5)
    out.sum().backward()
    assert not any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    with torch.no_grad():
        assert model.eval()(images(16, 40, batch=0)).shape == (0, 5)


@pytest.mark.parametrize("part", ["tables", "joint tables"])
def test_nodes_have_the_names_of_modules(part):
    model = small(**{"depth": 2, **PARTS[part]}).eval()
    nodes = create_feature_extractor(model, ["blocks.0.attn", "blocks.0"])(images())
    assert set(nodes) == {"blocks.0.attn", "blocks.0"}
    first = model.forward_intermediates(
        images(), [0], output_fmt="NLC", return_prefix_tokens=True, intermediates_only=True
    )[0]
    first = torch.cat((first[1], first[0]), dim=1) if model.num_prefix_tokens else first
    assert_same(nodes["blocks.0"], first, atol=0)


def test_other_tracers_are_refused_with_the_name_of_the_one_that_works():
    with pytest.raises(TypeError, match=r"got Proxy: .* use timm\.models\.create_feature_extractor"):
        torch.fx.symbolic_trace(small())


@pytest.mark.parametrize("model", ["test_relvit", "test_vit"])
def test_scripting_is_refused_in_one_sentence(model):
    model = timm.create_model(model)
    if not isinstance(model, relvit.RelVisionTransformer):
        relvit.retrofit(model)
    with pytest.raises(TypeError, match="has no TorchScript, which PyTorch has deprecated"):
        torch.jit.script(model)
