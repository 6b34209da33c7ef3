"""Offsets in memory that Triton kernels compute in 32 bits within a head: too large ones are refused."""

import pytest
import torch

pytest.importorskip("triton")

from relvit.ops.backends.triton.forward import forward
from relvit.ops.backends.triton.launch import Launch, Operands, variant


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_of(height, width, heads=2, dim=64, entries=32, packed=1):
    """Make a launch whose queries, keys and values are views of one projection, with tokens before heads."""
    length = height * width
    qkv = meta(1, length, packed * heads * dim).unflatten(-1, (packed, heads, dim))
    q, k, v = (qkv[:, :, min(part, packed - 1)].transpose(1, 2) for part in range(3))
    table, index = meta(heads, entries, dim), meta(1, length, height + width, dtype=torch.int16)
    bounds = meta(1, length, entries + 1, dtype=torch.int16)
    operands = Operands(q, k, v, None, None, table, None, table, index, bounds, index, bounds)
    return Launch(forward, operands, (0, height, width), 1.0, variant(operands, True))


@pytest.mark.parametrize(
    ("sizes", "largest"),
    [
        ({"height": 64, "width": 65, "heads": 4}, 64 * 65 * 4 * 64 - 3 * 64),
        ({"height": 64, "width": 65, "packed": 3}, (64 * 65 - 1) * 3 * 2 * 64 + 64),
        ({"height": 600, "width": 500, "heads": 1, "dim": 16}, 600 * 500 * 1100),
        ({"height": 3, "width": 5, "entries": 2000, "heads": 1, "dim": 16}, None),
    ],
)
def test_largest_offset(sizes, largest):
    launch = launch_of(**sizes)
    block = launch.constants()[0]["BLOCK_M"]
    if largest is None:
        largest = block * 2001
    out = launch.operands.query
    assert launch.largest_offset((out,)) == largest


def test_too_large_offsets_are_an_error():
    # 1,024 x 1,024 patches are 2^20 tokens with 2^11 rows and columns, so the index has 2^31 numbers.
    launch = launch_of(1024, 1024)
    with pytest.raises(ValueError, match=r"1048576 queries with 1048576 keys need 2147483648, above 2\^31 - 1"):
        launch.run((launch.operands.query,), ())
    assert launch_of(1024, 1023).largest_offset(()) < 2**31
    wide = launch_of(700, 700, heads=24, dim=128, packed=3)
    with pytest.raises(ValueError, match="offsets in 32 bits"):
        wide.run((), ())
