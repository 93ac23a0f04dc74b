"""Data from outside is typed and bounded in one place, and every refusal is a UserError that names the fault."""

import msgspec
import pytest

from lw_jax.core import schema
from lw_jax.core.errors import UserError


class Row(msgspec.Struct, frozen=True):
    name: str
    size: schema.Size = 1
    rate: float = 0.0
    parts: tuple[int, ...] = ()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b'{"name": "a", "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ""),
        (b'{"name": "a", "size": ' + b"9" * 5000 + b"}", ""),
        (b'{"name": "a", "size": 0}', "size=0"),
        (b'{"name": "a", "rate": NaN}', ""),
        (b'{"name": "\\ud800"}', ""),
        (b'{"name": "a", "parts": [1, "x"]}', "parts[1]='x'"),
        (b"{}", "name"),
    ],
    ids=range(7),
)
def test_every_fault_is_one_line_with_place_and_remedy(text: bytes, named: str) -> None:
    with pytest.raises(UserError) as caught:
        schema.decode(text, Row, where="rows.jsonl:7", remedy="mend the row")
    message = str(caught.value)
    assert message.startswith("rows.jsonl:7: ") and message.endswith("; mend the row")
    assert named in message and "\n" not in message and len(message) < 300


def test_large_and_unreadable_files_are_refused_before_they_are_read(tmp_path, monkeypatch) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b'{"name": "' + b"a" * 100 + b'"}')
    assert schema.read(file, Row, remedy="").name == "a" * 100
    monkeypatch.setattr(schema, "JSON_BYTES", 99)
    with pytest.raises(UserError, match="112 bytes"):
        schema.read(file, Row, remedy="fetch it again")
    with pytest.raises(UserError, match=str(tmp_path)):
        schema.read(tmp_path, Row, remedy="name a file")
    with pytest.raises(FileNotFoundError):
        schema.read(tmp_path / "absent", Row, remedy="")
