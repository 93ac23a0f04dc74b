"""The fields of a row and the columns in which they stand: one typed value a row, whoever parsed it."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from lw_jax.core import schema
from lw_jax.core.errors import UserError

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Fields(Generic[_T]):
    """The type of a row, and the columns in which its fields stand where they have other names."""

    kind: type[_T]  # a msgspec.Struct
    columns: Mapping[str, str]  # field -> column, with dots into nested ones; empty: the field is left out
    remedy: str

    @classmethod
    def of(cls, kind: type[_T], columns: Sequence[str], remedy: str) -> "Fields[_T]":
        """Returns the fields of a type, with what `data.columns` says of them."""
        mapping = dict(one.split(":", 1) for one in columns)
        own = {field: column for field, column in mapping.items() if field in names_of(kind)}
        taken = ", ".join(f"{field} from {column!r}" if column else f"no {field}" for field, column in own.items())
        named = f"data.columns takes {taken}" if own else "data.columns=FIELD:COLUMN names another column"
        return cls(kind, own, f"{remedy}; {named}")

    def decode(self, line: bytes, where: str) -> _T:
        """Returns one row of JSON."""
        if not self.columns:
            return schema.decode(line, self.kind, where=where, remedy=self.remedy)
        return self.convert(schema.decode(line, dict[str, Any], where=where, remedy=self.remedy), where)

    def convert(self, row: Mapping[str, Any], where: str) -> _T:
        """Returns one row that a library has read. Raises UserError naming place, field, value and rule."""
        if self.columns:
            self.choose(list(row), where)
            own = {field: value for field, value in row.items() if field not in self.columns}
            row = own | {field: self._take(row, field, where) for field, column in self.columns.items() if column}
        return schema.convert(row, self.kind, where=where, remedy=self.remedy)

    def choose(self, known: Sequence[str], where: str) -> list[str]:
        """Returns the columns of a table that are read. Raises UserError where one that a field needs is missing."""
        chosen = []
        for field in msgspec.structs.fields(self.kind):  # type: ignore[arg-type]
            name = field.encode_name
            column = self.columns.get(name, name)
            found = next((one for one in (column, column.partition(".")[0]) if one in known), None)
            if found is not None:
                if (count := list(known).count(found)) > 1:
                    raise UserError(f"{where}: column {found!r} is there {count} times; write the table with one")
                chosen.append(found)
            elif column and (field.required or name in self.columns):
                raise self._lacks(name, column, known, where)
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
        return [_descend(one, names) for one in value]
    if not isinstance(value, Mapping) or names[0] not in value:
        raise LookupError(list(value) if isinstance(value, Mapping) else [])
    return _descend(value[names[0]], names[1:])
