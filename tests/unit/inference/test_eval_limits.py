"""What an evaluation leaves out or refuses: rows without a second text, swapped rows alone, prompts beyond a reader."""

import json

import pytest

from lw_jax.core.errors import UserError
from lw_jax.inference import evaluation
from tests import tiny

ALL = ("text", "latents", "shuffled", "ceiling", "none")


def make(root, tmp_path, texts, answers=("3", "3", "3"), **changes):
    """An untrained wire whose held-out questions are about these texts."""
    file = tmp_path / "held_out.jsonl"
    rows = [
        {"context": text, "question": f"How many {i}?", "answers": [answer]}
        for i, (text, answer) in enumerate(zip(texts, answers, strict=False))
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return tiny.make_wire(root, only="llama", data__validation=str(file), **changes)


def test_rows_that_need_a_second_text_are_left_out_where_there_is_none(root, tmp_path, capsys):
    wire = make(root, tmp_path, ["Mara has 3 lamps."] * 3, eval__rows=ALL, eval__curve="none")
    found = evaluation.evaluate(wire)
    assert list(found.summary["llama"]) == ["text", "latents", "none"]
    said = capsys.readouterr().out
    assert "shuffled, ceiling" in said and "COLLAPSED" not in said
    assert "gap_nll" not in found.readers["llama"]
    wire = make(root, tmp_path, ["Mara has 3 lamps."] * 3, eval__rows=("shuffled",), eval__curve="none")
    with pytest.raises(UserError, match=r"config.eval.rows: shuffled"):
        evaluation.evaluate(wire)


def test_swapped_rows_alone_are_measured(root, tmp_path):
    texts, asked = ["Mara has 3 lamps.", "Tom owns 8 kites."], {"eval__rows": ("swapped", "swapped_text")}
    found = evaluation.evaluate(make(root, tmp_path, texts, ("3", "8"), eval__curve="none", **asked))
    assert list(found.summary["llama"]) == ["swapped", "swapped_text"]
    assert {record["answers"][0] for record in found.measured.records} == {"3", "8"}


def test_prompts_beyond_a_reader_s_positions_are_refused(root, tmp_path):
    long = {"data__context_tokens": 4000, "encoder__windows": 64, "eval__curve": "none"}
    words = " ".join(["lamp"] * 300)
    wire = make(root, tmp_path, [f"Mara has 3 {words}.", "Tom has 3."], eval__rows=("text", "none"), **long)
    with pytest.raises(UserError, match=r"reader 'llama': .* 512; "):
        evaluation.measure(wire)
    short = make(root, tmp_path, [f"Mara has 3 {words}.", "Tom has 3."], eval__rows=("latents", "none"), **long)
    assert evaluation.measure(short).records, "no row reads the text"
