"""The gradient of stock attention in `fused` has the layout of the result, as cuDNN's cached backward assumes."""

import pytest
import torch
import torch.nn.functional as F
from draws import draw_case

from relvit.ops import make_grid, relative_attention


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("which", ["q", "k", "v", "b", "kv", "qkvb"])
def test_the_gradient_has_the_layout_of_the_result(which, padded, contiguous, monkeypatch):
    """With another layout, a second call with equal shapes and other terms would get the gradients of other tokens."""
    layouts = []

    def spied(*args, **options):
        out = stock(*args, **options)
        out.register_hook(lambda grad: layouts.append((out.stride(), grad.stride())))
        return out

    stock = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", spied)
    q, k, v, terms, grid = draw_case(3, 4, prefix=1, which=which, dim=8)
    # In memory tokens come before heads, as in the output of projections.
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in (q, k, v))
    if padded:
        grid = make_grid(3, 4, 1, valid=torch.arange(12) < torch.tensor([[7], [12]]))
    out = relative_attention(q, k, v, terms, grid, backend="fused")
    cotangent = torch.randn_like(out, memory_format=torch.contiguous_format if contiguous else torch.preserve_format)
    torch.autograd.grad(out, (q, k, v), cotangent)
    ((of_result, of_gradient),) = layouts
    assert of_result == of_gradient
