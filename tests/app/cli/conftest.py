"""Fixtures for tests of the command line: a resumed training."""

import contextlib
import io
import shutil

import pytest
from command_line import without_figures

from relvit.app.cli import main


@pytest.fixture(scope="session")
def resumed(run, tmp_path_factory):
    """The folder of a copy of the run, resumed from its four epochs to six, and what the resumed training printed."""
    folder = shutil.copytree(run, tmp_path_factory.mktemp("resumed") / "run", ignore=shutil.ignore_patterns(".lock"))
    arguments, printed = ["fit", f"--resume={folder}", "--trainer.max_epochs=6"], io.StringIO()
    with pytest.MonkeyPatch.context() as patch, without_figures(), contextlib.redirect_stdout(printed):
        patch.setattr("sys.argv", ["relvit", *arguments])
        assert main(arguments) == 0
    return folder, printed.getvalue()
