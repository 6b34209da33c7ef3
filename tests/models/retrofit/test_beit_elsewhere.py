"""BEiT and Data2Vec of transformers: the source's numbers at its size, the tables' edges at others."""

import copy
import itertools

import pytest
import torch
from beit_cases import BEITS, OWN, hf_beit
from comparisons import assert_equal, tensors_of
from retrofit_cases import fingerprint, images
from sam_cases import transformers
from torch import nn

import relvit
from relvit.models import set_reach

TRAINED = (40, 40)
# Rows and columns of patches: smaller and larger than in training, never square.
GRIDS = [(3, 5), (7, 4), (6, 9)]
TABLE = "relative_position_bias_table"


def retrofitted(source):
    return relvit.retrofit(copy.deepcopy(source))


def outputs(model, x, **options):
    return tensors_of(model(x, output_hidden_states=True, **options))


def tolerance_of(case, dtype=torch.float64):
    """Of BEiT's eager attention the softmax is in single precision."""
    return {torch.float64: 1e-6 if case == "hf beit eager" else 1e-10, torch.float32: 1e-5}.get(dtype, 2e-2)


def clipped_bias(module, rows, columns):
    """The bias between all tokens, pair by pair, with offsets clipped at the edge of the module's table."""
    table = getattr(module, TABLE)
    (height, width), tokens = module.window_size, list(itertools.product(range(rows), range(columns)))
    bias = table.new_empty(table.shape[1], len(tokens) + 1, len(tokens) + 1)
    bias[:, 0, 1:], bias[:, 1:, 0], bias[:, 0, 0] = table[-3][:, None], table[-2][:, None], table[-1]
    for (i, (y, x)), (j, (down, across)) in itertools.product(enumerate(tokens), repeat=2):
        dy = max(1 - height, min(height - 1, y - down)) + height - 1
        dx = max(1 - width, min(width - 1, x - across)) + width - 1
        bias[:, 1 + i, 1 + j] = table[dy * (2 * width - 1) + dx]
    return bias[None]


@pytest.mark.parametrize("case", BEITS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_at_its_size_it_computes_what_it_did(case, dtype):
    source = hf_beit(case)
    model, x = retrofitted(source).to(dtype), images(*TRAINED).to(dtype)
    # In half precision the source is compared with what both approximate.
    reference = source if dtype == torch.bfloat16 else source.to(dtype)
    attentions = {"output_attentions": case.endswith("eager")}
    expected = outputs(reference, x.to(next(reference.parameters()).dtype), **attentions)
    assert len(expected) == (7 if case.endswith("eager") else 5)
    assert_equal(outputs(model, x, **attentions), expected, tolerance_of(case, dtype))


@pytest.mark.parametrize("case", ["hf beit", "hf beit both", "data2vec shared"])
def test_at_other_sizes_tables_have_their_edge(case):
    source = hf_beit(case, use_absolute_position_embeddings=False)
    model = retrofitted(source)
    for module in source.modules():
        if hasattr(module, TABLE):
            module.forward = lambda size, *_, module=module, **options: clipped_bias(module, *size)
    for grid in GRIDS:
        x = images(*(8 * side for side in grid))
        assert_equal(outputs(model, x), outputs(source, x), 1e-10)


@pytest.mark.parametrize("case", BEITS)
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["all kept", "checkpoint", "reentrant"])
def test_gradients_are_the_sources(case, checkpointing):
    source = hf_beit(case)
    model, x, grads = retrofitted(source), images(*TRAINED), []
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    for net in (source, model):
        net.train()
        sum(part.square().sum() for part in outputs(net, x).values()).backward()
        grads.append({name: parameter.grad for name, parameter in net.named_parameters()})
    assert_equal(grads[1], grads[0], tolerance_of(case))


@pytest.mark.parametrize("case", BEITS)
def test_state_dicts_and_restored_models_are_the_sources(case):
    source, other, x = hf_beit(case), hf_beit(case), images(*TRAINED)
    model = retrofitted(source)
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    model.load_state_dict(other.state_dict())
    assert_equal(outputs(model, x), outputs(other, x), tolerance_of(case))
    tables = {name for name in model.state_dict() if name.endswith(TABLE)}
    assert model.no_weight_decay() == tables | {"embeddings.position_embeddings"}
    set_reach(model, "logn")
    model = relvit.restore(copy.deepcopy(model))
    assert fingerprint(model) == fingerprint(other)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in other.state_dict().items())
    assert_equal(outputs(model, x), outputs(other, x), 0)


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
    sizes = {
        "num_hidden_layers": 3,
        "out_indices": [0, 1, 2, 3],
        "num_labels": 3,
        "vocab_size": 7,
        "pool_scales": (1, 2),
    }
    source = hf_beit(case, head, **sizes)
    model, x = copy.deepcopy(source), images(*TRAINED)
    with pytest.raises(ValueError, match=rf"it wraps {inner}, a \w+Model: retrofit that one in it, model\.{inner}"):
        relvit.retrofit(model)
    relvit.retrofit(getattr(model, inner))
    assert_equal({"logits": model(x).logits}, {"logits": source(x).logits}, 1e-10)


def test_masks_of_patches_and_of_tokens():
    source = hf_beit("hf beit eager", use_mask_token=True)
    model, x = retrofitted(source), images(*TRAINED)
    generator = torch.Generator().manual_seed(3)
    given = {
        "bool_masked_pos": torch.rand(2, 25, generator=generator) < 0.4,
        "attention_mask": (torch.rand(2, 26, generator=generator) < 0.7).long(),
    }
    assert_equal(outputs(model, x, **given), outputs(source, x, **given), 1e-6)
    # With 'sdpa' the source adds the mask to the bias as 0 and 1; here it hides tokens.
    sdpa = retrofitted(hf_beit("hf beit both", use_mask_token=True))
    assert_equal(outputs(sdpa, x, **given), outputs(source, x, **given), 1e-6)


@pytest.mark.parametrize("case", ["hf beit both", "data2vec"])
def test_plans_and_reaches(case):
    model = retrofitted(hf_beit(case))
    x, larger = images(*TRAINED), images(56, 48)
    plans = relvit.explain(model)
    entries = 2 * (81 + 3) * (2 if case == "hf beit both" else 1)
    assert [(plan.position, plan.terms, plan.parameters) for plan in plans] == [("BeitTables", "bc", entries)] * 2
    expected, other = outputs(model, x), outputs(model, larger)["last_hidden_state 0"]
    set_reach(model, "stretch")
    assert_equal(outputs(model, x), expected, 1e-10)
    assert (outputs(model, larger)["last_hidden_state 0"] - other).abs().max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("case", ["hf beit both", "data2vec"])
def test_compiled_and_exported(case):
    source = hf_beit(case).float()
    model, x = retrofitted(source), images(*TRAINED).float()
    expected = {"features": source(x)[0]}
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True)
    assert_equal({"features": compiled(x)[0]}, expected, 1e-5)
    assert_equal({"features": torch.export.export(model, (x,)).module()(x)[0]}, expected, 1e-5)


REFUSED = {
    "no positions": ({OWN: False}, r"layers\.0\.attention has no relative positions"),
    "a rectangle": ({"image_size": (40, 24)}, r"for 5 x 3 patches, which BeitModel reads with rows and columns"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_carried_over_is_refused_first(name):
    options, message = REFUSED[name]
    model = hf_beit("hf beit", use_absolute_position_embeddings=False, **options)
    before = fingerprint(model)
    with pytest.raises(ValueError, match=message):
        relvit.retrofit(model)
    assert fingerprint(model) == before


@pytest.mark.parametrize("family", ["Swin", "Swinv2", "MaskFormerSwin", "DonutSwin"])
def test_swins_are_refused_with_the_reason(family):
    sizes = {"image_size": 24, "embed_dim": 12, "depths": [1], "num_heads": [2], "window_size": 3}
    library = transformers()
    model = getattr(library, f"{family}Model")(getattr(library, f"{family}Config")(**sizes))
    with pytest.raises(ValueError, match="is a Swin Transformer, whose windows have as few tokens at every image size"):
        relvit.retrofit(model)


def test_other_attention_functions_are_refused():
    model = hf_beit("hf beit")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="attn_implementation must be 'eager' or 'sdpa', got 'flex_attention'"):
        relvit.retrofit(model)
