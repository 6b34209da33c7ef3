import pytest
import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed

from relvit.layers import resample_embedding

OLD = (5, 9)
SIZES = [(5, 9), (3, 4), (7, 12), (3, 12), (20, 1), (1, 40)]


def embedding(dtype=torch.float64, prefix=2):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, prefix + OLD[0] * OLD[1], 6, generator=generator, dtype=dtype)


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_is_the_antialiased_bicubic_interpolation_of_pytorch(size, prefix):
    table = embedding(prefix=prefix)
    image = table[:, prefix:].unflatten(1, OLD).permute(0, 3, 1, 2)
    expected = F.interpolate(image, size=size, mode="bicubic", antialias=True).flatten(2).transpose(1, 2)
    out = resample_embedding(table, OLD, size, prefix)
    torch.testing.assert_close(out[:, prefix:], expected, rtol=0, atol=1e-13)
    assert torch.equal(out[:, :prefix], table[:, :prefix])
    # timm rounds to float32 on the way.
    theirs = resample_abs_pos_embed(table, size, OLD, prefix)
    torch.testing.assert_close(out, theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_own_size_changes_nothing(dtype):
    table = embedding(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(resample_embedding(table, OLD, OLD, 2), table)


@pytest.mark.parametrize("size", SIZES[1:4], ids=str)
def test_gradients(size):
    table = embedding().requires_grad_()
    assert torch.autograd.gradcheck(lambda table: resample_embedding(table, OLD, size, 2), table)


def test_half_precision_rounds_once():
    table = embedding(torch.bfloat16)
    out = resample_embedding(table, OLD, (7, 12), 2)
    assert out.dtype == torch.bfloat16
    # Up to float32's error at the border between two neighbours.
    assert (out == resample_embedding(table.double(), OLD, (7, 12), 2).bfloat16()).double().mean() > 0.99


def test_meta_device():
    out = resample_embedding(embedding(torch.bfloat16).to("meta"), OLD, (7, 12), 2)
    assert (out.device.type, out.dtype, out.shape) == ("meta", torch.bfloat16, (1, 2 + 7 * 12, 6))
