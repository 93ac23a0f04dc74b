"""A file is there whole or not at all; a file system without locks is named."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from lw_jax.core import files
from lw_jax.core.errors import UserError
from lw_jax.data import frozen_cache


def test_file_takes_its_place_when_all_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old", encoding="utf-8")
    with files.whole(path) as partial:
        partial.write_text("ne", encoding="utf-8")
        assert path.read_text(encoding="utf-8") == "old"
        assert partial.name.startswith("."), "no pattern of a shell or a reader matches it"
        with partial.open("a", encoding="utf-8") as out:
            out.write("w")
    assert path.read_text(encoding="utf-8") == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("written", [False, True])
def test_after_an_error_nothing_has_changed(tmp_path: Path, written: bool) -> None:
    path = tmp_path / "a.json"
    files.write_whole(path, "öld")
    with pytest.raises(KeyboardInterrupt), files.whole(path) as partial:
        if written:
            partial.write_text("half", encoding="utf-8")
        raise KeyboardInterrupt
    assert path.read_bytes() == "öld".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_file_system_without_locks_is_named_with_its_remedy(tmp_path: Path, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    store = frozen_cache.Store(tmp_path, "a", rows={"x": ((2,), float)})
    with pytest.raises(UserError, match="ENOLCK.*LW_JAX_CACHE") as caught:
        store.fill([b"k" * 16], lambda _: {}, batch=1)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
