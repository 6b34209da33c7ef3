"""What PyTorch logs while a model is compiled: nothing about the checkpoints inside of relvit's layers."""

import subprocess
import sys

import pytest

PROGRAM = """
import timm, torch, relvit
model = timm.create_model("test_relvit", num_classes=2)
torch.compile(model, backend="aot_eager")(torch.randn(1, 3, 224, 224)).sum().backward()
torch._higher_order_ops.wrap.log.warning("something else")
"""


@pytest.mark.slow
def test_a_compiled_training_step_prints_nothing_of_checkpoints():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert "context_fn" not in done.stderr
    assert "something else" in done.stderr
