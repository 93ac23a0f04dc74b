"""lw_jax/data/row_sources.py, row_fields.py: the same rows from every form of table, or a refusal by place."""

import errno
import gzip
import json
import logging
import os
import re
import sys

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from lw_jax.core.config_sections import FIELDS
from lw_jax.core.errors import UserError
from lw_jax.core.types import Example
from lw_jax.data import examples, pairs, row_fields, row_sources, rows

COUNT = 301  # more than two batches
COLUMNS = ("context:passage.text", "question:query", "answers:gold.text", "id:")
ROWS = [
    {
        "passage": {"text": [f"One {i}.", f"Two {i}."], "rank": i},
        "query": f"What is {i}?",
        "gold": [{"text": f"{i}", "start": 0}, {"text": f"number {i}", "start": 1}],
        "id": {"no": "word"},
        "more": [0.5, None],
    }
    for i in range(COUNT)
]
EXPECTED = [(f"One {i}.\n\nTwo {i}.", f"What is {i}?", (f"{i}", f"number {i}")) for i in range(COUNT)]


def write(folder, form, made):
    """Writes rows as a form of table; returns the source's name."""
    path = folder / form.replace(" ", "")
    if form in ("rows.jsonl", "rows.jsonl.gz", "rows.json"):
        text = json.dumps(made) if form == "rows.json" else "\n".join(map(json.dumps, made))
        path.write_bytes(gzip.compress(text.encode()) if form.endswith("gz") else text.encode())
        return str(path)
    if form.startswith("saved"):
        datasets = pytest.importorskip("datasets")
        whole = datasets.Dataset.from_list(made)
        whole = whole if form == "saved" else datasets.DatasetDict({"train": whole, "test": whole.select([0])})
        whole.save_to_disk(str(path))
        return str(path)
    table, parquet = pyarrow.Table.from_pylist(made), pyarrow.parquet
    if form == "shards":
        path.mkdir()
        for number, start in enumerate(range(0, len(made), 97)):
            parquet.write_table(table.slice(start, 97), path / f"train-{number:05d}-of-00004.parquet")
        parquet.write_table(table.slice(0, 1), path / "test-00000-of-00001.parquet")
    elif form.endswith(".parquet"):
        parquet.write_table(table, path, row_group_size=143)
    else:
        new = pyarrow.ipc.new_stream if form == "stream.arrow" else pyarrow.ipc.new_file
        with pyarrow.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table, 211)
    return str(path)


# Forms of a table, and where row 200 stands in each.
FORMS = {
    "rows.jsonl": "rows.jsonl:201",
    "rows.jsonl.gz": "rows.jsonl.gz:201",
    "rows.json": "rows.json[200]",
    "a.parquet": "a.parquet[200]",
    "stream.arrow": "stream.arrow[200]",
    "file.arrow": "file.arrow[200]",
    "shards": "train-00002-of-00004.parquet[6]",
    "saved": "saved[200]",
    "saved s": "saveds:train[200]",
}


def texts(source, **options):
    return [(one.context, one.question, one.answers) for one in examples.read(source, **options)]


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("form", ["a.parquet", "stream.arrow", "saved"])
def test_objects_of_a_table_have_the_fields_that_they_have_in_json(tmp_path, form, typed):
    datasets = pytest.importorskip("datasets")
    given = [
        {"prompt": [{"role": "user", "content": "?"}], "rejected": [{"role": "assistant", "content": "no"}], **row}
        for row in (
            {"chosen": [{"role": "assistant", "content": "", "tool_calls": [{"arguments": arguments}]}], "tools": tools}
            for arguments in ({"a": 1}, {"b": "x"})
            for tools in ([{"name": "f", "properties": {"a": {"type": "integer"}}}, {"name": "g"}],)
        )
    ]
    made = datasets.Dataset.from_list(given)
    if typed:  # as datasets reads JSON whose objects differ
        features = made.features.copy()
        features["chosen"].feature["tool_calls"].feature["arguments"] = datasets.Json()
        features["tools"].feature["properties"] = datasets.Json()
        made = datasets.Dataset.from_list(given, features=features)
    if form == "saved":
        made.save_to_disk(str(tmp_path / form))
    elif form == "a.parquet":
        made.to_parquet(tmp_path / form)
    else:
        with pyarrow.OSFile(str(tmp_path / form), "wb") as sink, pyarrow.ipc.new_stream(sink, made.data.schema) as out:
            out.write_table(made.data.table)
    found, wanted = pairs.read(str(tmp_path / form)), pairs.read(write(tmp_path, "rows.jsonl", given))
    assert [(pair.chosen, pair.values) for pair in found] == [(pair.chosen, pair.values) for pair in wanted]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_table_gives_the_same_examples_from_columns_of_other_names(tmp_path, form):
    source = write(tmp_path, form, ROWS)
    assert texts(source, columns=COLUMNS) == EXPECTED
    with pytest.raises(UserError, match="'question': no column 'ask', .*'passage', 'query', 'gold', 'id', 'more'"):
        examples.read(source, columns=("context:passage.text", "question:ask", "answers:gold.text"))
    with pytest.raises(UserError, match="'context': no column 'passage.body', .*'text', 'rank'"):
        examples.read(source, columns=("context:passage.body", *COLUMNS[1:]))


@pytest.mark.parametrize("form", FORMS)
def test_null_is_refused_with_place_field_and_column(tmp_path, form):
    source = write(tmp_path, form, [row | {"query": None} if i == 200 else row for i, row in enumerate(ROWS)])
    with pytest.raises(UserError, match=f"{re.escape(FORMS[form])}: question=None: .*'query'"):
        examples.read(source, columns=COLUMNS)


@pytest.mark.parametrize(
    ("row", "columns", "context"),
    [
        ({"a.b": "whole", "a": {"b": "nested"}}, ("context:a.b",), "whole"),
        ({"a:b": "c"}, ("context:a:b",), "c"),
        ({"context": "q", "question": "c"}, ("context:question", "question:context"), "c"),
        ({"context": "c", "answers": [], "right": "x"}, ("answer:right",), "c"),
        ({"context": ["One.", " ", "Two."]}, (), "One.\n\nTwo."),
        ({"context": [{"title": "T", "text": "One."}, {"text": "Two."}, ["U", ["a.", " b."]]]}, (),
         "T: One.\n\nTwo.\n\nU: a. b."),
        ({"context": {"title": ["T", ""], "sentences": [["a.", "b."], ["c."]]}}, (), "T: a. b.\n\nc."),
    ],
)  # fmt: skip
def test_contexts_of_paragraphs_and_odd_columns_become_one_text(tmp_path, row, columns, context):
    row = {"question": "q", "answers": ["x"], "id": 5} | row
    assert examples.read(write(tmp_path, "rows.jsonl", [row]), columns=columns) == [Example("5", context, "q", ("x",))]


def test_columns_that_are_not_needed_are_not_read_and_broken_ones_are_refused(tmp_path):
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 1, pyarrow.array([b"\xff"], pyarrow.binary()).buffers())
    table = pyarrow.table({"context": ["c"], "question": ["q"], "answer": ["x"], "other": broken})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert texts(str(tmp_path / "a.parquet")) == [("c", "q", ("x",))]
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    (tmp_path / "c.arrow").write_bytes(b"ARROW1" * 9)
    for name, columns in (("a.parquet", ("context:other",)), ("b.parquet", ()), ("c.arrow", ())):
        with pytest.raises(UserError, match=f"{name}: cannot be read"):
            examples.read(str(tmp_path / name), columns=columns)


@pytest.mark.parametrize("form", ["rows.jsonl", "a.parquet", "saved"])
def test_columns_that_nobody_reads_are_named_once_with_their_count(tmp_path, form, caplog):
    given = [{"context": "c", "question": "q", "answer": "a", "score": i, "source": f"s{i}"} for i in range(COUNT)]
    source = write(tmp_path, form, given)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            examples.read(source, columns=("source:",) if form != "saved" else ())
    (told,) = (record.getMessage() for record in caplog.records)
    assert source in told and f"'score' ({COUNT} rows)" in told
    assert ("'source'" in told) == (form == "saved"), "what the user leaves out is not told"


@pytest.mark.parametrize(("form", "name"), [("rows.jsonl", "system"), ("a.parquet", "tools"), ("saved", "history")])
def test_column_that_changes_the_meaning_is_refused_where_it_holds_something(tmp_path, form, name):
    given = {"context": "c", "question": "q", "answer": "a"}
    source = write(tmp_path, form, [given | {name: None}, given | {name: "Be brief."}])
    with pytest.raises(UserError, match=rf"(:2|\[1\]): {name}='Be brief.'.*data.columns={name}:"):
        examples.read(source)
    assert len(examples.read(source, columns=(f"{name}:",))) == 2


# --- splits


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


@pytest.mark.parametrize(
    ("names", "split", "chosen"),
    [
        (("train-00000-of-00002.parquet", "train-00001-of-00002.parquet", "test.parquet"), "train", [0, 1]),
        (("data/train-00000-of-00001-8a1b2c3d4e.parquet", "data/validation-00000-of-00001.parquet"), "validation", [1]),
        (("text/train/0000.parquet", "text/test/0000.parquet", ".cache/train.parquet"), "train", [0]),
        (("train_prefs-00000-of-00001.parquet", "train_sft-00000-of-00001.parquet"), ":train_sft", [1]),
        (("b.parquet", "a/trains.arrow"), "validation", [1, 0]),
    ],
)
def test_split_of_a_folder_is_told_from_the_names_in_it(tmp_path, names, split, chosen):
    touch(tmp_path, *names, "README.md")
    source, split = (f"{tmp_path}{split}", "train") if split.startswith(":") else (str(tmp_path), split)
    assert row_sources.files(source, split) == [tmp_path / names[i] for i in chosen]


@pytest.mark.parametrize(
    ("names", "source", "named"),
    [
        (("train_sft-00000-of-00001.parquet",), "", "'train'.*'train_sft'"),
        (("train.parquet", "b.parquet"), "", r"b\.parquet"),
        (("a.parquet", "b.jsonl"), "", r"b\.jsonl: stands in a folder of tables"),
        (("a.parquet",), ":test", "'test'"),
        (("squad_train.parquet", "squad_dev.parquet"), "", r"\bdev, train\b"),
        (("Train.parquet", "Test.parquet"), "", r"\btest, train\b"),
        (tuple(f"{name}/train-00000-of-00001.parquet" for name in ("de", "en")), "", "same part of two tables"),
        (tuple(f"train-00000-of-00001-{name}.parquet" for name in ("8a1b2c3d4e", "0f0f0f0f0f")), "", "of two tables"),
        (("a.csv",), "", r"\.parquet, \.arrow"),
        ((), "/gone.parquet", r"gone\.parquet: no such file"),
        ((), "/gone.csv", r"gone\.csv: a CSV file"),
    ],
)
def test_folder_without_the_split_or_without_tables_is_refused(tmp_path, names, source, named):
    touch(tmp_path, *names)
    with pytest.raises(UserError, match=named):
        examples.read(f"{tmp_path}{source}")


def test_parts_of_a_table_that_are_not_there_are_reported(tmp_path, caplog):
    touch(tmp_path, *(f"train-{number:05}-of-00004.parquet" for number in (0, 3)), "test-00000-of-00001.parquet")
    assert len(row_sources.files(str(tmp_path), "train")) == 2
    assert "2 of the 4 files train-*-of-00004 are there" in caplog.text
    caplog.clear()
    assert len(row_sources.files(str(tmp_path), "test")) == 1 and not caplog.text
    texts = [f"{name}/part-{number}-of-2.txt" for name in ("books", "wiki") for number in (0, 1)]
    touch(tmp_path / "one text", *texts[:3])
    assert len(row_sources.files(str(tmp_path / "one text"), "train", beside=(".txt",))) == 3
    assert "1 of the 2 files" in caplog.text and "wiki/part-*" in caplog.text


# --- links


def test_folders_behind_links_are_read_once_each_and_a_loop_ends(tmp_path, caplog):
    data, other = tmp_path / "data", tmp_path / "other"
    touch(data, "b.parquet", "c/d.parquet", ".hidden/e.parquet")
    touch(other, "1.parquet", "deep/2.parquet")
    (data / "a").symlink_to(other)
    (data / ".also").symlink_to(other)
    assert row_sources.files(str(data), "train") == [
        data / name for name in ("a/1.parquet", "a/deep/2.parquet", "b.parquet", "c/d.parquet")
    ]
    assert not caplog.text
    for link, behind in ((data / "c" / "up", data), (data / "again", data / "c")):
        link.symlink_to(behind)
        assert len(row_sources.files(str(data), "train")) == 4
        assert f"{link}: a link to a folder that is read already" in caplog.text
    (other / "deep" / "back").symlink_to(data)
    assert len(row_sources.files(str(data), "train")) == len(row_sources.files(str(other), "train")) == 4


@pytest.mark.parametrize("name", ["b.parquet", "c/b.jsonl.gz", "wiki", "itself.arrow"])
def test_link_to_what_is_gone_is_refused_where_it_may_be_data(tmp_path, name):
    touch(tmp_path, "a.parquet", "c/d.txt")
    (tmp_path / name).symlink_to(tmp_path / name if name == "itself.arrow" else "gone")
    with pytest.raises(UserError, match=f"{name}: a link to .*, which cannot be read"):
        row_sources.files(str(tmp_path), "train", beside=(".txt", ".jsonl"))


def test_link_to_what_is_gone_is_named_where_it_would_not_be_read(tmp_path, caplog):
    touch(tmp_path, "a.parquet")
    (tmp_path / "b.png").symlink_to("gone")
    assert row_sources.files(str(tmp_path), "train") == [tmp_path / "a.parquet"]
    assert f"{tmp_path}: not read: b.png;" in caplog.text


def test_folder_that_cannot_be_read_is_reported(tmp_path, monkeypatch, caplog):
    touch(tmp_path, "a.parquet", "closed/b.parquet")
    scan = os.scandir

    def closed(path):
        if os.fspath(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", closed)
    assert row_sources.files(str(tmp_path), "train") == [tmp_path / "a.parquet"]
    assert f"{tmp_path / 'closed'}: not read: a folder without permission" in caplog.text


# --- sources


def test_split_of_a_saved_data_set_is_named_or_refused(tmp_path):
    source = write(tmp_path, "saved s", ROWS[:3])
    assert texts(f"{source}:test", columns=COLUMNS) == EXPECTED[:1]
    with pytest.raises(UserError, match="'validation'.*'test', 'train'"):
        examples.read(source, split="validation", columns=COLUMNS)


def test_validation_is_apart_from_training_by_what_is_read_not_by_its_name(tmp_path):
    touch(tmp_path, "s/dataset_dict.json", "one/a.parquet", "one/b.parquet", "p/train.parquet", "p/test.parquet")

    def check(train, validation):
        row_sources.check_apart(
            *(one if one.startswith("hub:") else f"{tmp_path}/{one}" for one in (train, validation))
        )

    for train, validation in (
        *(("s", "s"), ("p", "p:test"), ("one/a.parquet", "one/b.parquet"), ("hub:a/b", "hub:a/b:test")),
        *(("hub:a/b:train@x", "hub:a/b:train@y"), ("hub:a/b:train[:90%]", "hub:a/b:train[90%:]")),
        *(("hub:a/b:one:train", "hub:a/b:two:train"), ("hub:one/a.parquet", "one/a.parquet")),
    ):
        check(train, validation)
    for train, validation in (
        *(("s", "s:train"), ("s/train", "s:train"), ("one", "one"), ("one", "one/b.parquet"), ("p", "p/train.parquet")),
        *(("hub:a/b", "hub:a/b:train"), ("hub:a/b", "hub:a/b:train[:10%]"), ("hub:a/b", "hub:a/b:train@x")),
        *(("hub:a/b:train[:9]", "hub:a/b:train[:9]"), ("hub:a/b:train+validation", "hub:a/b")),
    ):
        with pytest.raises(UserError, match="is the training source, or a part of it"):
            check(train, validation)


def test_a_copy_of_the_training_file_is_warned_of(tmp_path, caplog):
    for name, text in (("a.jsonl", "12"), ("b.jsonl", "12"), ("c.jsonl", "34")):
        (tmp_path / name).write_text(text, "utf-8")
    train, copy, other = (str(tmp_path / f"{name}.jsonl") for name in "abc")
    row_sources.check_apart(train, other)
    assert not caplog.text
    row_sources.check_apart(f"{other},{train}", copy)
    assert f"{copy}: held-out data, a copy of the training data {train}" in caplog.text


def test_lists_of_sources_may_be_long_and_have_no_empty_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [f"questions_part_{number:03}.jsonl" for number in range(20)]
    assert row_sources.split_sources(",".join(names)) == names
    assert row_sources.split_sources("") == [""]
    for source in ("a.jsonl,", ",a.jsonl", "a.jsonl, ,b.jsonl"):
        with pytest.raises(UserError, match="an empty name between commas"):
            row_sources.split_sources(source)


def test_column_that_is_there_twice_is_refused(tmp_path):
    table = pyarrow.table([["c"], ["q"], ["a"], ["b"]], ["context", "question", "answer", "answer"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match="'answer'"):
        examples.read(str(tmp_path / "a.parquet"))


# --- packages and keys


@pytest.mark.parametrize(("package", "name"), [("pyarrow", "a.parquet"), ("datasets", "state.json"), ("datasets", "")])
def test_missing_package_is_refused_with_what_installs_it(tmp_path, monkeypatch, package, name):
    touch(tmp_path, name) if name else None
    source = "hub:a/b" if not name else str(tmp_path if name == "state.json" else tmp_path / name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"'{package}'.*pip install"):
        examples.read(source)


def test_fields_that_columns_may_name_are_those_of_the_rows():
    wire = [*row_fields.names_of(examples.Row), *row_fields.names_of(rows.Text)]
    assert sorted(FIELDS["latentwire"]) == sorted(name for name in wire if name != "_id")
    assert sorted(FIELDS["dpo"]) == sorted(row_fields.names_of(pairs.Row))
    assert sorted(FIELDS["ttt"]) == row_fields.names_of(rows.Text)
