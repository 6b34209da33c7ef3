"""Find the configurations that come with relvit: `configs/` of the repository, `relvit/configs/` of a wheel."""

from __future__ import annotations

from pathlib import Path


def shipped_configs() -> dict[str, Path]:
    """Return the file of each configuration by its name, which is the option `--config NAME`."""
    package = Path(__file__).parents[2]
    packed = package / "configs"
    # A clone and an editable install have the folder beside the package, so look there if it is not in the package.
    folder = packed if packed.is_dir() else package.parent / "configs"
    return {path.stem: path for path in sorted(folder.rglob("*.yaml"))}
