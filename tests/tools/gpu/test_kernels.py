"""The kernels of the backend 'triton', compiled for GPUs without a GPU: registers, shared memory, instructions."""

import pytest
import torch

pytest.importorskip("triton")
import triton
from scripts import load

from relvit.ops import AxisTables, RelativeTerms, make_grid
from relvit.ops.backends.triton.lookup import key_operands
from relvit.ops.inputs import AttentionInputs, checked

kernels = load("kernels")
# Bytes of a thread: Triton 3.6 spills a few registers of the kernels for terms, which smaller tiles would not spare.
SPILLED = 32 if triton.__version__.startswith("3.6.") else 0


def check_registers_and_shared_memory(arch, size, **options):
    for kernel in kernels.KERNELS:
        code = kernels.compiled(kernel, arch, size, **options)
        assert code.spilled <= SPILLED, kernel.__name__
        assert code.shared <= kernels.SHARED_LIMIT[arch], kernel.__name__


# sm_86 has the tiles of sm_80 and less shared memory. Narrower heads and no padding take fewer registers.
@pytest.mark.slow
@pytest.mark.parametrize("arch", [86, 90])
@pytest.mark.parametrize(
    ("dim", "dtype", "size", "padded"),
    [
        (64, torch.bfloat16, (14, 14), True),
        (64, torch.float16, (32, 32), True),
        # A tile of the forward kernel is one row.
        (64, torch.bfloat16, (64, 64), True),
        (128, torch.bfloat16, (14, 14), True),
        (128, torch.float16, (37, 50), False),
    ],
)
def test_no_register_spills_and_shared_memory_fits(arch, dim, dtype, size, padded):
    check_registers_and_shared_memory(arch, size, dim=dim, dtype=dtype, padded=padded)


# All architectures have the same tiles in float32.
@pytest.mark.slow
def test_no_register_spills_in_float32():
    check_registers_and_shared_memory(86, (14, 14), dtype=torch.float32, padded=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    # A global layer at 1,024 px with heads of ViT-B and ViT-L, then of ViT-H; all windows of such an image at once.
    ("arch", "side", "batch", "dim"),
    [(80, 64, 1, 64), (90, 64, 1, 80), (90, 14, 25, 64)],
)
def test_shapes_of_sam(arch, side, batch, dim):
    table = torch.zeros(2 * side - 1, dim)
    contents = torch.empty(3, 1, 1, side * side, dim)
    inputs = AttentionInputs(*contents, RelativeTerms(key=AxisTables(table, table)), make_grid(side, side))
    entries = key_operands(checked(inputs))[0].shape[1]
    check_registers_and_shared_memory(arch, (side, side), dim=dim, entries=(entries, 0), batch=batch)


# BEiT-B at 512 px, whose prefix biases are channels; ViT-H; a relpos ViT; windows of Swin.
@pytest.mark.slow
@pytest.mark.parametrize("arch", [86, 90])
@pytest.mark.parametrize(
    ("dims", "dtype", "grid", "padded"),
    [
        ((80, 64), torch.bfloat16, make_grid(32, 32, 1), False),
        ((80, 80), torch.float16, make_grid(37, 50), True),
        ((64, 64), torch.bfloat16, make_grid(14, 14, 1), True),
        ((32, 32), torch.float16, make_grid(7, 7), True),
        ((96, 96), torch.bfloat16, make_grid(24, 16), True),
        ((128, 128), torch.bfloat16, make_grid(14, 14), True),
        ((64, 64), torch.float32, make_grid(14, 14, 1), True),
    ],
)
def test_a_joint_bias_spills_no_registers_and_fits_shared_memory(arch, dims, dtype, grid, padded):
    for kernel in kernels.JOINT_KERNELS:
        code = kernels.compiled_joint(kernel, arch, grid, dims=dims, dtype=dtype, padded=padded)
        assert code.spilled == 0, kernel.__name__
        assert code.shared <= kernels.SHARED_LIMIT[arch], kernel.__name__


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
def test_terms_take_no_tensor_core_instructions(arch):
    for kernel in kernels.KERNELS:
        for side, most in ((14, 1.15), (64, 1.02)):
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
    assert printed.count("| 14x14 |") == 9 + 12
