"""Constant buffers keep their precision when a model is cast, and are computed for models from the meta device."""

from functools import partial

import pytest
import timm
import torch
from retrofit_cases import build
from torch import nn
from vits import images, small

import relvit
from relvit.families.reformer import LSHAttention
from relvit.layers import LookHerePosition2d, RelativeAttention, RotaryEmbedding2d, SlopePosition2d

MODULES = {
    "rope": lambda: RotaryEmbedding2d(8, 2, "axial"),
    "slopes": lambda: SlopePosition2d(8, 3),
    "lsh": lambda: LSHAttention(16, 2),
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


@pytest.mark.parametrize("kind", MODULES)
def test_constants_after_to_empty(kind):
    module = MODULES[kind]()
    torch.use_deterministic_algorithms(True)  # PyTorch fills new memory with NaN in this mode.
    try:
        empty = nn.Sequential(MODULES[kind]().to("meta", torch.bfloat16)).to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    assert list(module.buffers())
    for one, expected in zip(empty.buffers(), module.buffers(), strict=True):
        torch.testing.assert_close(one, expected, rtol=0, atol=0)


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


def slopes(position):
    return lambda: RelativeAttention(16, 4, position=position(4, 4))


def retrofitted(case):
    return relvit.retrofit(build(case).float())


# These models are made on the meta device and take their tensors from a state dict, which contains no constants.
ASSIGNED = {
    "slopes": partial(timm.create_model, "test_relvit", position="slopes"),
    "lookhere": partial(timm.create_model, "test_relvit", position="lookhere", num_heads=4),
    "rope": partial(timm.create_model, "test_relvit", rope="axial", embed_dim=64),
    "lsh": partial(timm.create_model, "test_relvit_lsh"),
    "a position": lambda: SlopePosition2d(4, 4),
    "a layer": slopes(LookHerePosition2d),
    "a part of another module": lambda: nn.Sequential(nn.Linear(16, 16), slopes(SlopePosition2d)()),
    "retrofitted": lambda: relvit.retrofit(timm.create_model("test_vit"), position="slopes"),
    # BEiT's attention, Swin V2's attention and rotary embeddings have timm's own buffers.
    **{case: partial(retrofitted, case) for case in ("beit", "swinv2", "eva", "eva02", "dinov3", "rope mixed")},
}


@pytest.mark.parametrize("case", ASSIGNED)
def test_constants_after_the_meta_device(case):
    model = ASSIGNED[case]()
    with torch.device("meta"):
        empty = ASSIGNED[case]()
    empty.load_state_dict(model.state_dict(), assign=True)
    for name, buffer in model.named_buffers():
        # timm computes these buffers of its mixed rotary embedding only for the embedding's own size.
        if not name.endswith((".t_x", ".t_y")):
            torch.testing.assert_close(empty.get_buffer(name), buffer, rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", ["slopes", "lookhere", "rope", "lsh", "a layer"])
def test_constants_of_a_model_that_is_loaded_while_the_default_device_is_meta(case):
    model = ASSIGNED[case]()
    with torch.device("meta"):
        empty = ASSIGNED[case]()
        empty.load_state_dict(model.state_dict(), assign=True)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(empty.get_buffer(name), buffer, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [*MODULES, "lookhere"])
def test_constants_do_not_depend_on_the_default_dtype(kind):
    make = MODULES.get(kind, lambda: LookHerePosition2d(4, 4, layer=(1, 4)))
    expected = make()
    torch.set_default_dtype(torch.bfloat16)
    try:
        module = make()
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(module.buffers(), expected.buffers(), strict=True):
        assert torch.equal(one, other)
