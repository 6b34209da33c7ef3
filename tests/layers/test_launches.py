"""Number of operations that backends launch beyond stock attention: on small grids, launches take most time."""

from collections import Counter

import pytest
import torch
from timm.layers import Attention
from timm.models.beit import Beit
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch.utils._python_dispatch import TorchDispatchMode

import relvit
from relvit.layers import RelativeAttention, RelativePosition2d
from relvit.ops import make_grid

_aten = torch.ops.aten
ALLOCATIONS = (_aten.empty, _aten.new_empty, _aten.empty_like, _aten.detach)


class Launches(TorchDispatchMode):
    """Count operations that compute something, without views and allocations."""

    def __init__(self):
        super().__init__()
        self.counted = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view and function.overloadpacket not in ALLOCATIONS:
            self.counted[function.overloadpacket] += 1
        return result


def launches(layer, *grid):
    x = torch.randn(2, 14 * 10, 64, requires_grad=True)

    def forward():
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x, *grid)

    return ahead_and_back(forward, [x, *layer.parameters()])


def ahead_and_back(forward, leaves):
    # The first call caches the tensors of the grid.
    forward()
    with Launches() as ahead:
        out = forward()
    with Launches() as back:
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    return ahead.counted.total(), back.counted.total()


# Backward includes two conversions of dtypes, because gradients of logits are summed in single precision.
@pytest.mark.parametrize(("backend", "most_ahead", "most_back"), [("fused", 17, 20), ("lean", 10, 10)])
def test_a_layer_launches_no_more_than_it_did(backend, most_ahead, most_back):
    plain = launches(Attention(64, 2, qkv_bias=True))
    position = RelativePosition2d(32, 2, "kv", max_distance=7)
    ours = launches(RelativeAttention(64, 2, position=position, backend=backend, qkv_bias=True), make_grid(14, 10))
    ahead, back = (our - their for our, their in zip(ours, plain, strict=True))
    assert ahead <= most_ahead
    assert back <= most_back


TINY = {"patch_size": 8, "embed_dim": 16, "num_classes": 3}
SOURCES = {
    "relpos table": lambda depth: VisionTransformerRelPos(
        (32, 48), depth=depth, num_heads=2, rel_pos_type="bias", class_token=True, **TINY
    ),
    "relpos network": lambda depth: VisionTransformerRelPos((32, 48), depth=depth, num_heads=2, **TINY),
    "beit": lambda depth: Beit((32, 48), depth=depth, num_heads=2, use_rel_pos_bias=True, **TINY),
    "swin": lambda depth: SwinTransformer((32, 48), depths=(depth,), num_heads=(2,), window_size=2, **TINY),
}


def launches_of_two_layers(build, gradient):
    images, counts = torch.randn(2, 3, 32, 48), []
    for depth in (2, 4):
        model = build(depth).requires_grad_(gradient)
        if gradient:
            counts.append(sum(ahead_and_back(lambda: model(images), list(model.parameters()))))  # noqa: B023
        else:
            model.eval()(images)
            with Launches() as ahead:
                model(images)
            counts.append(ahead.counted.total())
    return counts[1] - counts[0]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("gradient", [False, True])
def test_a_retrofit_launches_no_more_than_its_source(source, gradient):
    build = SOURCES[source]
    ours = launches_of_two_layers(lambda depth: relvit.retrofit(build(depth)), gradient)
    # In training, stock attention scales queries and keys, in forward and in backward; timm's Swin scales only the
    # queries.
    more = 2 * 2 if gradient and source == "swin" else 0
    assert ours <= launches_of_two_layers(build, gradient) + more
