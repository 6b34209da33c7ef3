"""One exported graph serves all image sizes, also as ONNX, for relvit's and retrofitted models."""

from functools import cache

import pytest
import torch
from graph_cases import FREE, HALTING, JOINT, PER_HEAD, SIZES, VARIANTS, build, images

# Each test exports, which takes long; tests of commands that are not slow export one model.
pytestmark = pytest.mark.slow


def any_size(variant):
    batch = {0: torch.export.Dim("batch", min=1, max=8)} if variant in FREE else {}
    height, width = (8 * torch.export.Dim(name, min=2, max=64) for name in ("height", "width"))
    return (batch | {2: height, 3: width},)


@cache
def exported(number):
    """Return a model of VARIANTS and its exported program for all sizes."""
    model = build(**VARIANTS[number])
    # timm's own DINOv3 cannot be exported for all sizes, either.
    return model, torch.export.export(model, (images(32, 40),), dynamic_shapes=any_size(VARIANTS[number]))


def name(number):
    return str(VARIANTS[number])


@pytest.mark.parametrize("number", range(len(VARIANTS)), ids=name)
def test_exported_once_for_all_sizes(number):
    model, program = exported(number)
    module = program.module()
    for size in SIZES:
        torch.testing.assert_close(module(images(*size)), model(images(*size)), rtol=0, atol=1e-4)


@pytest.mark.parametrize("rel_terms", ["kb", "qkvb"])
def test_exported_for_any_number_of_images_it_takes_one(rel_terms):
    model, batch = build(rel_terms=rel_terms, img_size=32), {0: torch.export.Dim("batch", min=1, max=8)}
    shapes = (batch | any_size({})[0],)
    module = torch.export.export(model, (images(32, 40),), dynamic_shapes=shapes).module()
    for x in (images(24, 16)[:1], images(24, 16)):
        torch.testing.assert_close(module(x), model(x), rtol=0, atol=1e-4)


@pytest.mark.parametrize("number", [0, 1, VARIANTS.index(FREE[0])], ids=name)
def test_onnx_runtime_gives_the_same_at_all_sizes(number, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model, program = exported(number)
    torch.onnx.export(program, dynamo=True, verbose=False).save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for size in SIZES:
        (logits,) = session.run(None, {session.get_inputs()[0].name: images(*size).numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), model(images(*size)).detach(), rtol=0, atol=1e-5)


FOUR_JOINT = {"layout": "joint", "rel_terms": "qkvb"}


@pytest.mark.parametrize(
    "variant", [PER_HEAD, FOUR_JOINT, {"case": "clip", "reach": "mirror"}, *JOINT, FREE[1], HALTING], ids=str
)
def test_the_older_onnx_exporter_serves_other_numbers_of_images(variant, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model, file = build(**variant), tmp_path / "model.onnx"
    size = variant.get("img_size", 32)
    two = images(*(size if isinstance(size, tuple) else (size, size)))
    options = {"input_names": ["images"], "dynamic_axes": {"images": {0: "batch"}}}
    torch.onnx.export(model, (two[:1],), file, dynamo=False, **options)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"images": two.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), model(two).detach(), rtol=0, atol=1e-5)
