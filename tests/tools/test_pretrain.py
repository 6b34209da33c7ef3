"""tools/study/pretrain.py: a short pretraining on synthetic images, and the table of probes."""

import pytest
import torch
from photos import write_photos
from scripts import load

pytest.importorskip("lightly", reason="pip install 'relvit[lightly]' brings lightly")
pytestmark = pytest.mark.elsewhere


@pytest.fixture(scope="module")
def pretrain():
    return load("pretrain")


def test_a_table_of_probes(pretrain, tmp_path, capsys):
    write_photos(tmp_path / "photos")
    options = ["--epochs=1", "--batch=6", "--shares", "1.0"]
    pretrain.main([f"--images={tmp_path / 'photos'}", f"--work={tmp_path / 'work'}", *options])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| kv-2")]
    assert [row.split(" | ")[3] for row in rows] == ["random start", "MAE, 1 epochs"]


def test_the_targets_are_normalised(pretrain):
    encoder = pretrain.timm.create_model("test_relvit", img_size=32, patch_size=8, num_classes=0, reg_tokens=1)
    mae = pretrain.MaskedAutoencoder(encoder, width=16, depth=1)
    images = torch.randn(2, 3, 32, 32)
    for parameter in mae.predict.parameters():
        torch.nn.init.zeros_(parameter)
    # The n = 192 values of a patch have variance one, so predicting zeros gives the loss (n - 1) / n.
    assert float(mae(images).detach()) == pytest.approx(191 / 192, abs=1e-5)
