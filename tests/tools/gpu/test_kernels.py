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
# The largest number of bytes of spilled registers. Triton 3.6 spills a few registers, and smaller tiles would not help.
SPILLED = 32 if triton.__version__.startswith("3.6.") else 0


def check_registers_and_shared_memory(arch, size, **options):
    for kernel in kernels.KERNELS:
        code = kernels.compiled(kernel, arch, size, **options)
        assert code.spilled <= SPILLED, kernel.__name__
        assert code.shared <= kernels.SHARED_LIMIT[arch], kernel.__name__


# sm_86 has the same tiles as sm_80 and less shared memory. Narrower heads, or grids without padding, take fewer
# registers.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "dim", "dtype", "size", "padded"),
    [
        (86, 64, torch.float16, (32, 32), True),
        (90, 64, torch.bfloat16, (14, 14), True),
        # For this grid a tile of the forward kernel is one row.
        *((arch, 64, torch.bfloat16, (64, 64), True) for arch in (86, 90)),
        *((arch, 128, torch.bfloat16, (14, 14), True) for arch in (86, 90)),
        (90, 128, torch.float16, (37, 50), False),
    ],
)
def test_no_register_spills_and_shared_memory_fits(arch, dim, dtype, size, padded):
    check_registers_and_shared_memory(arch, size, dim=dim, dtype=dtype, padded=padded)


# In float32 all architectures have the same tiles.
@pytest.mark.slow
def test_no_register_spills_in_float32():
    check_registers_and_shared_memory(86, (14, 14), dtype=torch.float32, padded=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    # These are a global layer at 1,024 px with heads of ViT-B and ViT-L, then with heads of ViT-H, and all windows of
    # such an image as a batch.
    ("arch", "side", "batch", "dim"),
    [(80, 64, 1, 64), (90, 64, 1, 80), (90, 14, 25, 64)],
)
def test_shapes_of_sam(arch, side, batch, dim):
    table = torch.zeros(2 * side - 1, dim)
    contents = torch.empty(3, 1, 1, side * side, dim)
    inputs = AttentionInputs(*contents, RelativeTerms(key=AxisTables(table, table)), make_grid(side, side))
    entries = key_operands(checked(inputs))[0].shape[1]
    check_registers_and_shared_memory(arch, (side, side), dim=dim, entries=(entries, 0), batch=batch)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "side", "most"), [(80, 14, 1.15), (90, 14, 1.15), (90, 64, 1.02)])
def test_terms_take_no_tensor_core_instructions(arch, side, most):
    for kernel in kernels.KERNELS:
        on, off = (kernels.compiled(kernel, arch, (side, side), terms=terms) for terms in (True, False))
        on, off = (
            code.tensor * kernels.tiles_per_head(kernel, code, (side, side), terms)
            for code, terms in ((on, True), (off, False))
        )
        assert on <= most * off, kernel.__name__


@pytest.mark.slow
def test_the_table_has_a_line_for_each_kernel_and_architecture(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "SHARED_LIMIT", {80: kernels.SHARED_LIMIT[80], 90: kernels.SHARED_LIMIT[90]})
    kernels.main(["--size", "224"])
    lines = [line for line in capsys.readouterr().out.splitlines() if "| 14x14 |" in line]
    of_kernels = [(kernel.__name__, arch) for arch in (80, 90) for kernel in kernels.KERNELS]
    of_kernels += [(kernel.__name__, arch) for arch in (80, 90) for kernel in kernels.JOINT_KERNELS]
    assert [(line.split("|")[1].strip(), int(line.split("|")[4])) for line in lines] == of_kernels
