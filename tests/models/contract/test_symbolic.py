"""Symbolic tracing (torch.fx): the outputs and gradients of the eager model; TorchScript is refused."""

import pytest
import timm
import torch
from timm.models import create_feature_extractor
from vits import assert_same, images, small

import relvit

VARIANTS = [
    {"rel_terms": "qkvb", "class_token": True, "reg_tokens": 2, "bucketing": "piecewise", "shared_heads": False},
    {"rel_terms": "qkvb", "layout": "joint", "pos_embed": "axial-sum"},
    {"position": "slopes", "class_token": True, "global_pool": "token", "pos_embed": "learn"},
    {"position": "xl", "class_token": True},
    {"position": "slopes-euclidean", "class_token": True},
    {"position": "fire"},
    {"position": "cpb"},
    {"position": "pape", "class_token": True},
    {"position": "low-rank"},
    {"rope": "mixed", "embed_dim": 16, "rel_terms": "kb", "class_token": True, "prefix_bias": True},
    {"rope": "axial", "embed_dim": 16, "rel_terms": ""},
    {"name": "test_relvit_lsh", "patch_size": 4, "bucket_size": 2},
    *({"name": "test_relvit_universal", "halting": halting, "class_token": True} for halting in ("", "act")),
    {"name": "test_relvit_aft", "kernel_size": (3, 5)},
    {"name": "test_relvit_aft", "mixer": "full", "bias_dim": 5, "reg_tokens": 1},
    {"name": "test_relvit_aft", "mixer": "local", "bias_dim": 5, "window": (1, 2)},
    {"name": "test_relvit_aft", "mixer": "simple"},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_symbolic_tracing_has_the_same_outputs_and_gradients(variant):
    model = small(**{"depth": 2, **variant}).eval()
    # Graphs compute all tokens at all steps, the model those alone that have not halted.
    atol = 1e-5 if variant.get("halting") else 0
    traced = create_feature_extractor(model, ["head"])
    assert_same(traced(images(16, 40))["head"], model(images(16, 40)), atol)
    expected, got = model(images()), traced(images())["head"]
    assert_same(got, expected, atol)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(expected.square().sum(), [model.get_parameter(name) for name in names])
    of_traced = torch.autograd.grad(got.square().sum(), [traced.get_parameter(name) for name in names])
    assert_same(of_traced, grads, atol)


@pytest.mark.parametrize("variant", VARIANTS[:2], ids=str)
def test_nodes_have_the_names_of_modules(variant):
    model = small(**{"depth": 2, **variant}).eval()
    nodes = create_feature_extractor(model, ["blocks.0.attn", "blocks.0"])(images())
    assert set(nodes) == {"blocks.0.attn", "blocks.0"}
    first = model.forward_intermediates(
        images(), [0], output_fmt="NLC", return_prefix_tokens=True, intermediates_only=True
    )[0]
    first = torch.cat((first[1], first[0]), dim=1) if model.num_prefix_tokens else first
    assert_same(nodes["blocks.0"], first, atol=0)


@pytest.mark.parametrize("model", ["test_relvit", "test_vit"])
def test_scripting_is_refused_in_one_sentence(model):
    model = timm.create_model(model)
    if not isinstance(model, relvit.RelVisionTransformer):
        relvit.retrofit(model)
    with pytest.raises(TypeError, match="has no TorchScript, which PyTorch has deprecated"):
        torch.jit.script(model)
