"""Questions with a context and their answers, as strings, from files, the hub or the project's own cards.

First stage of the data flow: it knows no tokenizer and no array. The format of JSON is recognised from its content.
"""

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from lw_jax.core import config, schema
from lw_jax.core.errors import UserError
from lw_jax.core.files import content_hash
from lw_jax.core.types import Example
from lw_jax.data import question_cards, row_sources, rows
from lw_jax.data.row_fields import Fields

Split = Literal["train", "validation"]

_T = TypeVar("_T")

_log = logging.getLogger(__name__)
VALIDATION_CARDS = 256  # made, or data.validation_limit if that is more
_FORMATS = (
    'SQuAD JSON, HotpotQA JSON, or rows {"context": ..., "question": ..., "answers": [...]} (JSON, parquet, the hub), '
    'in place of answers also "answer": "..."'
)
_REMEDY = f"known formats: {_FORMATS}"


class _Texts(msgspec.Struct):  # the hub's SQuAD
    text: list[str | rows.Text]


class _Columns(msgspec.Struct):  # the hub's HotpotQA: parallel lists
    title: list[str]
    sentences: list[list[str]]


class _Titled(msgspec.Struct):
    text: str
    title: str | None = None


_Context = str | list[str | tuple[str, list[str]] | _Titled] | _Columns
_Answers = list[str | rows.Text] | _Texts | None
_Id = str | int | float | bool | None


class Row(msgspec.Struct):
    """A question with its context and answers."""

    context: _Context
    question: str
    answers: _Answers | msgspec.UnsetType = msgspec.UNSET
    answer: Any = msgspec.UNSET  # asked for where there are no answers only; a table has null in the unused column
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
    if data.validation not in question_cards.STYLES:  # made cards share none between splits
        row_sources.check_apart(data.train, data.validation)
    train = split == "train"
    source, limit = (data.train, 0) if train else (data.validation, data.validation_limit)
    if source not in question_cards.STYLES:
        return read(source, limit=limit, split=split, columns=data.columns)
    count = data.cards if train else max(VALIDATION_CARDS, limit)
    every = train and data.packed_tokens > 0
    examples = question_cards.make(count, facts=data.facts, seed=seed, split=split, style=source, every=every)
    return [examples[i] for i in spread(len(examples), limit)]


def read(source: str, *, limit: int = 0, split: str = "train", columns: Sequence[str] = ()) -> list[Example]:
    """Returns the answerable questions of sources with commas between, as `row_sources.read`; also SQuAD's own JSON.

    With a limit, so many examples spread evenly over all of them: neighbours in SQuAD share their paragraph.
    `split` is taken where a source has several and names none, `columns` is `data.columns`. Raises UserError naming
    file, line or row, and field.
    """
    fields = Fields.of(Row, columns, _REMEDY)
    if "answer" in fields.columns and "answers" not in fields.columns:  # it is read where there are no answers
        fields = dataclasses.replace(fields, columns={**fields.columns, "answers": ""})
    names = row_sources.split_sources(source)
    texts: dict[str, str] = {}  # the text of several questions is in memory once
    parsed = [_example(row, where, texts) for name in names for where, row in _rows(name, split, fields)]
    examples = [example for example in parsed if example is not None]
    skipped = len(parsed) - len(examples)
    if skipped:
        _log.warning("%s: skipped %d of %d questions: unanswerable from their context", source, skipped, len(parsed))
    if not examples:
        raise UserError(f"{source}: no examples ({skipped} unanswerable questions skipped); expected {_FORMATS}")
    return [examples[i] for i in spread(len(examples), limit)]


def digest(examples: Sequence[Example]) -> str:
    """Identifies the words of examples, wherever they were read from."""
    return content_hash([content_hash([example.context, example.question, *example.answers]) for example in examples])


def spread(count: int, limit: int) -> list[int]:
    """Returns `limit` increasing positions spread evenly over `count` (all of them when the limit is 0 or larger)."""
    size = min(limit, count) if limit > 0 else count
    return [i * count // size for i in range(size)]


def choose(items: Sequence[_T], limit: int, *, seed: int) -> list[_T]:
    """Returns `limit` items spread evenly over all, in their order; of another seed each the next one."""
    return [items[(index + seed) % len(items)] for index in spread(len(items), limit)]


def _rows(source: str, split: str, fields: Fields[Row]) -> Iterator[tuple[str, Row]]:
    for where, record in row_sources.read(source, fields, split=split, document=_Squad):
        if isinstance(record, _Squad):
            if fields.columns or fields.left:
                _log.warning("%s: data.columns is of rows; the fields of SQuAD's own JSON are read", where)
            yield from _squad_rows(record, where)
        else:
            yield where, record


def _squad_rows(squad: "_Squad", path: str) -> Iterator[tuple[str, Row]]:
    for a, article in enumerate(squad.data):
        for p, paragraph in enumerate(article.paragraphs):
            for q, question in enumerate(paragraph.qas):
                marked = question.is_impossible
                yield (
                    f"{path}: data[{a}].paragraphs[{p}].qas[{q}]",
                    Row(
                        context=paragraph.context,
                        question=question.question,
                        answers=question.answers,
                        is_impossible=not question.answers if marked is msgspec.UNSET else marked,
                        id=question.id,
                    ),
                )


def _example(row: Row, where: str, texts: dict[str, str]) -> Example | None:
    context = _join_context(row.context, where)
    question = _clean(row.question, "question", where)
    answers = _answers(row, where)
    if not answers:
        return None
    named = next((value for value in (row.id, row.own_id) if value not in (None, "")), where)
    return Example(str(named), texts.setdefault(context, context), question, answers)


def _answers(row: Row, where: str) -> tuple[str, ...]:
    """Returns the distinct answers in order; none when the row is marked as unanswerable."""
    if row.is_impossible:
        return ()
    if row.answers is msgspec.UNSET or (row.answers is None and row.answer not in (None, msgspec.UNSET)):
        if row.answer is msgspec.UNSET:
            raise UserError(f"{where}: the fields 'answers' and 'answer' are missing; {_REMEDY}")
        answer = schema.convert({"answer": row.answer}, _Answered, where=where, remedy=_REMEDY).answer
        return (_clean(answer, "answer", where),)
    if isinstance(row.answers, _Texts):  # the hub's SQuAD: {"text": [...], "answer_start": [...]}, empty: unanswerable
        answers = row.answers.text
    elif row.answers:
        answers = row.answers
    else:
        raise UserError(f"{where}: field 'answers' is empty; give one, or mark the row with \"is_impossible\": true")
    texts = [item.text if isinstance(item, rows.Text) else item for item in answers]
    return tuple(dict.fromkeys(_clean(text, "answers", where) for text in texts))


def _join_context(value: _Context, where: str) -> str:
    """Returns a context as one text: paragraphs with an empty line between, each as "title: text" where it has one."""
    if isinstance(value, _Columns):
        if len(value.title) != len(value.sentences):
            raise UserError(
                f"{where}: context: {len(value.title)} titles and {len(value.sentences)} lists of sentences; each "
                "paragraph has one of both"
            )
        value = list(zip(value.title, value.sentences, strict=True))
    if isinstance(value, str):
        return _clean(value, "context", where)
    return _clean("\n\n".join(filter(None, map(_paragraph_text, value))), "context", where)


def _paragraph_text(paragraph: str | tuple[str, list[str]] | _Titled) -> str:
    if isinstance(paragraph, str):
        return paragraph.strip()
    if isinstance(paragraph, _Titled):
        title, text = paragraph.title, paragraph.text.strip()
    else:
        title, text = paragraph[0], " ".join(sentence.strip() for sentence in paragraph[1])
    return f"{title}: {text}" if title else text


def _clean(text: str, name: str, where: str) -> str:
    if not text.strip():
        raise UserError(f"{where}: field {name!r} is empty; fill it or remove the row")
    return text.strip()
