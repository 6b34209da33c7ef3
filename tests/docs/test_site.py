"""The documentation site, tested without MkDocs: navigation and rewritten links; .ci/run builds the site."""

import importlib
import re

import pytest
import yaml
from documents import ROOT, text
from scripts import load

hooks = load("hooks")


def pages(nav):
    for item in nav:
        for target in item.values():
            yield from [target] if isinstance(target, str) else pages(target)


def test_the_navigation_has_every_page_once():
    found = sorted(pages(yaml.safe_load(text("mkdocs.yml"))["nav"]))
    reference = {f"reference/{name}.md" for name in hooks.REFERENCE}
    docs = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert found == sorted(docs | reference | {*hooks.ROOT_PAGES.values()})


def test_the_reference_has_public_names():
    for package in hooks.REFERENCE.values():
        module = importlib.import_module(package)
        assert all(hasattr(module, public) for public in module.__all__)


@pytest.mark.parametrize(
    ("page", "before", "after"),
    [
        ("index.md", "![idea](docs/idea.png)", "![idea](idea.png)"),
        ("index.md", "[a](docs/sizes.md#reach), [b](CONTRIBUTING.md)", "[a](sizes.md#reach), [b](contributing.md)"),
        ("benchmarks/README.md", "[a](results.md) [b](../study/README.md)", "[a](results.md) [b](../study/README.md)"),
        ("study/README.md", "[a](../../CHANGELOG.md)", "[a](../changelog.md)"),
        ("models.md", "[tests](../tests/models)", "tests (`tests/models`)"),
        ("models.md", "[a](../no/such.py) [b](https://x.org/y)", "[a](../no/such.py) [b](https://x.org/y)"),
    ],
)
def test_links_lead_to_pages_or_become_paths(page, before, after):
    assert hooks.relink(before, page) == after


def test_the_readme_quotes_the_table_of_sam():
    row = next(
        line for line in text("docs/sam.md").splitlines() if line.startswith("| `transformers` | 1,024 x 1,024 |")
    )
    forward, step, of_forward, of_step = (cell.strip().partition(":")[0] for cell in row.strip("|").split("|")[2:])
    quoted = f"{forward} of the time and {of_forward} of the peak memory of a forward pass, {step} and {of_step} of a"
    assert quoted in " ".join(text("README.md").split())


def test_the_comparison_quotes_runs_that_exist():
    runs = re.findall(r"\d{4}-\d\d-\d\dT[\d:]+Z", text("docs/comparison.md"))
    assert len(runs) >= 4
    assert all(f"Run {run}," in text("docs/benchmarks/results.md") for run in runs)
