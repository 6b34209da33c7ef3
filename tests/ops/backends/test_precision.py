"""Half precision and autocast: errors against float64 beside those of stock attention."""

import pytest
import torch
import torch.nn.functional as F
from draws import draw_case, leaves, relative_error, with_tables

from relvit.ops import relative_attention

pytestmark = pytest.mark.usefixtures("several_tiles")
BACKENDS = ("fused", "tiled", "gathered")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("std", [0.02, 1.0])
def test_half_precision_loses_at_most_twice_what_stock_attention_loses(dtype, std):
    q, k, v, terms, grid = draw_case(14, 10, prefix=1, distance=(7, 7), which="qkvb", dim=64)
    q, k, v = (t.to(dtype).double() for t in (q, k, v))
    terms = with_tables(terms, lambda table: (std * table).to(dtype).double())
    inputs = leaves(q, k, v, terms)
    exact = relative_attention(q, k, v, terms, grid, backend="reference")
    cotangent = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact_grads = torch.autograd.grad(exact, inputs, cotangent.double())
    stock_exact = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), (q, k, v), cotangent.double())
    halves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
    stock = F.scaled_dot_product_attention(*halves)
    allowed = 2 * relative_error(stock, F.scaled_dot_product_attention(q, k, v))
    stock = torch.autograd.grad(stock, halves, cotangent)
    allowed_in_gradient = 2 * max(relative_error(got, want) for got, want in zip(stock, stock_exact, strict=True))

    terms = with_tables(terms, lambda table: table.detach().float().requires_grad_())
    halves = leaves(*(t.detach().to(dtype) for t in (q, k, v)), terms)
    for backend in BACKENDS:
        out = relative_attention(*halves[:3], terms, grid, backend=backend)
        assert out.dtype == dtype
        assert relative_error(out, exact) < allowed
        for got, want in zip(torch.autograd.grad(out, halves, cotangent), exact_grads, strict=True):
            # In the gradient of a scalar per offset, large terms of either sign cancel.
            assert relative_error(got, want) < (2 if got.dim() == 1 else 1) * allowed_in_gradient


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_around_forward_and_backward(backend, dtype):
    q, k, v, terms, grid = draw_case(3, 4, prefix=1, which="qkvb", dim=16)
    terms = with_tables(terms, torch.Tensor.float)
    inputs = leaves(*(t.to(dtype) for t in (q, k, v)), terms)
    expected = relative_attention(*inputs[:3], terms, grid, backend="reference").float()
    expected_grads = torch.autograd.grad(expected.sum(), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        out = relative_attention(*inputs[:3], terms, grid, backend=backend)
        grads = torch.autograd.grad(out.float().sum(), inputs)
    assert out.dtype == dtype
    for got, want in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert relative_error(got, want) < 0.05
