"""Fixed constants keep their precision through casts of a model, alone and in whole models."""

import pytest
import torch
from vits import images, small

from relvit.families.reformer import LSHAttention
from relvit.layers import RotaryEmbedding2d, SlopePosition2d
from relvit.training.optim.loss import ClassificationLoss

MODULES = {
    "rope": lambda: RotaryEmbedding2d(8, 2, "axial"),
    "slopes": lambda: SlopePosition2d(8, 3),
    "lsh": lambda: LSHAttention(16, 2),
    "loss": lambda: ClassificationLoss(3, class_weights=[0.1, 0.2, 0.7]),
}
CASTS = {
    "bfloat16": lambda module: module.bfloat16(),
    "half": lambda module: module.half(),
    "to": lambda module: module.to("cpu", torch.bfloat16),
    "double": lambda module: module.double(),
    "both": lambda module: module.double().half(),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("kind", MODULES)
def test_constants_of_a_module(kind, cast):
    module = MODULES[kind]()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    CASTS[cast](module)
    wide = torch.float64 if cast == "double" else torch.float32
    assert {buffer.dtype for buffer in module.buffers()} == {wide}
    assert {parameter.dtype for parameter in module.parameters()} <= {torch.bfloat16, torch.float16, wide}
    module.float()
    assert before.keys() == dict(module.named_buffers()).keys()
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())
    assert module.state_dict().keys() == dict(module.named_parameters()).keys()


@pytest.mark.parametrize("kind", MODULES)
def test_constants_follow_the_device_of_a_module(kind):
    module = MODULES[kind]().to("meta", torch.bfloat16)
    assert all(buffer.is_meta and buffer.dtype == torch.float32 for buffer in module.buffers())


@pytest.mark.parametrize(
    "options",
    [{"rope": "axial", "rel_terms": ""}, {"position": "slopes"}, {"model": "relvit_lsh_small"}, {"rope": "mixed"}],
    ids=str,
)
def test_a_model_that_was_cast_computes_the_same_with_its_float32_weights(options):
    options = {"embed_dim": 16, **options}
    model = small(options.pop("model", "relvit_tiny"), **options).eval()
    weights, x = {name: value.clone() for name, value in model.state_dict().items()}, images(40, 56)
    expected = model(x)
    half = model.bfloat16()(x.bfloat16())
    torch.testing.assert_close(half.float(), expected, rtol=0, atol=0.05 * float(expected.detach().abs().max()))
    model.float().load_state_dict(weights)
    assert torch.equal(model(x), expected)
