"""`relvit explain`: its table, the backends of another device, checkpoints, published folders, and narrow terminals."""

import pytest
import timm
from processes import in_terminal
from timm.models import save_for_hf

import relvit
from relvit.app.cli import main
from relvit.app.cli.commands.explain import as_table


def test_the_table_and_the_backends_on_cuda(capsys):
    assert main(["explain", "test_relvit", "--img_size", "[160,96]", "--model_kwargs.depth", "2"]) == 0
    title, _, *table, _, on_cuda, _, there = capsys.readouterr().out.splitlines()
    assert title == "test_relvit at 160 x 96 pixels, as it would train on the CPU in float32:"
    assert len(table) == 3
    assert "| blocks.0.attn ... blocks.1.attn (2) | RelativePosition2d | kv | lean |" in table[2]
    assert on_cuda == "On CUDA these would be:"
    assert there.startswith("- blocks.0.attn ... blocks.1.attn (2): backend lean, one stock attention over augmented q")


def test_the_table_of_another_device(capsys):
    assert main(["explain", "test_relvit", "--device", "cuda", "--model_kwargs.depth", "1"]) == 0
    title, *_, row = capsys.readouterr().out.splitlines()
    assert "as it would train on CUDA in float32" in title
    assert "| lean |" in row


def test_an_unknown_device_or_model_is_named_with_the_nearest(fails):
    assert "device is 'gpu'; allowed are 'cpu', 'cuda' (did you mean 'cuda'?)" in fails(
        ["explain", "test_relvit", "--device", "gpu"]
    )
    assert "did you mean 'test_relvit'" in fails(["explain", "--model.model", "test_relvitt"])


def test_equal_layers_share_a_row():
    model = timm.create_model("test_relvit", img_size=32, depth=3)
    model.blocks[1].attn.backend = "fused"
    _, _, *rows = as_table(relvit.explain(model)).splitlines()
    assert [row.split("|")[1].strip() for row in rows] == ["blocks.0.attn ... blocks.2.attn (2)", "blocks.1.attn"]


def test_a_published_folder(tmp_path, capsys, fails):
    model = relvit.retrofit(timm.create_model("test_vit", depth=1, img_size=(48, 32), in_chans=1), rel_terms="q")
    # `relvit publish` also writes the size in training as `input_size`.
    model.pretrained_cfg["input_size"] = (1, 48, 32)
    save_for_hf(model, tmp_path / "owls", safe_serialization=True)
    for name in (f"{tmp_path}/owls", f"local-dir:{tmp_path}/owls"):
        assert main(["explain", name]) == 0
        out = capsys.readouterr().out
        assert " at 48 x 32 pixels, " in out
        assert "| blocks.0.attn | RelativePosition2d | q |" in out
    assert "is published with its own arguments" in fails(["explain", f"{tmp_path}/owls", "--retrofit={}"])


def test_an_exported_file_is_named_as_such(tmp_path, fails):
    (tmp_path / "model.onnx").touch()
    message = fails(["explain", tmp_path / "model.onnx"])
    assert "model.onnx is an exported file, which only predict, test and validate take: give the checkpoint" in message


def test_a_checkpoint(best, capsys, fails):
    assert main(["explain", str(best)]) == 0
    assert "| blocks.0.attn" in capsys.readouterr().out
    assert "is a checkpoint with its own arguments" in fails(["explain", best, "--model_kwargs.depth=2"])


@pytest.mark.slow
def test_the_command_in_a_terminal(tmp_path):
    status, text = in_terminal(["explain", "test_relvit"], tmp_path, columns=60)
    assert status == 0, text
    lines = [line.rstrip() for line in text.splitlines()]
    assert "layers                 blocks.0.attn ... blocks.5.attn (6)" in lines
    assert max(map(len, lines[1:])) <= 60
    assert "|" not in text
