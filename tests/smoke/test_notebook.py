"""examples/quickstart.ipynb: its stored outputs can be read as they stand; it runs from top to bottom, twice alike."""

import base64
import copy
import os
import re
from pathlib import Path

import nbformat
import pytest

from tests import notebook
from tests.commands import PROJECT
from tests.smoke import test_docs

LARGEST = 100_000  # bytes of a picture
SECONDS = re.compile(r"\d ?(ms|s|sec|seconds|min|minutes|it/s)\b")
ABSOLUTE = re.compile(r"(?<![\w.~)-])[/~][\w.-]+/")
QUICK = {
    "train.steps": 4,
    "train.eval_every": 1,  # as many validations as the stored run's
    "train.alarm_step": 0,
    "train.global_batch": 8,
    "optim.warmup_steps": 1,
    "data.cards": 64,
    "data.validation_limit": 8,
    "selfmade.steps": 2,
    "eval.max_new_tokens": 2,
}


def code_cells(one: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in one.cells if cell.cell_type == "code"]


def kinds(one: nbformat.NotebookNode) -> list[list[tuple]]:
    """Of each cell its outputs: lines of a stream, or the types of what is displayed."""
    return [
        [
            (out["name"], out["text"].count("\n")) if out.output_type == "stream" else tuple(sorted(out["data"]))
            for out in cell.outputs
        ]
        for cell in code_cells(one)
    ]


@pytest.fixture(scope="module")
def stored() -> nbformat.NotebookNode:
    return notebook.read()


def test_stored_outputs_are_whole_and_hold_nothing_of_one_machine(stored):
    nbformat.validate(stored)
    cells = code_cells(stored)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    silent = [number for number, cell in enumerate(cells) if not cell.outputs]
    assert silent == [0, 1], "imports and parameters alone print nothing"
    assert any("image/png" in out.get("data", {}) for out in cells[-1].outputs)
    assert set(stored.metadata) == {"kernelspec", "language_info"} and set(stored.metadata.language_info) == {"name"}
    for cell in cells:
        assert set(cell.metadata) <= {"tags"}, "a cell's times"
        for out in cell.outputs:
            assert out.get("name", "stdout") == "stdout" and out.output_type != "error", out
            texts = [out["text"]] if out.output_type == "stream" else [out["data"].get("text/plain", "")]
            assert not [text for text in texts if ABSOLUTE.search(text) or SECONDS.search(text)], texts
            assert len(base64.b64decode(out.get("data", {}).get("image/png", ""))) < LARGEST
    assert notebook.FILE.read_text("utf-8") == nbformat.writes(stored) + "\n", "not as `make notebook` writes it"


def test_links_and_commands_of_the_text_exist(stored):
    text = "\n\n".join(cell.source for cell in stored.cells if cell.cell_type == "markdown")
    headings = {heading.replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        assert (notebook.FILE.parent / path).exists() if path else anchor in headings, link
    commands = test_docs.find_commands(notebook.FILE.name, text)
    assert commands
    for command in commands:
        test_docs.check(command.text)


@pytest.mark.slow
def test_notebook_runs_and_opens_its_own_run_with_the_same_outputs(
    stored: nbformat.NotebookNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    env = os.environ | {"JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(PROJECT)}
    env |= {"LW_JAX_CACHE": str(tmp_path / "cache"), "IPYTHONDIR": str(tmp_path / "ipython")}
    quick = copy.deepcopy(stored)
    for cell in code_cells(quick):
        if "parameters" in cell.metadata.get("tags", ()):
            cell.source += f"\nSETTINGS |= {QUICK}\nRUN, CARDS = {str(tmp_path / 'run')!r}, 8"
    first = notebook.execute(copy.deepcopy(quick), env=env)
    assert kinds(first) == kinds(stored)
    made = sorted((tmp_path / "run" / "checkpoints").iterdir())
    again = notebook.execute(quick, env=env)
    assert [cell.outputs for cell in code_cells(again)] == [cell.outputs for cell in code_cells(first)]
    assert sorted((tmp_path / "run" / "checkpoints").iterdir()) == made
