"""Records of an evaluation under way, on disk: one that was cut short resumes where it was."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from lw_jax.core.errors import UserError
from lw_jax.core.eval_rows import ROWS
from lw_jax.core.files import write_whole
from lw_jax.evals.comparison import Record

Name = tuple[str, str, int]  # of a record: reader, row, index of the example


class RecordLog:
    """Records by reader, row and example, each written to a file when it is added.

    The file's first line is the evaluation's key, each further one a record. A file of another key begins anew.
    Records of rows with a learned vector are of that vector, too.
    """

    def __init__(self, path: Path | None = None, key: str = "", *, vectors: Mapping[str, str] = {}):
        """Reads the records of the same key and vectors; without a path they are in memory alone.

        `vectors`: what identifies each reader's. Raises UserError for a line that is no record.
        """
        self._path, self._records, self._vectors = path, dict[Name, Record](), vectors
        self.dropped = 0  # records of another key
        if path is None:
            return
        # What stands behind the last line's end was being written when the process was killed.
        head = json.dumps({"key": key})
        try:
            lines = path.read_text("utf-8").rpartition("\n")[0].splitlines() if path.exists() else []
            resumed = lines[1:] if lines[:1] == [head] else []
            self.dropped = max(0, len(lines) - 1 - len(resumed))
            self._keep([json.loads(line) for line in resumed])
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{path}: a line is no record ({error}); remove the file: the evaluation begins anew"
            ) from error
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(f"{line}\n" for line in (head, *map(json.dumps, self._records.values()))))

    def __len__(self) -> int:
        return len(self._records)

    def missing(self, reader: str, rows: Sequence[str], indices: Sequence[int]) -> list[str]:
        """Returns the rows of which one of the examples has no record."""
        return [row for row in rows if any((reader, row, index) not in self._records for index in indices)]

    def add(self, records: Sequence[Record]) -> None:
        records = [record | self._vector(record) for record in records]
        self._keep(records)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)

    def read(self, readers: Sequence[str], rows: Sequence[str], indices: Sequence[int]) -> list[Record]:
        """Returns these records, those of one example together. Raises KeyError for one that was not added."""
        return [self._records[reader, row, index] for index in indices for reader in readers for row in rows]

    def _keep(self, records: Sequence[Record]) -> None:
        own = (record for record in records if record == record | self._vector(record))
        self._records |= {(record["reader"], record["row"], record["index"]): record for record in own}

    def _vector(self, record: Record) -> Record:
        return {"vector": self._vectors.get(record["reader"], "")} if ROWS[record["row"]].taught else {}
