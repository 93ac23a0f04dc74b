"""Answer scores by hand-computed cases of the SQuAD 1.1 rules."""

import pytest

from lw_jax.evals import answers


@pytest.mark.parametrize(
    ("text", "normalised"),
    [
        ("The Eiffel Tower!", "eiffel tower"),
        ("  an   apple\ta day\n", "apple day"),
        ("theatre, Anna; a.", "theatre anna"),  # articles are whole words
        ("U.S.A. 1,024", "usa 1024"),
        ("the", ""),
        ("rock-'n'-roll", "rocknroll"),
        ("café", "café"),
        ("cafe\u0301", "caf\u00e9"),  # decomposed: some tokenizers compose what they read
    ],
)
def test_normalisation_drops_case_punctuation_articles_and_space(text, normalised):
    assert answers.normalise(text) == normalised


@pytest.mark.parametrize(
    ("prediction", "references", "score"),
    [
        ("the Red door.", ("blue door", "red  door"), 1.0),
        ("red", ("red door",), 0.0),
        ("", ("red",), 0.0),
        ("", ("A",), 0.0),  # of which normalisation leaves nothing
        ("The", ("a",), 0.0),
        ("a", ("A", "C"), 1.0),
        ("(A).", ("A",), 1.0),  # as "(B)." is B
        ("(the)", ("A",), 0.0),
        ("the c", ("A", "C"), 1.0),
        ("red", (), 0.0),
    ],
)
def test_exact_match_takes_any_reference(prediction, references, score):
    assert answers.exact_match(prediction, references) == score


@pytest.mark.parametrize(
    ("prediction", "references", "score"),
    [
        ("the red door", ("red door",), 1.0),
        ("red door handle", ("red door",), 2 * (2 / 3) * 1 / (2 / 3 + 1)),
        ("red red door", ("red red",), 2 * (2 / 3) * 1 / (2 / 3 + 1)),
        ("red red", ("red door",), 0.5),  # a word counts as often as both have it
        ("door red", ("red door",), 1.0),  # order does not count
        ("blue", ("red door", "dark blue sky"), 2 * 1 * (1 / 3) / (1 + 1 / 3)),  # the best reference
        ("green", ("red door",), 0.0),
        ("", ("red",), 0.0),
        ("red", ("the",), 0.0),
        ("a", ("the", "red"), 0.0),
        ("?", ("?",), 1.0),
        ("", ("?",), 0.0),
    ],
)
def test_f1_is_the_best_overlap(prediction, references, score):
    assert answers.f1(prediction, references) == pytest.approx(score)
    assert answers.f1(prediction, iter(references)) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "line"),
    [(" Paris\nQuestion: and", "Paris"), ("\n\n Paris ", "Paris"), ("", ""), (" \n ", ""), ("one two", "one two")],
)
def test_first_line_is_what_a_reader_says_before_it_goes_on(text, line):
    assert answers.first_line(text) == line
