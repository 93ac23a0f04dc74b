"""Mutated inputs of every kind through the product's own loading functions, counted as the issue's table."""

import collections
import dataclasses
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.chaos import kinds, worker
from tests.chaos.cases import Case, Kind, Sample, draw, lay, read_sample
from tests.chaos.worker import BAD, Outcome

KIND_FILE = "chaos.json"  # in a saved folder: of which kind it is


@dataclasses.dataclass(frozen=True)
class Failure:
    case: Case
    outcome: Outcome
    folder: Path  # the input as files
    seed: int


@dataclasses.dataclass(frozen=True)
class Tally:
    counts: dict[str, collections.Counter[str]]  # row of the table -> outcome -> number
    failures: list[Failure]
    left: int  # not tried for want of time

    @property
    def tried(self) -> int:
        return sum(sum(counts.values()) for counts in self.counts.values())


def run(*, seed: int, count: int, seconds: float, folder: Path, processes: int = 2, only: Sequence[str] = ()) -> Tally:
    """Tries about `count` inputs of all kinds, or of `only` some, for so many seconds once drawn; saves failures."""
    chosen = [kind for kind in kinds.every() if not only or kind.name in only]
    samples = {kind.name: sample_of(kind) for kind in chosen}
    total = sum(kind.weight for kind in chosen)
    lists = [draw(kind, samples[kind.name], count=round(count * kind.weight / total), seed=seed) for kind in chosen]
    cases = _interleave(lists)
    rows = {kind.name: kind.row for kind in chosen}
    counts: dict[str, collections.Counter[str]] = {kind.row: collections.Counter() for kind in chosen}
    failures: list[Failure] = []
    until = time.monotonic() + seconds
    for case, outcome in worker.run_all(cases, samples, processes=processes, until=until):
        counts[rows[case.kind]][outcome.word] += 1
        if outcome.word in BAD:
            failures.append(_save(case, outcome, samples[case.kind], folder, seed))
    tally = Tally(counts, failures, 0)
    return dataclasses.replace(tally, left=len(cases) - tally.tried)


def sample_of(kind: Kind) -> Sample:
    with tempfile.TemporaryDirectory(prefix="lw_jax-chaos-") as scratch:
        folder = Path(scratch) / "sample"
        folder.mkdir()
        kind.write(folder)
        return read_sample(folder)


def replay(folder: Path) -> Outcome:
    told = json.loads((folder / KIND_FILE).read_text("utf-8"))
    (kind,) = (kind for kind in kinds.every() if kind.name == told["kind"])
    sample = {name: data for name, data in read_sample(folder).items() if name != KIND_FILE}
    with tempfile.TemporaryDirectory(prefix="lw_jax-chaos-") as scratch:
        return worker.judge(kind, {}, Case(kind.name, told["case"], dict(sample)), Path(scratch))


def table(tally: Tally) -> str:
    words = ("refused", "accepted", *BAD)
    lines = [f"| kind | tried | {' | '.join(words)} |", f"|---|{'---|' * (1 + len(words))}"]
    whole = collections.Counter[str]()
    for row, counts in [*tally.counts.items(), ("**all**", whole)]:
        whole.update(counts if counts is not whole else {})
        lines.append(f"| {row} | {sum(counts.values())} | {' | '.join(str(counts[word]) for word in words)} |")
    return "\n".join(lines)


def _interleave(lists: list[list[Case]]) -> list[Case]:
    """Returns all cases, in runs of one kind, so that a limit of time is shared by the kinds."""
    parts = [
        (place / len(cases), number, cases[place : place + 20])
        for number, cases in enumerate(lists)
        for place in range(0, len(cases), 20)
    ]
    return [case for _, _, part in sorted(parts, key=lambda part: part[:2]) for case in part]


def _save(case: Case, outcome: Outcome, sample: Sample, folder: Path, seed: int) -> Failure:
    place = folder / f"{case.kind}-{case.name}".replace(" ", "-").replace("/", "_")[:100]
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    lay(place, sample, case.files)
    told = {"kind": case.kind, "case": case.name, "seed": seed} | dataclasses.asdict(outcome)
    (place / KIND_FILE).write_text(json.dumps(told, indent=2), "utf-8")
    return Failure(case, outcome, place, seed)
