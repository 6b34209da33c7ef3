"""The GPU check, run on the CPU: it passes there, and reports wrong backends."""

import math
from contextlib import nullcontext

import pytest
import torch
from scripts import load
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from relvit.ops import Choice
from relvit.ops.backends import tiled

gpu_check, gpu_log, gpu_scenes = map(load, ("gpu_check", "gpu_log", "gpu_scenes"))
right = tiled.relative_attention
DTYPES = ("float64", "float32", "bfloat16", "float16")


@pytest.mark.slow
def test_all_is_well_on_the_cpu(capsys):
    assert gpu_check.main(["--device=cpu", "--quick"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    count = sum(line.startswith("ok   ") for line in lines)
    skipped = [line for line in lines if line.startswith("skip ")]
    # `lean` refuses query terms, so its lines are skipped, too.
    assert last.startswith(f"{count} ok, {len(skipped)} skip, 8 note in ")
    assert [line.split()[1] for line in skipped if ", lean, " not in line] == ["kernels", "memory", "compiled"]
    assert "ok   autocast kvb, backward inside, lean" in "\n".join(lines)
    printed = "\n".join(lines)
    for backend in ("fused", "tiled", "gathered", "auto"):
        for dtype in DTYPES:
            assert f"ok   far apart, AxisTables qkvb, {backend}, {dtype} " in printed
    assert "ok   cross, JointTable qkvb, gathered, float16 " in printed


def with_a_wrong_gradient(inputs):
    query = inputs.query
    return right(inputs._replace(query=query + 1e-4 * (query - query.detach())))


def refusing(inputs):
    raise RuntimeError("no kernel\nfor this")


@pytest.mark.parametrize(
    ("wrong", "dtypes", "remark"),
    [
        (with_a_wrong_gradient, DTYPES[:2], ""),
        (lambda inputs: right(inputs) + 1e-12, DTYPES[:3], "result"),
        (lambda inputs: right(inputs) * math.nan, DTYPES, ""),
        (refusing, DTYPES, "RuntimeError: no kernel"),
    ],
    ids=["wrong gradient", "leak", "NaN", "refusal"],
)
def test_a_wrong_backend_is_a_failure(wrong, dtypes, remark, monkeypatch, capsys):
    scenes = {scene.name: scene for scene in gpu_scenes.draw_scenes(quick=True)}
    # Results of one sample must be zero, so any other number is wrong, however small.
    scene = scenes["sample without valid key"]._replace(letters=("qkvb",))
    monkeypatch.setattr(tiled, "relative_attention", wrong)
    gpu_check.check_scene(gpu_check.Log(), scene, "cpu")
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL ")]
    # On the CPU 'auto' chooses 'tiled' as well.
    names = [f"sample without valid key, AxisTables qkvb, {name}, {{}} " for name in ("tiled", "auto")]
    expected = [name.format(dtype) for name in names for dtype in dtypes]
    assert len(failed) == len(expected)
    assert all(name in line and remark in line for name, line in zip(expected, failed, strict=True))


def test_auto_that_runs_something_else_is_a_failure(monkeypatch, capsys):
    scene = next(gpu_scenes.draw_scenes(quick=True))._replace(letters=("qkvb",))
    monkeypatch.setattr(gpu_check, "choose", lambda *_: Choice("fused", "", ""))
    gpu_check.check_scene(gpu_check.Log(), scene, "cpu")
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL ")]
    # Only the lines of 'auto' fail, because the results of all backends are right, also in half precision.
    assert len(failed) == 4
    assert all(", auto, " in line and "chosen fused, ran " in line for line in failed)


def test_a_failure_is_the_exit_status(monkeypatch):
    scene = next(gpu_scenes.draw_scenes(quick=True))._replace(letters=("kv",))
    monkeypatch.setattr(gpu_check, "draw_scenes", lambda quick: [scene])
    monkeypatch.setattr(tiled, "relative_attention", refusing)
    for name in ("report_determinism", "check_autocast", "check_attention_free"):
        monkeypatch.setattr(gpu_check, name, lambda *_, **__: None)
    assert gpu_check.main(["--device=cpu", "--quick"]) == 1


def test_relative_error():
    want = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert gpu_log.relative_error(torch.tensor([3.0, 4.5]), want) == pytest.approx(0.1)
    assert gpu_log.relative_error(torch.tensor([3.0, math.nan]), want) == math.inf
    assert gpu_log.relative_error(torch.zeros(2), 0 * want) == 0
    assert gpu_log.relative_error(torch.tensor([0.0, 1e-30]), 0 * want) == math.inf


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_without_a_gpu_it_names_the_option(device):
    if getattr(torch, device).is_available():
        pytest.skip(f"this machine has a GPU ({device}), so the refusal cannot be seen")
    with pytest.raises(ValueError, match=f"device '{device}' needs a GPU, torch sees none: use --device cpu"):
        gpu_check.main([f"--device={device}", "--quick"])


class WithoutFloat64(TorchDispatchMode):
    """Raise an error, as MPS does, if an operation makes a float64 tensor from tensors of other dtypes."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given, made = ({getattr(each, "dtype", None) for each in tree_leaves(tree)} for tree in (args, out))
        if torch.float64 in made - given:
            raise TypeError(f"{function} needs float64")
        return out


# On MPS, piecewise buckets are computed on the CPU. The scene 'cross' also has padding.
@pytest.mark.parametrize("name", ["table per head", "cross", "causal"])
def test_as_on_mps_nothing_needs_float64(name, monkeypatch, capsys):
    (scene,) = (scene for scene in gpu_scenes.draw_scenes(quick=True) if scene.name == name)

    def outcome(scene, terms, device, dtype, backend="auto"):
        with WithoutFloat64() if backend != "reference" else nullcontext():
            return gpu_scenes.outcome(scene, terms, device, dtype, backend)

    monkeypatch.setattr(gpu_check, "has_dtype", lambda device, dtype: dtype in (torch.float32, torch.float16))
    monkeypatch.setattr(gpu_check, "outcome", outcome)
    log = gpu_check.Log()
    gpu_check.check_scene(log, scene, "cpu")
    # Two dtypes in three backends and 'auto', and joint tables in one backend; `lean` refuses query terms.
    assert log.counts == {"ok": 2 * (4 + 1), "skip": 2}, capsys.readouterr().out


def test_each_short_part_has_kernels_of_its_own(monkeypatch):
    found = []
    monkeypatch.setattr(gpu_check, "check_parts", lambda log, parts, *_: found.extend(parts))
    assert gpu_check.main(["--device=cpu", "--short"]) == 0
    *scenes, _ = (part.keywords for part in found)
    every = [(each["scene"].name, *each["scene"].letters, *each["dtypes"]) for each in scenes]
    assert len(set(every)) == len(every)
    assert {len(each) for each in every} == {3}
    assert {each[1:] for each in every if each[0] == "padding 9x32"} == {
        (letters, dtype) for letters in ("kv", "b") for dtype in gpu_check.SHORT_DTYPES
    }


def broken(log):
    raise RuntimeError("out of order\nby now")


def test_an_error_outside_the_checks_is_a_failure_of_its_part_alone(monkeypatch, capsys):
    log = gpu_check.Log()
    good = gpu_check.partial(gpu_check.Log.print, status="ok", name="fine", remark="")
    gpu_check.check_parts(log, [gpu_check.partial(broken), good], 1, math.inf)
    assert capsys.readouterr().out == "FAIL broken RuntimeError: out of order\nok   fine\n"
    assert log.counts == {"FAIL": 1, "ok": 1}
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    assert gpu_check.counted(gpu_check.partial(broken)) == {"FAIL": 1}
    assert threads == [1]


def test_a_layer_that_does_not_compile_is_a_failure_of_its_own(monkeypatch):
    log = gpu_check.Log()
    monkeypatch.setattr(gpu_check.gpu_aft, "operations", lambda grid: ())
    monkeypatch.setattr(gpu_check.gpu_aft, "compiled_outcome", lambda *_: broken(None))
    gpu_check.check_attention_free(log, "cuda", quick=True)
    assert log.counts == {"FAIL": 2}
