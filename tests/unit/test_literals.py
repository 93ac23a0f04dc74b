"""lw_jax/data/literals.py: which words are chosen, by hand-made scores."""

import numpy as np
import pytest

from lw_jax.data import literals
from lw_jax.data.literals import Scored
from lw_jax.evals import selection

TEXT = 'In 1987, the "Mara Ellis" foundation (of Lisbon) gave 15% to the foundation.'


def score(text: str, **nll: float) -> Scored:
    """A token a word, its blank and marks included; `nll` by word without them, others 0.5."""
    ends = [i for i in range(1, len(text) + 1) if i == len(text) or text[i] == " "]
    spans = np.array(list(zip([0, *ends], ends, strict=False)), np.int32)
    found = [nll.get(text[a:b].strip(' .,()"%'), 0.5) for a, b in spans]
    return Scored(spans, np.array(found, np.float32))


def test_words_lose_marks_at_their_ends_and_keep_those_within():
    found = [TEXT[slice(*word)] for word in literals.words(TEXT)]
    assert found == "In 1987 the Mara Ellis foundation of Lisbon gave 15% to the foundation".split()
    assert [slice_of("1,000.5 -- a U-Boat's", w) for w in literals.words("1,000.5 -- a U-Boat's")] == [
        "1,000.5",
        "a",
        "U-Boat's",
    ]
    assert literals.words(" ... ") == []


def slice_of(text, word):
    return text[slice(*word)]


def test_neighbours_are_a_phrase_and_the_order_is_the_text_s():
    scored = score(TEXT, Lisbon=9.0, Mara=8.0, Ellis=7.0, **{"1987": 6.0, "15": 5.0})
    assert literals.choose(TEXT, scored, 1) == ("Lisbon",)
    assert literals.choose(TEXT, scored, 3) == ("Mara Ellis", "Lisbon")
    assert literals.choose(TEXT, scored, 5) == ("1987", "Mara Ellis", "Lisbon", "15%")
    assert literals.count_words(literals.choose(TEXT, scored, 5)) == 5
    everything = literals.choose(TEXT, scored, 99)
    assert literals.count_words(everything) == 11, "the and foundation count once"


def test_repeated_word_counts_once_where_it_is_least_predictable():
    text = "mara met Mara and MARA"
    spans = np.array([(0, 4), (4, 8), (8, 13), (13, 17), (17, 22)], np.int32)
    assert literals.choose(text, Scored(spans, np.array([3, 1, 5, 1, 4], np.float32)), 1) == ("Mara",)
    assert literals.choose(text, Scored(spans, np.array([5, 1, 5, 1, 5], np.float32)), 1) == ("mara",), "the first"


def test_word_scores_the_sum_of_its_tokens_and_one_of_too_many_is_none():
    text = "ab " + "x" * 20 + " y"
    spans = [(0, 1), (1, 2), *((i, i + 1) for i in range(3, 23)), (23, 25)]
    found = literals.words(text)
    np.testing.assert_allclose(
        literals.score(found, Scored(np.array(spans, np.int32), np.full(len(spans), 1.5, np.float32))),
        [3.0, -np.inf, 1.5],
    )


def test_token_of_marks_scores_for_no_word_and_text_beyond_the_tokens_has_none():
    text = "(a) b c"
    scored = Scored(np.array([(0, 1), (1, 2), (2, 3), (3, 5)], np.int32), np.array([9, 1, 9, 2], np.float32))
    np.testing.assert_allclose(literals.score(literals.words(text), scored), [1.0, 2.0, -np.inf])
    assert literals.choose(text, scored, 3) == ("a", "b")


def test_scripts_without_blanks_are_parted_where_a_token_ends():
    text = "(東京)は日本 GPT-4は。"
    # 京 is two tokens of a byte-level vocabulary, 日本 is one, and GPT-4 three; the last two characters have none.
    spans = [(0, 1), (1, 2), (2, 3), (2, 3), (3, 4), (4, 5), (5, 7), (7, 11), (11, 12), (12, 13)]
    values = np.array([9, 5, 3, 3, 9, 1, 4, 1, 1, 1], np.float32)
    scored = Scored(np.array(spans, np.int32), values)
    assert [text[slice(*word)] for word in literals.words(text, scored.spans)] == [
        "東",
        "京",
        "は",
        "日本",
        "GPT-4",
        "は",
    ]
    assert literals.choose(text, scored, 2) == ("東京",)
    assert literals.choose(text, scored, 3) == ("東京", "日本")
    assert literals.choose(text, scored, 9) == ("東京", "は日本 GPT-4"), "は counts once"

    assert len(literals.words("한국어 문장은", np.array([(0, 1), (1, 3), (4, 5)]))) == 2, "Korean has blanks"


@pytest.mark.parametrize("text", ["", "  ", "?!"])
def test_text_without_a_word_has_no_literal(text):
    nothing = Scored(np.zeros((0, 2), np.int32), np.zeros(0, np.float32))
    assert literals.choose(text, nothing, 4) == ()


def test_words_of_summed_scores_are_selected_by_the_token_and_those_of_means_by_themselves():
    class Letters:
        def encode_batch(self, texts):
            return [list(text.strip()) for text in texts]

    text = "aa bbbb c"
    halves = np.array([(0, 2), (3, 5), (5, 7), (8, 9)], np.int32), np.array([3.0, 2.0, 3.0, 1.0], np.float32)
    assert literals.choose(text, Scored(*halves), 1) == ("bbbb",)
    assert literals.choose(text, Scored(*halves, mean=True), 1) == ("aa",)
    whole = np.array([(0, 2), (3, 7), (8, 9)], np.int32), np.array([2.0, 3.0, 1.0], np.float32)
    assert selection.choose(text, Scored(*whole), Letters(), room=4) == "aa c", "a nat a token of the reader"
    assert selection.choose(text, Scored(*whole, mean=True), Letters(), room=4) == "bbbb"
