"""A kind of input, mutated inputs of it, and what the product makes of them."""

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Kind:
    """What is mutated, how the product reads it, and when what it has read is wrong."""

    name: str
    write: Callable[[Path], object]  # a valid sample into an empty folder
    mutate: Callable[[Sample], strategies.SearchStrategy[Files]]
    load: Callable[[Path], Any]  # by the product's own functions; raises UserError for what it refuses
    judge: Callable[[Any, Path], str]  # why what was accepted is wrong; empty where it is right
    explicit: Callable[[Sample], Mapping[str, Files]] = lambda sample: {}  # name -> the issue's own examples


def judge(kind: Kind, sample: Sample, changes: Files, folder: Path) -> str:
    """Lays the sample with these changes into the folder; returns "refused", "accepted", or what is wrong."""
    lay(folder, sample, changes)
    said = io.StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(said):
            value = kind.load(folder)
            wrong = kind.judge(value, folder)
    except (UserError, PlacementError) as error:
        text = str(error)
        if "\n" in text or len(text) > LONGEST:
            return f"a refusal of {len(text)} characters, {text.count(chr(10)) + 1} lines"
        return "refused"
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - what is counted here is everything that escapes
        return traceback.format_exc()[-2000:]
    return f"accepted though wrong: {wrong[:300]}" if wrong else "accepted"


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


def draw(kind: Kind, sample: Sample, *, count: int, seed: int) -> dict[str, Files]:
    """Returns the changes of "explicit NAME" and of so many "drawn NUMBER"; the same for the same seed."""
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
    return named | {f"drawn {number}": files for number, files in enumerate(drawn[:count])}
