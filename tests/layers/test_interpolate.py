"""`resample_embedding` compared with PyTorch's antialiased bicubic interpolation and timm's."""

import pytest
import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed

from relvit.layers import resample_embedding

OLD = (5, 9)


def embedding(dtype=torch.float64, prefix=2):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, prefix + OLD[0] * OLD[1], 6, generator=generator, dtype=dtype)


@pytest.mark.parametrize("size", [(5, 9), (3, 4), (7, 12), (20, 1), (1, 40)], ids=str)
def test_is_the_antialiased_bicubic_interpolation_of_pytorch(size):
    for prefix in (0, 2):
        table = embedding(prefix=prefix)
        image = table[:, prefix:].unflatten(1, OLD).permute(0, 3, 1, 2)
        expected = F.interpolate(image, size=size, mode="bicubic", antialias=True).flatten(2).transpose(1, 2)
        out = resample_embedding(table, OLD, size, prefix)
        torch.testing.assert_close(out[:, prefix:], expected, rtol=0, atol=1e-13)
        assert torch.equal(out[:, :prefix], table[:, :prefix])
        # timm rounds to float32 before the interpolation.
        torch.testing.assert_close(out, resample_abs_pos_embed(table, size, OLD, prefix), rtol=0, atol=2e-6)


def test_gradients():
    table = embedding().requires_grad_()
    assert torch.autograd.gradcheck(lambda table: resample_embedding(table, OLD, (3, 12), 2), table)


def test_precision_and_devices():
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            # At its own size the embedding stays the same.
            assert torch.equal(resample_embedding(embedding(dtype), OLD, OLD, 2), embedding(dtype))
    table = embedding(torch.bfloat16)
    out = resample_embedding(table, OLD, (7, 12), 2)
    assert out.dtype == torch.bfloat16
    # The result is rounded once. Near the border between two numbers of this dtype, float32's error may change it.
    assert (out == resample_embedding(table.double(), OLD, (7, 12), 2).bfloat16()).double().mean() > 0.99
    out = resample_embedding(table.to("meta"), OLD, (7, 12), 2)
    assert (out.device.type, out.dtype, out.shape) == ("meta", torch.bfloat16, (1, 2 + 7 * 12, 6))
