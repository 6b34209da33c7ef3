"""Chunked feed-forward: outputs, gradients and random numbers are the same as without chunks; memory is bounded."""

import numpy as np
import pytest
import torch
from timm.layers import GatedMlp, GlobalResponseNormMlp, GluMlp, Mlp, SwiGLU, SwiGLUPacked
from torch import nn
from vits import assert_same, images, small

from relvit.layers.feed_forward import check_chunk, chunked_mlp
from relvit.utils.memory import allocations, peak_bytes


def build(kind=Mlp, **options):
    torch.manual_seed(0)
    mlp = kind(12, 32, norm_layer=nn.LayerNorm, **options).double()
    return nn.LayerNorm(12).double(), mlp, torch.randn(2, 7, 12, dtype=torch.float64).requires_grad_()


# Neither the 7 tokens of an image nor the 14 tokens of both images are a multiple of the chunk of 3.
@pytest.mark.parametrize(
    ("kind", "chunk"), [*((kind, 3) for kind in (Mlp, GluMlp, SwiGLU, SwiGLUPacked, GatedMlp)), (Mlp, 1), (Mlp, 100)]
)
def test_numbers_and_gradients_are_those_of_one_piece(kind, chunk):
    norm, mlp, x = build(kind)
    # A number of NumPy becomes an int, because `Tensor.split` takes no other.
    chunk = check_chunk(np.int64(chunk), mlp)
    found = []
    for out in (chunked_mlp(norm, mlp, x, chunk), mlp(norm(x))):
        found.append([out, *torch.autograd.grad(out.sin().sum(), [x, *norm.parameters(), *mlp.parameters()])])
    assert_same(*found)
    with torch.no_grad():
        assert_same(chunked_mlp(norm, mlp, x, chunk), found[1][0])


def test_dropout_is_replayed():
    norm, mlp, x = build(drop=0.5)
    torch.manual_seed(1)
    out = chunked_mlp(norm, mlp, x, 4)
    after = torch.rand(2)
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.manual_seed(1)
    again = torch.cat([mlp(norm(tokens)) for tokens in x.flatten(0, 1).split(4)]).view_as(x)
    assert_same(after, torch.rand(2), atol=0)
    assert_same(out, again)
    assert_same(grad, torch.autograd.grad(again.sum(), x)[0])
    assert (out == 0).double().mean() > 0.3


@pytest.mark.parametrize("part", ["norm", "mlp"])
def test_parameters_that_are_changed_in_place_before_backward_are_refused(part):
    norm, mlp, x = build()
    out = chunked_mlp(norm, mlp, x, 4)
    with torch.no_grad():
        (norm.weight if part == "norm" else mlp.fc2.weight).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.slow
def test_memory_is_that_of_a_chunk():
    norm, mlp = nn.LayerNorm(12), Mlp(12, 48)
    x = torch.randn(1, 4096, 12).requires_grad_()
    hidden = 4096 * 48 * 4

    def kept(chunk):
        graph = []
        return sum(allocations(lambda: graph.append(chunked_mlp(norm, mlp, x, chunk).grad_fn)))

    assert kept(64) < 0.05 * hidden
    assert kept(4096) < 0.05 * hidden
    with torch.no_grad():
        assert peak_bytes(lambda: chunked_mlp(norm, mlp, x, 64)) < 0.6 * hidden
        assert peak_bytes(lambda: chunked_mlp(norm, mlp, x, 4096)) > 2 * hidden
    step = lambda chunk: peak_bytes(lambda: chunked_mlp(norm, mlp, x, chunk).sum().backward())  # noqa: E731
    assert step(64) < step(4096) / 2


@pytest.mark.parametrize("name", ["test_relvit", "test_relvit_rev", "test_relvit_aft"])
def test_models_have_it(name):
    x, results = images(16, 40, dtype=torch.float64), []
    for mlp_chunk in (None, 4):
        model = small(name, mlp_chunk=mlp_chunk, init_values=0.5).double()
        out = model(x)
        results.append([out, *torch.autograd.grad(out.square().sum(), [*model.parameters()])])
    assert_same(*results, atol=1e-10)


def test_an_exported_model_computes_the_mlp_in_one_piece():
    model, x = small(depth=1, mlp_chunk=4).eval(), images()
    assert_same(torch.export.export(model, (x,)).module()(x), model(x), atol=1e-5)


def mixes_tokens(*args, bias, norm_layer, **kwargs):
    return GlobalResponseNormMlp(*args, **kwargs)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mlp_chunk": 0}, ValueError, "mlp_chunk must be at least 1, got 0"),
        ({"mlp_chunk": 2.0}, TypeError, "mlp_chunk must be an integer, got 2.0"),
        ({"mlp_chunk": 8, "mlp_layer": mixes_tokens}, ValueError, "GlobalResponseNormMlp may .* take Mlp, "),
    ],
    ids=["0", "2.0", "mixes"],
)
def test_errors(options, error, message):
    with pytest.raises(error, match=message):
        small(**options)
