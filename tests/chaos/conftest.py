"""The environment of runs that are disturbed, and one that is not."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import runs


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where runs lie, with caches of their own and what killed processes leave; they have one device."""
    folder = tmp_path_factory.mktemp("chaos")
    own = {"TMPDIR": folder, "JAX_COMPILATION_CACHE_DIR": folder / "jax", "LW_JAX_CACHE": folder / "lw_jax"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"JAX_NUM_CPU_DEVICES": "1", **own}.items():
            patch.setenv(name, str(value))
        yield folder


@pytest.fixture(scope="session")
def config(folder: Path) -> Path:
    return runs.write_config(folder)


@pytest.fixture(scope="session")
def whole(config: Path, folder: Path) -> Path:
    """The folder of an unbroken run."""
    return runs.train_whole(config, folder)
