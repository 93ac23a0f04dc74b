"""What several files read: a text, and the curve that every other way of computing is held to."""

import pytest

from tests import tiny


@pytest.fixture(scope="session")
def single(root, tmp_path_factory):
    """(exit code, losses, weights, folder) of the run that every other is held to."""
    folder = tmp_path_factory.mktemp("single") / "run"
    return *tiny.unsaved_curve(tiny.make_recipe(root), folder), folder


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Folder of the text that runs of bytes read."""
    return tmp_path_factory.mktemp("text")
