"""Compiled models: kernels and operations of a layer beyond plain's, one graph for several sizes; the tool's table."""

import json

import pytest
import torch
from scripts import ROOT, load

recorded, tool = load("recorded"), load("compiled_kernels")

# A layer may have at most this number of kernels, and of operations before fusion, beyond plain's.
MOST = {
    ("plain retrofitted", "forward"): (6, 12),
    ("plain retrofitted", "step"): (15, 33),
    ("relvit_small", "forward"): (5, 11),
}


@pytest.mark.slow
def test_layers_have_few_kernels_beyond_plain():
    counts = {(name, mode): tool.count(name, 2, mode) for name, mode in [*MOST, *(("plain", m) for m in tool.MODES)]}
    for (name, mode), most in MOST.items():
        beyond = [counts[name, mode][key] - counts["plain", mode][key] for key in tool.COUNTS]
        assert all(count <= bound for count, bound in zip(beyond, most, strict=True)), (name, mode, beyond)


@pytest.mark.slow
def test_one_graph_serves_all_sizes():
    graphs, model = [], tool.build("plain retrofitted", 1)

    def backend(graph, _example):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for size in ((224, 112), (112, 224), (336, 224)):
        compiled(torch.randn(2, 3, *size))
    assert len(graphs) == 1


def test_the_table_of_versions(tmp_path, monkeypatch):
    page = tmp_path / "README.md"
    page.write_text(f"before\n{tool.TOOL.begin}\n<!-- end -->\nafter\n")
    rows = {
        name: {mode: dict.fromkeys(tool.COUNTS, count) for mode, count in zip(tool.MODES, counts, strict=True)}
        for name, counts in {
            "plain": (15, 42),
            "relvit_small": (21, 52),
            "sam": (9, 30),
            "sam retrofitted": (8, 31),
        }.items()
    }
    versions = {"relvit": "9.8", "torch": "2.3"}
    monkeypatch.setattr(recorded, "surroundings", lambda device: {"commit": "a" * 40, "versions": versions})
    tool.TOOL.write(rows, tmp_path)
    text = page.read_text()
    assert "| 9.8, aaaaaaaa, 2.3 | 15, 42 | +6, +10 | – | -1, +1 |" in text
    assert (text[:6], text[-6:]) == ("before", "after\n")


def test_a_name_that_is_not_known():
    with pytest.raises(ValueError, match=r"--names is 'ropes'; .*did you mean 'rope'"):
        tool.main(["--names", "ropes"])


def test_the_page_shows_the_recorded_runs():
    runs = [json.loads(line) for line in (ROOT / "docs/benchmarks/compiled_kernels.jsonl").open()]
    assert tool.table_of_versions(runs) in (ROOT / "docs/benchmarks/README.md").read_text()
