"""The examples in docstrings of the core run, and every public function and class has an example."""

import doctest
import inspect
import re
from functools import partial

import pytest
import timm
import torch
from documents import text

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


# The equations and tables of papers that a file cites, by their numbers in the paper. The comments say what the papers
# have under these numbers.
PAPERS = {
    # 2105.14103: AFT-full is 2, 3 rewrites it as attention, AFT-local is 4, AFT-conv is 6. Results on ImageNet are in
    # table 7, and those of a fine-tuned DeiT in table 8.
    "relvit/families/aft/operations.py": ["eq. 2", "eq. 4", "eq. 6"],
    "relvit/families/aft/mixers.py": ["eq. 2", "eq. 4", "eq. 6"],
    "relvit/families/aft/reference.py": ["eq. 2", "eq. 4", "eq. 6"],
    "relvit/families/aft/aft_vit.py": ["table 7", "table 8"],
    "configs/finetune_aft.yaml": ["table 8"],
    "configs/imagenet/imagenet_aft_conv_small.yaml": ["table 7", "table 9"],  # The recipe is DeiT's table 9.
    # 1603.08983: halting unit 5, probabilities 6, steps 7, remainder 8, weighted sum 9, N + R of a token 10.
    "relvit/families/universal/halting.py": ["equation 10", "equations 6 to 9"],
    # 1807.03819: attention 1 to 3, block 4 and 5, signals 6 and 7.
    "relvit/families/universal/signals.py": ["equations 6 and 7"],
    "docs/universal.md": ["equations 6 and 7"],
    # 2001.04451: attention in a set of tokens 3, in a bucket 4.
    "relvit/families/reformer/reference.py": ["eq. 3", "eq. 4"],
    # 1803.02155: values 3, logits 4, the logits in two terms 5.
    "relvit/ops/attention.py": ["eq. 3 and 4", "eq. 5"],
    "docs/concepts.md": ["eq. 3 and 4"],
    # 2112.01526: logits 3, their split by axes 4.
    "relvit/layers/positions/tables.py": ["eq. 3 and 4"],
}


@pytest.mark.parametrize("path", PAPERS)
def test_equations_and_tables_have_the_numbers_of_the_papers(path):
    plain = re.sub(r"[\s#]+", " ", text(path))
    assert sorted(set(re.findall(r"(?:eq\.|equations?|table) \d+(?: (?:and|to) \d+)?", plain))) == PAPERS[path]


@pytest.mark.parametrize(
    ("path", "fact"),
    [
        # Section 4.1 of 1803.02155 has vectors per layer and head for the base model, and per layer for the big one.
        ("relvit/layers/positions/tables.py", "as in the paper's big model; in its base model each head has its own"),
        ("docs/models.md", "for all heads of a block (Shaw's big model) or for each head (the base model)"),
        # Section 2 of 2001.04451, "Memory-efficient attention"; 2512.11260 compares times.
        ("docs/lsh.md", "keeps as little for the backward pass (section 2 of the paper), and [ViTs were faster]"),
        # The code of 2302.04869, and of 1901.02860.
        ("docs/reversible.md", "their mean (Mangalam: concatenation) is the output"),
        ("relvit/families/reversible/blocks.py", "Mangalam et al. concatenate the two streams instead"),
        ("relvit/families/transformer_xl/xl_position.py", "in the authors' PyTorch code all blocks share one u"),
        ("configs/finetune_aft.yaml", "The conversion and the 100 epochs are the paper's"),
        ("relvit/models/retrofit/sources/timm_mvit.py", "Eq. 3 does so, too, but MViTv2's code does not"),
    ],
)
def test_what_papers_do_is_said_as_they_do_it(path, fact):
    assert fact.lower() in re.sub(r"[\s#]+", " ", text(path)).lower()
