"""The backend 'triton': results in Triton's interpreter, in a new process, and inputs that it refuses."""

import ast
import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from draws import draw_case
from packaging.version import Version
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from relvit.ops import Channels, choose, make_grid, relative_attention
from relvit.ops.backends import triton
from relvit.ops.backends.triton import lookup
from relvit.ops.inputs import AttentionInputs, checked
from relvit.utils.old_torch import BUILDS_KERNELS

SUPPORT = Path(__file__).parents[2] / "support"
VERSION = pytest.importorskip("triton").__version__


def test_a_half_precision_bias_is_divided_by_the_scale_without_rounding():
    q, k, v, terms, grid = draw_case(2, 3, which="b", distance=(1, 2))
    q, k, v, terms = tree_map_only(torch.Tensor, torch.Tensor.bfloat16, (q, k, v, terms))
    inputs = checked(AttentionInputs(q, k, v, terms, grid, scale=0.3))
    bias = lookup.key_operands(inputs)[1][0]
    expected = torch.cat([table.float() / 0.3 for table in terms.bias])
    torch.testing.assert_close(bias[1 : 1 + len(expected)], expected)


@pytest.mark.skipif(Version(VERSION) < Version("3.7"), reason="interpreters before Triton 3.7 do not know NumPy 2.4")
@pytest.mark.slow
def test_in_the_interpreter():
    tests = [str(SUPPORT / name) for name in ("interpreted_triton.py", "interpreted/joint_bias.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1100)
    assert run.returncode == 0, run.stdout[-6000:]


def test_the_kernels_have_no_nested_targets_which_the_oldest_triton_refuses():
    # Triton 3.6, which comes with PyTorch 2.11, fails at `(a, b), c = ...` with a `TypeError`.
    from triton import JITFunction

    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(triton.__path__, "relvit.ops.backends.triton.")
    ]
    kernels = {
        function for module in modules for function in vars(module).values() if isinstance(function, JITFunction)
    }
    targets = [
        (kernel.fn.__name__, part)
        for kernel in kernels
        for node in ast.walk(kernel.parse())
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Tuple)
        for part in target.elts
    ]
    assert targets
    assert {name for name, part in targets if isinstance(part, ast.Tuple)} == set()


COORDS = torch.cartesian_prod(torch.arange(2), torch.arange(3))


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        ({}, {"dropout_p": 0.1}, r"no dropout on attention weights, got dropout_p=0.1: use 'fused'"),
        ({}, {"is_causal": True}, "no attn_mask and no is_causal"),
        ({}, {"attn_mask": torch.ones(6, 6, dtype=torch.bool)}, "no attn_mask and no is_causal"),
        ({}, {"key_grid": make_grid(2, 3, coords=COORDS)}, "keys in raster order, not with coords"),
        ({"which": "qk"}, {}, r"no query term \(terms.query\): use 'fused'"),
        ({"dim": 129}, {}, "head dimensions up to 128, got 129"),
        ({"layout": "joint"}, {}, "terms.key is a joint table: use 'gathered' or 'reference', not 'triton'"),
        ({"layout": "joint", "which": "b"}, {"is_causal": True}, "no attn_mask and no is_causal"),
    ],
)
def test_refused(case, options, message, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    q, k, v, terms, grid = draw_case(2, 3, **case)
    with pytest.raises(ValueError, match=message):
        relative_attention(q.float(), k.float(), v.float(), terms, grid, backend="triton", **options)


def test_a_joint_bias_beside_other_tables_or_with_coords_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    q, k, v, terms, grid = draw_case(2, 3, which="kb", layout="joint")
    q, k, v = (part.float() for part in (q, k, v))

    def reason(terms, grid, key_grid=grid):
        return triton.refusal(checked(AttentionInputs(q, k, v, terms, grid, key_grid)))

    alone = terms._replace(key=None)
    assert reason(alone, grid) is None
    assert "a joint table as the bias alone" in reason(terms, grid)
    separate = draw_case(2, 3, which="k")[3].key
    assert "a joint bias without key and value terms" in reason(terms._replace(key=separate), grid)
    assert "without coords of the queries" in reason(alone, grid._replace(coords=COORDS))


def test_refused_devices_dtypes_and_transforms(monkeypatch):
    q, k, v, terms, grid = draw_case(2, 3)
    with pytest.raises(ValueError, match="backend 'triton' needs a GPU, the query is on cpu"):
        relative_attention(q, k, v, terms, grid, backend="triton")
    with pytest.raises(ValueError, match="backend 'triton' cannot be compiled"):
        torch.func.grad(lambda q: relative_attention(q, k, v, terms, grid, backend="triton").sum())(q)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="takes float16, bfloat16 and float32, not"):
        relative_attention(q, k, v, terms, grid, backend="triton")


def choice_on_a_gpu(monkeypatch, capability=(8, 0), hip=None):
    """Return what `choose` takes for a joint bias on a GPU that is not there, and the refusal of the kernels."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    triton._failure_of_triton.cache_clear()
    *tensors, grid = draw_case(2, 3, which="b", layout="joint", dim=16)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = lambda part: mode.from_tensor(part.half()).to("cuda")  # noqa: E731
        inputs = AttentionInputs(*tree_map_only(torch.Tensor, fake, tensors), grid)
        return choose(*inputs[:5]).backend, triton.refusal(checked(inputs))


@pytest.mark.skipif(not BUILDS_KERNELS, reason="PyTorch >= 2.9")
def test_auto_leaves_the_kernels_out_where_they_cannot_run(monkeypatch):
    """A T4 has too little shared memory, AMD's GPUs know no PTX, and slim containers have no C compiler."""
    from triton.runtime import driver

    active = MagicMock()
    monkeypatch.setattr(driver, "_active", active)
    assert choice_on_a_gpu(monkeypatch) == ("triton", None)
    backend, reason = choice_on_a_gpu(monkeypatch, capability=(7, 5))
    assert backend == "fused"
    assert reason.startswith("needs a GPU of compute capability 8.0 (Ampere) or newer, the query's has 7.5")
    backend, reason = choice_on_a_gpu(monkeypatch, capability=(9, 4), hip="6.4")
    assert backend == "fused"
    assert "only NVIDIA's GPUs know" in reason
    active.get_current_target.side_effect = RuntimeError("Failed to find C compiler.\nPlease specify")
    backend, reason = choice_on_a_gpu(monkeypatch)
    assert backend == "fused"
    assert reason.startswith("cannot start Triton (RuntimeError: Failed to find C compiler.); it needs a C compiler")
    triton._failure_of_triton.cache_clear()


def test_channels_count_as_head_dimensions_before_and_after_they_are_appended(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    q, k, v, terms, grid = draw_case(2, 3, dim=127)
    q, k, v = (part.bfloat16() for part in (q, k, v))
    # In half precision, three channels represent each channel.
    channels = Channels(torch.ones(1, 1, 6, 1), torch.ones(1, 1, 6, 1))
    with pytest.raises(ValueError, match="head dimensions up to 128, got 130"):
        relative_attention(q, k, v, terms._replace(channels=channels), grid, backend="triton")
    inputs = AttentionInputs(q, k, v, terms._replace(channels=channels), grid)
    assert "got 130" in triton.refusal(checked(inputs))


@pytest.mark.skipif(not BUILDS_KERNELS, reason="PyTorch >= 2.9")
@pytest.mark.parametrize("layout", ["separate", "joint"])
def test_kernels_run_on_the_gpu_of_their_tensors(layout, monkeypatch):
    from relvit.ops.backends.triton import launch
    from relvit.ops.backends.triton.joint import joint_launch

    current, noted = [0], []

    def exchange(index):
        current.append(index)
        return current[-2]

    for module, name in ((launch, "forward"), (joint_launch, "joint_forward")):
        kernel = MagicMock()
        kernel.__name__ = name
        kernel.__getitem__.return_value.side_effect = lambda *_, **__: noted.append(current[-1])
        monkeypatch.setattr(module, name, kernel)
    monkeypatch.setattr(torch.cuda, "_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=1))
    *tensors, grid = draw_case(2, 3, which="b", layout=layout, dim=16)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        fake = lambda part: mode.from_tensor(part.bfloat16()).to("cuda:1")  # noqa: E731
        q, k, v, terms = tree_map_only(torch.Tensor, fake, tensors)
        relative_attention(q, k, v, terms, grid, backend="triton")
    assert (noted, current[-1]) == ([1], 0)
