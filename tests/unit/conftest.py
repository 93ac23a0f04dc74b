"""Fixtures of several unit tests."""

from pathlib import Path

import pytest

from tests import standin


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the two tiny readers, which `tests.tiny` writes there once."""
    return tmp_path_factory.getbasetemp() / "readers"


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> standin.Measure:
    """StepMemory by arithmetic, nothing compiled."""
    return standin.replace_compiler(monkeypatch)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of what one test alone keeps: plans, and outputs of frozen models."""
    monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
