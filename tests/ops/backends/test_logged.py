"""What PyTorch logs while an attention is compiled: nothing about the checkpoint inside of it."""

import subprocess
import sys

import pytest

PROGRAM = """
import torch
from relvit.ops import AxisTables, RelativeTerms, make_grid, relative_attention
query, table, grid = torch.randn(1, 2, 6, 8, requires_grad=True), torch.randn(3, 8), make_grid(2, 3)
terms = RelativeTerms(key=AxisTables(table, table))
attend = torch.compile(lambda query: relative_attention(query, query, query, terms, grid), backend="aot_eager")
attend(query).sum().backward()
torch._higher_order_ops.wrap.log.warning("something else")
"""


@pytest.mark.slow
def test_a_compiled_training_step_prints_nothing_of_checkpoints():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert "context_fn" not in done.stderr
    assert "something else" in done.stderr
