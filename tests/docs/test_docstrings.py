"""Examples in the docstrings of the core run, and every public function and class has one."""

import doctest
import inspect
from functools import partial

import pytest
import timm
import torch

import relvit
from relvit import layers, models, ops
from relvit.families import aft, reformer, reversible, transformer_xl, universal

ROOMS = (ops, layers, models, aft, reformer, reversible, transformer_xl, universal)
# What the examples use without an import.
LIBRARIES = {"torch": torch, "timm": timm, "relvit": relvit, "partial": partial}
PUBLIC = {name: getattr(room, name) for room in ROOMS for name in room.__all__}
DOCUMENTED = {name: value for name, value in PUBLIC.items() if inspect.isclass(value) or inspect.isfunction(value)}
# The functions that return or take these values show them.
WITHOUT = {"Choice", "AttentionMaps", "AttentionInputs", "LayerPlan", "Bands", "Memory", "Weights", "TransferReport"}
WITHOUT |= {"Pondered", "ReversibleDepth"}


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_examples(name):
    (test,) = doctest.DocTestFinder(recurse=False).find(DOCUMENTED[name], name, globs=LIBRARIES | PUBLIC)
    torch.manual_seed(0)
    failed, _ = doctest.DocTestRunner().run(test)
    assert failed == 0


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__)
def test_public_names_have_examples(room):
    documented = [name for name in room.__all__ if name in DOCUMENTED and not name.endswith("VisionTransformer")]
    assert [name for name in documented if ">>>" not in DOCUMENTED[name].__doc__ and name not in WITHOUT] == []
