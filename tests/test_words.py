"""Words of the project: terms that a PyTorch user would search for, and docstrings whose first line names the thing."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = sorted(
    f"relvit/{path.name}"
    for path in (ROOT / "relvit").glob("[a-z_]*")
    if path.suffix != ".typed" and path.name != "__pycache__"
)
FOLDERS = (*ROOMS, "tests", "tools", "docs", "README.md", "CONTRIBUTING.md")

# A pattern, and what to write instead.
BANNED = {
    r"\blonger (query|queries|keys?|values?|vectors?|q, k)\b|\blengthen|\bshortened (vectors?|output)": "augmented",
    r"\b(places|lines) of (an |the )?ax[ei]s\b|\bPicks?\(|\bclass Pick\b|\bPlaces\b": "axis index, AxisRange",
    r"\brebuilt\b|\bmade again\b": "recomputed, recompute",
    r"\bin_graph\b": "is_compiling, is_functorch",
    r"\bfurther room\b|\bclass Job\b|\bJob\(": "workspace, TileConfig",
    r"\bSteadyLoader\b|\bheed|\b[Dd]raws?Dataset\b|\btest_draws\b|\btest_shares\b": "SignalSafeDataLoader, eval shards",
    r"\b(random|the|these|those|their) draws\b": "random numbers, random augmentation",
    r"\bshares of (a |the )?(images|data|split|evaluation)\b|\beval(uation)? shares\b": "eval shards",
    r"\bas_it_is\b|\bas_they_are\b": "identity_collate",
    r"\bWholeCheckpoints\b|\bdef whole\b|\bwhole\(": "AtomicCheckpointIO, gather_full",
    r"\bhire[ds]?\b|\bhiring\b": "build_teacher",
    r"\bfruit(s|less|ful)?\b|fruitless": "empty run, run artifacts",
    r"\bPlacedAttention\b|\bPlaced\b": "TimmRelativeAttention, GridArgument",
    r"\bcourses? of (a|the|its) (training|run)s?\b": "training curve",
    r"\bwhat becomes? of\b": "result",
    r"\bhow (the )?tables start\b|\btables at the start\b": "initialise",
    r"\b(is|are|was|were|be|been|being) told\b|\btold to\b|\bdef (say|tell)\b|\bsay\(": "receives, report",
    r"\bstrangers?\b": "a new user",
    r"\blie\b|\blies\b|\blying\b|\blain\b": "are at, are in",
}
PRONOUNS = "it its they their them this that these those he she we our you your someone something everything"
QUESTIONS = "what how where whether which who whose why when"
NO_BEGINNING = {*PRONOUNS.split(), *QUESTIONS.split()}


def texts(folder):
    path = ROOT / folder
    found = (
        [path]
        if path.is_file()
        else sorted(p for p in path.rglob("*") if p.suffix in (".py", ".md", ".yaml", ".sbatch"))
    )
    return [file for file in found if file != Path(__file__)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_words_that_are_not_used(folder):
    hits = []
    for path in texts(folder):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            for pattern, instead in BANNED.items() if "_RENAMED" not in line else ():
                if found := re.search(pattern, line):
                    hits.append(f"{path.relative_to(ROOT)}:{number}: {found[0]!r}: write {instead}")
        hits += [f"{path.relative_to(ROOT)}: its name" for pattern in BANNED if re.search(pattern, path.stem)]
    assert not hits, "\n".join((f"{len(hits)} in {folder}", *hits))


def documented(tree):
    """Name, docstring and whether it needs one: the module, public classes and functions, and their public methods."""
    yield "module", ast.get_docstring(tree), True
    definitions = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in (node for node in tree.body if isinstance(node, definitions) and not node.name.startswith("_")):
        yield node.name, ast.get_docstring(node), True
        if isinstance(node, ast.ClassDef):
            methods = (part for part in node.body if isinstance(part, definitions) and not part.name.startswith("_"))
            yield from ((f"{node.name}.{part.name}", ast.get_docstring(part), False) for part in methods)


@pytest.mark.parametrize("folder", ROOMS)
def test_first_lines_of_docstrings(folder):
    """A verb, or a noun phrase: no pronoun without its noun, no question."""
    hits = []
    for file in texts(folder):
        for name, text, needed in documented(ast.parse(file.read_text())):
            first = (text or "").strip().partition("\n")[0]
            word = re.match(r"[\w']*", first)[0].lower()
            if (needed and not first) or word in NO_BEGINNING:
                hits.append(f"{file.relative_to(ROOT)}: {name}: {first or 'no docstring'}")
    assert not hits, "\n".join((f"{len(hits)} in {folder}", *hits))
