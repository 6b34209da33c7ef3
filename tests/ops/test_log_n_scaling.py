"""Log-n scaling of the logits by the number of keys (`trained_keys`), compared with an explicit softmax."""

import math

import pytest
import torch
from draws import BACKENDS, assert_all_close, assert_same, brute_force, draw_case, leaves, with_tables

from relvit.ops import RelativeTerms, make_grid, relative_attention

TRAINED = 5


def by_hand(q, k, v, terms, grid, factor, scale, **options):
    """Compute attention whose logits are multiplied by `factor`; the scale does not multiply the bias."""
    if terms.bias is not None:
        terms = terms._replace(bias=with_tables(RelativeTerms(bias=terms.bias), lambda t: t * factor).bias)
    return brute_force(q, k, v, terms, grid, scale=scale * factor, **options)


@pytest.mark.parametrize(("which", "layout"), [("qkvb", "separate"), ("kvb", "joint"), ("", "separate")])
def test_all_logits_are_multiplied(which, layout):
    q, k, v, terms, grid = draw_case(2, 4, prefix=1, which=which, layout=layout, batch=1)
    inputs = leaves(q, k, v, terms)
    expected = by_hand(q, k, v, terms, grid, math.log(9) / math.log(TRAINED), 0.4)
    for backend in ("reference", "gathered") if layout == "joint" else BACKENDS:
        got = relative_attention(q, k, v, terms, grid, scale=0.4, trained_keys=TRAINED, backend=backend)
        assert_same(got, expected, inputs, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_counts_for_no_sample(backend):
    q, k, v, terms, grid = draw_case(2, 3, which="qkv", batch=3)
    valid = torch.tensor([[True] * 5 + [False], [True] * 2 + [False] * 4, [False] * 6])
    grid = make_grid(2, 3, valid=valid)
    got = relative_attention(q, k, v, terms, grid, scale=0.4, trained_keys=TRAINED, backend=backend)
    for sample, keys in enumerate((5, 2, 1)):  # The last sample has only padding, so any factor is right.
        one = slice(sample, sample + 1)
        factor = math.log(keys) / math.log(TRAINED)
        expected = by_hand(q[one], k[one], v[one], terms, grid._replace(valid=valid[one]), factor, 0.4)
        assert_all_close([got[one]], [expected], 1e-12)


def test_the_same_padding_in_all_samples_allows_a_bias():
    q, k, v, terms, _ = draw_case(2, 3, which="kb")
    grid = make_grid(2, 3, valid=torch.tensor([True] * 4 + [False] * 2))
    got = relative_attention(q, k, v, terms, grid, scale=0.4, trained_keys=TRAINED)
    expected = by_hand(q, k, v, terms, grid, math.log(4) / math.log(TRAINED), 0.4)
    assert_all_close([got], [expected], 1e-12)
    mixed = make_grid(2, 3, valid=torch.tensor([[True] * 6, [True] * 4 + [False] * 2]))
    with pytest.raises(ValueError, match=r"reach 'logn'\) cannot .* for a padded batch, .* reach 'trained'$"):
        relative_attention(q, k, v, terms, mixed, trained_keys=TRAINED)


def test_masks_are_added_afterwards_and_rotated_queries_scaled_like_others():
    q, k, v, terms, grid = draw_case(2, 3, which="qkv")
    generator = torch.Generator().manual_seed(2)
    options = {
        "mask": torch.randn(2, 2, 6, 6, generator=generator, dtype=torch.float64),
        "position_query": torch.randn(q.shape, generator=generator, dtype=torch.float64),
        "position_key": torch.randn(k.shape, generator=generator, dtype=torch.float64),
    }
    expected = by_hand(q, k, v, terms, grid, math.log(6) / math.log(TRAINED), 0.4, **options)
    options["attn_mask"] = options.pop("mask")
    got = relative_attention(q, k, v, terms, grid, scale=0.4, trained_keys=TRAINED, **options)
    assert_all_close([got], [expected], 1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_trained_number_changes_no_bit(dtype):
    q, k, v, terms, _ = draw_case(2, 4, prefix=1, which="qkvb")
    terms = with_tables(terms, lambda table: table.to(dtype))
    for valid in (None, torch.tensor([True] * 7 + [False])):
        grid, keys = make_grid(2, 4, 1, valid=valid), 9 if valid is None else 8
        inputs = [tensor.to(dtype) for tensor in (q, k, v)]
        expected = relative_attention(*inputs, terms, grid)
        assert torch.equal(relative_attention(*inputs, terms, grid, trained_keys=keys), expected)


def test_bf16_is_near():
    q, k, v, terms, grid = draw_case(3, 5, which="kvb")
    inputs = [tensor.bfloat16() for tensor in (q, k, v)]
    terms = with_tables(terms, lambda table: table.bfloat16())
    got = relative_attention(*inputs, terms, grid, trained_keys=TRAINED)
    assert got.dtype == torch.bfloat16
    exact = with_tables(terms, torch.Tensor.double)
    expected = relative_attention(*(tensor.double() for tensor in inputs), exact, grid, trained_keys=TRAINED)
    assert_all_close([got.double()], [expected], 0.05)
