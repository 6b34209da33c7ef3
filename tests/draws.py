"""Random inputs of relative attention, float64, for tests."""

import torch

from relvit.ops import AxisTables, RelativeTerms


def draw(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def draw_terms(generator, which, distance, dim, heads):
    """Tables for the letters in `which`: vectors shared by the heads, but those on values per head, as is the bias."""
    widths = {"q": ((), (dim,)), "k": ((), (dim,)), "v": ((heads,), (dim,)), "b": ((heads,), ())}
    pairs = {
        letter: AxisTables(*(draw(generator, *lead, 2 * k + 1, *tail) for k in distance))
        for letter, (lead, tail) in widths.items()
        if letter in which
    }
    return RelativeTerms(*map(pairs.get, "qkvb"))


def tables_of(terms):
    return [table for pair in terms[:4] if pair is not None for table in pair]


def assert_all_close(got, expected, atol):
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


def gradients(out, inputs, cotangent):
    """Gradients of all inputs, zeros for those that the output does not depend on."""
    return torch.autograd.grad(out, inputs, cotangent, allow_unused=True, materialize_grads=True)
