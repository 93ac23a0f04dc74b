"""Exact match and token F1 against all references, by the rules of the SQuAD 1.1 evaluation script.

But for references of which those rules leave nothing, so that no answer at all would be right: an article ("A" of a
choice) stays, and marks alone ("?") are compared as they are.
"""

import operator
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower-cases, drops punctuation and articles, collapses white space.

    Unicode is composed first, as some tokenizers do: SQuAD's own script would tell such answers apart.
    """
    return " ".join(_ARTICLES.sub(" ", _unmarked(text)).split())


def exact_match(prediction: str, references: Iterable[str]) -> float:
    """1.0 when the prediction equals any reference after normalisation."""
    return float(any(operator.eq(*_words(prediction, reference)) for reference in references))


def f1(prediction: str, references: Iterable[str]) -> float:
    """Best token F1 over the references; an empty one counts only against an empty prediction."""
    return max(_f1(*_words(prediction, reference)) for reference in references)


def _lower(text: str) -> str:
    return unicodedata.normalize("NFC", text).lower()


def _unmarked(text: str) -> str:
    return _lower(text).translate(_PUNCTUATION)


def _words(prediction: str, reference: str) -> tuple[list[str], list[str]]:
    form = next((form for form in (normalise, _unmarked) if form(reference).strip()), _lower)
    return form(prediction).split(), form(reference).split()


def _f1(prediction: list[str], reference: list[str]) -> float:
    if not prediction or not reference:
        return float(prediction == reference)
    shared = sum((Counter(prediction) & Counter(reference)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(prediction), shared / len(reference)
    return 2 * precision * recall / (precision + recall)


def contains(text: str, answer: str) -> bool:
    """Returns whether the answer's words stand one after the other in the text, both normalised."""
    return f" {normalise(answer)} " in f" {normalise(text)} " and bool(normalise(answer))


def first_line(text: str) -> str:
    """Returns the first line of a generation: the answer of a reader that was never trained to stop."""
    return text.strip().split("\n", 1)[0].strip()
