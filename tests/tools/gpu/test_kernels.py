"""The kernels of the backend 'triton', compiled for GPUs that are not there."""

import pytest
import torch

pytest.importorskip("triton")
from scripts import load

from relvit.ops import AxisTables, RelativeTerms, make_grid
from relvit.ops.backends.triton.lookup import key_operands
from relvit.ops.inputs import AttentionInputs, checked

kernels = load("kernels")


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 86, 90])
@pytest.mark.parametrize(
    ("dim", "dtype", "size", "padded"),
    [
        (64, torch.bfloat16, (14, 14), False),
        (64, torch.bfloat16, (32, 32), True),
        (32, torch.float16, (14, 10), True),
        (128, torch.bfloat16, (14, 14), True),
        (128, torch.float16, (37, 50), False),
        (64, torch.float32, (14, 14), True),
    ],
)
def test_no_register_spills_and_shared_memory_fits(arch, dim, dtype, size, padded):
    for kernel in kernels.KERNELS:
        code = kernels.compiled(kernel, arch, size, dim=dim, dtype=dtype, padded=padded)
        assert code.spilled == 0, kernel.__name__
        assert code.shared <= kernels.SHARED_LIMIT[arch], kernel.__name__


@pytest.mark.slow
@pytest.mark.parametrize(
    # A global layer at 1,024 px, and all windows of such an image at once; heads of ViT-B and ViT-L, then of ViT-H.
    ("arch", "side", "batch", "dim"),
    [(80, 64, 1, 64), (90, 64, 1, 64), (80, 14, 25, 64), (90, 14, 25, 64), (90, 64, 1, 80)],
)
def test_shapes_of_sam(arch, side, batch, dim):
    table = torch.zeros(2 * side - 1, dim)
    contents = torch.empty(3, 1, 1, side * side, dim)
    inputs = AttentionInputs(*contents, RelativeTerms(key=AxisTables(table, table)), make_grid(side, side))
    entries = key_operands(checked(inputs))[0].shape[1]
    for kernel in kernels.KERNELS:
        code = kernels.compiled(kernel, arch, (side, side), dim=dim, entries=(entries, 0), batch=batch)
        assert code.spilled == 0, kernel.__name__
        assert code.shared <= kernels.SHARED_LIMIT[arch], kernel.__name__


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
def test_terms_take_no_tensor_core_instructions(arch):
    for kernel in kernels.KERNELS:
        for side, most in ((14, 1.15), (32, 1.02), (64, 1.02)):
            on, off = (kernels.compiled(kernel, arch, (side, side), terms=terms) for terms in (True, False))
            on, off = (
                code.tensor * kernels.tiles_per_head(kernel, code, (side, side), terms)
                for code, terms in ((on, True), (off, False))
            )
            assert on <= most * off, (kernel.__name__, side)


@pytest.mark.slow
def test_the_table(capsys):
    kernels.main(["--size", "224"])
    printed = capsys.readouterr().out
    assert printed.count("| 14x14 |") == 9
