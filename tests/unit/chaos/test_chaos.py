"""Mutated inputs of every kind of tests/chaos; `make chaos` draws more of them (CHAOS_INPUTS) from another seed."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from lw_jax.core.errors import UserError
from tests.chaos.cases import BAD, Case, Kind, draw, judge, sample_of
from tests.chaos.kinds import every

KINDS = {kind.name: kind for kind in every()}
# kind -> how many are drawn, and every so many of all cases that is read; a page takes the most time.
SEED, MORE = int(os.environ.get("CHAOS_SEED", "7")), int(os.environ.get("CHAOS_INPUTS", "0"))
TRIED = {kind: (40, 1) for kind in KINDS}
TRIED |= {"configuration": (30, 2), "report": (30, 25), "report-language": (24, 4)}
TRIED = dict.fromkeys(KINDS, (MORE, 1)) if MORE else TRIED


@pytest.mark.parametrize("name", TRIED)
def test_no_input_ends_in_a_traceback_or_is_wrongly_taken(name: str, tmp_path: Path) -> None:
    kind, (count, every_nth) = KINDS[name], TRIED[name]
    sample = sample_of(kind)
    cases = [Case(name, "valid", {}), *draw(kind, sample, count=count, seed=SEED)[::every_nth]]
    found = [(case.name, judge(kind, sample, case, tmp_path / str(i))) for i, case in enumerate(cases)]
    assert found[0][1].word == "accepted", found[0]
    refused = sum(outcome.word == "refused" for _, outcome in found)
    assert refused > len(found) / 4 or name == "checkpoint"  # beside a damaged one lies a whole one
    assert not [(case, outcome) for case, outcome in found if outcome.word in BAD]


def _kind(load: Any) -> Kind:
    return Kind(
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
    sample = sample_of(kind)
    (case,) = draw(kind, sample, count=3, seed=0)  # the same bytes count once
    assert judge(kind, sample, case, tmp_path / "case").word == word
