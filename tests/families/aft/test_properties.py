"""Attention-free averages by every backend: gradients, and no influence of later tokens or padding."""

import pytest
import torch
from draws import assert_all_close, assert_right_or_refused, assert_same, draw, gradients

from relvit.families.aft import aft_conv, aft_full, aft_local, aft_simple
from relvit.ops import make_grid

pytestmark = pytest.mark.usefixtures("several_tiles")

HEADS, DIM, HEIGHT, WIDTH, PREFIX = 2, 5, 3, 4, 1
TOKENS = PREFIX + HEIGHT * WIDTH
LATER = 7  # The test changes the tokens from this one on.
BACKENDS = {
    "simple": ("auto", "reference"),
    "full": ("products", "pairs", "reference"),
    "local": ("products", "pairs", "reference"),
    "conv": ("convolution", "difference", "pairs", "reference"),
}
# Each case has the kind of operation, the backend, and whether it is causal.
CASES = [(kind, backend, False) for kind, backends in BACKENDS.items() for backend in backends]
CASES += [(kind, name, True) for kind, name, _ in CASES if name in ("auto", "pairs", "reference")]


def draw_inputs(kind, backend, is_causal=False, dtype=torch.float64, valid=None):
    """All inputs of an attention-free operation by name, and the operation as a function of them."""
    generator = torch.Generator().manual_seed(0)
    inputs = {name: draw(generator, 2, HEADS, TOKENS, DIM) for name in ("query", "key", "value")}
    if kind == "conv":
        inputs |= {"key": inputs["key"][..., :1].clone(), "weight": draw(generator, HEADS, 3, 5)}
    elif kind != "simple":
        inputs["bias"] = draw(generator, HEADS, TOKENS, TOKENS)
    inputs = {name: tensor.to(dtype).requires_grad_() for name, tensor in inputs.items()}
    grid = make_grid(HEIGHT, WIDTH, PREFIX, valid=valid)
    operation = {"simple": aft_simple, "full": aft_full, "local": aft_local, "conv": aft_conv}[kind]
    window = {"window": 2} if kind == "local" else {}
    return inputs, lambda inputs: operation(**inputs, **window, grid=grid, is_causal=is_causal, backend=backend)


@pytest.mark.parametrize(("kind", "backend", "is_causal"), CASES)
def test_attention_free_changed_in_place_before_backward(kind, backend, is_causal):
    inputs, operation = draw_inputs(kind, backend, is_causal)
    for changed in (*inputs, "output"):
        assert_right_or_refused(inputs, operation, changed)


@pytest.mark.parametrize(("kind", "backend", "is_causal"), [case for case in CASES if case[2]])
def test_later_tokens_do_not_change_a_causal_attention_free_average(kind, backend, is_causal):
    inputs, operation = draw_inputs(kind, backend, is_causal, dtype=torch.float32)
    before = operation(inputs)
    for size in (1e4, 1e30):
        changed = {name: inputs[name].detach().clone() for name in ("key", "value")}
        for tensor in changed.values():
            tensor[:, :, LATER:] = size
        after = operation(inputs | changed)
        torch.testing.assert_close(after[:, :, :LATER], before[:, :, :LATER], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["full", "conv"])
def test_a_bias_that_hides_a_large_key_leaves_the_others_exact(kind):
    inputs, operation = draw_inputs(kind, "pairs", dtype=torch.float32)
    hidden = TOKENS - 1
    with torch.no_grad():
        inputs["key"][:, :, hidden] = 1e6
        if kind == "full":
            inputs["bias"][:, :, hidden] = -1e9
        else:
            inputs["weight"].fill_(-1e9)
    exact, exact_operation = draw_inputs(kind, "reference")
    wide = {name: inputs[name].detach().double() for name in exact}
    torch.testing.assert_close(operation(inputs).double(), exact_operation(wide), rtol=0, atol=1e-6)


VALID = torch.rand(2, TOKENS - PREFIX, generator=torch.Generator().manual_seed(3)) < 0.6
REAL = torch.cat((VALID.new_ones(2, PREFIX), VALID), dim=1)[:, None, :, None]


@pytest.mark.parametrize(("kind", "backend", "is_causal"), CASES)
def test_attention_free_averages_do_not_depend_on_what_padding_holds(kind, backend, is_causal):
    inputs, operation = draw_inputs(kind, backend, is_causal, torch.float32, VALID)

    def run(padding):
        filled = {name: torch.where(REAL, inputs[name], padding) for name in ("key", "value")}
        out = operation(inputs | filled)
        return out, *gradients(out, list(inputs.values()), torch.ones_like(out))

    expected = run(0.0)
    for garbage in (float("nan"), 1e30, float("inf")):
        assert_all_close(run(garbage), expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "is_causal"), [("conv", False), ("conv", True), ("simple", True), ("full", False), ("full", True)]
)
def test_compiled_attention_free_averages_agree_with_eager_beside_padding_of_nan(kind, is_causal):
    inputs, operation = draw_inputs(kind, "auto", is_causal, valid=VALID)
    inputs |= {name: torch.where(REAL, inputs[name], torch.nan).detach().requires_grad_() for name in ("key", "value")}
    torch._dynamo.reset()
    compiled = torch.compile(operation, backend="aot_eager", fullgraph=True)
    assert_same(compiled(inputs), operation(inputs), list(inputs.values()), atol=1e-10)
