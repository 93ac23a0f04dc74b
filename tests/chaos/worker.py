"""Processes that read one mutated input after the other, with limits of time and of memory."""

import concurrent.futures
import dataclasses
import faulthandler
import functools
import io
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from lw_jax.core.errors import UserError
from sharding.errors import PlacementError
from tests.chaos import runs
from tests.chaos.cases import Case, Kind, Sample, lay

SECONDS = 60.0  # of one input, on a machine busy with other work; then the process ends itself
BATCH = 200  # cases of one set of processes
MEMORY_BYTES = 6 << 30  # of address space above what a process has after its start
LONGEST = 2000  # characters of a refusal
BAD = ("raw traceback", "accepted though wrong", "hang or crash")


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


def run_all(cases: Iterable[Case], samples: dict[str, Sample], *, processes: int,
            until: float) -> Iterator[tuple[Case, Outcome]]:  # fmt: skip
    """Yields each case with its outcome, in no order, until all are read or `time.monotonic()` is `until`.

    A process that dies ends its executor: what it had is tried again one by one, and what ends it again is counted.
    """
    left = list(cases)
    while left and time.monotonic() < until:
        lost = []
        with _executor(processes) as executor:
            chosen, left = left[:BATCH], left[BATCH:]
            futures = {executor.submit(_read, case, samples[case.kind]): case for case in chosen}
            for future in concurrent.futures.as_completed(futures):
                try:
                    yield futures[future], future.result()
                except BrokenProcessPool:
                    lost.append(futures[future])
        for case in lost:
            with _executor(1) as executor:
                try:
                    yield case, executor.submit(_read, case, samples[case.kind]).result()
                except BrokenProcessPool:
                    yield case, Outcome("hang or crash", f"the process ended, or was ended after {SECONDS:.0f} s")


def _executor(processes: int) -> concurrent.futures.ProcessPoolExecutor:
    return concurrent.futures.ProcessPoolExecutor(processes, runs.context(), _prepare)


def _prepare() -> None:
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())  # what libraries write themselves
        os.dup2(nowhere.fileno(), sys.stderr.fileno())


@functools.cache
def _kind(name: str) -> Kind:
    from tests.chaos import kinds  # imports the product; here, so that a parent stays light

    return next(kind for kind in kinds.every() if kind.name == name)


_WARM: set[str] = set()  # kinds whose valid sample this process has read, so that limits count the case alone


def _read(case: Case, sample: Sample) -> Outcome:
    kind = _kind(case.kind)
    with tempfile.TemporaryDirectory(prefix="lw_jax-chaos-") as folder:
        if case.kind not in _WARM:
            first = judge(kind, sample, Case(case.kind, "valid", {}), Path(folder) / "valid")
            if first.word != "accepted":
                raise RuntimeError(f"the valid sample of {case.kind} is not accepted: {first}")
            _WARM.add(case.kind)
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MEMORY_BYTES, resource.RLIM_INFINITY))
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            return judge(kind, sample, case, Path(folder) / "case")
        finally:
            faulthandler.cancel_dump_traceback_later()
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
