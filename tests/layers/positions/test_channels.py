"""PaPE compared with the authors' formula, pair by pair, and low-rank biases with the bias itself, in float64."""

import pytest
import timm
import torch
import torch.nn.functional as F
from draws import all_places
from position_cases import DIM, HEADS, LAYOUTS, draw, layer, plain

from relvit.layers import LowRankPosition2d, ParabolicPosition2d, SlopePosition2d, factorise_bias
from relvit.ops import make_grid, num_tokens, patch_coords
from relvit.ops.reference.attention import pair_bias


def parabolas(position, x, places, unit):
    """Compute the sum of scale (-softplus(W_a x_i) (w (p_i - p_j))^2 + W_b x_i w (p_i - p_j)) for each pair."""
    a, b = (x @ position.coefficients.weight.mT).unflatten(-1, (2, HEADS, -1)).unbind(2)
    samples = []
    for n, spots in enumerate(places):
        rows = []
        for i, here in enumerate(spots):
            for there in spots:
                total = x.new_zeros(HEADS)
                if here is not None and there is not None:
                    step = x.new_tensor([(p - q) * u for p, q, u in zip(here, there, unit, strict=True)])
                    s = position.directions @ step
                    total = (-F.softplus(a[n, i]) * s**2 + b[n, i] * s).sum(-1) * (DIM // HEADS) ** -0.5
                rows.append(total)
        samples.append(torch.stack(rows, dim=-1).unflatten(-1, (len(spots), -1)))
    return torch.stack(samples)


@pytest.mark.parametrize("trained", [None, (4, 5)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_parabolas_are_the_authors_formula_with_gradients(name, trained):
    grid = LAYOUTS[name]
    position = layer(ParabolicPosition2d(DIM // HEADS, HEADS, parabolas=3)).position
    position.trained_grid, x = trained, draw(2, num_tokens(grid), DIM)
    unit = (1, 1) if trained is None else (trained[0] / grid.height, trained[1] / grid.width)
    channels = position.terms(x, grid, grid).channels
    got, expected = channels.query @ channels.key.mT, parabolas(position, x, all_places(grid, 2), unit)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    grads = [torch.autograd.grad(out.sin().sum(), list(position.parameters())) for out in (got, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-10)


def test_factors_of_a_bias_and_their_error():
    grid = make_grid(4, 3)
    bias = pair_bias(SlopePosition2d(4, HEADS, distance="euclidean").double()(grid), grid, grid, draw(1))[0]
    channels, error = factorise_bias(bias, 3)
    product = (channels.query @ channels.key.mT)[0]
    left = (bias - product).flatten(1).norm(dim=1) / bias.flatten(1).norm(dim=1)
    torch.testing.assert_close(error, left, rtol=0, atol=1e-10)
    singular = torch.linalg.svdvals(bias)
    torch.testing.assert_close(error, singular[:, 3:].norm(dim=1) / singular.norm(dim=1), rtol=0, atol=1e-12)
    assert 0 < error.max() < 0.2
    assert not factorise_bias(torch.zeros(1, 2, 3), 5)[1].any()
    # A bias of the Manhattan distance has at most rank rows + columns.
    manhattan = pair_bias(SlopePosition2d(4, HEADS).double()(grid), grid, grid, draw(1))[0]
    assert factorise_bias(manhattan, 7)[1].max() < 1e-12


@pytest.mark.parametrize(
    ("shape", "rank", "message"),
    [
        ((4, 4), 2, r"bias has shape \(4, 4\), expected \(heads, Nq, Nk\)"),
        ((1, 1, 4, 4), 2, r"bias has shape \(1, 1, 4, 4\), expected"),
        ((1, 4, 4), 0, "rank must be at least 1, got 0"),
    ],
)
def test_what_has_no_factors(shape, rank, message):
    with pytest.raises(ValueError, match=message):
        factorise_bias(torch.ones(shape), rank)


def test_a_loaded_bias_is_kept_on_smaller_grids_and_stretched_over_larger_ones():
    """At full rank the bias is exact: at its own size, with prefix tokens, with dropped patches, and on fewer rows."""
    trained = make_grid(4, 3)
    bias = draw(HEADS, 12, 12)
    attn = layer(LowRankPosition2d(DIM // HEADS, HEADS, rank=12, grid_size=(4, 3)))
    assert attn.position.load_bias(bias).max() < 1e-12
    for grid in (
        trained,
        make_grid(4, 3, prefix=2),
        make_grid(3, 2, prefix=1),
        make_grid(4, 3, coords=torch.tensor([[3, 0], [1, 2], [0, 0]])),
    ):
        x, spots = draw(2, num_tokens(grid), DIM), all_places(grid, 1)[0]
        index = torch.tensor([0 if spot is None else spot[0] * 3 + spot[1] for spot in spots])
        on_grid = torch.tensor([spot is not None for spot in spots])
        expected = bias[:, index][:, :, index] * (on_grid[:, None] & on_grid)
        torch.testing.assert_close(attn(x, grid), plain(attn)(x, attn_mask=expected[None]), rtol=0, atol=1e-10)
    terms = attn.position.terms(x, make_grid(7, 3), make_grid(7, 3)).channels
    # Rows are interpolated as torch.nn.functional.interpolate does.
    maps = attn.position.query.permute(2, 3, 0, 1)
    larger = F.interpolate(maps, (7, 3), mode="bilinear", align_corners=False)
    torch.testing.assert_close(terms.query[0], larger.flatten(2).mT, rtol=0, atol=1e-12)


def test_gradients_of_bfloat16_factors_are_summed_without_rounding():
    position = LowRankPosition2d(4, 2, rank=3, grid_size=(2, 3)).bfloat16()
    grid = make_grid(2, 3, coords=patch_coords(make_grid(2, 3)).expand(1000, -1, -1))
    # Each place has the gradient 1 in each of 1000 images, and a sum in bfloat16 would end at 256.
    position.terms(torch.zeros(1000, 6, 8), grid, grid).channels.query.sum().backward()
    torch.testing.assert_close(position.query.grad.float(), torch.full((2, 3, 2, 3), 1000.0), rtol=0.01, atol=0)


def test_a_model_starts_with_the_positions_own_deviation_unless_one_is_given():
    options = {"position": "pape", "depth": 1, "embed_dim": 12, "num_heads": 2}
    std = [
        float(timm.create_model("test_relvit", **options, **given).blocks[0].attn.position.directions.detach().std())
        for given in ({}, {"rel_init_std": 0.1}, {"rel_init_std": 0})
    ]
    assert std == pytest.approx([0.41, 0.1, 0], rel=0.3)


def test_a_bias_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"bias has shape \(2, 5, 6\), expected \(2, 6, 6\)"):
        LowRankPosition2d(4, 2, grid_size=(2, 3)).load_bias(torch.zeros(2, 5, 6))
