"""Records of an evaluation under way."""

import math

import pytest

from lw_jax.core.errors import UserError
from lw_jax.evals.record_log import RecordLog

FIRST, SECOND = ({"reader": "llama", "row": "text", "index": index, "nll": math.nan} for index in (0, 1))


def test_records_of_the_same_key_are_read_again(tmp_path):
    path = tmp_path / "new folder" / "log.jsonl"
    RecordLog(path, "a").add([FIRST, SECOND])
    log = RecordLog(path, "a")
    assert log.missing("llama", ["text", "none"], [0, 1]) == ["none"]
    assert log.missing("llama", ["text"], [2]) == ["text"]
    assert [one["index"] for one in log.read(["llama"], ["text"], [1, 0])] == [1, 0]
    assert math.isnan(log.read(["llama"], ["text"], [0])[0]["nll"])
    other = RecordLog(path, "b")
    assert (len(other), other.dropped) == (0, 2)
    assert len(RecordLog(path, "a")) == 0, "another evaluation took the file"


def test_a_line_that_was_cut_is_left_out(tmp_path):
    path = tmp_path / "log.jsonl"
    RecordLog(path, "a").add([FIRST, SECOND])
    path.write_text(path.read_text("utf-8")[:-9], "utf-8")
    RecordLog(path, "a").add([{**SECOND, "nll": 1.0}])
    assert RecordLog(path, "a").read(["llama"], ["text"], [1])[0]["nll"] == 1.0


@pytest.mark.parametrize("line", [b'{"reader": ', b'{"reader": "llama"}', b"[1]", b"\xff"])
def test_a_line_that_is_no_record_is_refused_with_its_file(line, tmp_path):
    path = tmp_path / "log.jsonl"
    RecordLog(path, "a").add([FIRST])
    broken = path.read_bytes() + line + b"\n"
    path.write_bytes(broken)
    with pytest.raises(UserError, match=r"log\.jsonl.*remove the file"):
        RecordLog(path, "a")
    assert path.read_bytes() == broken, "it stays as it was"
