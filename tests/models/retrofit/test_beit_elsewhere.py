"""BEiT and Data2Vec of transformers: other sizes, at which offsets are clipped at the table's edge; heads and masks."""

import copy
import itertools
import json

import pytest
import torch
from beit_cases import hf_beit
from comparisons import assert_equal
from own_positions import imported, outputs
from retrofit_cases import images
from safetensors.torch import load_file

import relvit

TRAINED = (40, 40)
# These grids are smaller and larger than in training, and never square.
GRIDS = [(3, 5), (7, 4), (6, 9)]
TABLE = "relative_position_bias_table"


def clipped_bias(module, rows, columns):
    """Compute the bias between all tokens, pair by pair, with offsets clipped at the edge of the module's table."""
    table = getattr(module, TABLE)
    (height, width), tokens = module.window_size, list(itertools.product(range(rows), range(columns)))
    bias = table.new_empty(table.shape[1], len(tokens) + 1, len(tokens) + 1)
    bias[:, 0, 1:], bias[:, 1:, 0], bias[:, 0, 0] = table[-3][:, None], table[-2][:, None], table[-1]
    for (i, (y, x)), (j, (down, across)) in itertools.product(enumerate(tokens), repeat=2):
        dy = max(1 - height, min(height - 1, y - down)) + height - 1
        dx = max(1 - width, min(width - 1, x - across)) + width - 1
        bias[:, 1 + i, 1 + j] = table[dy * (2 * width - 1) + dx]
    return bias[None]


@pytest.mark.parametrize("case", ["hf beit", "hf beit both", "data2vec shared"])
def test_at_other_sizes_tables_have_their_edge(case):
    source = hf_beit(case, use_absolute_position_embeddings=False)
    model = imported(source)
    for module in source.modules():
        if hasattr(module, TABLE):
            module.forward = lambda size, *_, module=module, **options: clipped_bias(module, *size)
    for grid in GRIDS if case == "hf beit both" else GRIDS[1:2]:
        x = images(*(8 * side for side in grid))
        assert_equal(outputs(model, x), outputs(source, x), 1e-10)


@pytest.mark.parametrize(
    ("case", "head", "inner"),
    [
        ("hf beit", "ForImageClassification", "beit"),
        ("hf beit shared", "ForMaskedImageModeling", "beit"),
        ("hf beit both", "ForSemanticSegmentation", "beit"),
        ("data2vec", "ForImageClassification", "data2vec_vision"),
    ],
)
def test_heads_get_the_same(case, head, inner):
    sizes = {"num_hidden_layers": 3, "num_labels": 3, "vocab_size": 7}
    source = hf_beit(case, head, **sizes, out_indices=[0, 1, 2, 3], pool_scales=(1, 2))
    model, x = copy.deepcopy(source), images(*TRAINED)
    with pytest.raises(ValueError, match=rf"it wraps {inner}, a \w+Model: retrofit that one in it, model\.{inner}"):
        relvit.retrofit(model)
    relvit.retrofit(getattr(model, inner))
    assert_equal({"logits": model(x).logits}, {"logits": source(x).logits}, 1e-10)


@pytest.mark.parametrize(
    ("case", "head", "inner"),
    [("hf beit both", "Model", ""), ("hf beit", "Backbone", "beit"), ("data2vec", "Model", "")],
)
def test_files_of_save_pretrained_are_the_sources(case, head, inner, tmp_path):
    source, saved = hf_beit(case, head), []
    for model in (source, copy.deepcopy(source)):
        if model is not source:
            relvit.retrofit(model.get_submodule(inner))
        model.save_pretrained(tmp_path)
        saved.append((json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")))
    (config, tensors), (expected, theirs) = saved[1], saved[0]
    assert config == expected
    assert tensors.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in tensors.items())


def test_masks_of_patches_and_of_tokens():
    source = hf_beit("hf beit eager", use_mask_token=True)
    model, x = imported(source), images(*TRAINED)
    generator = torch.Generator().manual_seed(3)
    given = {
        "bool_masked_pos": torch.rand(2, 25, generator=generator) < 0.4,
        "attention_mask": (torch.rand(2, 26, generator=generator) < 0.7).long(),
    }
    assert_equal(outputs(model, x, **given), outputs(source, x, **given), 1e-6)
    # With 'sdpa' transformers adds this mask (0 and 1) to the bias, but here the mask must hide tokens.
    sdpa = imported(hf_beit("hf beit both", use_mask_token=True))
    assert_equal(outputs(sdpa, x, **given), outputs(source, x, **given, output_attentions=False), 1e-6)
