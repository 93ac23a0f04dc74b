"""Literals: the words of a text with the highest scores, chosen from its tokens' (`recipes.token_scores`).

A word stands between blanks; punctuation at its ends is removed. So a text without blanks has hardly a word.
"""

import re
import unicodedata
from typing import NamedTuple

import numpy as np

LONGEST = 16  # tokens of a word: an address or a hash costs a reader more positions than it tells
_WORD = re.compile(r"\S+")
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


def words(text: str) -> list[Word]:
    """Returns a text's words in their order."""
    found = []
    for match in _WORD.finditer(text):
        start, end = match.span()
        while start < end and _is_mark(text[start]):
            start += 1
        while start < end and _is_mark(text[end - 1]):
            end -= 1
        if start < end:
            found.append(Word(start, end))
    return found


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

    Words that follow each other after one blank are one phrase. A word that occurs again, in any case of its letters,
    counts once: where its score is highest, of equal ones the first.
    """
    found = words(text)
    scores = score(found, scored)
    best: dict[str, int] = {}
    for number in np.argsort(-scores, kind="stable"):
        if len(best) == count or scores[number] == -np.inf:
            break
        best.setdefault(text[slice(*found[number])].casefold(), int(number))
    phrases: list[str] = []
    last: Word | None = None
    for number in sorted(best.values()):
        word = found[number]
        if last is not None and text[last.end : word.start] == " ":
            phrases[-1] += " " + text[slice(*word)]
        else:
            phrases.append(text[slice(*word)])
        last = word
    return tuple(phrases)


def count_words(phrases: tuple[str, ...]) -> int:
    """Returns the number of words of phrases."""
    return sum(len(phrase.split()) for phrase in phrases)


def _is_mark(character: str) -> bool:
    return unicodedata.category(character).startswith("P") and character not in _KEPT
