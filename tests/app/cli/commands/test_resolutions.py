"""`relvit resolutions`: its table, files and errors; `tests/app/evaluation` checks the numbers."""

import contextlib
import io
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from command_line import drawn_figures, rows, write_checkpoint_like
from PIL import Image

from relvit.app.cli import main
from relvit.app.evaluation import PROTOCOLS, evaluate_sizes
from relvit.app.plots.style import short_labels

VIT = {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}


class Compared(NamedTuple):
    """Two checkpoints, the command's output, and the folder that it wrote."""

    checkpoints: tuple[Path, Path]
    out: str
    err: str
    folder: Path

    @property
    def found(self):
        return json.loads((self.folder / "resolutions.json").read_text())


@pytest.fixture(scope="module")
def compared(best, tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("compared")
    vit = write_checkpoint_like(best, tmp_path / "vit.ckpt", "vit_tiny_patch16_224", VIT)
    command = ["resolutions", best, vit, "--sizes", "16", "[24,16]", "--protocol", "field", "--fill", "grey"]
    command += ["--split", "test", "--accelerator", "cpu", "--output", tmp_path / "new" / "folder"]
    out, err = io.StringIO(), io.StringIO()
    with drawn_figures(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(list(map(str, command))) == 0
    return Compared((best, vit), out.getvalue(), err.getvalue(), tmp_path / "new" / "folder")


def test_the_output_says_what_is_compared(compared):
    (best, vit), lines = compared.checkpoints, compared.out.splitlines()
    assert lines[0] == f"1  {best}: test_relvit, trained at 16 x 16 px"
    assert lines[1] == f"2  {vit}: vit_tiny_patch16_224, trained at 16 x 16 px"
    assert lines[2].startswith("18 images of test; field: objects keep their scale")
    assert "vit_tiny_patch16_224 at 24 x 16" in compared.err


def test_the_file_has_the_rows_of_evaluate_sizes(compared):
    found, given = compared.found, {"accelerator": "cpu", "protocol": "field", "fill": "grey"}
    expected = evaluate_sizes(compared.checkpoints, [16, (24, 16)], "test", **given)
    for row, of_python in zip(found, expected, strict=True):
        assert row.keys() == of_python.keys()
        # The first pass at a size caches index tables, so the peak of a second pass differs a little.
        assert row["peak_memory"] == pytest.approx(of_python["peak_memory"], rel=0.01)
        measured = dict.fromkeys(("images_per_second", "peak_memory"))
        assert row | measured == of_python | measured


def test_the_file_names_checkpoints_so_that_they_are_found_from_any_folder(best, tmp_path, monkeypatch):
    monkeypatch.chdir(best.parent)
    assert main(["resolutions", best.name, "--sizes=16", "--accelerator=cpu", f"--output={tmp_path / 'a.json'}"]) == 0
    assert [row["checkpoint"] for row in json.loads((tmp_path / "a.json").read_text())] == [str(best)]


def test_the_csv_has_the_same_rows(compared):
    found, of_csv = compared.found, rows(compared.folder / "resolutions.csv")
    columns = list(found[1] | found[2])
    assert of_csv == [{name: str(row.get(name, "")) for name in columns} for row in found]


def test_the_figure_has_two_panels(compared):
    with Image.open(compared.folder / "resolutions.png") as figure:
        assert figure.size == (1500, 550)


@pytest.mark.parametrize("widths", [[], ["--widths", "16"]])
def test_the_figure_names_the_split(best, tmp_path, monkeypatch, widths):
    titles = []
    for plot in ("plot_sizes", "plot_size_grid"):
        monkeypatch.setattr(f"relvit.app.cli.commands.resolutions.{plot}", lambda *_, title: titles.append(title))
    command = ["resolutions", best, "--sizes", "16", *widths, "--split=test", "--output", tmp_path / "a.png"]
    assert main(list(map(str, [*command, "--accelerator=cpu"]))) == 0
    assert titles == [f"18 images of test; crop: {PROTOCOLS['crop']}"]


def test_the_table_is_sorted_by_size_and_shows_differences(compared):
    found, lines = compared.found, compared.out.splitlines()
    # The table is sorted by size and then by checkpoint, but `found` is sorted by checkpoint.
    table = [numbers for line in lines if len(numbers := re.findall(r"\d\.\d{4}(?= )", line)) > 1]
    names = ("acc1", "acc1_se", "loss", "calibration_error")
    assert table == [[f"{found[index][name]:.4f}" for name in names] for index in (0, 2, 1, 3)]
    difference = f"{found[2]['acc1_difference']:+.4f} ± {found[2]['acc1_difference_se']:.4f}"
    assert f"2 minus 1, on the same images at 16 x 16: {difference}" in lines


@pytest.mark.slow
def test_heights_by_widths(best, tmp_path, capsys):
    command = ["resolutions", best, "--sizes", "16", "24", "--widths", "16", "24", "32", "--accelerator", "cpu"]
    assert main(list(map(str, [*command, "--output", tmp_path]))) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "resolutions.json").read_text())
    assert [(row["height"], row["width"]) for row in found] == [(h, w) for h in (16, 24) for w in (16, 24, 32)]
    assert [row.get("square") for row in found] == [None, 16, 24, 16, None, 24]
    written = f"{found[2]['square_difference']:+.4f} ± {found[2]['square_difference_se']:.4f}"
    assert f"16 x 32 minus squashed to 24 x 24: {written}" in out.splitlines()
    assert (tmp_path / "resolutions.png").exists()


def test_paths_are_shortened_to_what_differs():
    assert short_labels(["runs/a/best.ckpt", "runs/b/best.ckpt", "runs/a/best.ckpt"]) == ["a", "b", "a"]
    assert short_labels(["a.ckpt", "b/a.ckpt", "b.ckpt"]) == ["a.ckpt", "b/a.ckpt", "b.ckpt"]
    assert short_labels(["x/last.ckpt", "x/y/last.ckpt"]) == ["x/last.ckpt", "x/y/last.ckpt"]
    assert short_labels(["x/best.ckpt", "x/best.ckpt"]) == ["x/best.ckpt", "x/best.ckpt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sizes=[16]", "--protocol=fields"], "--protocol must be one of 'crop', 'resize', 'field', got fields"),
        (["--sizes=[16]", "--fill=black"], "--fill must be one of 'reflect', 'grey', got black"),
        (["--sizes=[16]", "--output=x.jpg"], "output x.jpg ends in '.jpg'; allowed are .csv, .json, .png"),
        (
            ["--sizes=[16]", "--output=https://a/b"],
            "output https://a/b is a remote address: give a folder of this machine",
        ),
        (["--sizes=[16,[16,24]]", "--widths=[16]"], "with widths, each of sizes is a height"),
        (["--sizes=[16,20]"], "image height 20 is not a multiple of the patch size 8"),
    ],
)
def test_mistakes(options, message, best, fails, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in fails(["resolutions", best, "--accelerator=cpu", *options])
    assert not list(tmp_path.iterdir())
