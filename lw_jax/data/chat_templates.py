"""Chat templates of models: rendered as transformers does, but on a fixed day; and what they leave out of the turns.

A template belongs to its model's folder and is trusted as its weights are: jinja2's sandbox keeps it from Python's own
objects, and its errors are one line.
"""

import datetime
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
from jinja2 import ext, nodes, sandbox

from lw_jax.core.errors import UserError

DATE = datetime.date(2024, 7, 26)  # today of every template: a prompt must not change overnight
REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of a turn; templates read the first or the second
CALLS = ("tool_calls", "function_call")
# Keys of a turn that hold what it says: a template that reads one of them writes its text.
SAID = ("content", *REASONING, *CALLS, "refusal")
_MARKS = ("id", "type", "index")  # of a call, which few templates write
_THOUGHT = re.compile(r"(.*(?:</think(?:ing)?>|\[/THINK\]))?(.*)", re.DOTALL)
_ESCAPED = re.compile(r"\\+u([0-9a-fA-F]{4})")
_BLANK = re.compile(r"\\+[nrt]|\\")
# Errors that a faulty template can raise.
_FAULTS = (
    *(jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError),
    *(SyntaxError, TypeError, ValueError),
)


def render(template: str, values: Mapping[str, Any], *, where: str, remedy: str) -> str:
    """Returns the text of a template with these values. Raises UserError naming its source and the fault."""
    try:
        return _compile(template).render(values)
    except _FAULTS as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{where}: the chat template fails ({reason}); {remedy}") from error


def as_given(turns: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns turns as templates are given them: reasoning under both names that templates read."""
    messages = []
    for turn in turns:
        thought = next((turn[key] for key in REASONING if key in turn), None)
        messages.append(turn if thought is None else {"thinking": thought, **turn, "reasoning_content": thought})
    return messages


class Said(NamedTuple):
    """A text that a template was given."""

    where: str
    text: str
    thought: bool = False  # reasoning of an earlier turn, which templates leave out by design


def said(turns: Sequence[Mapping[str, Any]], where: str, *, earlier: bool = False) -> list[Said]:
    """Returns the texts of turns; `earlier`: they are replied to, so the assistant's reasoning in them is past."""
    texts = []
    for number, turn in enumerate(turns, 1):
        past = earlier and turn["role"] == "assistant"
        thoughts = {str(turn[key]): key for key in reversed(REASONING) if turn.get(key)}
        named = f"{where}, turn {number} ({turn['role']})"
        texts += [Said(f"{named}: {key!r}", text, past) for text, key in thoughts.items()]
        for text in texts_of(turn):
            thought, reply = _THOUGHT.fullmatch(text).groups() if past else (None, text)  # type: ignore[union-attr]
            texts += [Said(f"{named}: 'content'", thought, True)] if thought else []
            texts.append(Said(f"{named}: 'content'", reply))
        for key in (*CALLS, "refusal"):
            calls = turn.get(key) or []
            for call in calls if isinstance(calls, list) else [calls]:
                body = call.get("function") or call if isinstance(call, Mapping) else call
                values = [body[k] for k in body if k not in _MARKS] if isinstance(body, Mapping) else body
                texts += [Said(f"{named}: {key!r}", text) for text in _leaves(values)]
    return [item for item in texts if item.text]


def described(values: Mapping[str, Any]) -> list[Said]:
    """Returns the texts of a row's tools (names, descriptions, the parameters' names) and documents."""

    def texts(value: Any) -> Iterator[str]:
        if isinstance(value, Mapping):
            yield from (value[key] for key in ("name", "description") if isinstance(value.get(key), str))
            yield from properties if isinstance(properties := value.get("properties"), Mapping) else ()
            value = list(value.values())
        if isinstance(value, list):
            for item in value:
                yield from texts(item)

    tools = [Said("'tools'", text) for text in texts(values.get("tools"))]
    documents = [list(item.values()) for item in values.get("documents") or []]
    return tools + [Said("'documents'", text) for text in _leaves(documents)]


def texts_of(turn: Mapping[str, Any]) -> list[str]:
    content = turn.get("content") or ""
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def find_lost(written: str, given: Iterable[Said]) -> list[Said]:
    """Returns what was given and does not stand in a text; white space and escapes of JSON make no difference."""
    left, lost = _fold(written), []
    folded = sorted(((item, _fold(item.text)) for item in given), key=lambda pair: -len(pair[1]))
    for item, text in folded:  # the longest first, each in a place of its own
        before, match, after = left.partition(text) if text else (left, " ", "")
        left = f"{before}\0{after}" if text and match else left
        if not match:
            lost.append(item)
    return lost


def _fold(text: str) -> str:
    if "\\" in text:
        text = _BLANK.sub("", _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text))
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # two escapes may be one character
    return "".join(text.split())


def _leaves(value: Any) -> Iterator[str]:
    """Yields texts, numbers and the names of fields inside JSON."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif value is not None and not isinstance(value, bool):
        yield value if isinstance(value, str) else json.dumps(value)


class _Generation(ext.Extension):
    """The block tag by which templates mark replies for training; here only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own interface)

    def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
    )
    # As transformers: jinja's own escapes what HTML would need.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals |= {"raise_exception": _raise, "strftime_now": DATE.strftime}
    return environment.from_string(template)
