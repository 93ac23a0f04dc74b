"""Readers apart work at once, by the profiler's trace. (A rendezvous inside the programs cannot show it on CPUs: XLA
runs a program with host callbacks in the thread that dispatches it.)"""

import statistics

import jax
import pytest

from tests import tiny

pytestmark = pytest.mark.slow

STEPS = 3  # of which most must show it, on a machine busy with other work


def busy(folder) -> dict[int, list[tuple[float, float]]]:
    """Device -> (start, end) in ns of each run of a reader's program, by the trace."""
    (path,) = folder.rglob("*.xplane.pb")
    spans: dict[tuple[int, int], tuple[float, float]] = {}
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for event in (event for line in plane.lines for event in line.events):
            told = dict(event.stats)
            if told.get("hlo_module") == "jit_branch":
                key = int(told["device_ordinal"]), int(told["run_id"])
                start, end = spans.get(key, (event.start_ns, event.end_ns))
                spans[key] = min(start, event.start_ns), max(end, event.end_ns)
    return {
        device: sorted(span for (where, _), span in spans.items() if where == device)
        for device in sorted({device for device, _ in spans})
    }


def trace(recipe, folder) -> list[float]:
    """For each step, the share of the shorter reader's time in which the other one was at work too."""
    batch = recipe.data("train").collate(range(recipe.cfg.train.global_batch))
    program, state, frozen, batch = tiny.start_step(recipe, batch)
    state, values = program.step(state, frozen, batch)
    jax.block_until_ready(values)
    with jax.profiler.trace(str(folder)):
        for _ in range(STEPS):
            state, values = program.step(state, frozen, batch)
            jax.block_until_ready(values)
    found = busy(folder)
    assert found.keys() == {0, 1} and all(len(runs) == STEPS for runs in found.values())
    return [
        (min(first[1], second[1]) - max(first[0], second[0])) / min(first[1] - first[0], second[1] - second[0])
        for first, second in zip(found[0], found[1], strict=True)
    ]


def test_a_trace_shows_both_readers_at_work_at_the_same_time(root, tmp_path):
    shares = trace(tiny.make_recipe(root, devices=2, strategy="split", train__global_batch=32), tmp_path)
    assert statistics.median(shares) > 0, shares
