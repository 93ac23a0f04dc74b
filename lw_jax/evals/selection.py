"""Row `selected_taught`: the text's least predictable words in a message's positions.

The idea of LLMLingua (arXiv 2310.05736): no message at all, the reader gets some of the text's tokens, those that a
language model finds least predictable. A word stands between blanks; punctuation at its ends is removed. In scripts
without blanks each token is a word.
"""

import bisect
import dataclasses
import itertools
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from lw_jax.core.progress import phase
from lw_jax.data import batches, prompt_tokens
from lw_jax.data.batches import Encoded
from lw_jax.data.tokens import Tokenizer
from lw_jax.evals.control_rows import positions

ROW = "selected_taught"
CONTEXT = "selected_context"  # field of its prompt up to the question
LONGEST = 16  # tokens of a word: an address or a hash costs a reader more positions than it tells
_WORD = re.compile(r"\S+")
# Thai, Lao, Tibetan, Burmese, Khmer, Han, kana
_UNSPACED = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]"
)
_KEPT = frozenset("%#&@")  # at a word's end: they are part of what it says


class Scored(NamedTuple):
    """A text's tokens, each with the characters it stands for and its NLL in nats."""

    spans: np.ndarray  # i32[n 2]: first character, and the one after the last
    values: np.ndarray  # f32[n]


class Word(NamedTuple):
    """A word of a text as the characters from `start` to before `end`."""

    start: int
    end: int


def attach(
    encoded: Encoded, indices: Sequence[int], scored: Sequence[Scored], *, layout: prompt_tokens.Layout
) -> Encoded:
    """Returns the data set with prompts of selected words for the examples at `indices`; the others' are empty.

    `scored`: the tokens of each one's context.
    """
    readers, counts = {}, {}
    for name, fields in encoded.readers.items():
        tokenizer = layout.readers[name].tokenizer
        ids, chosen_tokens = [np.zeros(0, np.int32)] * len(encoded), [0] * len(encoded)
        known: dict[tuple[str, int], np.ndarray] = {}  # of a text, whatever is asked about it
        with phase(f"{name}: choosing the least predictable words", len(indices), "texts") as done:
            for index, slots, tokens in done.track(zip(indices, encoded.count_slots(indices), scored, strict=True)):
                room = positions(encoded, name, "latents", index, slots=int(slots))
                text = encoded.examples[index].context
                if (text, room) not in known:
                    chosen = choose(text, tokens, tokenizer, room=room)
                    known[text, room] = prompt_tokens.tokenize(tokenizer, [chosen])[0][:room]
                ids[index] = np.concatenate([fields["before"].ids[index], known[text, room]])
                chosen_tokens[index] = len(known[text, room])
        readers[name] = fields | {CONTEXT: batches.field(ids, tokenizer.pad, left=True)}
        counts[name] = {**encoded.context_tokens[name], CONTEXT: chosen_tokens}
    return dataclasses.replace(encoded, readers=readers, context_tokens=counts)


def choose(text: str, scored: Scored, tokenizer: Tokenizer, *, room: int) -> str:
    """Returns the words with the most nats for each of the reader's tokens, as many as fit, in the text's order."""
    candidates = words(text, scored.spans)
    spoken = [text[slice(*word)] for word in candidates]
    scores = score(candidates, scored)
    blank = "" if tokenizer.adds_blank else " "
    sizes = np.array([len(ids) for ids in tokenizer.encode_batch([blank + word for word in spoken])], int)
    chosen: list[int] = []
    for number in np.argsort(-scores / np.maximum(sizes, 1), kind="stable"):
        if scores[number] == -np.inf:
            break
        if sizes[number] <= room:
            room -= int(sizes[number])
            chosen.append(int(number))
    return join(text, [candidates[number] for number in sorted(chosen)])


def words(text: str, spans: np.ndarray) -> list[Word]:
    """Returns a text's words in their order; `spans` i32[n 2] of its tokens part scripts without blanks."""
    word_spans = []
    borders = _borders(text, spans)
    for match in _WORD.finditer(text):
        within = borders[bisect.bisect_right(borders, match.start()) : bisect.bisect_left(borders, match.end())]
        for start, end in itertools.pairwise((match.start(), *within, match.end())):
            while start < end and _is_mark(text[start]):
                start += 1
            while start < end and _is_mark(text[end - 1]):
                end -= 1
            if start < end:
                word_spans.append(Word(start, end))
    return word_spans


def _borders(text: str, spans: np.ndarray) -> list[int]:
    """Returns the places beside a character of a script without blanks where no token goes on."""
    starts, ends = spans.T if len(spans) else np.zeros((2, 0), np.int32)
    reached = np.maximum.accumulate(ends)  # the bytes of one character may be several tokens
    borders = {*starts[1:][starts[1:] >= reached[:-1]].tolist(), *reached[-1:].tolist()}
    beside = (place for place in borders if _UNSPACED.search(text, max(place - 1, 0), place + 1))
    return sorted(place for place in beside if not unicodedata.category(text[place : place + 1] or " ").startswith("M"))


def score(words: list[Word], scored: Scored) -> np.ndarray:
    """Returns each word's nats f64[w], the sum of its tokens'; -inf with no token or too many.

    A token belongs to the first word of which it has a character. Words beyond the last token have none.
    """
    if not words:
        return np.zeros(0)
    starts, ends = np.array(words).T
    first = np.minimum(np.searchsorted(ends, scored.spans[:, 0], side="right"), len(words) - 1)
    within = (scored.spans[:, 0] < ends[first]) & (scored.spans[:, 1] > starts[first])
    total = np.bincount(first[within], scored.values[within].astype(np.float64), len(words))
    tokens = np.bincount(first[within], minlength=len(words))
    return np.where((tokens > 0) & (tokens <= LONGEST), total, -np.inf)


def join(text: str, chosen: Iterable[Word]) -> str:
    """Returns words with one blank between those that neither follow each other nor stand a blank apart in the text."""
    joined, last = "", None  # the text so far, and its last word
    for word in chosen:
        between = "" if last is None else text[last.end : word.start]
        joined += (between if between in ("", " ") else " ") + text[slice(*word)]
        last = word
    return joined


def _is_mark(character: str) -> bool:
    return unicodedata.category(character).startswith("P") and character not in _KEPT
