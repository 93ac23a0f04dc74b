"""examples/answers_picture.py: the texts beside the answers are those that were answered."""

import json

import pytest

from examples import answers_picture
from lw_jax.core.errors import UserError
from tests import runs


def test_cards_are_those_of_the_predictions_where_examples_were_dropped(tmp_path):
    cards = [{"id": str(i), "context": f"It is gold {i}.", "question": "What is it?"} for i in range(12)]
    rows = [card | {"answers": [f"gold {i}"]} for i, card in enumerate(cards)]
    runs.write_lines(tmp_path / "held.jsonl", rows)
    folder = runs.write_run(tmp_path / "run", data__validation=str(tmp_path / "held.jsonl"), data__validation_limit=3)
    predictions = runs.predictions(12)
    for prediction in predictions:  # the examples 0, 1 and 2 were dropped: places are those of what is left
        kept = prediction["index"] // 3 + 3
        prediction |= {"index": kept - 3, "id": str(kept % 12), "question": "What is it?", "answers": [f"gold {kept}"]}
    runs.write_lines(folder / "predictions.jsonl", predictions)
    shown, _, _ = answers_picture.read(folder, "qwen")
    assert [card["context"] for card in shown] == [f"It is gold {i}." for i in range(3, 8)]
    assert answers_picture.main(["--run", str(folder), "--reader", "qwen", "--out", str(tmp_path / "a.png")]) == 0
    for out in (tmp_path / "a.words", tmp_path / "nowhere" / "a.png"):
        with pytest.raises(UserError, match=f"^--out {out}"):
            answers_picture.main(["--run", str(folder), "--reader", "qwen", "--out", str(out)])
    (tmp_path / "held.jsonl").write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(UserError, match="predictions.jsonl is of other data"):
        answers_picture.read(folder, "qwen")


def test_an_evaluation_without_a_row_of_the_picture_is_refused(tmp_path):
    folder = runs.write_run(tmp_path / "run")
    found = json.loads((folder / "eval.json").read_text())
    del found["rows"]["qwen"]["shuffled"], found["rows"]["llama"]["shuffled"]
    (folder / "eval.json").write_text(json.dumps(found))
    with pytest.raises(UserError, match="no row shuffled.*--config.eval.rows=text,latents,shuffled,none"):
        answers_picture.read(folder, "qwen")
