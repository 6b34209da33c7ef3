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


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        # Zhai et al. 2021, table 4, whose numbers have one digit; the rest is counted by hand.
        ("relvit_aft_full_tiny", "6.323"),
        ("relvit_aft_full_small", "22.656"),
        ("relvit_aft_conv_tiny_k11_h32", "5.356"),
        ("relvit_aft_conv_tiny_k11_h192", "5.963"),
        ("relvit_aft_conv_small_k11_h16", "20.298"),
        ("relvit_aft_conv_small_k11_h384", "22.541"),
        ("relvit_aft_conv_small_k15_h384", "23.021"),
    ],
)
def test_parameters_are_those_of_the_paper_on_models_without_attention(name, millions):
    assert f"{model_table.cost(create(name)).parameters / 1e6:.3f}" == millions


@pytest.mark.parametrize("kwargs", [{"mixer": "simple"}, {"mixer": "full"}, {"mixer": "local", "window": 2}], ids=str)
def test_products_without_attention_are_what_pytorch_counts(kwargs):
    model = create("test_relvit_aft", **kwargs, num_heads=1, img_size=(48, 80), pos_embed="")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.empty(1, 3, 48, 80, device="meta"))
    # On the grid of the model's own the interpolation of both factors, rows and columns, changes nothing.
    interpolation = 0 if kwargs["mixer"] == "simple" else 6 * 2 * 128 * (3 * 3 * 5 + 5 * 5 * 3)
    assert model_table.cost(model).macs == counter.get_total_flops() / 2 - interpolation


def test_products_of_windows_are_what_pytorch_counts_as_convolutions():
    model = create("test_relvit_aft", img_size=(48, 80), backend="convolution")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.empty(1, 3, 48, 80, device="meta"))
    stem = 15 * model.patch_embed.proj.weight.numel()
    cost = model_table.cost(model)
    convolutions = counter.get_flop_counts()["Global"][torch.ops.aten.convolution]
    assert cost.relative_macs == convolutions / 2 - stem
    assert cost.relative_parameters == 6 * 2 * (5 * 5 + 2)


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
