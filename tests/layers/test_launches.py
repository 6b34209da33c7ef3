"""Number of operations that backends launch beyond stock attention: on small grids they cost more than arithmetic."""

from collections import Counter

import pytest
import torch
from timm.layers import Attention
from torch.utils._python_dispatch import TorchDispatchMode

from relvit.layers import RelativeAttention, RelativePosition2d
from relvit.ops import make_grid

_aten = torch.ops.aten
ALLOCATIONS = (_aten.empty, _aten.new_empty, _aten.empty_like, _aten.detach)


class Launches(TorchDispatchMode):
    """Count operations that compute: neither views nor allocations."""

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

    # From the second call on, the tensors of the grid are cached.
    forward()
    with Launches() as ahead:
        out = forward()
    with Launches() as back:
        torch.autograd.grad(out, [x, *layer.parameters()], torch.ones_like(out))
    return ahead.counted.total(), back.counted.total()


@pytest.mark.parametrize(("backend", "most_ahead", "most_back"), [("fused", 17, 19), ("lean", 10, 9)])
def test_a_layer_launches_no_more_than_it_did(backend, most_ahead, most_back):
    plain = launches(Attention(64, 2, qkv_bias=True))
    position = RelativePosition2d(32, 2, "kv", max_distance=7)
    ours = launches(RelativeAttention(64, 2, position=position, backend=backend, qkv_bias=True), make_grid(14, 10))
    ahead, back = (our - their for our, their in zip(ours, plain, strict=True))
    assert ahead <= most_ahead
    assert back <= most_back
