"""A small part of the campaign, tests/chaos, with a fixed seed and in this process; and that it sees what is wrong."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from lw_jax.core.errors import UserError
from tests.chaos import inputs, mutations, worker
from tests.chaos.cases import Case, Kind, draw
from tests.chaos.kinds import every

KINDS = {kind.name: kind for kind in every()}
# kind -> how many are drawn, and every so many of all cases that is read; a page takes the most time.
TRIED = {kind: (40, 1) for kind in KINDS}
TRIED |= {"configuration": (30, 2), "report": (30, 25), "report-language": (24, 4)}


@pytest.mark.parametrize("name", TRIED)
def test_no_input_ends_in_a_traceback_or_is_wrongly_taken(name: str, tmp_path: Path) -> None:
    kind, (count, every_nth) = KINDS[name], TRIED[name]
    sample = inputs.sample_of(kind)
    cases = [Case(name, "valid", {}), *draw(kind, sample, count=count, seed=7)[::every_nth]]
    found = [(case.name, worker.judge(kind, sample, case, tmp_path / str(i))) for i, case in enumerate(cases)]
    assert found[0][1].word == "accepted", found[0]
    refused = sum(outcome.word == "refused" for _, outcome in found)
    assert refused > len(found) / 4 or name == "checkpoint"  # beside a damaged one lies a whole one
    assert not [(case, outcome) for case, outcome in found if outcome.word in worker.BAD]


def _kind(load: Any) -> Kind:
    return Kind(
        row="tests",
        name="test",
        write=lambda folder: (folder / "a").write_bytes(b"1"),
        mutate=lambda sample: st.just({"a": b"2"}),
        load=load,
        judge=lambda value, folder, changed: "it is two" if value == b"2" else "",
    )


def _refuse(folder: Path) -> None:
    raise UserError("no")


@pytest.mark.parametrize(
    ("load", "word"),
    [
        (lambda folder: (folder / "a").read_bytes(), "accepted though wrong"),
        (lambda folder: 1 // 0, "raw traceback"),
        (lambda folder: exit(0), "raw traceback"),
        (_refuse, "refused"),
        (lambda folder: None, "accepted"),
    ],
)
def test_outcome_is_counted_as_what_it_is(load: Any, word: str, tmp_path: Path) -> None:
    kind = _kind(load)
    sample = inputs.sample_of(kind)
    (case,) = draw(kind, sample, count=3, seed=0)  # the same bytes count once
    assert worker.judge(kind, sample, case, tmp_path / "case").word == word


def test_the_same_seed_draws_the_same_inputs() -> None:
    kind = KINDS["message"]
    sample = inputs.sample_of(kind)
    one, again, other = (draw(kind, sample, count=20, seed=seed) for seed in (3, 3, 4))
    assert one == again and len(one) > 15 and one != other


def test_what_was_drawn_does_not_change_what_comes() -> None:
    changed = {"a": [mutations.json_file(b'{"a": 1}')]}
    kind = dataclasses.replace(_kind(Path.exists), mutate=lambda sample: mutations.files(sample, changed))
    before = copy.deepcopy(mutations.JUNK)
    draw(kind, inputs.sample_of(kind), count=400, seed=0)
    assert before == mutations.JUNK
