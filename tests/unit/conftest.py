"""Fixtures of the planner's tests."""

from pathlib import Path

import pytest

from tests import standin


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> standin.Measure:
    """StepMemory by arithmetic, nothing compiled."""
    return standin.replace_compiler(monkeypatch)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the plans of one test alone."""
    monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans"
