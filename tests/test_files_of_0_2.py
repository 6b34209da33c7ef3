"""Files that relvit 0.2.0 wrote compute the same and resume (`tests/fixtures/of_0_2`).

There is a run of each family, of two epochs of `--config digits` (`config.yaml` has its options), a published folder, a
`.pt2` and an `.onnx` file. `expected.json` and `models.json` hold what relvit 0.2.0 itself computed and knew.
"""

import gzip
import json
import shutil

import numpy as np
import pytest
import timm
import torch
from files_of_0_2 import EXPECTED, FAMILIES, FOLDER, images, picture

import relvit
from relvit.cli import main
from relvit.evaluation.deploy import OnnxClassifier


def close(found, expected):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=0, atol=1e-5)


def unpacked(kind, folder):
    """The file and the JSON beside it, as that version's export left them."""
    file = folder / f"model.{kind}"
    file.write_bytes(gzip.decompress((FOLDER / kind / f"{file.name}.gz").read_bytes()))
    shutil.copy(FOLDER / kind / "model.json", folder)
    return file


@pytest.mark.parametrize("name", FAMILIES)
def test_checkpoints_have_the_same_logits_and_predict_the_same(name):
    predictor = relvit.load(FOLDER / name / "checkpoints" / "last.ckpt")
    with torch.inference_mode():
        # The tables of AFT-full belong to one size.
        close(predictor.model(images()[..., : 16 if name == "aft_full" else 24]), EXPECTED[name]["logits"])
    (prediction,) = predictor.predict([picture()])
    assert prediction.names == EXPECTED[name]["names"]
    close(prediction.probabilities, EXPECTED[name]["probabilities"])


@pytest.mark.parametrize(
    "name", ["tables", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name != "tables")]
)
def test_runs_resume_with_the_same_numbers(name, tmp_path):
    shutil.copytree(FOLDER / name, tmp_path / name)
    assert main(["fit", "--resume", str(tmp_path / name), "--epochs", "3", "--accelerator", "cpu"]) == 0
    summary = json.loads((tmp_path / name / "summary.json").read_text())
    assert {key: summary[key] for key in EXPECTED[name]["resumed"]} == pytest.approx(
        EXPECTED[name]["resumed"], abs=1e-4
    )


def test_a_published_folder_computes_the_same():
    model = timm.create_model(f"local-dir:{FOLDER / 'published'}", pretrained=True).eval()
    with torch.inference_mode():
        close(model(images()), EXPECTED["published"])


def test_exported_files_compute_the_same(tmp_path):
    program = torch.export.load(unpacked("pt2", tmp_path)).module()
    close(program(images()).detach(), EXPECTED["pt2"])
    session = OnnxClassifier(unpacked("onnx", tmp_path)).session
    close(session.run(None, {session.get_inputs()[0].name: images().numpy()})[0], EXPECTED["onnx"])


def test_models_keep_their_names_modules_and_configurations():
    for name, expected in json.loads((FOLDER / "models.json").read_text()).items():
        entry, cfg = timm.models.model_entrypoint(name), timm.models.get_pretrained_cfg(name)
        # timm's registry knows modules by the last part of their names.
        module = expected["module"].rpartition(".")[2]
        assert entry.__module__.rpartition(".")[2] == ("reversible_vit" if "_rev" in name else module), name
        found = None if cfg is None else json.loads(json.dumps(cfg.to_dict(), default=str))
        assert found == expected["default_cfg"], name
