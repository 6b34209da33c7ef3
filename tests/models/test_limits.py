"""Models that cannot be meant are refused before they take memory; others come out as if nothing had been looked at."""

import math
import resource

import pytest
import timm
import torch

from relvit.models import build_model
from relvit.models.limits import MemoryLimit, TooLargeError, check_memory


def peak():
    """Bytes that this process has ever had."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"depth": 10**9}, "depth 1e.09 cannot be meant: numbers of a model go up to 1000"),
        ({"embed_dim": 10**9}, "embed_dim 1e.09 cannot be meant: numbers of a model go up to 1000000"),
        ({"max_distance": [3, 10**9]}, "max_distance 1e.09 cannot be meant"),
        ({"mlp_ratio": math.inf}, "mlp_ratio inf cannot be meant"),
        ({"mlp_ratio": math.nan}, "mlp_ratio nan cannot be meant"),
        ({"mlp_ratio": 1e5, "embed_dim": 960}, "more memory than there is: a part of it has 96000000 x 960 numbers"),
        ({"embed_dim": 96_000, "depth": 2, "num_heads": 1000}, "more memory than there is"),
        ({"embed_dim": 192, "depth": 1000, "mlp_ratio": 300}, "more memory than there is"),
    ],
)
def test_what_cannot_be_meant(kwargs, message):
    before = peak()
    with pytest.raises(ValueError, match=message):
        build_model("relvit_tiny", 7, model_kwargs=kwargs)
    assert peak() - before < 2e8


@pytest.mark.parametrize(("classes", "retrofit"), [(10**9, None), (7, {"max_distance": 10**9})])
def test_what_does_not_come_from_model_kwargs(classes, retrofit):
    with pytest.raises(ValueError, match="cannot be meant"):
        build_model("test_vit", classes, retrofit=retrofit)


def test_a_tried_out_model_is_the_same_afterwards():
    kwargs = {"depth": 2, "embed_dim": 48}
    torch.manual_seed(0)
    expected = timm.create_model("relvit_tiny", num_classes=7, **kwargs).state_dict()
    torch.manual_seed(0)
    found = build_model("relvit_tiny", 7, model_kwargs=kwargs).state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert found["head.weight"].device.type == "cpu"


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "test_resnet", "test_relvit"])
def test_what_is_counted_is_what_the_model_takes(name):
    limit = MemoryLimit(of_meta=True)
    before = limit.left
    with torch.device("meta"), limit:
        model = timm.create_model(name)
    taken = sum(parameter.nbytes for parameter in model.parameters())
    assert taken <= before - limit.left < 1.1 * taken


def test_the_limit_is_that_of_the_machine(monkeypatch):
    size = sum(p.nbytes for p in timm.create_model("relvit_tiny").parameters())
    for left, fits in ((2 * size, True), (size // 2, False)):
        monkeypatch.setattr("relvit.models.limits.available_memory", lambda left=left: left)
        if fits:
            check_memory(lambda: timm.create_model("relvit_tiny"))
        else:
            with pytest.raises(TooLargeError):
                check_memory(lambda: timm.create_model("relvit_tiny"))
