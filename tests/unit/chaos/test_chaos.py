"""Mutated inputs of every kind of tests/chaos; `make chaos` draws more of them, for its minutes, from its seed."""

import math
import os
from pathlib import Path

import pytest

from tests.chaos import kinds_run, kinds_text, kinds_wire
from tests.chaos.cases import draw, judge, sample_of

KINDS = {kind.name: kind for kind in (*kinds_text.KINDS, *kinds_run.KINDS, *kinds_wire.KINDS)}
# kind -> how many are drawn, and every so many of all cases that is read; a page takes the most time.
SEED, MORE = int(os.environ.get("CHAOS_SEED", "7")), int(15 * float(os.environ.get("CHAOS_MINUTES", "0")))
TRIED = {kind: (40, 1) for kind in KINDS}
TRIED |= {"configuration": (30, 2), "report": (30, 25), "report-language": (24, 4)}
TRIED = dict.fromkeys(KINDS, (MORE, 1)) if MORE else TRIED
# One of so many inputs at least is refused: beside a damaged checkpoint lies a whole one, and most texts are texts.
FEW = {"checkpoint": math.inf, "passages-text": 16}


@pytest.mark.parametrize("name", TRIED)
def test_no_input_ends_in_a_traceback_or_is_wrongly_taken(name: str, tmp_path: Path) -> None:
    kind, (count, every_nth) = KINDS[name], TRIED[name]
    sample = sample_of(kind)
    cases = [("valid", {}), *list(draw(kind, sample, count=count, seed=SEED).items())[::every_nth]]
    found = {case: judge(kind, sample, files, tmp_path / str(i)) for i, (case, files) in enumerate(cases)}
    assert not {case: told for case, told in found.items() if told not in ("refused", "accepted")}
    assert found["valid"] == "accepted"
    assert list(found.values()).count("refused") > len(found) / FEW.get(name, 4)
