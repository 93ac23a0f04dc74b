"""Runs examples/quickstart.ipynb from top to bottom and writes its outputs anew: `python -m tests.notebook`."""

import os
from collections.abc import Mapping
from pathlib import Path

import nbclient
import nbformat

FILE = Path(__file__).resolve().parent.parent / "examples" / "quickstart.ipynb"
VERSION = 4  # of the format
LONGEST = 1800  # seconds of a cell


def read() -> nbformat.NotebookNode:
    """Returns the notebook with its stored outputs."""
    return nbformat.read(FILE, VERSION)


def execute(notebook: nbformat.NotebookNode, *, env: Mapping[str, str] = os.environ) -> nbformat.NotebookNode:
    """Runs all cells in a fresh kernel of this interpreter, in the notebook's folder; returns it with their outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised an error; its message holds cell and traceback.
    """
    place = {"metadata": {"path": str(FILE.parent)}}
    client = nbclient.NotebookClient(
        notebook,
        timeout=LONGEST,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,  # or a cell's lines are cut into outputs by chance
        resources=place,
        extra_arguments=["--log-level=ERROR"],  # it warns that its local sockets are not encrypted
    )
    client.execute(env=dict(env))
    notebook.metadata.language_info = {"name": "python"}  # without the interpreter's version
    return notebook


if __name__ == "__main__":
    nbformat.write(execute(read()), FILE)
