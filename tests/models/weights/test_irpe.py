"""iRPE's DeiT converted to relvit's models: the same outputs as by the authors' formula, also for the class token."""

import math

import pytest
import timm
import torch
from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from vits import images

from relvit.models import checkpoint_filter_fn, retrofit
from relvit.models.weights.transfer import Weights, transfer_weights

ALPHA, BETA, GAMMA = 1.9, 3.8, 15.2
# 7 x 6 patches have offsets in all buckets, and larger ones.
SMALL = {"img_size": (56, 48), "patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 2, "num_classes": 5}
SIZES = [(56, 48), (24, 96)]
HEAD_DIM = 6
OWN = {"class_token": True, "global_pool": "token", "pos_embed": "learn", "layout": "joint", "mlp_ratio": 4}


def piecewise(offset):
    """Compute eq. 18 of Wu et al. 2021, rounded as in the authors' code."""
    if abs(offset) <= ALPHA:
        return offset
    stretched = ALPHA + math.log(abs(offset) / ALPHA) / math.log(GAMMA / ALPHA) * (BETA - ALPHA)
    return int(math.copysign(min(round(stretched), BETA), offset))


def buckets(rows, columns):
    """Compute the bucket of each pair of tokens, the class token first; offsets are query minus key."""
    places = [None, *((y, x) for y in range(rows) for x in range(columns))]
    index = torch.empty(len(places), len(places), dtype=torch.int64)
    for i, query in enumerate(places):
        for j, key in enumerate(places):
            if query is None or key is None:
                index[i, j] = 49
            else:
                index[i, j] = (piecewise(query[0] - key[0]) + 3) * 7 + piecewise(query[1] - key[1]) + 3
    return index


class Rpe(nn.Module):
    """A table with the name that the authors' code gives to it."""

    def __init__(self, *shape):
        super().__init__()
        self.lookup_table_weight = nn.Parameter(torch.empty(shape))


class RpeAttention(Attention):
    """Attention of the formula, pair by pair; `grid` is set for each image size."""

    def forward(self, x, **_):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        index = buckets(*self.grid)
        logits = q @ k.mT
        if hasattr(self, "rpe_k"):
            logits = logits + torch.einsum(
                "bhid,hijd->bhij", q, self.rpe_k.lookup_table_weight.mT[:, index].expand(2, -1, -1, -1)
            )
        if hasattr(self, "rpe_q"):
            table = self.rpe_q.lookup_table_weight.mT[:, index.T].expand(2, -1, -1, -1)
            logits = logits + torch.einsum("bhjd,hijd->bhij", k, table)
        weights = (logits * HEAD_DIM**-0.5).softmax(-1)
        out = weights @ v
        if hasattr(self, "rpe_v"):
            table = self.rpe_v.lookup_table_weight[:, index].expand(2, -1, -1, -1)
            out = out + torch.einsum("bhij,hijd->bhid", weights, table)
        return self.proj(out.transpose(1, 2).flatten(2))


def authors(terms, heads=1):
    """Build DeiT with tables for these terms, and random parameters."""
    torch.manual_seed(0)
    model = VisionTransformer(**SMALL, attn_layer=RpeAttention, dynamic_img_size=True)
    for block in model.blocks:
        for term in terms:
            shape = (heads, 50, HEAD_DIM) if term == "v" else (heads, HEAD_DIM, 50)
            setattr(block.attn, f"rpe_{term}", Rpe(*shape))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model.double().eval()


def of_authors(model, x):
    for block in model.blocks:
        block.attn.grid = (x.shape[2] // 8, x.shape[3] // 8)
    return model(x)


def loaded(state, **options):
    model = timm.create_model("test_relvit", **{**SMALL, **OWN, **options}).double().eval()
    model.load_state_dict(checkpoint_filter_fn(state, model))
    return model


@pytest.mark.parametrize(("terms", "heads", "own"), [
    ("k", 1, {"rel_terms": "k", "max_distance": 4}),
    ("v", 1, {"rel_terms": "v", "max_distance": 5}),
    ("q", 2, {"rel_terms": "q", "max_distance": 4, "shared_heads": False}),
    ("qk", 1, {"rel_terms": "qkb", "max_distance": 4}),
    ("qkv", 2, {"rel_terms": "qkvb", "max_distance": (4, 6), "shared_heads": False}),
    ("qkv", 1, {"rel_terms": "qkvb", "max_distance": 4, "shared_heads": False}),
])  # fmt: skip
def test_the_authors_formula_at_every_size(terms, heads, own):
    source = authors(terms, heads)
    model = loaded({"model": source.state_dict()}, **own)
    for size in SIZES:
        x = images(*size, dtype=torch.float64)
        # timm interpolates absolute embeddings in single precision.
        atol = 1e-10 if size == SIZES[0] else 1e-5
        torch.testing.assert_close(model(x), of_authors(source, x), rtol=0, atol=atol)


def test_in_a_retrofitted_deit():
    source, x = authors("qkv"), images(*SIZES[0], dtype=torch.float64)
    vit = timm.create_model("vit_tiny_patch16_224", **SMALL).double().eval()
    model = retrofit(vit, "qkvb", layout="joint", max_distance=4)
    report = transfer_weights(model, Weights("irpe.pth", source.state_dict()))
    assert (report.new, report.skipped) == ([], [])
    torch.testing.assert_close(model(x), of_authors(source, x), rtol=0, atol=1e-10)


def test_what_does_not_fit_is_refused():
    state = authors("qk").state_dict()
    needed = (
        "need a model with rel_terms='qkb', layout='joint', bucketing='clip', max_distance=4 or more, got position Rel"
    )
    for options in ({"rel_terms": "qk"}, {"rel_terms": "qkvb", "layout": "separate"}, {"max_distance": 3}):
        with pytest.raises(ValueError, match=needed):
            loaded(dict(state), **{"rel_terms": "qkb", "max_distance": 4, **options})
    other = {name: tensor[..., :20] if "rpe_" in name else tensor for name, tensor in state.items()}
    with pytest.raises(ValueError, match=r"rpe_q\.lookup_table_weight has shape \(1, 6, 20\): of iRPE's"):
        loaded(other, rel_terms="qkb", max_distance=4)
    bare = {name: tensor for name, tensor in state.items() if not name.endswith("qkv.bias")}
    with pytest.raises(ValueError, match=r"no blocks\.0\.attn\.qkv\.bias, .*: take a checkpoint"):
        loaded(bare, rel_terms="qkb", max_distance=4)
