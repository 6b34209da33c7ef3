"""What backward of `fused` recomputes is bit by bit what was there, as often as backward runs."""

from contextlib import nullcontext

import torch
from draws import draw_case, leaves

from relvit.ops import relative_attention
from relvit.ops.backends import fused


def test_gradients_are_bit_equal_to_those_with_everything_kept(monkeypatch):
    q, k, v, terms, grid = draw_case(3, 4, prefix=1, which="qkvb")
    inputs = leaves(q, k, v, terms)
    run = lambda q=q: relative_attention(q, k, v, terms, grid, backend="fused").square().sum()  # noqa: E731
    out = run()
    first = torch.autograd.grad(out, inputs, retain_graph=True)
    second = torch.autograd.grad(out, inputs)
    # torch.func forbids the hooks by which tensors are exchanged.
    transformed = torch.func.grad(run)(q.detach())
    monkeypatch.setattr(fused, "recompute_saved", lambda *arguments: nullcontext())
    kept = torch.autograd.grad(run(), inputs)
    for one, again, expected in zip(first, second, kept, strict=True):
        assert torch.equal(one, expected)
        assert torch.equal(again, expected)
    torch.testing.assert_close(transformed, kept[0], rtol=0, atol=1e-12)
