"""Execute the notebooks and store their outputs: `python notebooks/execute.py`, or with the paths of some of them."""

import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def execute(path: Path) -> None:
    """Execute a notebook in an empty folder and rewrite its file, without times and names of the machine.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed; the file is as it was.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        options = {"timeout": 600, "record_timing": False, "coalesce_streams": True}
        NotebookClient(notebook, resources={"metadata": {"path": folder}}, **options).execute()
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    # Names of runs begin with the time.
    path.write_text(re.sub(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", "DATE", nbformat.writes(notebook)) + "\n")


if __name__ == "__main__":
    # The cells call `relvit`, which is beside this Python.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    # tqdm asks for widgets that nothing here needs.
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"
    for name in sys.argv[1:] or sorted(Path(__file__).parent.glob("*.ipynb")):
        execute(Path(name))
