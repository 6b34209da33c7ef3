"""Random models and bands: the same numbers as one pass under a mask, or the bands are refused.

FUZZ_EXAMPLES=300 pytest -m fuzz tests/app/fuzz/test_bands.py --hypothesis-seed=31
"""

import pytest
import torch
from fuzzed import fuzzed
from hypothesis import note
from vits import band_mask

from relvit.families.transformer_xl import set_bands
from relvit.layers.positions import POSITIONS
from relvit.layers.positions.by_name import accepts
from relvit.models.relative_vit import RelVisionTransformer

pytestmark = pytest.mark.fuzz

# Bands refuse only these positions, which depend on the image's size.
REFUSED = {"fire", "low-rank"}
PATCH = 4


def draw_position(random):
    """Draw one of all positions, and its arguments."""
    position = random.choice(list(POSITIONS))
    chosen = {"position": position, "rope": random.choice(["", "", "axial", "mixed"])}
    if position == "tables":
        chosen["rel_terms"] = "".join(letter for letter in "qkvb" if random.random() < 0.5)
        chosen["layout"] = random.choice(["separate", "joint"])
        chosen["bucketing"] = random.choice(["clip", "piecewise"])
        chosen["shared_heads"] = random.random() < 0.5
    if accepts(position, "max_distance") and random.random() < 0.7:
        one, other = random.randint(0, 9), random.randint(0, 9)
        chosen["max_distance"] = random.choice([one, (one, other)])
    return chosen


def draw(random):
    """Draw a position, and the sizes of model, image and bands."""
    rows, columns = random.randint(1, 11), random.randint(1, 9)
    if rows == columns:
        rows += 1
    band = random.randint(1, rows + 1)
    position = draw_position(random)
    # LookHere needs at least four heads.
    heads = 4 if position["position"] == "lookhere" else random.choice([1, 2])
    model = position | {
        "depth": random.randint(1, 4),
        "embed_dim": 16 if heads == 4 else random.choice([8, 16]),
        "num_heads": heads,
        "qk_norm": random.random() < 0.2,
        "global_pool": random.choice(["avg", "avg", "max", "map", ""]),
        "dynamic_img_pad": random.random() < 0.3,
        # None of these positions depends on the size for which the model is made.
        "img_size": (PATCH * random.randint(1, 8), PATCH * random.randint(1, 8)),
    }
    if model["position"] == "tables" and model["layout"] == "separate":
        model["backend"] = random.choice(["auto", "auto", "reference", "fused", "tiled", "gathered"])
    cut = [random.randrange(PATCH) if model["dynamic_img_pad"] else 0 for _ in range(2)]
    size = PATCH * rows - cut[0], PATCH * columns - cut[1]
    memory = random.choice([None, None, 0, random.randint(1, rows + 2), random.randint(1, 3)])
    return model, size, (rows, columns), band, memory


def build(options, number):
    torch.manual_seed(number)
    model = RelVisionTransformer(patch_size=PATCH, num_classes=5, mlp_ratio=2, **options)
    for parameter in model.parameters():
        # Use large weights, so that every parameter changes the outputs visibly.
        torch.nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


@fuzzed(25)
@torch.no_grad()
def test_bands_equal_one_pass_under_the_mask_or_are_refused(chance):
    options, size, grid, band, memory = draw(chance)
    note(f"{options}, image {size}, bands of {band} rows, memory {memory}")
    model = build(options, chance.getrandbits(32))
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    mask = band_mask(*grid, band, memory)
    expected = [model.forward_features(images, attn_mask=mask), model(images, attn_mask=mask)]
    if options["position"] in REFUSED:
        with pytest.raises(ValueError, match="depends on the size of the image"):
            set_bands(model, band, memory)
        return
    set_bands(model, band, memory)
    found = [model.forward_features(images), model(images)]
    assert all(one.isfinite().all() for one in expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
