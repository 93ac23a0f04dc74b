"""Literals: the words of a text with the highest scores, chosen from its tokens' (`recipes.token_scores`).

A word stands between blanks; punctuation at its ends is removed. In scripts without blanks each token is a word.
"""

import bisect
import itertools
import re
import unicodedata
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

LONGEST = 16  # tokens of a word: an address or a hash costs a reader more positions than it tells
_WORD = re.compile(r"\S+")
# Thai, Lao, Tibetan, Burmese, Khmer, Han, kana
_UNSPACED = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]"
)
_KEPT = frozenset("%#&@")  # at a word's end: they are part of what it says


class Scored(NamedTuple):
    """A text's tokens, each with the characters it stands for and a value, for Surprisal its NLL in nats."""

    spans: np.ndarray  # i32[n 2]: first character, and the one after the last
    values: np.ndarray  # f32[n]
    mean: bool = False  # a word has the mean of its tokens' values, not their sum


class Word(NamedTuple):
    """A word of a text as the characters from `start` to before `end`."""

    start: int
    end: int


def words(text: str, spans: np.ndarray | None = None) -> list[Word]:
    """Returns a text's words in their order; `spans` i32[n 2] of its tokens part scripts without blanks."""
    found = []
    borders = [] if spans is None else _borders(text, spans)
    for match in _WORD.finditer(text):
        within = borders[bisect.bisect_right(borders, match.start()) : bisect.bisect_left(borders, match.end())]
        for start, end in itertools.pairwise((match.start(), *within, match.end())):
            while start < end and _is_mark(text[start]):
                start += 1
            while start < end and _is_mark(text[end - 1]):
                end -= 1
            if start < end:
                found.append(Word(start, end))
    return found


def _borders(text: str, spans: np.ndarray) -> list[int]:
    """Returns the places beside a character of a script without blanks where no token goes on."""
    starts, ends = spans.T if len(spans) else np.zeros((2, 0), np.int32)
    reached = np.maximum.accumulate(ends)  # the bytes of one character may be several tokens
    found = {*starts[1:][starts[1:] >= reached[:-1]].tolist(), *reached[-1:].tolist()}
    beside = (place for place in found if _UNSPACED.search(text, max(place - 1, 0), place + 1))
    return sorted(place for place in beside if not unicodedata.category(text[place : place + 1] or " ").startswith("M"))


def score(found: list[Word], scored: Scored) -> np.ndarray:
    """Returns each word's score f64[w]: the sum or mean of its tokens' values; -inf with no token or too many.

    A token belongs to the first word of which it has a character. Words beyond the last token have none.
    """
    if not found:
        return np.zeros(0)
    starts, ends = np.array(found).T
    first = np.minimum(np.searchsorted(ends, scored.spans[:, 0], side="right"), len(found) - 1)
    within = (scored.spans[:, 0] < ends[first]) & (scored.spans[:, 1] > starts[first])
    total = np.bincount(first[within], scored.values[within].astype(np.float64), len(found))
    tokens = np.bincount(first[within], minlength=len(found))
    if scored.mean:
        total = total / np.maximum(tokens, 1)
    return np.where((tokens > 0) & (tokens <= LONGEST), total, -np.inf)


def choose(text: str, scored: Scored, count: int) -> tuple[str, ...]:
    """Returns the `count` words of highest score as phrases, in the text's order.

    A word that occurs again, in any case of its letters,
    counts once: where its score is highest, of equal ones the first.
    """
    found = words(text, scored.spans)
    scores = score(found, scored)
    best: dict[str, int] = {}
    for number in np.argsort(-scores, kind="stable"):
        if len(best) == count or scores[number] == -np.inf:
            break
        best.setdefault(text[slice(*found[number])].casefold(), int(number))
    return join(text, [found[number] for number in sorted(best.values())])


def join(text: str, chosen: Iterable[Word]) -> tuple[str, ...]:
    """Returns words as phrases: those that follow each other, or stand one blank apart, as they are in the text."""
    phrases: list[str] = []
    last: Word | None = None
    for word in chosen:
        between = " \n" if last is None else text[last.end : word.start]
        if between in ("", " "):
            phrases[-1] += between + text[slice(*word)]
        else:
            phrases.append(text[slice(*word)])
        last = word
    return tuple(phrases)


def count_words(phrases: tuple[str, ...]) -> int:
    """Returns the number of words of phrases."""
    return sum(len(phrase.split()) for phrase in phrases)


def _is_mark(character: str) -> bool:
    return unicodedata.category(character).startswith("P") and character not in _KEPT
