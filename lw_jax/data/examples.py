"""Questions with a context and their answers, as strings, from files, the hub or the project's own cards.

First stage of the data flow: it knows no tokenizer and no array. The format of a file is recognised from its content.
"""

import hashlib
import importlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from lw_jax.core import config, schema
from lw_jax.core.errors import UserError
from lw_jax.core.types import Example
from lw_jax.data import question_cards, rows

Split = Literal["train", "validation"]

_log = logging.getLogger(__name__)
VALIDATION_CARDS = 256  # made; data.validation_limit takes fewer
_FORMATS = (
    'SQuAD JSON, HotpotQA JSON, or rows {"context": ..., "question": ..., "answers": [...]} (JSONL or a JSON array)'
)
_REMEDY = f"known formats: {_FORMATS}"


class _Texts(msgspec.Struct):  # the hub's SQuAD
    text: list[str | rows.Text]


class _Columns(msgspec.Struct):  # the hub's HotpotQA: parallel lists
    title: list[str]
    sentences: list[list[str]]


_Context = str | list[str | tuple[str, list[str]]] | _Columns
_Answers = list[str | rows.Text] | _Texts | None
_Id = str | int | float | bool | None


class _Row(msgspec.Struct):
    context: _Context
    question: str
    answers: _Answers | msgspec.UnsetType = msgspec.UNSET
    answer: Any = msgspec.UNSET  # asked for where there are no answers only
    is_impossible: bool | int | None = None
    id: _Id = None
    own_id: _Id = msgspec.field(default=None, name="_id")


class _Answered(msgspec.Struct):
    answer: str


class _Question(msgspec.Struct):
    question: str
    answers: _Answers
    is_impossible: bool | int | None | msgspec.UnsetType = msgspec.UNSET
    id: _Id = None


class _Paragraph(msgspec.Struct):
    context: _Context
    qas: list[_Question]


class _Article(msgspec.Struct):
    paragraphs: list[_Paragraph]


class _Squad(msgspec.Struct):
    data: list[_Article]


def load(data: config.Data, split: Split, *, seed: int) -> list[Example]:
    """Returns the examples that the configuration names for a split.

    Raises UserError when the validation source is the training source, and for whatever `read` refuses.
    """
    disjoint = data.validation in question_cards.STYLES  # made cards share none between splits
    trained = [] if disjoint else [_identity(name, "train") for name in split_sources(data.train)]
    for name in split_sources(data.validation):
        if _identity(name, "validation") in trained:
            raise UserError(
                f"config.data.validation={name!r} is the training source: scores would measure memory; "
                'name another file or split, or "cards"'
            )
    train = split == "train"
    source, limit = (data.train, 0) if train else (data.validation, data.validation_limit)
    if source not in question_cards.STYLES:
        return read(source, limit=limit, split=split)
    count = data.cards if train else VALIDATION_CARDS
    examples = question_cards.make(count, facts=data.facts, seed=seed, split=split, style=source)
    return [examples[i] for i in spread(len(examples), limit)]


def read(source: str, *, limit: int = 0, split: str = "train") -> list[Example]:
    """Returns the answerable questions of .json/.jsonl[.gz] files or "hub:NAME[:CONFIG][:SPLIT]", commas between them.

    With a limit, so many examples spread evenly over all of them: neighbours in SQuAD share their paragraph.
    `split` is taken where a hub source names none. Raises UserError naming file, line or row, and field.
    """
    parsed = [_example(row, where) for name in split_sources(source) for where, row in _rows(name, split)]
    examples = [example for example in parsed if example is not None]
    skipped = len(parsed) - len(examples)
    if skipped:
        _log.warning("%s: skipped %d of %d questions: unanswerable from their context", source, skipped, len(parsed))
    if not examples:
        raise UserError(f"{source}: no examples ({skipped} unanswerable questions skipped); expected {_FORMATS}")
    return [examples[i] for i in spread(len(examples), limit)]


def split_sources(source: str) -> list[str]:
    """Returns the names in a list of sources; a file whose own name has commas is one source."""
    return [source] if Path(source).expanduser().is_file() else [name.strip() for name in source.split(",")]


def digest(examples: Sequence[Example]) -> str:
    """Identifies the words of examples, wherever they were read from."""
    said = hashlib.blake2b(digest_size=16)
    for example in examples:
        for text in (example.context, example.question, *example.answers, ""):
            said.update(f"{len(text)}:{text}".encode())
    return said.hexdigest()


def spread(count: int, limit: int) -> list[int]:
    """Returns `limit` increasing positions spread evenly over `count` (all of them when the limit is 0 or larger)."""
    kept = min(limit, count) if limit > 0 else count
    return [i * count // kept for i in range(kept)]


def _identity(source: str, split: Split) -> str | tuple[str, str, str]:
    if source.startswith("hub:"):
        return _parse_hub(source, split)
    return source if source in question_cards.STYLES else os.path.realpath(os.path.expanduser(source))


def _rows(source: str, split: str) -> Iterator[tuple[str, _Row]]:
    return _hub_rows(source, split) if source.startswith("hub:") else _file_rows(Path(source).expanduser())


def _file_rows(path: Path) -> Iterator[tuple[str, _Row]]:
    for where, found in rows.read(path, _Row, remedy=_REMEDY, document=_Squad):
        if isinstance(found, _Squad):
            yield from _squad_rows(found, where)
        else:
            yield where, found


def _squad_rows(squad: "_Squad", path: str) -> Iterator[tuple[str, _Row]]:
    for a, article in enumerate(squad.data):
        for p, paragraph in enumerate(article.paragraphs):
            for q, question in enumerate(paragraph.qas):
                marked = question.is_impossible
                yield (
                    f"{path}: data[{a}].paragraphs[{p}].qas[{q}]",
                    _Row(
                        context=paragraph.context,
                        question=question.question,
                        answers=question.answers,
                        is_impossible=not question.answers if marked is msgspec.UNSET else marked,
                        id=question.id,
                    ),
                )


def _parse_hub(source: str, split: str) -> tuple[str, str, str]:
    name, *rest = re.split(r":(?![^\[]*\])", source.removeprefix("hub:"))  # a slice "train[:90%]" stays whole
    if not name or len(rest) > 2:
        raise UserError(f"{source!r}: expected hub:NAME, hub:NAME:CONFIG, hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT")
    if len(rest) == 1:  # one word: a split when it begins like one, else a configuration
        rest = ["", rest[0]] if rest[0].startswith(("train", "validation", "test", "dev")) else [rest[0], split]
    subset, chosen = rest or ("", split)
    return name, subset, chosen or split


def _hub_rows(source: str, split: str) -> Iterator[tuple[str, _Row]]:
    name, subset, chosen = _parse_hub(source, split)
    try:
        datasets = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise UserError(
            f"{source!r} needs the package 'datasets' ({error}): pip install datasets, or name a local file"
        ) from error
    try:
        found = datasets.load_dataset(name, subset or None, split=chosen)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"{source!r}: config {subset or 'default'!r}, split {chosen!r} could not be loaded: {error}; "
            "check the names and the network, or download a file and name its path"
        ) from error
    for i, row in enumerate(found):
        where = f"{source}[{i}]"
        yield where, schema.convert(row, _Row, where=where, remedy=_REMEDY)


def _example(row: _Row, where: str) -> Example | None:
    context = _join_context(row.context, where)
    question = _clean(row.question, "question", where)
    answers = _answers(row, where)
    if not answers:
        return None
    return Example(str(row.id or row.own_id or where), context, question, answers)


def _answers(row: _Row, where: str) -> tuple[str, ...]:
    """Returns the distinct answers in order; none when the row is marked as unanswerable."""
    if row.is_impossible:
        return ()
    if row.answers is msgspec.UNSET:
        if row.answer is msgspec.UNSET:
            raise UserError(f"{where}: the fields 'answers' and 'answer' are missing; {_REMEDY}")
        answer = schema.convert({"answer": row.answer}, _Answered, where=where, remedy=_REMEDY).answer
        return (_clean(answer, "answer", where),)
    if isinstance(row.answers, _Texts):  # the hub's SQuAD: {"text": [...], "answer_start": [...]}, empty: unanswerable
        found = row.answers.text
    elif row.answers:
        found = row.answers
    else:
        raise UserError(f"{where}: field 'answers' is empty; give one, or mark the row with \"is_impossible\": true")
    texts = [one.text if isinstance(one, rows.Text) else one for one in found]
    return tuple(dict.fromkeys(_clean(text, "answers", where) for text in texts))


def _join_context(value: _Context, where: str) -> str:
    """Returns a context as one text; HotpotQA's paragraphs become lines "title: sentences"."""
    if isinstance(value, _Columns):
        if len(value.title) != len(value.sentences):
            raise UserError(
                f"{where}: context: {len(value.title)} titles and {len(value.sentences)} lists of sentences; each "
                "paragraph has one of both"
            )
        value = list(zip(value.title, value.sentences, strict=True))
    if isinstance(value, str):
        return _clean(value, "context", where)
    parts = (
        part.strip() if isinstance(part, str) else f"{part[0]}: {' '.join(sentence.strip() for sentence in part[1])}"
        for part in value
    )
    return _clean("\n".join(parts), "context", where)


def _clean(text: str, name: str, where: str) -> str:
    if not text.strip():
        raise UserError(f"{where}: field {name!r} is empty; fill it or remove the row")
    return schema.encodable(text.strip(), where=f"{where}: {name}", remedy="mend or remove the row")
