"""Training data: examples, preference pairs, passages and documents; JSON, text and tables."""

import functools
import gzip
import importlib
import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lw_jax.data import documents, examples, pairs, passages
from tests.chaos import mutations
from tests.chaos.cases import Kind, Sample

EXAMPLE = {"id": "a1", "context": "Mara lives in Lisbon.", "question": "Where does Mara live?", "answers": ["Lisbon"]}
OTHER = {"context": "Tom is a baker.", "question": "What is Tom?", "answer": "a baker", "is_impossible": False}
ANSWER = {"text": "Lisbon", "answer_start": 14}
QUESTION = {"id": "q1", "question": "Where?", "answers": [ANSWER], "is_impossible": False}
SQUAD = {
    "version": "v2.0",
    "data": [{"title": "t", "paragraphs": [{"context": "Mara, Lisbon.", "qas": [QUESTION] * 2}]}],
}
HOTPOT = {
    "_id": "h",
    "question": "Who?",
    "answer": "Mara",
    "context": [["Mara", ["She writes.", "A lot."]], ["Tom", ["x"]]],
}
COLUMNS = HOTPOT | {"context": {"title": ["Mara", "Tom"], "sentences": [["She writes."], ["x"]]}}
NAMED = {"passage": {"body": ["Mara lives in Lisbon.", "Tom bakes."]}, "ask": "Where?", "gold": [ANSWER]}
MAPPING = ("context:passage.body", "question:ask", "answers:gold.text")
PAIR = {"prompt": "Say hello.", "chosen": "Hello!", "rejected": "No."}
TURNS = {
    "prompt": [{"role": "user", "content": "Say hello."}],
    "chosen": [{"role": "assistant", "content": "Hello!"}],
    "rejected": [{"role": "assistant", "content": "No."}],
}
CALLS = TURNS | {
    "chosen": [{"role": "assistant", "tool_calls": [{"function": {"name": "say", "arguments": {"text": "Hello!"}}}]}],
    "tools": [{"type": "function", "function": {"name": "say"}}],
    "chat_template_kwargs": {"documents": [{"text": "x"}]},
}
TEXT = {"text": "A document of some words.\n\nAnd more."}


def _lines(*rows: Any) -> bytes:
    return "".join(mutations.text_of(row) + "\n" for row in rows).encode("utf-8", "surrogatepass")


def _table(file: str, *rows: Any) -> Callable[[Path], object]:
    """Returns what writes rows as a parquet file or as a stream of Arrow."""

    def write(folder: Path) -> object:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
        table, sink = arrow.Table.from_pylist(list(rows)), io.BytesIO()
        if file.endswith(".parquet"):
            parquet.write_table(table, sink)
        else:
            with arrow.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table)
        return (folder / file).write_bytes(sink.getvalue())

    return write


def texts_of(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from texts_of(one)
    elif isinstance(value, dict):
        yield from texts_of([*value, *value.values()])
    elif hasattr(value, "__dict__"):
        yield from texts_of(list(vars(value).values()))


def _judge(value: Any, _: Path) -> str:
    for text in texts_of(value):
        try:
            text.encode()
        except UnicodeEncodeError:
            return f"text that is no UTF-8: {text!r:.60}"
    return ""


def _kind(name: str, file: str, content: bytes | Callable[[Path], object], read: Callable[[str], Any]) -> Kind:
    lines = ".jsonl" in file

    def mutate(sample: Sample) -> Any:
        plain = gzip.decompress(sample[file]) if file.endswith(".gz") else sample[file]
        changed = [mutations.changed_bytes(sample[file])]
        if ".json" in file:
            inner = mutations.json_lines(plain) if lines else mutations.json_file(plain)
            changed += [inner.map(gzip.compress) if file.endswith(".gz") else inner] * 3
        return mutations.files(sample, {file: changed})

    return Kind(
        name=name,
        write=content if callable(content) else lambda folder: (folder / file).write_bytes(content),
        mutate=mutate,
        load=lambda folder: list(read(str(folder / file))),
        judge=_judge,
    )


_read_columns = functools.partial(examples.read, columns=MAPPING)
KINDS = [
    _kind("examples", "examples.jsonl", _lines(EXAMPLE, OTHER, EXAMPLE), examples.read),
    _kind("examples-gz", "examples.jsonl.gz", gzip.compress(_lines(EXAMPLE, OTHER), mtime=0), examples.read),
    _kind("squad", "squad.json", json.dumps(SQUAD).encode(), examples.read),
    _kind("hotpot", "hotpot.jsonl", _lines(HOTPOT, COLUMNS), examples.read),
    _kind("columns", "columns.jsonl", _lines(NAMED, NAMED), _read_columns),
    _kind("parquet", "a.parquet", _table("a.parquet", *[NAMED] * 5), _read_columns),
    _kind("arrow", "a.arrow", _table("a.arrow", *[TEXT] * 5), documents.read),
    _kind("pairs", "pairs.jsonl", _lines(PAIR, PAIR | {"prompt": "Again."}), pairs.read),
    _kind("pairs-turns", "pairs.jsonl", _lines(TURNS, CALLS), pairs.read),
    _kind("passages", "passages.jsonl", _lines(TEXT, TEXT), passages.read),
    _kind("passages-text", "passages.txt", b"One text.\n\nAnother text.\n", passages.read),
    _kind("documents", "documents.jsonl", _lines(TEXT, TEXT), documents.read),
    _kind("documents-gz", "documents.txt.gz", gzip.compress(b"One text.\n\nAnother.\n", mtime=0), documents.read),
]
