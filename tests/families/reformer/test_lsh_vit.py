"""LSH models: full attention with shared queries and keys on small images, every size, graphs, refused arguments."""

import pytest
import timm
import torch
import torch.nn.functional as F
from vits import SMALL, assert_same, images

from relvit.families.reformer import LSHVisionTransformer
from relvit.layers import RelativeAttention
from relvit.models import set_reach
from relvit.ops import Grid
from relvit.ops.reference.attention import pair_bias


def build(**options):
    torch.manual_seed(0)
    model = timm.create_model("test_relvit_lsh", **{**SMALL, "patch_size": 4, "bucket_size": 2, **options})
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def test_registered_models_have_the_parameters_counted_by_hand():
    with torch.device("meta"):
        model = timm.create_model("relvit_lsh_small")
    assert type(model) is LSHVisionTransformer
    block = 3 * 384**2 + 3 * 384 + 8 * 384**2 + 5 * 384 + 4 * 384 + 6 * 2 * 15
    expected = 769 * 384 + 12 * block + 2 * 384 + 385 * 1000
    assert sum(p.numel() for p in model.parameters()) == expected
    assert set(timm.list_models("*relvit_lsh*")) == {"relvit_lsh_small", "test_relvit_lsh"}


@pytest.mark.parametrize("position", ["tables", "slopes"])
def test_small_images_get_full_attention(position):
    """Each block computes as timm's, except that keys are normalised queries and no token attends to itself."""
    model = build(bucket_size=16, position=position, depth=2, class_token=True).double()
    x = images(dtype=torch.float64)
    with torch.no_grad():
        tokens, grid = model.embed(x)
        itself = torch.eye(25, dtype=torch.bool)
        for block in model.blocks:
            attn = block.attn
            q, v = attn.qk_v(block.norm1(tokens)).unflatten(-1, (2, 2, 6)).permute(2, 0, 3, 1, 4)
            logits = q @ F.normalize(q, dim=-1).mT + pair_bias(attn.position(grid), grid, grid, q)
            mixed = logits.masked_fill(itself, -torch.inf).softmax(-1) @ v
            tokens = tokens + attn.proj(mixed.transpose(1, 2).flatten(2))
            tokens = tokens + block.mlp(block.norm2(tokens))
        torch.testing.assert_close(model.forward_features(x), model.norm(tokens), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_compiled_exported_and_onnx(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = build(depth=1)
    compiled = torch.compile(model, dynamic=True)
    with torch.no_grad():
        for size in [(24, 16), (16, 40)]:
            assert_same(compiled(images(*size)), model(images(*size)), atol=1e-5)
    exported = torch.export.export(model, (images(),))
    assert_same(exported.module()(images()), model(images()), atol=1e-6)
    torch.onnx.export(exported, (images(),), tmp_path / "model.onnx", dynamo=True)
    (out,) = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, {"x": images().numpy()})
    assert_same(torch.from_numpy(out), model(images()).detach(), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rel_terms": "b", "position": "slopes", "layout": "joint"}, ValueError, "layout is for position 'tables'"),
        ({"position": "pape"}, ValueError, "LSH attention takes no position .*, got ParabolicPosition2d"),
        ({"rel_terms": "k", "position": "slopes"}, ValueError, "rel_terms is for position 'tables'"),
        ({"backend": "fused"}, ValueError, "backend cannot be chosen: LSH attention is computed in one way"),
        ({"mixer": RelativeAttention}, ValueError, "mixer cannot be chosen: it is LSH attention in these models"),
        ({"bucketsize": 3}, TypeError, "did you mean 'bucket_size'"),
        ({"band_rows": 1}, ValueError, "its LSHAttention takes no memory"),
    ],
)
def test_refused(options, error, message):
    with pytest.raises(error, match=message):
        build(**options)


def test_without_a_bias_and_with_a_reach():
    model = build(rel_terms="")
    with pytest.raises(ValueError, match="no relative attention"):
        set_reach(model, "stretch")
    assert model.blocks[0].attn.position(Grid(2, 3)).bias is None
    assert model(images()).shape == (2, 5)
