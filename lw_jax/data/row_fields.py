"""The fields of a row and the columns in which they stand: one typed value a row, whoever parsed it.

What a row has beside them is counted, and refused where it changes what the row means.
"""

import contextlib
import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from lw_jax.core import schema
from lw_jax.core.config_sections import MEANING
from lw_jax.core.errors import UserError

_log = logging.getLogger(__name__)
_SHOWN = 20  # columns in a message

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Fields(Generic[_T]):
    """The type of a row, and the columns in which its fields stand where they have other names."""

    kind: type[_T]  # a msgspec.Struct
    columns: Mapping[str, str]  # field -> column, with dots into nested ones; empty: the field is left out
    remedy: str
    left: frozenset[str] = frozenset()  # fields that the user leaves out
    sparse: bool = False  # a null in a table's object says that this one has no such field
    unread: Counter[str] = dataclasses.field(default_factory=Counter)  # column that nobody reads -> rows
    skipped: set[str] = dataclasses.field(default_factory=set)  # columns of a table that are not loaded

    @classmethod
    def of(cls, kind: type[_T], columns: Sequence[str], remedy: str, *, sparse: bool = False) -> "Fields[_T]":
        """Returns the fields of a type, with what `data.columns` says of them."""
        mapping = dict(entry.split(":", 1) for entry in columns)
        renames = {field: column for field, column in mapping.items() if field in names_of(kind)}
        taken = ", ".join(f"{field} from {column!r}" if column else f"no {field}" for field, column in renames.items())
        named = f"data.columns takes {taken}" if renames else "data.columns=FIELD:COLUMN names another column"
        left = frozenset(field for field, column in mapping.items() if not column)
        return cls(kind, renames, f"{remedy}; {named}", left, sparse)

    @contextlib.contextmanager
    def counted(self, where: str) -> Iterator["Fields[_T]"]:
        """Gives the fields for one source; names at its end, once, what nobody reads of it."""
        fields = dataclasses.replace(self, unread=Counter(), skipped=set())
        yield fields
        if fields.unread:
            warn_unread(
                where, [f"{column!r} ({count:,} rows)" for column, count in fields.unread.most_common()], _SHOWN
            )

    def convert(self, row: Mapping[str, Any], where: str) -> _T:
        """Returns one row that a library has read. Raises UserError naming place, field, value and rule."""
        self._count(row, where)
        if self.columns:
            plain = {field: value for field, value in row.items() if field not in self.columns}
            row = plain | {field: self._take(row, field, where) for field, column in self.columns.items() if column}
        return schema.convert(row, self.kind, where=where, remedy=self.remedy)

    def _count(self, row: Mapping[str, Any], where: str) -> None:
        self.unread.update(self.skipped)
        for name in row.keys() - self._read:
            if row[name] in (None, "", [], {}):
                continue
            if name in MEANING:
                raise UserError(
                    f"{where}: {name}={str(row[name])[:60]!r}: it changes what the row means and is not read; move it "
                    f"into {', '.join(names_of(self.kind))}, or leave it out: data.columns={name}:"
                )
            self.unread[name] += 1

    @functools.cached_property
    def _read(self) -> frozenset[str]:
        columns = [self.columns.get(name, name) for name in names_of(self.kind)]
        return self.left.union(columns, (column.partition(".")[0] for column in columns))

    def choose(self, known: Sequence[str], where: str) -> list[str]:
        """Returns the columns of a table that are read, and notes the others.

        Raises UserError where one that a field needs is missing.
        """
        chosen = [name for name in known if name in MEANING and name not in self.left]
        for field in msgspec.structs.fields(self.kind):  # type: ignore[arg-type]
            name = field.encode_name
            column = self.columns.get(name, name)
            match = next((candidate for candidate in (column, column.partition(".")[0]) if candidate in known), None)
            if match is not None:
                if (count := list(known).count(match)) > 1:
                    raise UserError(f"{where}: column {match!r} is there {count} times; write the table with one")
                chosen.append(match)
            elif column and (field.required or name in self.columns):
                raise self._lacks(name, column, known, where)
        self.skipped.clear()
        self.skipped.update(set(known).difference(chosen, self.left))
        return list(dict.fromkeys(chosen))

    def _take(self, row: Mapping[str, Any], field: str, where: str) -> Any:
        column = self.columns[field]
        if column in row:
            return row[column]
        try:
            return _descend(row, column.split("."))
        except LookupError as error:
            raise self._lacks(field, column, error.args[0], where) from error

    def _lacks(self, field: str, column: str, known: Iterable[str], where: str) -> UserError:
        here = ", ".join(map(repr, known)) or "none"
        return UserError(
            f"{where}: field {field!r}: no column {column!r}, here are {here}; "
            f"data.columns={field}:COLUMN names another"
        )


def names_of(kind: type) -> list[str]:
    """Returns the fields of a row's type as they stand in files."""
    return [field.encode_name for field in msgspec.structs.fields(kind)]


def _descend(value: Any, names: Sequence[str]) -> Any:
    """Returns what stands under nested names, of a list that of each item. Raises LookupError(names that are there)."""
    if value is None or not names:
        return value
    if isinstance(value, list):
        return [_descend(item, names) for item in value]
    if not isinstance(value, Mapping) or names[0] not in value:
        raise LookupError(list(value) if isinstance(value, Mapping) else [])
    return _descend(value[names[0]], names[1:])


def warn_unread(where: str, names: Sequence[str], most: int, rule: str = "") -> None:
    """Names what is not read of a source, `most` of it, once in a process."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    warn_once(f"{where}: not read: {', '.join(names[:most])}{more}{rule}")


@functools.lru_cache(maxsize=64)
def warn_once(line: str) -> None:
    """Logs a line, once in a process."""
    _log.warning(line)
