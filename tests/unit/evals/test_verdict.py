"""Each reader's evaluation ends with one sentence, which says no more than the intervals of its figures allow."""

import pytest

from lw_jax.evals import verdict

ROWS = {
    "text": {"f1": 0.80, "positions": 60.2},
    "text_taught": {"f1": 0.80, "positions": 60.2},
    "latents": {"f1": 0.82, "positions": 11.3},
    "shuffled": {"f1": 0.03, "positions": 11.3},
    "none": {"f1": 0.01, "positions": 0.0},
}
GOOD = {
    "upper": "text",
    "texts": 64,
    "fewer_positions": 5.3,
    "normalised_f1": 1.02,
    "normalised_f1_interval": [0.95, 1.1],
    "recovered_nll": 1.01,
    "recovered_nll_interval": [0.9, 1.1],
    "own_f1": 1.02,
    "own_f1_interval": [0.95, 1.1],
    "gap_nll": 3.0,
    "gap_nll_interval": [2.5, 3.5],
    "gap_f1": 0.8,
    "gap_f1_interval": [0.7, 0.9],
}


def say(rows=ROWS, figures=GOOD, **changes) -> str:
    line = verdict.sentence("llama", figures | changes, rows)
    assert "\n" not in line and line.startswith("llama: ")
    return line


@pytest.mark.parametrize(
    ("interval", "said", "unsaid"),
    [
        ([0.95, 1.1], "as well as", "settled"),
        ([1.01, 1.3], "better than", "settled"),
        ([0.70, 1.2], "keeps 102% (70% to 120%)", "as well as from"),
        ([0.60, 0.8], "keeps 102% (60% to 80%)", "settled"),
        (None, "not settled", "better than"),
    ],
)
def test_share_is_settled_by_its_interval(interval, said, unsaid):
    line = say(normalised_f1_interval=interval)
    assert said in line and unsaid not in line
    assert ("not settled" in line) == (interval in ([0.70, 1.2], None))


def test_what_another_texts_message_gives_too_is_not_counted_as_the_texts():
    line = say(own_f1=0.55, own_f1_interval=[0.3, 0.8])
    assert "keeps 102%" in line and "55% (30% to 80%)" in line and "as well as" not in line
    less = {"own_f1": None, "own_f1_interval": None, "own_f1_reason": "text may be no better than shuffled"}
    line = say(**less)
    assert "no better than shuffled" in line and "as well as" not in line
    assert "70% (60% to 80%) of what" in say(**less, own_nll=0.7, own_nll_interval=[0.6, 0.8])
    knows = ROWS | {"shuffled": {"f1": 0.5, "positions": 11.3}}
    assert "form" in say(knows) and "form" not in say() and "form" not in say(knows, upper="text_taught")


def test_control_that_still_answers_is_not_called_failing():
    line = say(ROWS | {"shuffled": {"f1": 0.5, "positions": 11.3}})
    assert "worse (F1 0.50)" in line and "fails" not in line
    line = say(gap_f1_interval=[-0.1, 0.2])
    assert "fails" not in line and "not settled" in line


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"texts": 5}, "no verdict: 5 texts are too few"),
        ({"gap_nll_interval": [-0.1, 0.3]}, "COLLAPSED"),
        ({"gap_f1_interval": [-0.1, 0.3]}, "not settled"),
        ({"normalised_f1_interval": [-0.3, 0.2], "recovered_nll_interval": [-1.7, -1.2]}, "USELESS"),
    ],
)
def test_few_texts_and_a_control_that_may_serve_as_well_are_said(changes, word):
    assert word in say(**changes)


def test_rows_that_are_missing_or_a_text_that_does_not_help_give_no_verdict():
    assert "no verdict" in verdict.sentence("llama", {}, {})
    reason = "text may be no better than none (0.1, -0.1..0.2)"
    none = {"normalised_f1": None, "recovered_nll": None, "normalised_f1_reason": reason}
    assert say(**none) == f"llama: no verdict: {reason}"
    alone = {"gap_nll": 1.0, "gap_nll_interval": [0.5, 1.5], "texts": 20}
    assert "no verdict" in verdict.sentence("llama", alone, {"latents": ROWS["latents"], "shuffled": ROWS["shuffled"]})
    assert "COLLAPSED" in verdict.sentence("llama", alone | {"gap_nll_interval": None}, {})
