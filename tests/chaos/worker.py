"""Processes that read one mutated input after the other, with limits of time and of memory."""

import dataclasses
import io
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, Queue

from lw_jax.core.errors import UserError
from sharding.errors import PlacementError
from tests.chaos.cases import Case, Kind, Sample, lay

SECONDS = 10.0  # of one input, of wall time and of the process's own: a busy machine makes no hang
ASLEEP = 120.0  # seconds of wall time, for what waits and takes no time of the processor
START_SECONDS = 600.0  # of a process until it has read the valid sample
MEMORY_BYTES = 6 << 30  # of address space above what a process has after its start
LONGEST = 2000  # characters of a refusal
BAD = ("raw traceback", "accepted though wrong", "hang", "crash")


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
    """Yields each case with its outcome, in no order, until all are read or `time.monotonic()` is `until`."""
    todo: Queue[Case] = Queue()
    for case in cases:
        todo.put(case)
    done: Queue[tuple[Case, Outcome] | BaseException | None] = Queue()
    threads = [
        threading.Thread(target=_serve, args=(todo, done, samples, until), daemon=True) for _ in range(processes)
    ]
    for thread in threads:
        thread.start()
    left = len(threads)
    while left:
        found = done.get()
        if isinstance(found, BaseException):
            raise found
        if found is None:
            left -= 1
        else:
            yield found


def _serve(todo: "Queue[Case]", done: "Queue[tuple[Case, Outcome] | BaseException | None]", samples: dict[str, Sample],
           until: float) -> None:  # fmt: skip
    worker: _Worker | None = None
    try:
        while time.monotonic() < until:
            try:
                case = todo.get_nowait()
            except Empty:
                break
            worker = worker or _Worker()
            outcome = worker.read(case, samples[case.kind])
            if outcome.word in ("hang", "crash"):
                worker.close()
                worker = None
            done.put((case, outcome))
    except RuntimeError as error:  # of the campaign itself
        done.put(error)
    finally:
        if worker is not None:
            worker.close()
        done.put(None)


class _Worker:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_loop, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._warm: set[str] = set()

    def read(self, case: Case, sample: Sample) -> Outcome:
        if case.kind not in self._warm:
            first = self._ask(Case(case.kind, "valid", {}), sample, START_SECONDS, START_SECONDS)
            if first.word != "accepted":
                raise RuntimeError(f"the valid sample of {case.kind} is not accepted: {first}")
            self._warm.add(case.kind)
        return self._ask(case, sample, SECONDS, ASLEEP)

    def _ask(self, case: Case, sample: Sample, seconds: float, asleep: float) -> Outcome:
        began, used = time.monotonic(), self._processor_seconds()
        try:
            self._pipe.send((case, sample))
            while not self._pipe.poll(1.0):
                took, worked = time.monotonic() - began, self._processor_seconds() - used
                if took > asleep or min(took, worked) > seconds:
                    return Outcome("hang", f"no end in {took:.0f} s, {worked:.0f} s of the processor")
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            return Outcome("crash", f"the process ended with {self._process.exitcode}")

    def _processor_seconds(self) -> float:
        try:
            told = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:  # it has ended: the pipe says so
            return 0.0
        return (int(told[11]) + int(told[12])) / os.sysconf("SC_CLK_TCK")  # of all its threads

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _loop(pipe: Connection) -> None:
    from tests.chaos import kinds  # imports the product; here, so that a parent stays light

    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())  # what libraries write themselves
        os.dup2(nowhere.fileno(), sys.stderr.fileno())
    every, warm = {kind.name: kind for kind in kinds.every()}, set()
    base = Path(tempfile.mkdtemp(prefix="lw_jax-chaos-"))
    try:
        for number in range(10**9):
            case, sample = pipe.recv()
            folder = base / str(number)
            folder.mkdir()
            limit = resource.RLIM_INFINITY if case.kind not in warm else _address_space() + MEMORY_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
            outcome = judge(every[case.kind], sample, case, folder)
            warm.add(case.kind)
            shutil.rmtree(folder, ignore_errors=True)
            pipe.send(outcome)
    except EOFError:
        pass
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
