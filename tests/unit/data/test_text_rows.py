"""lw_jax/data/rows.py: whatever a file of rows holds, it is read, or refused by a UserError in one line."""

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from lw_jax.core.errors import UserError
from lw_jax.data import documents, examples, pairs, passages

DEEP = "[" * 100_000 + "]" * 100_000
LONG = "9" * 5_000
LONE = '"\\ud800 alone"'
CONTEXT, QUESTION = '"context": "Ann has a dog."', '"question": "What?"'


def squad(**paragraph: Any) -> str:
    whole = {"context": "a", "qas": [{"question": "q", "answers": [{"text": "x"}]}]} | paragraph
    return json.dumps({"data": [{"paragraphs": [whole]}]})


def hotpot(titles: Any, sentences: Any) -> str:
    return json.dumps({"context": {"title": titles, "sentences": sentences}, "question": "q", "answer": "a"})


# reader -> text -> what the message must name
BAD: dict[str, dict[str, str]] = {
    "examples": {
        f'{{"context": {LONE}, {QUESTION}, "answer": "a"}}': "surrogate",
        f'{{{CONTEXT}, {QUESTION}, "answers": ["a", {LONE}]}}': "surrogate",
        f'{{{CONTEXT}, {QUESTION}, "answer": "a", "more": {DEEP}}}': "deep",
        f'{{{CONTEXT}, {QUESTION}, "answer": "a", "id": {LONG}}}': "out of range",
        f'{{{CONTEXT}, {QUESTION}, "answer": null}}': "answer=None",
        f'{{{CONTEXT}, {QUESTION}, "answers": {{"text": "abc"}}}}': "answers.text='abc'",
        f'{{{CONTEXT}, {QUESTION}, "answers": "abc"}}': "answers='abc'",
        squad(qas=[None]): "qas[0]=None",
        squad(context=None): "context=None",
        '{"data": [{"paragraphs": 3}]}': "data[0].paragraphs=3",
        hotpot(["a", "b"], [["x"]]): "2 titles and 1",
        hotpot(["a"], "x"): "context.sentences='x'",
    },
    "pairs": {
        f'{{"prompt": {LONE}, "chosen": "a", "rejected": "b"}}': "surrogate",
        f'{{"prompt": {DEEP}, "chosen": "a", "rejected": "b"}}': "deep",
        '{"prompt": [null], "chosen": [], "rejected": []}': "prompt[0]=None",
        '{"prompt": [{"role": "", "content": "x"}], "chosen": [], "rejected": []}': "role=''",
    },
    "passages": {f'{{"text": {LONE}}}': "surrogate", '{"text": null}': "text=None", DEEP: "expected object"},
    "documents": {f'{{"text": {LONE}}}': "surrogate", '{"text": null}': "text=None", DEEP: "expected object"},
}
READERS: dict[str, Callable[[str], Iterable[Any]]] = {
    "examples": examples.read,
    "pairs": pairs.read,
    "passages": passages.read,
    "documents": documents.read,
}
CASES = [(reader, text, named) for reader, texts in BAD.items() for text, named in texts.items()]


@pytest.mark.parametrize(("reader", "text", "named"), CASES, ids=range(len(CASES)))
def test_bad_row_is_refused_in_one_short_line_with_its_place(
    tmp_path: Path, reader: str, text: str, named: str
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text, "utf-8")
    with pytest.raises(UserError) as caught:
        list(READERS[reader](str(file)))
    message = str(caught.value)
    assert message.startswith(str(file)) and named in message
    assert "\n" not in message and len(message) < 600


def test_long_rows_of_text_that_really_is_packed_are_read(tmp_path: Path) -> None:
    text = " ".join(str(i) for i in range(40_000))
    rows = "\n".join(json.dumps({"text": text, "id": i}) for i in range(3))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    assert passages.read(str(tmp_path / "a.jsonl.gz")) == [text] * 3
    assert [piece.text for piece in documents.read(str(tmp_path / "a.jsonl.gz"))] == [text] * 3


def test_first_row_with_a_byte_order_mark_is_read_in_every_form(tmp_path: Path) -> None:
    row = json.dumps({"text": "a"}).encode()
    for name, content in {"a.jsonl": row + b"\n" + row, "b.json": b"[\n" + row + b"]", "c.json": row}.items():
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
        assert set(passages.read(str(tmp_path / name))) == {"a"}
