"""lw_jax/data/documents.py: documents streamed from every kind of source, and what tells one source from another."""

import gzip
import json
import os
import sys

import pytest

from lw_jax.core.errors import UserError
from lw_jax.data import documents
from lw_jax.data.documents import Piece, identify, read
from lw_jax.data.row_sources import Unreachable

TEXT = "naïve 中文\r\n\r\n" + "".join(f"line {i} of it\n" for i in range(97)) + "no end"


def texts(source, split="train", columns=()):
    """Joins the pieces of each document."""
    found, held = [], ""
    for piece in read(str(source), split, columns):
        held += piece.text
        if piece.ends:
            found.append(held)
            held = ""
    assert held == ""
    return found


def write_rows(path, rows):
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("size", [5, 41, 10_000])
def test_pieces_end_with_a_line_or_before_a_word_and_only_the_last_ends_the_document(tmp_path, monkeypatch, size):
    monkeypatch.setattr(documents, "PIECE", size)
    text = TEXT + "\n" + "word " * 40 + "x" * 100
    (tmp_path / "a.txt").write_bytes(text.encode())
    pieces = list(read(str(tmp_path / "a.txt")))
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(len(piece.text) < 3 * size for piece in pieces)
    if size == 41:  # longer than any line but the last
        for piece, behind in zip(pieces[:-3], pieces[1:-2], strict=True):
            assert piece.text.endswith("\n") or behind.text.startswith(" word")


def test_rows_are_documents_and_blank_ones_are_told_as_such(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", ["one\n two ", "", "\u2028three"])
    path.write_text(path.read_text() + "\n\n")
    assert list(read(str(path))) == [Piece("one\n two ", True), Piece("", True), Piece("\u2028three", True)]
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert texts(packed) == texts(path)


def test_folder_is_read_in_the_order_of_names_at_any_depth(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "c.txt").write_text("last")
    (tmp_path / "b" / "z.txt").write_text("third")
    write_rows(tmp_path / "b" / "a.jsonl", ["first", "second"])
    (tmp_path / "README.md").write_text("not read")
    (tmp_path / ".hidden" / "a.txt").write_text("not read")
    assert texts(tmp_path) == ["first", "second", "third", "last"]


def test_files_of_a_folder_that_are_not_read_are_named_once(tmp_path, caplog):
    (tmp_path / "b").mkdir()
    for name in ("a.txt", "a.json", "b/rows.csv.gz", "LICENSE", ".hidden.json"):
        (tmp_path / name).write_text("text")
    assert [identify(str(tmp_path)), texts(tmp_path)][1] == ["text"]
    (warning,) = caplog.messages
    assert f"{tmp_path}: not read: LICENSE, a.json, b/rows.csv.gz;" in warning and ".jsonl" in warning


def test_folder_of_several_splits_that_are_not_tables_alone_is_refused(tmp_path):
    for name in ("train.jsonl", "train-2.jsonl.gz", "train-3.jsonl.gz", "test.jsonl"):
        write_rows(tmp_path / name, [name])
        if name != "test.jsonl":
            assert len(texts(tmp_path)) == len(list(tmp_path.iterdir()))
    with pytest.raises(UserError, match=r"files of the splits test, train, .*name one of its"):
        texts(tmp_path)  # a list with commas is no source of this recipe


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.txt", b"caf\xe9", r"a\.txt: not UTF-8"),
        ("a.txt.gz", gzip.compress(b"text" * 99, mtime=0)[:-9], r"a\.txt\.gz: broken gzip"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "a"', r"a\.jsonl:2: broken JSON"),
        ("a.csv", b"a,b", r"a\.csv: "),
        ("", b"", "is a directory"),
        ("gone/a.txt", None, r"gone/a\.txt: no such file"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, name, content, named):
    if content:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=named):
        texts(tmp_path / name)


# --- what a source is


def test_identity_follows_names_and_content_but_not_the_folder(tmp_path):
    def folder(name, **files):
        (tmp_path / name).mkdir()
        for stem, text in files.items():
            (tmp_path / name / f"{stem}.txt").write_text(text)
        return identify(str(tmp_path / name))

    first = folder("one", a="text", b="more")
    assert folder("two", a="text", b="more") == first
    for name, files in {"c": {"a": "texT", "b": "more"}, "d": {"a": "text", "c": "more"}, "e": {"a": "text"}}.items():
        assert folder(name, **files) != first
    os.utime(tmp_path / "one" / "a.txt", (5, 5))
    assert identify(str(tmp_path / "one")) == first == json.loads(json.dumps(first))


def test_identity_of_a_saved_data_set_follows_what_its_links_lead_to(tmp_path):
    saved, other = tmp_path / "saved", tmp_path / "other"
    for folder in (saved, other):
        folder.mkdir()
    (saved / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (saved / "train").symlink_to(other)
    (other / "state.json").write_text("{}")
    (other / "data-00000-of-00001.arrow").write_bytes(b"old")
    first = identify(str(saved))
    assert [name for name, _ in first] == ["dataset_dict.json", "train/data-00000-of-00001.arrow", "train/state.json"]
    (other / "data-00000-of-00001.arrow").write_bytes(b"new")
    assert identify(str(saved)) != first
    (saved / "train").unlink()
    (saved / "train").symlink_to("gone")
    with pytest.raises(UserError, match="train: a link to gone"):
        identify(str(saved))


# --- docstrings


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A standard library of four modules, two of which are not read."""
    for name, code in {
        "b.py": 'def f():\n    "of f"\n    class C:\n        """of C\n\n        More.\n\n          deeper"""\n',
        "a.py": '"""of a"""\nif True:\n    async def g():\n        "of g"\ndef h():\n    "of h"\n    return "\\d"\n',
        "bare.py": "x = 1\n",
        "test/c.py": '"of a test"',
        "x/site-packages/d.py": '"of another"',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code)
    monkeypatch.setattr(documents.sysconfig, "get_path", lambda name: {"stdlib": str(tmp_path)}[name])
    return tmp_path


def test_docstrings_are_cleaned_and_in_the_order_of_the_file(library):
    assert texts("docstrings") == ["of a\n\nof g\n\nof h", "of f\n\nof C\n\nMore.\n\n  deeper"]


def test_identity_of_docstrings_follows_python(library, monkeypatch):
    first = identify("docstrings")
    assert identify("docstrings") == first
    monkeypatch.setattr(sys, "version", "2.7")
    assert identify("docstrings") != first


# --- data sets


@pytest.mark.parametrize(
    ("source", "split", "named"),
    [
        ("hub:org/t", "train", ("org/t", None, "train", None)),
        ("hub:org/t:raw-v1", "validation", ("org/t", "raw-v1", "validation", None)),
        ("hub:org/t:raw-v1:test@1a2b", "train", ("org/t", "raw-v1", "test", "1a2b")),
    ],
)
def test_hub_source_is_streamed_and_known_by_its_hash(hub, source, split, named):
    asked = hub([{"text": "one"}, {"text": ""}, {"text": "two", "id": 3}])
    assert texts(source, split) == ["one", "", "two"]
    assert asked == [(*named, True)]
    assert identify(source, split) == [source, "5eed", *([split] if split != "train" else [])]


def test_hub_that_does_not_answer_is_told(hub):
    hub(ConnectionError("no route"))
    for ask in (texts, identify):
        with pytest.raises(Unreachable, match="hub:org/t.*no route"):
            ask("hub:org/t")


def test_text_in_a_column_of_another_name_is_read_and_tells_sources_apart(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": 5, "body": {"en": "one"}}\n{"body": {"en": "two"}}\n')
    assert texts(path, columns=("text:body.en",)) == ["one", "two"]
    assert identify(str(path), columns=("text:body.en",)) != identify(str(path))
    with pytest.raises(UserError, match=r"a\.jsonl:1: field 'text': no column 'body.fr', here are 'en'"):
        texts(path, columns=("text:body.fr",))
