"""Python blocks of the README and of docs/*.md: each page runs from top to bottom, with models of one block."""

import pytest
import torch
from documents import PAGES, blocks
from one_block import use_one_block

from relvit.app.evaluation.deploy import publish_model
from relvit.models import attention_maps, set_reach

# For some pages, check more than that the code runs.
RESULTS = {
    "docs/dense.md": lambda names: [tuple(m.shape) for m in names["maps"]] == [(1, 192, 6, 10)] * 3,
    "docs/attention.md": lambda names: names["x"].shape == (2, 140, 64),
    "docs/checkpoints.md": lambda names: names["features"].shape == (2, 16) and names["received"].shape == (2, 2),
    "docs/own_data.md": lambda names: len(names["scores"]) == 3 and names["average"].module is not None,
    "docs/extend.md": lambda names: (
        type(names["named"].blocks[0].attn) is names["RowColumnMean"]
        and attention_maps(set_reach(names["cosine"].eval(), "stretch"), names["images"]).grid == (6, 4)
    ),
    "docs/own_position.md": lambda names: names["model"].blocks[0].attn.position.centre.grad.abs().max() > 0,
}


# The export of one page and the trainings of the other take long; tests of the application also export and train.
SLOW = ("docs/sizes.md", "docs/own_data.md")


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else []) for page in PAGES if blocks(page, "python")],
)
def test_blocks_run(page, place, monkeypatch, capsys):
    # With all blocks, exports would take half a minute.
    use_one_block(monkeypatch)
    names = {"__name__": __name__}  # timm registers a model with the module of its function
    for library in ("transformers", "segment_anything") if page == "docs/sam.md" else ():
        pytest.importorskip(library, reason=f"docs/sam.md says how to install {library}")
    if page == "docs/publish.md":
        publish_model("best.ckpt", "my_model")
    for block in blocks(page, "python"):
        # A user may copy a single block of the README, but reads other pages from top to bottom.
        own = {} if page == "README.md" else names
        exec(compile(block, page, "exec"), own)
        names |= own
    assert RESULTS.get(page, lambda names: True)(names)
    if page == "README.md":
        # Code blocks in the README must be short.
        assert all(len(block.splitlines()) <= 8 for language in ("python", "bash") for block in blocks(page, language))
    if page == "docs/sizes.md":
        assert (place / "model.onnx").is_file()
    if page == "docs/checkpoints.md":
        torch.testing.assert_close(float(names["received"].sum()), 1.0)
        lines = [f"photos/test/{name}/{number}.jpg" for name in ("cat", "dog", "owl") for number in range(6)]
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("photos")] == lines
