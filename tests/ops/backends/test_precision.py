"""Autocast; errors in half precision beside those of stock attention are in `tests/tools/gpu/test_gpu_check.py`."""

import pytest
import torch
from draws import draw_case, leaves, relative_error, with_tables

from relvit.ops import relative_attention

pytestmark = pytest.mark.usefixtures("several_tiles")
BACKENDS = ("fused", "tiled", "gathered")


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
