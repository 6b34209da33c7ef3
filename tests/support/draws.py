"""Random inputs of relative attention in float64, and comparisons of results and gradients."""

import torch
from oracles import relative_attention as oracle

from relvit.ops import AxisTables, JointTable, RelativeTerms, key_mask, make_grid, num_tokens

BACKENDS = ("reference", "fused", "tiled", "gathered")
JOINT = (("joint", "reference"), ("joint", "gathered"))


def draw(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def draw_tables(generator, distance, dim, heads, per_head, layout="separate"):
    """Draw tables of vectors, or of scalars if dim is None."""
    lead, tail = (heads,) if per_head else (), () if dim is None else (dim,)
    if layout == "joint":
        sizes = [2 * min(k, 3) + 1 for k in distance]
        return JointTable(draw(generator, *lead, *sizes, *tail))
    return AxisTables(*(draw(generator, *lead, 2 * k + 1, *tail) for k in distance))


def draw_terms(generator, which, distance, dim, heads, per_head="vb", bucketing="clip", layout="separate"):
    """Draw tables for the letters in `which`, with one table per head for the letters in `per_head`."""
    pairs = {
        letter: draw_tables(generator, distance, None if letter == "b" else dim, heads, letter in per_head, layout)
        for letter in "qkvb"
        if letter in which
    }
    return RelativeTerms(*map(pairs.get, "qkvb"), bucketing)


def draw_case(
    height, width, prefix=0, distance=(2, 2), which="kv", per_head="", bucketing="clip", layout="separate", **sizes
):
    """Draw queries, keys, values, terms and their grid; `sizes` may have batch, dim and seed."""
    heads, dim, batch = 2, sizes.get("dim", 5), sizes.get("batch", 2)
    generator = torch.Generator().manual_seed(sizes.get("seed", 0))
    grid = make_grid(height, width, prefix)
    q, k, v = draw(generator, 3, batch, heads, num_tokens(grid), dim)
    return q, k, v, draw_terms(generator, which, distance, dim, heads, per_head, bucketing, layout), grid


def all_places(grid, batch):
    coords = None if grid.coords is None else grid.coords.expand(batch, -1, -1).tolist()
    return [
        [oracle.place(i, grid.prefix, coords and coords[b], grid.height, grid.width) for i in range(num_tokens(grid))]
        for b in range(batch)
    ]


def brute_force(q, k, v, terms, grid, key_grid=None, **options):
    grids = (grid, grid if key_grid is None else key_grid)
    if grids[1].valid is not None:
        options["valid"] = key_mask(grids[1]).expand(q.shape[0], -1).tolist()
    return oracle.attention(q, k, v, terms, *(all_places(each, q.shape[0]) for each in grids), **options)


def tables_of(terms):
    return [table for pair in terms[:4] if pair is not None for table in pair]


def with_tables(terms, change):
    """Return the same terms with every table changed by a function."""
    pairs = zip(terms._fields[:4], terms[:4], strict=True)
    return terms._replace(**{name: type(pair)(*map(change, pair)) for name, pair in pairs if pair is not None})


def leaves(q, k, v, terms):
    return [t.requires_grad_() for t in (q, k, v, *tables_of(terms))]


def assert_all_close(got, expected, atol):
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


def gradients(out, inputs, cotangent):
    """Compute the gradients of all inputs; inputs that do not affect the output get zeros."""
    options = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
    return torch.autograd.grad(out, inputs, cotangent, **options)


def assert_same(got, expected, inputs, atol):
    """Compare results, and the gradients of all inputs."""
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)
    cotangent = draw(torch.Generator().manual_seed(9), *expected.shape)
    assert_all_close(*(gradients(out, inputs, cotangent) for out in (got, expected)), atol=atol)


def assert_right_or_refused(inputs, operation, changed):
    """Change a tensor between forward and backward: gradients are as without the change, or an error is raised."""
    wanted = [tensor for tensor in inputs.values() if tensor.requires_grad]
    out = operation(inputs)
    cotangent = draw(torch.Generator().manual_seed(9), *out.shape).to(out.dtype)
    expected = gradients(out, wanted, cotangent)
    out = operation(inputs)
    if changed == "output":
        out.mul_(2)
        expected = [2 * gradient for gradient in expected]
    else:
        kept = inputs[changed].detach().clone()
        with torch.no_grad():
            inputs[changed].zero_()
    try:
        found = gradients(out, wanted, cotangent)
    except RuntimeError as error:
        assert "modified" in str(error)  # noqa: PT017 (either outcome is right)
    else:
        assert_all_close(found, expected, atol=1e-10)
    if changed != "output":
        # Without a change there must be no error.
        with torch.no_grad():
            inputs[changed].copy_(kept)
        assert_all_close(gradients(operation(inputs), wanted, cotangent), expected, atol=1e-10)


def relative_error(got, want):
    return float((got.detach().double() - want.detach()).norm() / want.detach().norm())
