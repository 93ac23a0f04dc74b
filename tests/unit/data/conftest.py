"""Fixtures of several tests of data."""

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest


class Rows(list):
    """A data set of the hub; a streamed one does not know its columns before the first row."""

    features = None

    def __init__(self, rows: list[dict[str, Any]], streamed: bool):
        super().__init__(rows)
        self.column_names = None if streamed else list(rows[0])

    def select_columns(self, names: list[str]) -> "Rows":
        return Rows([{name: row[name] for name in names} for row in self], streamed=False)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[tuple]]:
    """Puts a package "datasets" in place that answers rows, or raises an error, and remembers what was asked."""

    def put(rows: Any) -> list[tuple]:
        asked: list[tuple] = []

        def load(name: str, subset: str | None, *, split: str = "", revision: str | None, streaming: bool = False):
            asked.append((name, subset, split, revision, streaming))
            if isinstance(rows, Exception):
                raise rows
            return Rows(rows, streaming)

        def build(name: str, subset: str | None, *, revision: str | None) -> types.SimpleNamespace:
            load(name, subset, revision=revision)
            return types.SimpleNamespace(hash="5eed")

        module = types.ModuleType("datasets")
        errors = types.SimpleNamespace(DatasetsError=type("DatasetsError", (Exception,), {}))
        for key, value in {"load_dataset": load, "load_dataset_builder": build, "exceptions": errors}.items():
            setattr(module, key, value)
        monkeypatch.setitem(sys.modules, "datasets", module)
        return asked

    return put
