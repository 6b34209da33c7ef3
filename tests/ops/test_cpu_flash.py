"""The backward that is written out is that of the composition from stock parts."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from relvit.ops import AxisTables, RelativeTerms, cpu_flash, make_grid, relative_attention


def case(which, per_head=False, valid=None, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()  # noqa: E731
    lead = (3,) if per_head else ()
    vectors = [AxisTables(draw(*lead, 5, 4), draw(*lead, 7, 4)) if letter in which else None for letter in "qkv"]
    terms = RelativeTerms(*vectors, AxisTables(draw(3, 5), draw(3, 7)) if "b" in which else None)
    grid = make_grid(3, 4, 1, valid=valid)
    return [draw(2, 3, 13, 4) for _ in range(3)], terms, grid


def gradients(inputs, terms, grid, **options):
    out = relative_attention(*inputs, terms, grid, backend="fused", **options)
    leaves = [*inputs, *(table for pair in terms[:4] if pair is not None for table in pair)]
    return out, torch.autograd.grad((out * torch.arange(out.numel()).view_as(out).cos()).sum(), leaves)


@pytest.mark.parametrize("which", ["", "k", "v", "q", "b", "kv", "qv", "qkvb"])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("kind", ["plain", "valid", "causal"])
def test_equals_the_composition(which, per_head, kind, monkeypatch):
    valid = None
    if kind == "valid":
        valid = torch.tensor([[True] * 5 + [False] * 7, [False] * 12])
        # Without prefix tokens the second sample has no key at all.
    inputs, terms, grid = case(which, per_head, valid)
    if kind == "valid":
        grid = grid._replace(prefix=0)
        inputs = [tensor[:, :, 1:] for tensor in inputs]
    options = {"is_causal": kind == "causal"}
    ran = []
    original = cpu_flash.applies
    monkeypatch.setattr(cpu_flash, "applies", lambda *tensors: ran.append(original(*tensors)) or ran[-1])
    out, grads = gradients(inputs, terms, grid, **options)
    assert ran == [True]
    monkeypatch.setattr(cpu_flash, "applies", lambda *tensors: False)
    expected, expected_grads = gradients(inputs, terms, grid, **options)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)
    for grad, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=0, atol=1e-12)


def test_does_not_apply_where_stock_attention_would_take_another_kernel():
    (q, k, _), _, _ = case("kv")
    assert cpu_flash.applies(q, k)
    with sdpa_kernel(SDPBackend.MATH):
        assert not cpu_flash.applies(q, k)
    with torch.no_grad():
        assert not cpu_flash.applies(q, k)


@pytest.mark.parametrize("which", ["kv", "qkvb"])
def test_second_derivatives_exist_where_those_of_stock_attention_do(which):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()  # noqa: E731
    q, k, v = (draw(1, 1, 3, 2) for _ in range(3))
    tables = [draw(3, 2) for _ in range(6)]
    bias = [draw(1, 3) for _ in range(2)]

    def run(q, k, v, *tables):
        terms = RelativeTerms(
            AxisTables(*tables[:2]) if "q" in which else None,
            AxisTables(*tables[2:4]),
            AxisTables(*tables[4:6]),
            AxisTables(*tables[6:]) if "b" in which else None,
        )
        return relative_attention(q, k, v, terms, make_grid(1, 2, 1), backend="fused")

    inputs = (q, k, v, *tables, *bias)
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(run, inputs)
    # The CPU's flash kernel has none, of stock attention and of ours: an error, no wrong number.
    grad = torch.autograd.grad(run(*inputs).square().sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="flash_attention_for_cpu_backward is not implemented"):
        torch.autograd.grad(grad.sum(), q)


def test_an_input_changed_in_place_before_backward_is_an_error():
    (q, k, v), terms, grid = case("kv")
    out = relative_attention(q, k, v, terms, grid, backend="fused")
    with torch.no_grad():
        v.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        out.sum().backward()


def test_frozen_inputs_and_tables_get_no_gradient():
    (q, k, v), terms, grid = case("kv")
    terms.value.rows.requires_grad_(False)
    terms.value.cols.requires_grad_(False)
    out = relative_attention(q, k.detach(), v.detach(), terms, grid, backend="fused")
    out.sum().backward()
    assert terms.value.rows.grad is None
    assert q.grad.abs().max() > 0
    assert terms.key.rows.grad.abs().max() > 0
