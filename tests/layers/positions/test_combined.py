"""Combined positions ('lookhere+tables'): terms, arguments, reach, weights, and combinations that are refused."""

from functools import partial

import pytest
import timm
import torch

import relvit
from relvit.layers import CombinedPosition2d, LookHerePosition2d, RelativePosition2d
from relvit.models import set_reach
from relvit.ops import make_grid

LOOKHERE_TABLES = {"position": "lookhere+tables", "num_heads": 4, "depth": 3}


def test_terms_are_those_of_both_and_each_argument_goes_to_its_owner():
    model = timm.create_model("test_relvit", rel_terms="v", max_distance=2, **LOOKHERE_TABLES)
    attn = model.blocks[1].attn
    terms, grid = attn.position(make_grid(4, 6)), make_grid(4, 6)
    tables = RelativePosition2d(attn.head_dim, 4, "v", 2)
    tables.load_state_dict(attn.position.tables.state_dict())
    torch.testing.assert_close(terms.value, tables(grid).value, rtol=0, atol=0)
    bias = LookHerePosition2d(attn.head_dim, 4, layer=(1, 3))(grid).bias
    torch.testing.assert_close(terms.bias, bias, rtol=0, atol=0)
    assert terms._replace(value=None, bias=None) == type(terms)()
    both = timm.create_model("test_relvit", position="slopes+tables", max_distance=3).blocks[0].attn.position
    assert both.slopes.max_distance == both.tables.max_distance == (3, 3)


def test_a_retrofit_has_tables_of_zeros_beside_the_bias():
    torch.manual_seed(0)
    models = [timm.create_model("test_vit", num_heads=4).eval() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    names = ("lookhere", "lookhere+tables")
    out, both = (
        relvit.retrofit(model, position=name)(torch.ones(1, 3, 160, 160))
        for model, name in zip(models, names, strict=True)
    )
    torch.testing.assert_close(both, out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rel_terms": "kb", **LOOKHERE_TABLES}, "'lookhere' and 'tables' both have a bias"),
        ({"position": "slopes+fire"}, "'slopes' and 'fire' both have a bias"),
        ({"position": "tables+tables"}, "give each name once"),
        ({"position": "tables+fier"}, "did you mean 'fire'"),
        ({"position": "slopes+fire", "rel_terms": "k"}, "rel_terms is for position 'tables'"),
        ({"bucketing": "piecewise", "rel_terms": "kv", **LOOKHERE_TABLES}, "bucketing is for tables alone"),
    ],
)
def test_combinations_that_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model("test_relvit", **arguments)


def test_piecewise_tables_beside_channels_keep_their_bucketing():
    model = timm.create_model("test_relvit", position="pape+tables", bucketing="piecewise")
    position, grid = model.blocks[0].attn.position, make_grid(4, 6)
    terms = position.terms(torch.randn(1, 24, model.embed_dim), grid, grid)
    assert (terms.bucketing, terms.channels is None, terms.key is None) == ("piecewise", False, False)


def test_reach_stretches_all_positions_or_refuses():
    model = timm.create_model("test_relvit", position="slopes+tables", img_size=32)
    set_reach(model, "stretch")
    position = model.blocks[0].attn.position
    assert position.slopes.trained_grid == position.tables.trained_grid == model.patch_embed.grid_size
    with pytest.raises(ValueError, match="CombinedPosition2d, which cannot be stretched"):
        set_reach(timm.create_model("test_relvit", **LOOKHERE_TABLES), "stretch")


def test_weights_of_other_clip_distances_and_of_models_without_positions():
    make = partial(timm.create_model, "test_relvit", **LOOKHERE_TABLES)
    source, wide = make(max_distance=2), make(max_distance=3)
    wide.load_state_dict(relvit.models.checkpoint_filter_fn(source.state_dict(), wide))
    rows, more = (model.blocks[0].attn.position.tables.key_rows for model in (source, wide))
    torch.testing.assert_close(more, rows[[0, *range(5), -1]], rtol=0, atol=0)
    plain = timm.create_model("test_relvit", rel_terms="", num_heads=4, depth=3)
    wide.load_state_dict(relvit.models.checkpoint_filter_fn(plain.state_dict(), wide))
    assert not any(name.endswith("_rows") and table.any() for name, table in wide.state_dict().items())


def test_parts_are_submodules_by_name():
    makers = {"lookhere": LookHerePosition2d, "tables": RelativePosition2d}
    position = CombinedPosition2d(8, 4, makers)
    assert [*position.state_dict()] == [
        f"tables.{term}_{axis}" for term in ("key", "value") for axis in ("rows", "cols")
    ]


@pytest.mark.parametrize("position", ["lookhere+tables", "pape+tables"])
def test_hooks_run(position):
    model, seen = timm.create_model("test_relvit", position=position, num_heads=4, depth=1), []
    model.blocks[0].attn.position.register_forward_hook(lambda *_: seen.append(True))
    model(torch.randn(1, 3, 64, 96))
    assert seen == [True]
