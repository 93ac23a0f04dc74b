"""Questions with a context and their answers, as strings, from files, the hub or the project's own cards.

First stage of the data flow: it knows no tokenizer and no array. The format of a file is recognised from its content.
"""

import gzip
import importlib
import json
import logging
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from lw_jax.core import config
from lw_jax.core.errors import UserError
from lw_jax.core.types import Example
from lw_jax.data import cards

Split = Literal["train", "validation"]
_Row = tuple[str, Any]  # where it stands (for messages), the parsed JSON value

_log = logging.getLogger(__name__)
_FORMATS = (
    'SQuAD JSON, HotpotQA JSON, or rows {"context": ..., "question": ..., "answers": [...]} (JSONL or a JSON array)'
)


def load(data: config.Data, split: Split, *, seed: int) -> list[Example]:
    """Returns the examples that the configuration names for a split.

    Raises UserError when the validation source is the training source, and for whatever `read` refuses.
    """
    apart = data.validation in cards.STYLES  # made cards share none between splits
    if not apart and _identity(data.train, "train") == _identity(data.validation, "validation"):
        raise UserError(
            f"config.data.validation={data.validation!r} is the training source: scores would measure memory; "
            'name another file or split, or "cards"'
        )
    train = split == "train"
    source, limit = (data.train, data.train_limit) if train else (data.validation, data.validation_limit)
    if source not in cards.STYLES:
        return read(source, limit=limit, split=split)
    count = data.cards if train else data.validation_cards
    examples = cards.make(count, facts=data.facts, seed=seed, split=split, style=source)
    return [examples[i] for i in spread(len(examples), limit)]


def read(source: str, *, limit: int = 0, split: str = "train") -> list[Example]:
    """Returns the answerable questions of a .json/.jsonl[.gz] file or of "hub:NAME[:CONFIG][:SPLIT]".

    With a limit, so many examples spread evenly over the source: neighbours in SQuAD share their paragraph.
    `split` is taken where a hub source names none. Raises UserError naming file, line or row, and field.
    """
    rows = _hub_rows(source, split) if source.startswith("hub:") else _file_rows(Path(source).expanduser())
    parsed = [_example(row, where) for where, row in rows]
    examples = [example for example in parsed if example is not None]
    skipped = len(parsed) - len(examples)
    if skipped:
        _log.warning("%s: skipped %d of %d questions: unanswerable from their context", source, skipped, len(parsed))
    if not examples:
        raise UserError(f"{source}: no examples ({skipped} unanswerable questions skipped); expected {_FORMATS}")
    return [examples[i] for i in spread(len(examples), limit)]


def spread(count: int, limit: int) -> list[int]:
    """Returns `limit` increasing positions spread evenly over `count` (all of them when the limit is 0 or larger)."""
    kept = min(limit, count) if limit > 0 else count
    return [i * count // kept for i in range(kept)]


def _identity(source: str, split: Split) -> str | tuple[str, str, str]:
    if source.startswith("hub:"):
        return _parse_hub(source, split)
    return source if source in cards.STYLES else os.path.realpath(os.path.expanduser(source))


def _file_rows(path: Path) -> Iterator[_Row]:
    text = read_text(path)
    yield from rows_of(path, text)


def rows_of(path: Path, text: str) -> Iterator[_Row]:
    """Yields (place, value) of each row of a file's text. Raises UserError naming file and line of broken JSON."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UserError(f"{path}: the file is empty; expected {_FORMATS}")
    if len(lines) > 1 and (".jsonl" in path.suffixes or _is_object(lines[0][1])):
        for number, line in lines:
            yield f"{path}:{number}", _parse(line, path, number)
        return
    document = _parse(text, path, 1)
    if isinstance(document, dict) and isinstance(document.get("data"), list):
        yield from _squad_rows(document["data"], str(path))
    elif isinstance(document, list):
        yield from ((f"{path}[{i}]", row) for i, row in enumerate(document))
    else:
        yield f"{path}:{lines[0][0]}", document


def read_text(path: Path) -> str:
    """Returns the text of a file, gzipped or not. Raises UserError where it cannot be read."""
    if not path.is_file():
        found = "is a directory" if path.is_dir() else "no such file"
        raise UserError(f'{path}: {found}; name a .json or .jsonl file (also .gz), "hub:NAME" or "cards"')
    raw = path.read_bytes()
    try:
        return (gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw).decode("utf-8-sig")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: broken gzip data ({error}); fetch or compress the file again") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error}); convert it to UTF-8") from error


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except json.JSONDecodeError:
        return False


def _parse(text: str, path: Path, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise UserError(f"{path}:{line}: broken JSON, column {error.colno}: {error.msg}; mend or remove it") from error


def _squad_rows(articles: list[Any], path: str) -> Iterator[_Row]:
    for a, article in enumerate(articles):
        for p, paragraph in enumerate(_field(article, "paragraphs", f"{path}: data[{a}]")):
            where = f"{path}: data[{a}].paragraphs[{p}]"
            context = _field(paragraph, "context", where)
            for q, question in enumerate(_field(paragraph, "qas", where)):
                unanswerable = not _field(question, "answers", f"{where}.qas[{q}]")
                row = {"is_impossible": unanswerable, **question, "context": context}
                yield f"{where}.qas[{q}]", row


def _parse_hub(source: str, split: str) -> tuple[str, str, str]:
    name, *rest = re.split(r":(?![^\[]*\])", source.removeprefix("hub:"))  # a slice "train[:90%]" stays whole
    if not name or len(rest) > 2:
        raise UserError(f"{source!r}: expected hub:NAME, hub:NAME:CONFIG, hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT")
    if len(rest) == 1:  # one word: a split when it begins like one, else a configuration
        rest = ["", rest[0]] if rest[0].startswith(("train", "validation", "test", "dev")) else [rest[0], split]
    subset, chosen = rest or ("", split)
    return name, subset, chosen or split


def _hub_rows(source: str, split: str) -> Iterator[_Row]:
    name, subset, chosen = _parse_hub(source, split)
    try:
        datasets = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise UserError(
            f"{source!r} needs the package 'datasets' ({error}): pip install datasets, or name a local file"
        ) from error
    try:
        rows = datasets.load_dataset(name, subset or None, split=chosen)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"{source!r}: config {subset or 'default'!r}, split {chosen!r} could not be loaded: {error}; "
            "check the names and the network, or download a file and name its path"
        ) from error
    yield from ((f"{source}[{i}]", row) for i, row in enumerate(rows))


def _field(row: Any, name: str, where: str) -> Any:
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object, found {type(row).__name__}; known formats: {_FORMATS}")
    if name not in row:
        found = ", ".join(map(repr, row)) or "nothing"
        raise UserError(f"{where}: field {name!r} is missing, found {found}; known formats: {_FORMATS}")
    return row[name]


def _example(row: Any, where: str) -> Example | None:
    context = _join_context(_field(row, "context", where), where)
    question = _nonempty(_field(row, "question", where), "question", where)
    answers = _answers(row, where)
    if not answers:
        return None
    return Example(str(row.get("id") or row.get("_id") or where), context, question, answers)


def _answers(row: dict[str, Any], where: str) -> tuple[str, ...]:
    """Returns the distinct answers in order; none when the row itself says that it is unanswerable."""
    if row.get("is_impossible"):
        return ()
    if "answers" not in row and "answer" in row:
        return (_nonempty(row["answer"], "answer", where),)
    answers = _field(row, "answers", where)
    if isinstance(answers, dict):  # the hub's SQuAD: {"text": [...], "answer_start": [...]}, both empty: unanswerable
        answers = _field(answers, "text", f"{where}: answers")
    elif not answers:
        raise UserError(f"{where}: field 'answers' is empty; give one, or mark the row with \"is_impossible\": true")
    if not isinstance(answers, list):
        raise UserError(f"{where}: field 'answers' must be a list of strings, found {type(answers).__name__}")
    texts = [_field(a, "text", where) if isinstance(a, dict) else a for a in answers]
    return tuple(dict.fromkeys(_nonempty(text, "answers", where) for text in texts))


def _join_context(value: Any, where: str) -> str:
    """Returns a context as one text; HotpotQA's paragraphs become lines "title: sentences"."""
    if isinstance(value, dict):  # the hub's HotpotQA: parallel lists
        titles, paragraphs = _field(value, "title", where), _field(value, "sentences", where)
        value = list(zip(titles, paragraphs, strict=True))
    if not isinstance(value, list):
        return _nonempty(value, "context", where)
    lines = []
    for paragraph in value:
        match paragraph:
            case str():
                lines.append(paragraph.strip())
            case [str() as title, [*sentences]] if all(isinstance(s, str) for s in sentences):
                lines.append(f"{title}: {' '.join(s.strip() for s in sentences)}")
            case _:
                raise UserError(f"{where}: field 'context' must hold strings or [title, [sentence, ...]] pairs")
    return _nonempty("\n".join(lines), "context", where)


def _nonempty(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: field {name!r} must be a string, found {type(value).__name__}; quote or remove it")
    if not value.strip():
        raise UserError(f"{where}: field {name!r} is empty; fill it or remove the row")
    return value.strip()
