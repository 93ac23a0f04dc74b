"""lw_jax/data/examples.py: formats are recognised by content and bad input is refused by place and field."""

import gzip
import json

import pytest

from configs import base
from lw_jax.core import config
from lw_jax.core.errors import UserError
from lw_jax.core.types import Example
from lw_jax.data import examples

SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": "Rivers",
            "paragraphs": [
                {
                    "context": "The Tarn runs for 381 km.",
                    "qas": [
                        {
                            "id": "q0",
                            "question": " How long is the Tarn?",
                            "answers": [{"text": t, "answer_start": 17} for t in ("381 km", "381", "381 km ")],
                        },
                        {"id": "q1", "question": "How deep is it?", "answers": [], "is_impossible": True},
                    ],
                },
                {
                    "context": "The Lot is longer.",
                    "qas": [{"id": "q2", "question": "Which is longer?", "answers": [{"text": "The Lot"}]}],
                },
            ],
        }
    ],
}
ROWS = [
    {"context": "Ann has a dog.", "question": "What has Ann?", "answers": ["dog", "a dog"]},
    {"context": "Bo has a cat.", "question": "What has Bo?", "answer": "cat", "answers": None, "id": 0},
]


def write(path, text):
    raw = text.encode("utf-8", "surrogateescape")
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return str(path)


def data_config(**changes):
    keys = base.get_config().data.to_dict() | changes
    return config.Data(**keys)


def test_the_text_of_several_questions_is_in_memory_once(tmp_path):
    path = write(tmp_path / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in (*ROWS, ROWS[0])))
    first, _, last = examples.read(path)
    assert first.context is last.context


@pytest.mark.parametrize("name", ["squad.json", "squad.json.gz"])
def test_squad_keeps_distinct_references_in_order_and_tells_unanswerable_ones(tmp_path, caplog, name):
    path = write(tmp_path / name, json.dumps(SQUAD, indent=1 if name.endswith("json") else None))
    read = examples.read(path)
    assert read == [
        Example("q0", "The Tarn runs for 381 km.", "How long is the Tarn?", ("381 km", "381")),
        Example("q2", "The Lot is longer.", "Which is longer?", ("The Lot",)),
    ]
    assert "skipped 1 of 3 questions" in caplog.text
    rows = "".join(json.dumps({"data": [1], **row}) + "\n" for row in ROWS)
    told = examples.read(write(tmp_path / f"lines{name[5:]}", rows))
    assert [example.context for example in told] == [row["context"] for row in ROWS], "lines with a column of that name"


def test_hotpot_paragraphs_become_titled_text(tmp_path):
    context = [["Ed", ["Ed ran.", " He won."]], ["Al", ["Al sat."]]]
    rows = [{"_id": "h", "answer": "yes", "question": "Did Ed run?", "context": context, "supporting_facts": []}]
    read = examples.read(write(tmp_path / "hotpot.json", json.dumps(rows)))
    assert read == [Example("h", "Ed: Ed ran. He won.\n\nAl: Al sat.", "Did Ed run?", ("yes",))]


def test_plain_rows_may_have_one_answer_and_stand_in_lines_whatever_the_file_is_called(tmp_path):
    first, second = examples.read(write(tmp_path / "rows.json", "\n\n".join(map(json.dumps, ROWS)) + "\n"))
    assert (first.answers, second.answers, second.id) == (("dog", "a dog"), ("cat",), "0")


def test_limit_spreads_evenly_over_the_source(tmp_path):
    rows = [ROWS[0] | {"id": f"r{i}"} for i in range(11)]
    path = write(tmp_path / "x.jsonl", "\n".join(map(json.dumps, rows)))
    assert [e.id for e in examples.read(path, limit=3)] == ["r0", "r3", "r7"]
    assert len(examples.read(path, limit=99)) == 11


BROKEN = [
    ("x.jsonl", json.dumps(ROWS[0]) + '\n{"context": "a", "answer": "b"}', r"x\.jsonl:2: .*question"),
    ("x.jsonl", json.dumps(ROWS[0]) + '\n{"context": ', r"x\.jsonl:2: broken JSON"),
    ("x.json", '{"data": [\n{"a": 1},\n}', r"x\.json:1: broken JSON.*line 3, byte 1"),
    ("x.jsonl", json.dumps(ROWS[0] | {"context": " "}), r"x\.jsonl:1: .*'context'"),
    ("x.jsonl", json.dumps(ROWS[0] | {"answers": ["a", ""]}), r"x\.jsonl:1: .*'answers'"),
    ("x.jsonl", json.dumps(ROWS[0] | {"answers": []}), r"x\.jsonl:1: .*'answers'"),
    ("x.json", json.dumps([ROWS[0], ROWS[1] | {"answer": 3}]), r"x\.json\[1\]: answer=3"),
    ("x.json", '{"prompt": "a", "chosen": "b"}', "context.*'prompt', 'chosen'"),
    ("x.json", " \n", r"x\.json: "),
    ("x.jsonl.zst", "(\N{MICRO SIGN}/\n", r"x\.jsonl\.zst:1: begins with b'\(.*gzipped"),
    (
        "x.jsonl",
        json.dumps(ROWS[0] | {"id": "caf\udce9 au"}, ensure_ascii=False),
        r"x\.jsonl:1: not UTF-8 \(.*caf\\xe9'",
    ),
    ("x.csv.gz", "context,question\n", r"x\.csv\.gz: a CSV file"),
    ("x.json", "[]", r"x\.json: no examples"),
    ("x.jsonl", json.dumps(ROWS[0] | {"is_impossible": True}), "no examples.*1 unanswerable"),
    ("x.json", json.dumps([ROWS[0] | {"context": [["t", "s"]]}]), r"x\.json\[0\]: context\[0\]\[1\]='s'"),
    ("x.json", '{"data": [{"paragraphs": [{"context": "a"}]}]}', r"data\[0\]\.paragraphs\[0\]: .*qas"),
]


@pytest.mark.parametrize(("name", "text", "named"), BROKEN)
def test_broken_input_is_refused_with_place_and_field(tmp_path, name, text, named):
    with pytest.raises(UserError, match=named):
        examples.read(write(tmp_path / name, text))


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("hub:org/qa:validation[:10%]", ("org/qa", None, "validation[:10%]", None)),
        ("hub:org/qa@refs/convert/parquet", ("org/qa", None, "train", "refs/convert/parquet")),
    ],
)
def test_hub_source_names_dataset_config_and_split(hub, source, named):
    asked = hub([
        {"id": "a", "context": "c", "question": "q", "answers": {"text": ["x", "x", "y"], "answer_start": [0, 0, 1]}},
        {"id": "b", "context": "c", "question": "q", "answers": {"text": [], "answer_start": []}},
    ])  # fmt: skip
    assert examples.read(source) == [Example("a", "c", "q", ("x", "y"))]
    assert asked == [(*named, False)]


@pytest.mark.parametrize("source", ["hub:org/qa:a:b:c", "hub:org/qa@1a2b:test", "hub::test"])
def test_hub_source_of_another_form_is_refused(source):
    with pytest.raises(UserError, match="hub:NAME"):
        examples.read(source)


def test_load_takes_source_and_limit_of_the_split(tmp_path, hub):
    path = write(tmp_path / "x.jsonl", "\n".join(map(json.dumps, ROWS)))
    data = data_config(train=path, cards=5, validation_limit=3)
    assert examples.load(data, "train", seed=0) == examples.read(path)
    assert len(examples.load(data, "validation", seed=0)) == 3
    asked = hub([ROWS[0]])
    for split in ("train", "validation"):
        examples.load(data_config(train="hub:org/qa", validation="hub:org/qa"), split, seed=0)
    assert [request[2] for request in asked] == ["train", "validation"]


def test_of_made_data_as_many_are_held_out_as_are_asked_for():
    some, more = (examples.load(data_config(validation_limit=limit), "validation", seed=0) for limit in (0, 300))
    assert (len(some), len(more)) == (256, 300) and more[:256] == some


def test_several_sources_follow_each_other(tmp_path):
    one, two = (write(tmp_path / name, json.dumps(row)) for name, row in (("1.jsonl", ROWS[0]), ("2.jsonl", ROWS[1])))
    odd = write(tmp_path / "a,b.jsonl", json.dumps(ROWS[0]))
    assert examples.read(f"{one},{two}") == examples.read(one) + examples.read(two)
    assert len(examples.read(odd)) == 1
    (tmp_path / "link.jsonl").symlink_to(two)
    for validation in (two, str(tmp_path / "." / "2.jsonl"), str(tmp_path / "link.jsonl")):
        with pytest.raises(UserError, match="is the training source"):
            examples.load(data_config(train=f"{one},{two}", validation=validation), "train", seed=0)
