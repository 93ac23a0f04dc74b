"""Texts and messages from and to files and pipes, and what is refused at the door."""

import io
import sys
from pathlib import Path

import pytest

from lw_jax.core.errors import UserError
from lw_jax.inference import message_io


class Pipe:
    """Standard input or output as a program finds it: text on top, bytes beneath."""

    def __init__(self, content: bytes = b"") -> None:
        self.buffer = io.BytesIO(content)


def test_text_and_message_come_from_a_file_or_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "one"
    file.write_bytes("Ä text.\n".encode())
    assert message_io.read_text(str(file)) == "Ä text.\n"
    assert message_io.read_message(str(file)) == "Ä text.\n".encode()
    file.write_bytes("Ä text.\n".encode("utf-8-sig"))
    assert message_io.read_text(str(file)) == "Ä text.\n", "the mark of the encoding is no text"
    monkeypatch.setattr(sys, "stdin", Pipe(b"LWJX\xff\r\n\x00"))
    assert message_io.read_message("-") == b"LWJX\xff\r\n\x00"
    monkeypatch.setattr(sys, "stdin", Pipe("Ä text.\n".encode()))
    assert message_io.read_text("-") == "Ä text.\n"


def test_message_goes_to_a_file_or_alone_to_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message_io.write_message(b"LWJX\xff\n", str(tmp_path / "one"))
    assert (tmp_path / "one").read_bytes() == b"LWJX\xff\n"
    monkeypatch.setattr(sys, "stdout", pipe := Pipe())
    message_io.write_message(b"LWJX\xff\n", "-")
    assert pipe.buffer.getvalue() == b"LWJX\xff\n"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "No such file"),
        (b"", "empty"),
        (b" \n\t", "empty"),
        ("".encode("utf-8-sig"), "empty"),
        (b"\xff", "UTF-8"),
    ],
)
def test_what_is_no_text_is_refused_with_flag_and_path(tmp_path: Path, content: bytes | None, named: str) -> None:
    file = tmp_path / "one"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=f"--context {file}: .*{named}"):
        message_io.read_text(str(file))


def test_message_that_cannot_be_read_or_written_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "one"):
        with pytest.raises(UserError, match=f"--message {path}: "):
            message_io.read_message(str(path))
        with pytest.raises(UserError, match=f"--write {path}: "):
            message_io.write_message(b"x", str(path))
