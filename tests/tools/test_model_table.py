"""The table of models: counts against PyTorch's own and by hand, and the README's copy."""

import pytest
import timm
import torch
from scripts import ROOT, load
from torch.utils.flop_counter import FlopCounterMode

model_table = load("model_table")


def create(name, **kwargs):
    with torch.device("meta"):
        return timm.create_model(name, **kwargs).eval()


# One of each size and each kind.
@pytest.mark.parametrize("name", ["relvit_tiny", "relvit_small_reg4_gap", "relvit_small_patch4_32", "test_relvit"])
def test_all_but_the_relative_part_is_what_pytorch_counts(name):
    plain = create(name, rel_terms="")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        plain(torch.empty(1, *plain.pretrained_cfg["input_size"], device="meta"))
    cost, relative = model_table.cost(plain), model_table.cost(create(name))
    assert cost.macs == relative.macs - relative.relative_macs == counter.get_total_flops() / 2
    assert cost.relative_parameters == cost.relative_macs == 0
    assert cost.parameters == relative.parameters - relative.relative_parameters


@pytest.mark.parametrize(
    ("name", "kwargs", "parameters", "macs"),
    [
        # 12 blocks, 6 heads of 64, 14 x 14 patches: a row per offset from -7 to 7 on two axes, for keys and values.
        ("relvit_small", {}, 12 * 60 * 64, 12 * 6 * 196 * 60 * 64),
        ("relvit_small_reg4_gap", {}, 12 * 60 * 64, 12 * 6 * 196 * 60 * 64),
        ("relvit_tiny_patch4_32", {"max_distance": (2, 3)}, 12 * 24 * 64, 12 * 3 * 64 * 24 * 64),
        # Tables per head: more parameters, as many products. Biases are looked up.
        ("relvit_small", {"rel_terms": "k", "shared_heads": False}, 12 * 6 * 30 * 64, 12 * 6 * 196 * 30 * 64),
        ("relvit_small", {"rel_terms": "qb"}, 12 * (30 * 64 + 6 * 30), 12 * 6 * 196 * 30 * 64),
    ],
)
def test_relative_part_by_hand(name, kwargs, parameters, macs):
    cost = model_table.cost(create(name, **kwargs))
    assert (cost.relative_parameters, cost.relative_macs) == (parameters, macs)


def test_readme_has_the_table_as_it_is():
    text = (ROOT / "README.md").read_text()
    assert model_table.written(text) == text
    for name in timm.list_models("relvit_*"):
        assert text.count(f"| `{name}` | ") == 1


def test_write_changes_the_table_and_nothing_else(tmp_path, monkeypatch, capsys):
    readme = tmp_path / "README.md"
    monkeypatch.setattr(model_table, "README", readme)
    monkeypatch.setattr(model_table, "table", lambda: "| new |")
    begin, end = model_table.BEGIN, model_table.END
    readme.write_text(f"before\n{begin}\n| old |\n{end}\nafter {end}\n")
    model_table.main(["--write"])
    assert readme.read_text() == f"before\n{begin}\n\n| new |\n\n{end}\nafter {end}\n"
    model_table.main([])
    assert capsys.readouterr().out == "| new |\n"
    with pytest.raises(ValueError, match="expected one table between the lines"):
        model_table.written("no table")
