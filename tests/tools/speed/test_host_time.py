"""The tool for host time: it prints all figures, counts operations correctly, and its table has a row per version."""

import json
from types import SimpleNamespace

import pytest
import torch
from scripts import ROOT, load
from timm.layers import DropPath
from torch import nn

from relvit.ops.attention import BACKENDS

recorded, tool = load("recorded"), load("host_time")


@pytest.mark.slow
def test_one_layer_and_one_round_print_all_figures(capsys):
    names = ["relvit_small", "rope", "relpos retrofitted", "sam retrofitted", "swin retrofitted"]
    threads = torch.get_num_threads()
    tool.main(["--layers", "1", "--rounds", "1", "--names", *names])
    torch.set_num_threads(threads)
    head, _, *lines = capsys.readouterr().out.splitlines()
    rows = {cells[0]: cells[1:] for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)}
    # The tool also measures the baselines, which come first.
    assert list(rows) == ["plain", *names[:2], "relpos", names[2], "sam", names[3], "swin", names[4]]
    assert [rows[name][2] for name in names] == ["plain", "plain", "relpos", "sam", "swin"]
    for cells in rows.values():
        assert len(cells) == head.count("|") - 2
        assert all(float(cell) > 0 for cell in (*cells[:2], *cells[3:7]))
    assert rows["plain"][-1] == "+0"
    assert rows["plain"][3:5] == ["1.00", "1.00"]


@pytest.mark.parametrize("name", ["relpos", "sam", "beit", "swin"])
def test_sources_have_no_stochastic_depth(name):
    assert not any(isinstance(part, DropPath) for part in tool.KNOWN[name].build(2).modules())


def test_a_baseline_is_compared_with_its_own():
    found = tool.measure(["relpos retrofitted"], 1, 1)
    assert list(found) == ["plain", "relpos", "relpos retrofitted"]


def test_the_default_names_have_every_backend_that_runs_on_a_cpu():
    backends = {name.removeprefix("relvit_small_") for name in tool.DEFAULT if name.startswith("relvit_small_")}
    assert backends == set(BACKENDS) - {"reference", "triton"}
    assert {"plain", "relpos", "rope", "rope_mixed", *tool.SHOWN} < set(tool.DEFAULT)


class Layers(nn.Module):
    """A model whose layers have 4 operations in forward and 9 in a step; the pooling does not belong to a layer."""

    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, image):
        x = image.mean((1, 2)).reshape(8, 4)
        for layer in self.layers:
            # A layer has a product, an activation, a copy and a sum. Views, and dropout in evaluation, do not count.
            x = nn.functional.dropout(layer(x).relu().T.contiguous().T, training=False) + x
        return x


def test_operations_of_a_layer(monkeypatch):
    monkeypatch.setitem(tool.KNOWN, "layers", tool.Model(Layers, "layers"))
    for layers in (1, 4):
        # Backward has the gradient of relu, two products, the sum for the bias, and the sum of both gradients of x.
        counts = [tool.operations_of_layer("layers", layers, mode) for mode in tool.MODES]
        assert counts == [4, 9]


def test_the_table_of_versions(tmp_path, monkeypatch):
    page = tmp_path / "README.md"
    page.write_text(f"before\n{tool.TOOL.begin}\n<!-- end -->\nafter\n")
    rows = {"relvit_small": {mode: {"ratio": ratio} for mode, ratio in zip(tool.MODES, (1.234, 2.5), strict=True)}}
    for commit in ("a" * 40, "b" * 40):
        monkeypatch.setattr(
            recorded, "surroundings", lambda device, c=commit: {"commit": c, "versions": {"relvit": "9.8"}}
        )
        tool.TOOL.write(rows, tmp_path)
    assert [json.loads(line)["commit"][0] for line in (tmp_path / "host_time.jsonl").open()] == ["a", "b"]
    text = page.read_text()
    assert f"| 9.8, aaaaaaaa | 1.23, 2.50 |{' – |' * (len(tool.SHOWN) - 1)}\n| 9.8, bbbbbbbb | 1.23, 2.50 |" in text
    assert (text[:6], text[-6:]) == ("before", "after\n")


def test_ratios_pair_the_rounds():
    ours, theirs = (SimpleNamespace(samples={"step": list(times)}) for times in ((1, 3, 10), (1, 1, 5)))
    assert tool.ratio(ours, theirs, "step") == 2


def test_a_name_that_is_not_known():
    with pytest.raises(ValueError, match=r"--names is 'ropes'; .*did you mean 'rope'"):
        tool.main(["--names", "ropes"])


def test_the_page_shows_the_recorded_runs():
    runs = [json.loads(line) for line in (ROOT / "docs/benchmarks/host_time.jsonl").open()]
    assert tool.table_of_versions(runs) in (ROOT / "docs/benchmarks/README.md").read_text()
