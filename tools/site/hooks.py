"""Hooks of MkDocs: pages from files outside docs/, and a reference page per package; see `mkdocs.yml`.

All pages stay readable in the repository, where relative links between files work. On the site, links to the files in
`ROOT_PAGES` lead to their pages. Other files outside docs/ are not on the site: a link to one becomes its text and the
path in the repository. A link to a file that does not exist stays, and `mkdocs build --strict` refuses it.
"""

from __future__ import annotations

import os.path
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# The site has pages from these files outside of docs/.
ROOT_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
# These packages get a page from the docstrings of the names in their `__all__`.
CORE, APPLICATION = ("ops", "layers", "models"), ("data", "training", "evaluation", "plots")
REFERENCE = {
    "relvit": "relvit",
    **{name: f"relvit.{name}" for name in CORE},
    **{name: f"relvit.app.{name}" for name in APPLICATION},
    "app_models": "relvit.app.models",
}
# These functions have the same name as their module. MkDocs does not import sources, so it would find the module.
SAME_NAME = ("relvit.models.retrofit.api.retrofit", "relvit.models.attention_maps.attention_maps")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    for source, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for name, package in REFERENCE.items():
        content = f"# {package}\n\n::: {package}\n"
        if name in ("relvit", "models"):
            # The entries of these functions need headings, unlike the entries of packages.
            shown = "    options: {show_root_heading: true, show_root_toc_entry: true}"
            content += "".join(f"\n::: {function}\n{shown}\n" for function in SAME_NAME)
        files.append(File.generated(config, f"reference/{name}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page that lead, or come, from outside docs/."""
    return relink(markdown, page.file.src_uri)


def relink(markdown: str, page: str) -> str:
    """Rewrite relative links of `markdown`, whose page is `page` on the site, as the site has the files."""
    source = {made: given for given, made in ROOT_PAGES.items()}.get(page, f"docs/{page}")

    def rewrite(match: re.Match[str]) -> str:
        bang, text, target, anchor = match.groups(default="")
        path = os.path.normpath(os.path.join(os.path.dirname(source), target))
        if path in ROOT_PAGES or path.startswith("docs/"):
            there = ROOT_PAGES.get(path) or path.removeprefix("docs/")
            return f"{bang}[{text}]({os.path.relpath(there, os.path.dirname(page) or '.')}{anchor})"
        return f"{text} (`{path}`)" if (ROOT / path).exists() else match[0]

    return re.sub(r"(!?)\[([^\]]*)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)", rewrite, markdown)
