"""lw_jax/evals/selection.py: which words are chosen, by hand-made scores."""

import types

import numpy as np
import pytest

from lw_jax.core.types import Example
from lw_jax.data import batches
from lw_jax.data.tokens import ByteTokenizer
from lw_jax.evals import selection
from lw_jax.evals.selection import Scored

TEXT = 'In 1987, the "Mara Ellis" foundation (of Lisbon) gave 15% to the foundation.'


class Letters:
    """A tokenizer with a token a letter."""

    adds_blank = False

    def encode_batch(self, texts):
        return [list(text.strip()) for text in texts]


def score(text: str, **nll: float) -> Scored:
    """A token a word, its blank and marks included; `nll` by word without them, others 0.5."""
    ends = [i for i in range(1, len(text) + 1) if i == len(text) or text[i] == " "]
    spans = np.array(list(zip([0, *ends], ends, strict=False)), np.int32)
    found = [nll.get(text[a:b].strip(' .,()"%'), 0.5) for a, b in spans]
    return Scored(spans, np.array(found, np.float32))


def spoken(text, spans=()):
    found = selection.words(text, np.array(spans, np.int32).reshape(-1, 2))
    return [text[slice(*word)] for word in found]


def test_words_lose_marks_at_their_ends_and_keep_those_within():
    assert spoken(TEXT) == "In 1987 the Mara Ellis foundation of Lisbon gave 15% to the foundation".split()
    assert spoken("1,000.5 -- a U-Boat's") == ["1,000.5", "a", "U-Boat's"]
    assert spoken(" ... ") == []


def test_most_nats_for_a_token_of_the_reader_are_chosen_in_the_text_s_order():
    scored = score(TEXT, Lisbon=90.0, Mara=80.0, Ellis=70.0, **{"1987": 60.0, "15": 50.0})
    assert selection.choose(TEXT, scored, Letters(), room=11) == "1987 Mara 15%"
    assert selection.choose(TEXT, scored, Letters(), room=16) == "1987 Mara Ellis 15%"
    whole = selection.choose("aa bbbb c", score("aa bbbb c", aa=2.0, bbbb=3.0, c=1.0), Letters(), room=4)
    assert whole == "aa c", "a word that does not fit is left out, not what comes after it"


def test_a_blank_that_sentencepiece_puts_before_a_word_takes_no_position_twice(sentencepiece):
    text = "a a a a"
    assert len(sentencepiece.encode(text)) == 4
    assert selection.choose(text, score(text), sentencepiece, room=4) == text


def test_word_scores_the_sum_of_its_tokens_and_one_of_too_many_is_none():
    text = "ab " + "x" * 20 + " y"
    spans = np.array([(0, 1), (1, 2), *((i, i + 1) for i in range(3, 23)), (23, 25)], np.int32)
    scored = Scored(spans, np.full(len(spans), 1.5, np.float32))
    np.testing.assert_allclose(selection.score(selection.words(text, spans), scored), [3.0, -np.inf, 1.5])


def test_scripts_without_blanks_are_parted_where_a_token_ends():
    text = "(東京)は日本 GPT-4は。"
    # 京 is two tokens of a byte-level vocabulary, 日本 is one, and GPT-4 three; the last two characters have none.
    spans = [(0, 1), (1, 2), (2, 3), (2, 3), (3, 4), (4, 5), (5, 7), (7, 11), (11, 12), (12, 13)]
    assert spoken(text, spans) == ["東", "京", "は", "日本", "GPT-4", "は"]
    scored = Scored(np.array(spans, np.int32), np.array([9, 5, 3, 3, 9, 1, 4, 1, 1, 1], np.float32))
    assert selection.choose(text, scored, Letters(), room=2) == "東京"
    assert selection.choose(text, scored, Letters(), room=4) == "東京 日本"
    assert len(spoken("한국어 문장은", [(0, 1), (1, 3), (4, 5)])) == 2, "Korean has blanks"


@pytest.mark.parametrize("text", ["", "  ", "?!"])
def test_text_without_a_word_has_none_selected(text):
    nothing = Scored(np.zeros((0, 2), np.int32), np.zeros(0, np.float32))
    assert selection.choose(text, nothing, Letters(), room=4) == ""


def test_words_of_a_text_are_chosen_once_for_all_of_its_questions(monkeypatch):
    read, choose = [], selection.choose
    monkeypatch.setattr(
        selection, "choose", lambda text, *rest, room: read.append(text) or choose(text, *rest, room=room)
    )
    tokenizer = types.SimpleNamespace(encode_batch=ByteTokenizer().encode_batch, pad=256, adds_blank=False)
    texts = ("Ann is in Rome.", "Bo is in Oslo.", "Ann is in Rome.")
    ids = tokenizer.encode_batch(list(texts))
    field = batches.field(ids, tokenizer.pad, left=False)
    encoded = batches.Encoded(
        examples=tuple(Example(str(n), text, "Where?", ("?",)) for n, text in enumerate(texts)),
        source=field,
        readers={"a": {"before": batches.field([np.zeros(1, np.int32)] * 3, tokenizer.pad, left=True)}},
        counts={},
        slots=7,
        width=1,
        context_tokens={"a": {}},
    )
    spans = [np.stack([np.arange(len(row)), np.arange(len(row)) + 1], axis=1) for row in ids]
    scored = [Scored(span, np.arange(len(span), dtype=np.float32)) for span in spans]
    layout = types.SimpleNamespace(readers={"a": types.SimpleNamespace(tokenizer=tokenizer)})
    found = selection.attach(encoded, range(3), scored, layout=layout)
    assert read == ["Ann is in Rome.", "Bo is in Oslo."]
    assert [bytes(row[1:].tolist()) for row in found.readers["a"][selection.CONTEXT].ids] == [
        b"in Rome",
        b"in Oslo",
        b"in Rome",
    ]
