"""Tables, effective kernels, parts of logits and AFT windows compared with loops over pairs of tokens in float64."""

from itertools import product

import pytest
import torch
from beit_cases import hf_beit
from oracles.relative_attention import pair_entries
from retrofit_cases import build, retrofitted
from vits import images, small

import relvit
from relvit.app.evaluation.pictures import (
    NotApplicableError,
    aft_windows,
    draw,
    effective_kernels,
    logit_parts,
    position_tables,
)
from relvit.families.transformer_xl import set_bands
from relvit.models import set_reach
from relvit.ops import Grid

pytestmark = pytest.mark.usefixtures("figures")

PREFIX = {"class_token": True, "global_pool": "token", "reg_tokens": 2}
TABLES = {
    "clip": {"rel_terms": "qkvb", "max_distance": (1, 2)},
    "heads": {"rel_terms": "qk", "shared_heads": False, **PREFIX},
    "joint": {"rel_terms": "kb", "layout": "joint", "max_distance": 1},
    "piecewise": {"rel_terms": "b", "bucketing": "piecewise", "max_distance": 1},
    "xl": {"position": "xl", **PREFIX},
    "slopes": {"position": "slopes"},
}
CHANNELS = {"pape": {"position": "pape"}, "low-rank": {"position": "low-rank", **PREFIX}}
# The image has 2 x 5 patches.
IMAGE = images(16, 40, dtype=torch.float64)[0]


def model_of(options):
    return small(**options).double().eval()


def vectors(model, layer):
    """Compute queries and keys of a relvit model, (heads, N, head_dim), from the inputs of its attention."""
    attn, tokens = model.blocks[layer].attn, []
    handle = attn.register_forward_pre_hook(lambda _module, given: tokens.append(given[0]))
    with torch.no_grad():
        model.forward_features(IMAGE[None])
        qkv = attn.qkv(tokens[0])[0].unflatten(-1, (3, attn.num_heads, -1))
        handle.remove()
        query, key = (qkv[:, part].transpose(0, 1) for part in (0, 1))
        if hasattr(attn.position, "content_bias"):
            query = query + attn.position.content_bias[:, None]
    return query, key


@torch.no_grad()
def pair_logit(terms, head, query, key, start, end, scale):
    """Compute the position part of one logit by the formula."""
    given = {name: pair_entries(getattr(terms, name), head, start, [end], terms.bucketing) for name in ("query", "key")}
    parts = {name: 0.0 if entry is None else float(entry @ (key if name == "query" else query)) * scale
             for name, entry in given.items()}  # fmt: skip
    bias = pair_entries(terms.bias, head, start, [end], terms.bucketing, vector=False)
    return {"q": parts["query"], "k": parts["key"], "b": 0.0 if bias is None else float(bias)}


@pytest.mark.parametrize("name", TABLES)
def test_kernels_and_parts_of_tables(name):
    model = model_of(TABLES[name])
    prefix, attn = model.num_prefix_tokens, model.blocks[1].attn
    query, key = vectors(model, 1)
    terms = attn.position(Grid(2, 5, prefix))
    for patch, of_query in ((None, query[:, prefix:].mean(1)), ((1, 3), query[:, prefix + 8])):
        found, expected = effective_kernels(model, IMAGE, patch), torch.zeros(2, 3, 9)
        assert list(found) == [f"blocks.{index}.attn" for index in range(3)]
        for head, dy, dx in product(range(2), range(-1, 2), range(-4, 5)):
            mean_key = key[head, prefix:].mean(0)
            one = pair_logit(terms, head, of_query[head], mean_key, (0, 0), (dy, dx), attn.scale)
            expected[head, dy + 1, dx + 4] = sum(one.values())
        torch.testing.assert_close(found["blocks.1.attn"], expected, rtol=0, atol=1e-6)
    query, parts = query[:, prefix + 8], logit_parts(model, IMAGE, (1, 3), layer=1)
    content = attn.scale * torch.einsum("hd,hjd->hj", query, key)
    torch.testing.assert_close(parts.pop("content"), content, rtol=0, atol=1e-12)
    given = zip("qkb", (terms.query, terms.key, terms.bias), strict=True)
    assert set(parts) == {letter for letter, term in given if term}
    for letter, part in parts.items():
        assert not part[:, :prefix].any()
        for head, index in product(range(2), range(10)):
            place = divmod(index, 5)
            one = pair_logit(terms, head, query[head], key[head, prefix + index], (1, 3), place, attn.scale)
            assert float(part[head, prefix + index]) == pytest.approx(one[letter], abs=1e-12)


def by_offset(pairs):
    """Sort the numbers (..., 10, 10) of pairs by offset: means over all pairs, and the pairs of patch (1, 3)."""
    total, count = torch.zeros(*pairs.shape[:-2], 3, 9), torch.zeros(3, 9)
    of_patch = torch.full_like(total, torch.nan)
    for index, other in product(range(10), repeat=2):
        dy, dx = other // 5 - index // 5, other % 5 - index % 5
        total[..., dy + 1, dx + 4] += pairs[..., index, other]
        count[dy + 1, dx + 4] += 1
        if index == 8:
            of_patch[..., dy + 1, dx + 4] = pairs[..., index, other]
    return total / count, of_patch


@pytest.mark.parametrize("name", CHANNELS)
def test_kernels_of_channels(name):
    model = model_of(CHANNELS[name])
    parts = [logit_parts(model, IMAGE, divmod(index, 5))["channels"] for index in range(10)]
    mean, of_patch = by_offset(torch.stack(parts, 1)[..., model.num_prefix_tokens :].float())
    for patch, expected in ((None, mean), ((1, 3), of_patch)):
        found = effective_kernels(model, IMAGE, patch)["blocks.2.attn"]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("case", [*TABLES, *CHANNELS, "prefix bias", "dinov3", "grouped", "naflex axial", "logn"])
def test_the_sum_of_the_parts_is_what_softmax_sees(case):
    if case in ("dinov3", "grouped", "naflex axial"):
        model = retrofitted(build(case), rel_terms="qkvb")
    else:
        others = {"prefix bias": {"rel_terms": "kb", "prefix_bias": True, **PREFIX}, "logn": {"rel_terms": "kb"}}
        model = model_of({**TABLES, **CHANNELS, **others}[case])
        if case == "logn":
            set_reach(model, "logn", (24, 16))
    maps = relvit.attention_maps(model, IMAGE[None])
    for layer in (0, -1):
        for patch in ((0, 0), (1, 3)):
            parts = logit_parts(model, IMAGE, patch, layer)
            weights = torch.stack(list(parts.values())).sum(0).softmax(-1).float()
            index = maps.prefix + patch[0] * 5 + patch[1]
            torch.testing.assert_close(weights, maps.weights[layer][0, :, index], rtol=0, atol=1e-6)
    # The kernel of the patch is the position part of the logits at its offsets. The term q is left out: its kernel uses
    # the mean key.
    position = torch.stack([part for name, part in parts.items() if name not in ("content", "q")]).sum(0)
    if "q" not in parts:
        kernel = effective_kernels(model, IMAGE, (1, 3))
        around = list(kernel.values())[-1][:, 0:2, 1:6].flatten(1)
        torch.testing.assert_close(around, position[:, maps.prefix :].float(), rtol=0, atol=1e-5)


def test_bfloat16():
    model = model_of(TABLES["clip"])
    expected = logit_parts(model, IMAGE, (1, 3))
    found = logit_parts(model.bfloat16(), IMAGE.bfloat16(), (1, 3))
    for name, part in found.items():
        assert part.dtype == torch.float32
        torch.testing.assert_close(part.double(), expected[name], rtol=0.1, atol=0.1)
    assert all(kernel.isfinite().all() for kernel in effective_kernels(model, IMAGE.bfloat16()).values())


def test_tables_are_the_parameters():
    model = model_of(TABLES["clip"] | {"shared_heads": False})
    position = model.blocks[2].attn.position
    found = position_tables(model, (16, 40))["blocks.2.attn"]
    assert list(found) == [f"{letter} {axis}" for letter in "qkvb" for axis in ("rows", "columns")]
    for name, table in found.items():
        term = {"q": "query", "k": "key", "v": "value", "b": "bias"}[name[0]]
        parameter = getattr(position, f"{term}_{'rows' if name.endswith('rows') else 'cols'}")
        assert torch.equal(table, parameter.float())
    joint = model_of(TABLES["joint"])
    found, position = position_tables(joint, (16, 40))["blocks.0.attn"], joint.blocks[0].attn.position
    torch.testing.assert_close(found["k length, joint"][0], position.key_table.pow(2).sum(-1).sqrt().float())
    assert torch.equal(found["b, joint"], position.bias_table.float())
    assert position_tables(small("relvit_lsh_small"), (16, 40))["blocks.0.attn"]["b rows"].shape == (2, 15)


@pytest.mark.parametrize("layout", ["separate", "joint"])
def test_piecewise_tables_have_a_row_for_each_offset(layout):
    model = small(rel_terms="b", bucketing="piecewise", max_distance=2, layout=layout)
    position, found = model.blocks[0].attn.position, position_tables(model, (16, 40))["blocks.0.attn"]
    # Of the 5 rows of a table, the row for each offset from -8 to 8, by iRPE's eq. 18 with alpha 1, beta 2, gamma 8.
    rows = [0] * 6 + [1] * 2 + [2] + [3] * 2 + [4] * 6
    if layout == "joint":
        assert torch.equal(found["b, joint"], position.bias_table[:, rows][:, :, rows])
    else:
        assert torch.equal(found["b rows"], position.bias_rows[:, rows])
        assert torch.equal(found["b columns"], position.bias_cols[:, rows])


def test_computed_tables_reach_over_the_windows_of_their_layers():
    found = position_tables(retrofitted(build("swinv2")), (24, 40))
    assert {table["b, joint"].shape[1:] for table in found.values()} == {(5, 7)}  # The grid has 3 x 4 patches.


def test_windows_of_aft():
    conv = small("test_relvit_aft").eval()
    with torch.no_grad():
        assert torch.equal(aft_windows(conv, (24, 16))["blocks.0.attn"], conv.blocks[0].attn.learned_bias(Grid(3, 2)))
    full = small("relvit_aft_full_small", bias_dim=3).eval()
    # The grid has 2 x 5 patches after a class token.
    mean, of_patch = by_offset(full.blocks[1].attn.learned_bias(Grid(2, 5, 1)).detach()[1:, 1:])
    found = aft_windows(full, (16, 40), (1, 3))["blocks.1.attn"][0]
    torch.testing.assert_close(found, of_patch, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(aft_windows(full, (16, 40))["blocks.1.attn"][0], mean)


@pytest.mark.parametrize("case", ["hf beit eager", "data2vec eager"])
def test_logits_of_models_of_transformers_are_those_of_their_weights(case):
    model = relvit.retrofit(hf_beit(case))
    image = images(24, 40, dtype=torch.float64)[0]
    shown = model(image[None], output_attentions=True).attentions
    for layer, weights in enumerate(shown):
        found = sum(logit_parts(model, image, (1, 3), layer).values()).softmax(-1)
        torch.testing.assert_close(found, weights[0, :, 1 + 5 + 3], rtol=0, atol=1e-6)
    title = draw("logits", model, image).get_suptitle()
    assert title == f"Logits of the query of patch (1, 2), layer {len(shown) - 1}, 3 x 5 patches"
    assert draw("kernels", model, image).axes


def test_what_is_refused():
    model, aft = model_of({}), small("test_relvit_aft", mixer="simple").eval()
    for refused, compute in {
        "AFTVisionTransformer has no tables of rows and columns .*: choose another kind": lambda: position_tables(
            aft, (24, 16)
        ),
        "AFTVisionTransformer has no attention with relative positions, .*: train a model that has": lambda: (
            effective_kernels(aft, IMAGE.float())
        ),
        "AFTVisionTransformer has no attention-free layers with biases: choose another kind": lambda: aft_windows(
            aft, (24, 16)
        ),
        "RelVisionTransformer has no attention-free layers with biases": lambda: aft_windows(model, (24, 16)),
        r"no tables of rows and columns \(ParabolicPosition2d\)": lambda: position_tables(
            small(position="pape"), (24, 16)
        ),
        "attention within windows or parts has no logits": lambda: effective_kernels(
            set_reach(model_of({}), "windows", (24, 16)), IMAGE
        ),
        "windows or parts": lambda: logit_parts(set_bands(model_of({}), 1), IMAGE, (0, 0)),
    }.items():
        with pytest.raises(NotApplicableError, match=refused):
            compute()
    with pytest.raises(ValueError, match=r"patch \(2, 0\): give a row from 0 to 1 and a column from 0 to 4"):
        effective_kernels(model, IMAGE, (2, 0))
    with pytest.raises(ValueError, match=r"patch \(0, -1\): give a row"):
        logit_parts(model, IMAGE, (0, -1))
    with pytest.raises(ValueError, match="layer is 3, the model has 3: give a number from 0 to 2"):
        logit_parts(model, IMAGE, (0, 0), layer=3)
    with pytest.raises(ValueError, match=r"in evaluation mode: call model.eval\(\)"):
        effective_kernels(model.train(), IMAGE)
