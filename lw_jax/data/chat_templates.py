"""Chat templates of models: foreign Jinja programs in jinja2's sandbox, bounded in time, size and calls.

A template gets turns and the names of special tokens, as in transformers, and nothing else. jinja2's sandbox bounds
neither time nor memory: here each operation's result is measured before it is made, and loops and calls check the time.
"""

import datetime
import functools
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2 import ext, filters, nodes, sandbox

from lw_jax.core.errors import UserError

LARGEST = 1 << 22  # characters of any value, and of a prompt; templates have some 10,000 characters
ITEM = 8  # characters that a number or a list counts as
SECONDS = 5.0  # for one conversation; the longest published template takes a few milliseconds
DATE = datetime.date(2024, 7, 26)  # today of every template: a prompt must not change overnight
_FILTERS = (
    "abs capitalize count d default dictsort e escape first float groupby indent int items join last length list "
    "lower map max min reject rejectattr replace reverse round safe select selectattr sort string sum title trim "
    "unique upper attr wordcount tojson"
).split()
_PADDING = ("center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "translate")
_WIDTH = re.compile(r"%[-+ #0]*(\d|\*|\.)")
# Errors that a faulty template can raise.
_FAULTS = (
    *(jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError),
    *(SyntaxError, TypeError, ValueError),
)


def render(template: str, values: Mapping[str, Any], *, where: str, remedy: str) -> str:
    """Returns the text of a template with these values.

    Raises:
        UserError: names the source of the template, the fault and the remedy.
    """
    try:
        if len(template) > LARGEST:
            raise _Refused(f"it has {len(template):,} characters, at most {LARGEST:,} are read")
        environment, made = _compile(template)
        environment.deadline = time.monotonic() + SECONDS
        return made.render(values)
    except _FAULTS as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{where}: the chat template fails ({reason}); {remedy}") from error


class _Refused(jinja2.TemplateRuntimeError):
    """The template went beyond a bound."""


class _Namespace(jinja2.utils.Namespace):
    """Variables of a template; as in transformers, none may have a private name of Python."""

    def __init__(*args: Any, **named: Any) -> None:
        self, given = args[0], dict(*args[1:], **named)
        for name in given:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


class _Generation(ext.Extension):
    """The block tag by which templates mark replies for training; here only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own interface)

    def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))
    deadline = float("inf")

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols], finalize=_measured
        )
        self.filters = {name: self._bounded(name) for name in _FILTERS} | {_COUNTED: self._count, _JOINED: _join}
        self.globals = {
            "range": _range,
            "dict": lambda *args, **named: dict(*args, **named),
            "namespace": _Namespace,
            "raise_exception": _raise,
            "strftime_now": lambda form: DATE.strftime(form[:LARGEST]),
        }

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Joins the output of a template or of its block."""
        found, size = [], 0
        for part in parts:
            size += len(part)
            _limit(size)
            found.append(part)
        return "".join(found)

    def _generate(self, source: nodes.Template, *rest: Any, **options: Any) -> str:
        for loop in list(source.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
        _replace_concat(source)
        source.set_environment(self)
        return super()._generate(source, *rest, **options)

    def tick(self) -> None:
        """Refuses to continue after the deadline."""
        if time.monotonic() > self.deadline:
            raise _Refused(f"it takes more than {SECONDS:g} s")

    def _count(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.tick()
            yield value

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Measures the result of an operation before computing it."""
        self.tick()
        if operator == "%" and isinstance(left, str) and _WIDTH.search(left):
            raise _Refused("a width in a format is not allowed")
        if operator == "+" and not isinstance(left, int | float):
            _limit(_weigh(left) + _weigh(right))
        if operator == "*":
            for one, times in ((left, right), (right, left)):
                if isinstance(times, int) and not isinstance(one, int | float):
                    _limit(_weigh(one) * max(times, 0))
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = abs(left).bit_length() * (abs(right) if operator == "**" else 1)
            if max(bits, abs(right).bit_length()) > 1024:
                raise _Refused("a number of more than 1,024 bits")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls what the sandbox allows, without methods that pad or format."""
        self.tick()
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            if name in _PADDING:
                raise _Refused(f"str.{name} is not allowed")
            _limit_made(name, owner, args)
        return super().call(context, function, *args, **kwargs)

    def _bounded(self, name: str) -> Any:
        plain = _to_json if name == "tojson" else filters.FILTERS[name]

        @functools.wraps(plain)  # with its marks: whether it takes the environment or the context
        def run(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            marked = hasattr(plain, "jinja_pass_arg")
            value, rest = args[marked], args[marked + 1 :]
            if name in ("join", "replace", "indent", "string", "tojson"):
                _limit(_weigh(value))
                _limit_made(name, value, (*rest, *kwargs.values()))
            found = plain(*args, **kwargs)
            return _measured(found) if isinstance(found, str) else found

        return run


_COUNTED, _JOINED = "counted loop", "joined values"  # filters of ours; no template can write such a name


def _refuse_private(name: Any) -> None:
    if str(name).startswith("_"):
        raise _Refused(f"a variable {name!r} of a namespace")


def _replace_concat(source: nodes.Node) -> None:
    """Makes `a ~ b` a call of `_join`, which measures."""
    for node in list(source.find_all(nodes.Node)):
        for field, value in list(node.iter_fields()):
            if isinstance(value, nodes.Concat):
                setattr(node, field, _joined(value))
            elif isinstance(value, list):
                setattr(node, field, [_joined(one) if isinstance(one, nodes.Concat) else one for one in value])


def _joined(node: nodes.Concat) -> nodes.Filter:
    parts = nodes.List(list(node.nodes), lineno=node.lineno)
    return nodes.Filter(parts, _JOINED, [], [], None, None, lineno=node.lineno)


def _join(parts: list[Any]) -> str:
    _limit(sum(map(_weigh, parts)))
    return "".join(map(str, parts))


def _limit_made(name: str, value: Any, args: tuple[Any, ...]) -> None:
    """Refuses calls that would multiply their arguments' sizes beyond the bound."""
    size, given = _weigh(value), sum(map(_weigh, args))
    numbers = [one for one in args if isinstance(one, int)]
    if name == "replace" and args:
        first = str(args[0])
        _limit(size + (str(value).count(first) if first else size + 1) * given)
    elif name == "join":  # of a method the separator is the value, of a filter the argument
        _limit(size + given + max(size, 1) * max(given, 1) if min(size, given) else size + given)
    elif name == "indent":
        _limit(size + (str(value).count("\n") + 1) * (sum(map(abs, numbers)) + given))
    elif name == "tojson":
        _limit(size * (1 + sum(map(abs, numbers))))


def _measured(value: Any) -> Any:
    _limit(_weigh(value))
    return value


def _limit(size: int) -> None:
    if size > LARGEST:
        raise _Refused(f"a value of more than {LARGEST:,} characters")


def _weigh(value: Any) -> int:
    """Counts the characters that a value would have when it is written, to a little beyond the bound."""
    size, waiting = 0, [value]
    while waiting and size <= LARGEST:
        one = waiting.pop()
        if isinstance(one, str | bytes):
            size += len(one) + 1
        elif isinstance(one, Mapping):
            waiting += [*one.keys(), *one.values()]
            size += ITEM
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += one
            size += ITEM
        else:
            size += ITEM
    return size


def _range(*args: int) -> range:
    found = range(*args)
    if len(found) > sandbox.MAX_RANGE:
        raise _Refused(f"a range of more than {sandbox.MAX_RANGE:,}")
    return found


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys=False
) -> str:
    # As transformers: jinja's own escapes what HTML would need.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> tuple[_Sandbox, jinja2.Template]:
    environment = _Sandbox()
    return environment, environment.from_string(template)
