"""A kind of input, one mutated input of it, and what the product makes of it."""

import dataclasses
import hashlib
import io
import tempfile
import traceback
import zlib
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, strategies

from lw_jax.core.errors import UserError
from sharding.errors import PlacementError
from tests import tiny
from tests.chaos.mutations import Files

Sample = dict[str, bytes]
LONGEST = 2000  # characters of a refusal
BAD = ("raw traceback", "accepted though wrong")


@dataclasses.dataclass(frozen=True)
class Kind:
    """What is mutated, how the product reads it, and when what it has read is wrong."""

    name: str
    write: Callable[[Path], object]  # a valid sample into an empty folder
    mutate: Callable[[Sample], strategies.SearchStrategy[Files]]
    load: Callable[[Path], Any]  # by the product's own functions; raises UserError for what it refuses
    judge: Callable[[Any, Path, bool], str] = lambda value, folder, changed: ""  # why what was accepted is wrong
    explicit: Callable[[Sample], Mapping[str, Files]] = lambda sample: {}  # name -> the issue's own examples


@dataclasses.dataclass(frozen=True)
class Case:
    kind: str
    name: str  # "explicit NAME" or "drawn NUMBER"
    files: Files


@dataclasses.dataclass(frozen=True)
class Outcome:
    word: str  # "refused" | "accepted" | one of BAD
    detail: str = ""
    place: str = ""  # the product's file and function that raised


def judge(kind: Kind, sample: Sample, case: Case, folder: Path) -> Outcome:
    lay(folder, sample, case.files)
    said = io.StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(said):
            value = kind.load(folder)
            wrong = kind.judge(value, folder, bool(case.files))
    except (UserError, PlacementError) as error:
        text = str(error)
        if "\n" in text or len(text) > LONGEST:
            return Outcome("raw traceback", f"a refusal of {len(text)} characters, {text.count(chr(10)) + 1} lines")
        return Outcome("refused", text)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - what is counted here is everything that escapes
        return Outcome("raw traceback", f"{type(error).__name__}: {error}"[:300], _place(error))
    return Outcome("accepted though wrong", wrong[:300]) if wrong else Outcome("accepted")


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/lw_jax/" in frame.filename or frame.filename.endswith("/run.py")]
    return f"{'/'.join(Path(own[-1].filename).parts[-3:])}:{own[-1].name}" if own else ""


def sample_of(kind: Kind) -> Sample:
    with tempfile.TemporaryDirectory(prefix="lw_jax-chaos-") as scratch:
        kind.write(Path(scratch))
        return tiny.contents(Path(scratch))


def lay(folder: Path, sample: Mapping[str, bytes], changes: Files) -> None:
    folder.mkdir(exist_ok=True)
    for name, data in (dict(sample) | changes).items():
        if data is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)


def draw(kind: Kind, sample: Sample, *, count: int, seed: int) -> list[Case]:
    """Returns the explicit cases and so many drawn ones, no two with the same bytes; the same for the same seed."""
    named = {f"explicit {name}": files for name, files in kind.explicit(sample).items()}
    drawn: list[Files] = []

    @hypothesis.seed(zlib.crc32(f"{seed} {kind.name}".encode()))
    @hypothesis.settings(
        max_examples=max(count, 1),
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(kind.mutate(sample))
    def collect(files: Files) -> None:
        drawn.append(files)

    collect()
    named |= {f"drawn {number}": files for number, files in enumerate(drawn[:count])}
    known = {_digest(sample, {})}
    cases = []
    for name, files in named.items():
        digest = _digest(sample, files)
        if digest not in known:
            known.add(digest)
            cases.append(Case(kind.name, name, files))
    return cases


def _digest(sample: Sample, files: Files) -> str:
    said = hashlib.blake2b()
    for name, data in sorted((dict(sample) | files).items()):
        if data is not None:
            said.update(f"{name} {len(data)} ".encode() + data)
    return said.hexdigest()
