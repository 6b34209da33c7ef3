"""What backward recomputes is what was there."""

from contextlib import nullcontext

import pytest
import torch

from relvit.ops import AxisTables, RelativeTerms, make_grid, relative_attention
from relvit.ops.backends import fused


def case():
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()  # noqa: E731
    q, k, v = (draw(2, 3, 13, 4) for _ in range(3))
    terms = RelativeTerms(*(AxisTables(draw(5, 4), draw(7, 4)) for _ in range(3)), AxisTables(draw(3, 5), draw(3, 7)))
    return q, k, v, terms, make_grid(3, 4, 1)


def gradients(q, k, v, terms, grid):
    out = relative_attention(q, k, v, terms, grid, backend="fused")
    inputs = [q, k, v, *(table for pair in terms[:4] for table in pair)]
    return torch.autograd.grad(out.square().sum(), inputs, retain_graph=True), out


def test_gradients_are_bit_equal_to_those_with_everything_kept(monkeypatch):
    (recomputed, _) = gradients(*case())
    monkeypatch.setattr(fused, "recompute_saved", lambda *arguments: nullcontext())
    (kept, _) = gradients(*case())
    assert all(torch.equal(a, b) for a, b in zip(recomputed, kept, strict=True))


def test_backward_may_run_twice():
    q, k, v, terms, grid = case()
    out = relative_attention(q, k, v, terms, grid, backend="fused")
    first = torch.autograd.grad(out.square().sum(), q, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(out.square().sum(), q)[0])


def test_an_input_changed_in_place_before_backward_is_an_error():
    q, k, v, terms, grid = case()
    out = relative_attention(q, k, v, terms, grid, backend="fused")
    with torch.no_grad():
        v.add_(1)
    with pytest.raises(RuntimeError, match=r"modified in place|modified by an inplace"):
        out.sum().backward()


def test_no_hooks_without_gradients():
    q, k, v, terms, grid = case()
    with torch.no_grad():
        out = relative_attention(q, k, v, terms, grid, backend="fused")
    assert not out.requires_grad


def test_torch_func_which_forbids_hooks_gives_the_same_gradient():
    q, k, v, terms, grid = case()
    run = lambda q: relative_attention(q, k, v, terms, grid, backend="fused").square().sum()  # noqa: E731
    expected = torch.autograd.grad(run(q), q)[0]
    torch.testing.assert_close(torch.func.grad(run)(q.detach()), expected, rtol=0, atol=1e-12)
