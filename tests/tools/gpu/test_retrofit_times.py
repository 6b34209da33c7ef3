"""The times of retrofitted models: a model that fails stops no other."""

import json
import math

import pytest
import torch
from scripts import load
from torch import nn

retrofit_times = load("retrofit_times")


class Failing(nn.Module):
    def forward(self, images):
        raise RuntimeError("CUDA out of memory\nwith this")


@pytest.mark.parametrize("failing", [["source"], ["flex"], ["source", "flex"]])
def test_a_model_that_fails_stops_no_other(failing, monkeypatch):
    def build(name, layers, side, variant):
        return Failing() if variant in failing else nn.Conv2d(3, 2, 1)

    monkeypatch.setattr(retrofit_times, "build", build)
    rows = list(retrofit_times.compare("timm-beit", "flex", 1, torch.randn(1, 3, 4, 4), 2, math.inf))
    assert [row["action"] for row in rows] == ["forward", "step"]
    for row in rows:
        variants, text = row["variants"], retrofit_times.line(row)
        for name in ("source", "flex"):
            assert variants[name]["status"] == ("failed: RuntimeError: CUDA out of memory" if name in failing else "ok")
            assert f"{name} {variants[name]['status'] if name in failing else ''}" in text
            assert len(variants[name].get("seconds", [])) == (0 if name in failing else 2)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_features_that_are_not_finite_are_null_in_json(wrong, monkeypatch):
    def build(name, layers, side, variant):
        made = nn.Conv2d(3, 2, 1)
        if variant == "flex":
            nn.init.constant_(made.bias, wrong)
        return made

    monkeypatch.setattr(retrofit_times, "build", build)
    for row in retrofit_times.compare("timm-beit", "flex", 1, torch.randn(1, 3, 4, 4), 2, math.inf):
        read = json.loads(json.dumps(row, allow_nan=False))
        assert [each["difference"] for each in read["variants"].values()] == [0, None]
        assert retrofit_times.line(read).endswith("difference not finite")


def test_flex_attention_comes_last_since_its_compilation_may_take_the_rest_of_the_time():
    for cases in (retrofit_times.CASES, retrofit_times.TOY_CASES):
        assert [variant for _, variant, *_ in cases] == ["retrofitted", "retrofitted", "flex"]
