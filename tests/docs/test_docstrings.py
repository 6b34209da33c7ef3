"""The examples in docstrings of the core run, and every public function and class has an example."""

import doctest
import inspect
from functools import partial

import pytest
import timm
import torch

import relvit
from relvit import families, layers, models, ops

PACKAGES = (ops, layers, models, *(getattr(families, name) for name in families.__all__))
# The examples use these modules without importing them.
LIBRARIES = {"torch": torch, "timm": timm, "relvit": relvit, "partial": partial}
PUBLIC = {name: getattr(package, name) for package in PACKAGES for name in package.__all__}
DOCUMENTED = {name: value for name, value in PUBLIC.items() if inspect.isclass(value) or inspect.isfunction(value)}
# These classes need no example: the examples of functions that return or take them show them.
WITHOUT = {"Choice", "AttentionMaps", "AttentionInputs", "LayerPlan", "Bands", "Memory", "Weights", "TransferReport"}
WITHOUT |= {"Pondered", "ReversibleDepth"}


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_examples(name):
    (test,) = doctest.DocTestFinder(recurse=False).find(DOCUMENTED[name], name, globs=LIBRARIES | PUBLIC)
    torch.manual_seed(0)
    failed, _ = doctest.DocTestRunner().run(test)
    assert failed == 0


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_public_names_have_examples(package):
    documented = [name for name in package.__all__ if name in DOCUMENTED and not name.endswith("VisionTransformer")]
    assert [name for name in documented if ">>>" not in DOCUMENTED[name].__doc__ and name not in WITHOUT] == []
