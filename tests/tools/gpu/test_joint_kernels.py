"""The kernels for a joint bias, compiled for GPUs without a GPU: registers and shared memory."""

import pytest
import torch

pytest.importorskip("triton")
from scripts import load

from relvit.ops import make_grid

kernels = load("kernels")


# The cases are BEiT-B at 512 px, whose prefix biases are channels, ViT-H, a relpos ViT, and windows of Swin. Tiles
# depend on the kernel, the architecture, and whether heads are wider than 64, so each combination occurs here.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "dims", "dtype", "grid", "padded"),
    [
        (86, (80, 64), torch.bfloat16, make_grid(32, 32, 1), False),
        (86, (64, 64), torch.bfloat16, make_grid(14, 14, 1), True),
        (86, (128, 128), torch.bfloat16, make_grid(14, 14), True),
        (86, (64, 64), torch.float32, make_grid(14, 14, 1), True),
        (90, (80, 80), torch.float16, make_grid(37, 50), True),
        (90, (64, 64), torch.bfloat16, make_grid(14, 14, 1), True),
        (90, (32, 32), torch.float16, make_grid(7, 7), True),
        (90, (96, 96), torch.bfloat16, make_grid(24, 16), True),
        (90, (128, 128), torch.bfloat16, make_grid(14, 14), True),
    ],
)
def test_a_joint_bias_spills_no_registers_and_fits_shared_memory(arch, dims, dtype, grid, padded):
    for kernel in kernels.JOINT_KERNELS:
        code = kernels.compiled_joint(kernel, arch, grid, dims=dims, dtype=dtype, padded=padded)
        assert code.spilled == 0, kernel.__name__
        assert code.shared <= kernels.SHARED_LIMIT[arch], kernel.__name__
