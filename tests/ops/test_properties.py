"""Properties of relative attention for every backend and option: right gradients, no leak of the future or padding."""

from functools import partial

import pytest
import torch
from draws import (
    BACKENDS,
    assert_all_close,
    assert_right_or_refused,
    assert_same,
    brute_force,
    draw,
    draw_terms,
    gradients,
    leaves,
    with_tables,
)

from relvit.ops import key_mask, make_grid, relative_attention

pytestmark = pytest.mark.usefixtures("several_tiles")

HEADS, DIM, HEIGHT, WIDTH, PREFIX = 2, 5, 3, 4, 1
TOKENS = PREFIX + HEIGHT * WIDTH


def attention_case(batch, backend, layout="separate", dtype=torch.float64):
    """All inputs by name, and the operation as a function of them."""
    generator = torch.Generator().manual_seed(batch)
    names = ["query", "key", "value", "position_query", "position_key"]
    inputs = {name: draw(generator, batch, HEADS, TOKENS, DIM) for name in names}
    inputs["attn_mask"] = draw(generator, TOKENS, TOKENS)
    terms = draw_terms(generator, "qkvb", (2, 2), DIM, HEADS, layout=layout)
    for letter, pair in zip("qkvb", terms[:4], strict=True):
        inputs |= {f"{letter}.{part}": table for part, table in zip(pair._fields, pair, strict=True)}
    inputs = {name: tensor.to(dtype).requires_grad_() for name, tensor in inputs.items()}
    coords = torch.cartesian_prod(torch.arange(HEIGHT), torch.arange(WIDTH)).flip(0)
    inputs |= {"coords": coords, "valid": torch.arange(TOKENS - PREFIX) != 3}

    def attend(inputs, names=tuple(inputs)):
        tables = iter([inputs[name] for name in names if "." in name])
        filled = with_tables(terms, lambda _: next(tables))
        grid = make_grid(HEIGHT, WIDTH, PREFIX, inputs["coords"], inputs["valid"])
        contents = (inputs[name] for name in ("query", "key", "value"))
        options = {name: inputs[name] for name in ("position_query", "position_key", "attn_mask")}
        return relative_attention(*contents, filled, grid, **options, backend=backend)

    return inputs, attend


INPUTS = ["query", "key", "value", "position_query", "position_key", "attn_mask", "coords", "valid", "output"]
TABLES = ["q.rows", "k.cols", "v.rows", "b.cols"]


CHANGES = [("separate", backend, changed) for backend in BACKENDS for changed in (*INPUTS, *TABLES)]
CHANGES += [("joint", "gathered", changed) for changed in ("query", "value", "q.table", "v.table")]


@pytest.mark.parametrize(("layout", "backend", "changed"), CHANGES)
def test_attention_changed_in_place_before_backward(layout, backend, changed):
    for batch in (1, 2):  # products of one sample are written straight into memory
        assert_right_or_refused(*attention_case(batch, backend, layout), changed)


@pytest.mark.parametrize("backend", ["fused", "tiled", "gathered"])
@pytest.mark.parametrize("which", ["", "k", "b"])
def test_output_of_attention_without_a_value_term_changed_in_place(backend, which):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (draw(generator, 2, HEADS, TOKENS, DIM).requires_grad_() for _ in range(3))
    terms = draw_terms(generator, which, (2, 2), DIM, HEADS)
    inputs = {"query": q, "key": k, "value": v}
    attend = partial(relative_attention, terms=terms, grid=make_grid(HEIGHT, WIDTH, PREFIX), backend=backend)
    assert_right_or_refused(inputs, lambda inputs: attend(**inputs), "output")


LATER = 7  # tokens from here on are changed


@pytest.mark.parametrize("backend", BACKENDS)
def test_later_tokens_do_not_change_causal_attention(backend):
    generator = torch.Generator().manual_seed(0)
    q, k, v = draw(generator, 3, 2, HEADS, TOKENS, DIM).float()
    terms = draw_terms(generator, "qkvb", (2, 2), DIM, HEADS)
    grid = make_grid(HEIGHT, WIDTH, PREFIX)
    attend = partial(relative_attention, terms=terms, grid=grid, is_causal=True, backend=backend)
    before = attend(q, k, v)
    k, v = k.clone(), v.clone()
    k[:, :, LATER:], v[:, :, LATER:] = 1e8, 1e8
    torch.testing.assert_close(attend(q, k, v)[:, :, :LATER], before[:, :, :LATER], rtol=0, atol=1e-6)


@pytest.mark.parametrize("garbage", [float("nan"), 1e30])
@pytest.mark.parametrize("option", ["none", "causal", "mask"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_does_not_depend_on_what_padding_holds(backend, option, garbage):
    generator = torch.Generator().manual_seed(0)
    tensors = [draw(generator, 2, HEADS, TOKENS, DIM).float() for _ in range(4)]
    valid = torch.rand(2, TOKENS - PREFIX, generator=generator) < 0.6
    grid = make_grid(HEIGHT, WIDTH, PREFIX, valid=valid)
    real = torch.cat((valid.new_ones(2, PREFIX), valid), dim=1)[:, None, :, None]
    terms = draw_terms(generator, "qkvb", (2, 2), DIM, HEADS)
    options = {"is_causal": True} if option == "causal" else {}
    if option == "mask":
        options["attn_mask"] = torch.rand(2, 1, TOKENS, TOKENS, generator=generator) < 0.7
    cotangent = draw(generator, 2, HEADS, TOKENS, DIM).float()

    def run(padding):
        query, *keys = (tensor.clone().requires_grad_() for tensor in tensors)
        key, value, position_key = (torch.where(real, tensor, padding) for tensor in keys)
        out = relative_attention(query, key, value, terms, grid, position_key=position_key, backend=backend, **options)
        return out, *gradients(out, [query, *keys], cotangent)

    assert_all_close(run(garbage), run(0.0), atol=1e-6)


def options_case(option):
    """Padding, a mask and whether attention is causal, such that some queries may attend to padding alone."""
    generator = torch.Generator().manual_seed(1)
    valid = torch.ones(2, TOKENS - PREFIX, dtype=torch.bool)
    valid[0, :4], valid[1, 6:] = False, False
    if option == "causal, left padding":
        return valid, None, True
    if option == "padding":
        return valid, None, False
    mask = torch.rand(2, 1, TOKENS, TOKENS, generator=generator) < 0.6
    mask[0, :, 5] = torch.cat((valid.new_zeros(PREFIX), ~valid[0]))  # this query is allowed padding alone
    mask[1, :, 2] = False  # and this one nothing
    if option == "boolean mask":
        return valid, mask, False
    if option == "mask of -inf":
        return valid, torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf), False
    finite = draw(generator, 2, 1, TOKENS, TOKENS)
    finite[0, :, 4] = -1e9  # finite: what this query may see, it still sees, to 1e-7 in double precision
    return valid, finite, False


OPTIONS = ["padding", "causal, left padding", "boolean mask", "mask of -inf", "finite mask"]


def case_under(option, scale=None, which="qkvb"):
    """Queries, keys, values, terms, as leaves too, their grid, and the options of attention."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (draw(generator, 2, HEADS, TOKENS, DIM) for _ in range(3))
    terms = draw_terms(generator, which, (2, 2), DIM, HEADS)
    valid, mask, is_causal = options_case(option)
    # No prefix token: it would always be there to attend to.
    grid = make_grid(1, TOKENS, valid=torch.cat((valid[:, :1], valid), dim=1))
    options = {"attn_mask": mask, "is_causal": is_causal, "scale": scale}
    return (q, k, v, terms), leaves(q, k, v, terms), grid, options


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("which", "scale"), [("", None), ("kv", 0.0), ("qkvb", -0.5), ("qkvb", 1e5)])
def test_every_backend_equals_brute_force_under_every_option(option, which, scale):
    contents, inputs, grid, options = case_under(option, scale, which)
    mask = torch.zeros(TOKENS, TOKENS, dtype=torch.float64)
    if options["is_causal"]:
        mask.masked_fill_(torch.ones(TOKENS, TOKENS).triu(1) > 0, -torch.inf)
    elif options["attn_mask"] is not None and options["attn_mask"].dtype == torch.bool:
        mask = mask.masked_fill(~options["attn_mask"], -torch.inf)
    elif options["attn_mask"] is not None:
        mask = options["attn_mask"]
    expected = brute_force(*contents, grid, mask=mask.expand(2, HEADS, -1, -1).tolist(), scale=scale)
    largest = max(float(g.abs().max()) for g in (expected.detach(), *gradients(expected, inputs, expected)))
    for backend in BACKENDS:
        got = relative_attention(*contents, grid, **options, backend=backend)
        assert_same(got, expected, inputs, atol=(1e-5 if option == "finite mask" else 1e-10) * max(1.0, largest))


@pytest.mark.slow
@pytest.mark.parametrize("option", ["causal, left padding", "boolean mask", "mask of -inf"])
def test_compiled_graphs_agree_with_eager_under_every_option(option):
    (q, k, v, terms), inputs, grid, options = case_under(option)
    attend = partial(relative_attention, q, terms=terms, grid=grid, **options)
    padding = ~key_mask(grid)[:, None, :, None]
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    got = compiled(key=k.masked_fill(padding, torch.nan), value=v.masked_fill(padding, torch.nan))
    assert_same(got, attend(key=k, value=v, backend="reference"), inputs, atol=1e-10)


@pytest.mark.parametrize("queries", [3, 9])
@pytest.mark.parametrize("backend", ["fused", "tiled", "gathered"])
def test_causal_attention_to_left_padding_on_another_grid(backend, queries):
    generator = torch.Generator().manual_seed(0)
    valid = torch.tensor([[False, False, True, False, True, True]])
    grid, key_grid = make_grid(1, queries), make_grid(2, 3, valid=valid)
    query, (key, value) = draw(generator, 1, HEADS, queries, DIM), draw(generator, 2, 1, HEADS, 6, DIM)
    terms = draw_terms(generator, "qkvb", (2, 2), DIM, HEADS)
    attend = partial(relative_attention, query, key, value, terms, grid, key_grid, is_causal=True)
    torch.testing.assert_close(attend(backend=backend), attend(backend="reference"), rtol=0, atol=1e-12)
