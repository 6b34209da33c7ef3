"""Relative attention by every backend with every option: gradients, causality, masks, padding, changes in place."""

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
    draw_case,
    draw_terms,
    gradients,
    leaves,
    with_tables,
)

from relvit.ops import key_mask, make_grid, relative_attention

pytestmark = pytest.mark.usefixtures("several_tiles")

HEADS, DIM, HEIGHT, WIDTH, PREFIX = 2, 5, 3, 4, 1
TOKENS = PREFIX + HEIGHT * WIDTH


def attention_case(batch, backend, layout="separate"):
    """Return all inputs by name, and the operation as a function of them."""
    generator = torch.Generator().manual_seed(batch)
    names = ["query", "key", "value", "position_query", "position_key"]
    inputs = {name: draw(generator, batch, HEADS, TOKENS, DIM) for name in names}
    inputs["attn_mask"] = draw(generator, TOKENS, TOKENS)
    terms = draw_terms(generator, "qkvb", (2, 2), DIM, HEADS, layout=layout)
    for letter, pair in zip("qkvb", terms[:4], strict=True):
        inputs |= {f"{letter}.{part}": table for part, table in zip(pair._fields, pair, strict=True)}
    inputs = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    coords = torch.cartesian_prod(torch.arange(HEIGHT), torch.arange(WIDTH)).flip(0)
    inputs |= {"coords": coords, "valid": torch.arange(TOKENS - PREFIX) != 3}

    def attend(inputs):
        tables = iter([tensor for name, tensor in inputs.items() if "." in name])
        filled = with_tables(terms, lambda _: next(tables))
        grid = make_grid(HEIGHT, WIDTH, PREFIX, inputs["coords"], inputs["valid"])
        contents = (inputs[name] for name in ("query", "key", "value"))
        options = {name: inputs[name] for name in ("position_query", "position_key", "attn_mask")}
        return relative_attention(*contents, filled, grid, **options, backend=backend)

    return inputs, attend


CHANGED = ["query", "key", "value", "position_query", "position_key", "attn_mask", "coords", "valid", "output"]
CHANGED += ["q.rows", "k.cols", "v.rows", "b.cols"]


@pytest.mark.parametrize(
    ("backend", "layout", "changed"),
    [
        *((backend, "separate", CHANGED) for backend in ("fused", "tiled", "gathered")),
        ("gathered", "joint", ["query", "value", "q.table", "v.table"]),
    ],
)
def test_attention_changed_in_place_before_backward(backend, layout, changed):
    # For a single sample, tiles write their products directly into the result.
    for batch in (1, 2) if backend == "tiled" else (2,):
        inputs, attend = attention_case(batch, backend, layout)
        for name in changed:
            assert_right_or_refused(inputs, attend, name)


@pytest.mark.parametrize("backend", ["fused", "tiled", "gathered"])
@pytest.mark.parametrize("which", ["", "k", "b"])
def test_output_of_attention_without_a_value_term_changed_in_place(backend, which):
    *contents, terms, grid = draw_case(HEIGHT, WIDTH, PREFIX, which=which)
    inputs = {name: part.requires_grad_() for name, part in zip(("query", "key", "value"), contents, strict=True)}
    attend = partial(relative_attention, terms=terms, grid=grid, backend=backend)
    assert_right_or_refused(inputs, lambda inputs: attend(**inputs), "output")


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


def case_under(option, scale=None, which="qkvb"):
    """Draw contents and terms, the same as leaves, their grid, and the options of attention.

    Without prefix tokens, which are never padding, some queries may attend to padding only.
    """
    q, k, v, terms, _ = draw_case(1, TOKENS, which=which, per_head="vb")
    generator = torch.Generator().manual_seed(1)
    valid = torch.ones(2, TOKENS, dtype=torch.bool)
    valid[0, :5], valid[1, 7:] = False, False
    mask = torch.rand(2, 1, TOKENS, TOKENS, generator=generator) < 0.6
    mask[0, :, 5] = ~valid[0]  # This query may attend to padding only.
    mask[1, :, 2] = False  # This query may attend to no token.
    finite = draw(generator, 2, 1, TOKENS, TOKENS)
    finite[0, :, 4] = -1e9  # The softmax over logits near -1e9 has an accuracy of 1e-7.
    masks = {
        "boolean mask": mask,
        "mask of -inf": torch.zeros_like(finite).masked_fill(~mask, -torch.inf),
        "finite mask": finite,
    }
    options = {"attn_mask": masks.get(option), "is_causal": "causal" in option, "scale": scale}
    grid = make_grid(1, TOKENS, valid=None if option == "causal" else valid)
    return (q, k, v, terms), leaves(q, k, v, terms), grid, options


OPTIONS = ["causal", "padding", "causal, left padding", "boolean mask", "mask of -inf", "finite mask"]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("which", "scale"), [("", None), ("kv", 0.0), ("qkvb", -0.5), ("qkvb", 1e5)])
def test_every_backend_equals_brute_force_under_every_option(option, which, scale):
    contents, inputs, grid, options = case_under(option, scale, which)
    mask = options["attn_mask"]
    if options["is_causal"]:
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    if mask is not None:
        hidden = torch.zeros(2, HEADS, TOKENS, TOKENS, dtype=torch.float64)
        mask = hidden.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask.expand_as(hidden)
    expected = brute_force(*contents, grid, mask=mask, scale=scale)
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
