"""lw_jax/planning/placement_search.py: which candidates there are, what is compiled of them, and which one is taken."""

import dataclasses

import jax
import pytest

from lw_jax.core import config
from lw_jax.planning import estimate, gpus, hlo_counts, placement_search, roofline
from lw_jax.planning.hardware import Hardware
from lw_jax.planning.plans import Guess, StepCandidate
from lw_jax.training import memory, micro_batch_search
from lw_jax.training.memory_limit import MemoryLimit
from tests import tiny
from tests.standin import replace_compiler
from tests.tiny import make_searched_config

H100 = gpus.CARDS["h100"]
ENOUGH = MemoryLimit(10**12, 0.8)
EXACT = 1e-12  # relative: a handful of fp64 sums


def hardware(count: int, room: MemoryLimit = ENOUGH, **changes) -> Hardware:
    return Hardware(jax.devices()[:count], room, **{"target": gpus.Target(H100, count)} | changes)


# ---- which candidates there are

MODELS = {1: [], 2: [2], 3: [3], 4: [2, 4], 5: [5], 6: [2, 3, 6], 7: [7], 8: [2, 4, 8]}
EVEN = {3: 2, 5: 4, 6: 4, 7: 4}  # the data axis of a second fsdp, for widths that the first one's does not divide


@pytest.mark.parametrize("readers", [1, 2, 3])
@pytest.mark.parametrize("count", range(1, 9))
def test_strategies_are_every_way_to_use_the_devices(count, readers, root):
    sizes = {f"reader{i}": 7 + i for i in range(readers)}
    found = list(placement_search.strategies(make_searched_config(root, train__global_batch=64), sizes, count))
    wanted = {("single", -1, 1)}
    if count > 1:
        wanted |= {("replicate", count, 1), ("fsdp", count, 1)}
        wanted |= {("fsdp", EVEN[count], 1)} if count in EVEN else set()
        wanted |= {("tensor", count // model, model) for model in MODELS[count]}
    if count > 1 and readers > 1:
        wanted.add(("split", -1, 1))
    if count > 1 and readers == 2:
        wanted.add(("hybrid3" if count == 3 else "hybrid4", -1, 1))
    assert len(found) == len(wanted) and set(found) == wanted


def test_devices_that_make_no_share_smaller_are_left_out_unless_each_process_needs_its_own(root):
    cfg, sizes = make_searched_config(root, train__global_batch=8), {"a": 3}
    spread = [one for one in placement_search.strategies(cfg, sizes, 6) if one[0] in ("replicate", "fsdp")]
    assert spread == [("replicate", 4, 1), ("fsdp", 4, 1)], "shares of two either way"
    spread = [one for one in placement_search.strategies(cfg, sizes, 6, 2) if one[0] in ("replicate", "fsdp")]
    assert spread == [("replicate", 6, 1), ("fsdp", 6, 1)]


def test_every_number_of_cards_takes_its_share_of_a_batch_that_it_does_not_divide(root, measure):
    def choose(strategy: str, count: int):
        cfg = tiny.make_config(root, only="qwen", train__global_batch=64, mesh__placement=strategy)
        (found,) = placement_search.choose(cfg, hardware(count))
        return found

    alone = choose("single", 1).estimate
    for count, micro in ((3, 22), (7, 10)):
        one = choose("replicate", count)
        assert one.fits and one.devices_used == count and one.needs.micro_batch == micro
        assert one.estimate.flops == pytest.approx(alone.flops * micro / 64, rel=0.02)  # the optimizer is whole
        assert one.estimate.step_seconds < alone.step_seconds


def test_a_configured_placement_is_the_only_one(root):
    cfg = tiny.make_config(root, mesh__placement="tensor", mesh__data=2, mesh__model=2)
    assert list(placement_search.strategies(cfg, {"a": 3, "b": 5}, 8)) == [("tensor", 2, 2)]


# ---- which one is taken


def candidate(seconds: float | None, *, devices: int = 1, peak: int = 100, **more) -> StepCandidate:
    sizes = {"devices_used": devices, "peak_bytes": peak, "step_seconds": seconds}
    return StepCandidate(strategy="replicate", mesh=f"{devices}x1", remat="none", **sizes, **more)


SENDS = {"flops": 13.0, "collective_bytes": 8.0}
# Of each rule the candidate to be taken, then the others.
TAKEN = {
    "the fastest": [candidate(1.0, devices=8, peak=700), candidate(3.0), candidate(2.0)],
    "not for a gain below 2 %": [candidate(1.019, devices=3), candidate(1.0, devices=8), candidate(1.021, devices=1)],
    "of the equally fast the least full": [candidate(1.01, peak=20), candidate(1.0, peak=30), candidate(1.0, peak=21)],
    "of unknown speed the least arithmetic on a device": [
        candidate(None, devices=4, flops=13.0),
        candidate(None, flops=50.0),
        candidate(None, devices=3, flops=17.0),
    ],
    "of which only one has no time, too": [candidate(None, flops=13.0), candidate(1.0, flops=50.0)],
    "then what sends least, then the fewest devices": [
        candidate(None, devices=3, peak=90, **SENDS),
        candidate(None, flops=13.0, collective_bytes=9.0),
        candidate(None, devices=5, peak=10, **SENDS),
        candidate(None, devices=3, **SENDS),
    ],
    "nothing with an obstacle": [candidate(5.0), candidate(1.0, fits=False)],
}


@pytest.mark.parametrize("rule", TAKEN)
def test_which_candidate_is_taken(rule):
    best, *others = TAKEN[rule]
    assert placement_search.pick([*others, best]) is placement_search.pick([best, *others]) is best
    assert placement_search.pick([]) is placement_search.pick([candidate(1.0, fits=False)]) is None


# ---- what is compiled on the way


def test_where_all_fits_one_program_is_compiled_for_each_placement(root, measure):
    found = placement_search.choose(make_searched_config(root), hardware(4))
    assert sorted(measure.asked) == sorted(
        [("single", "none", 8), ("replicate", "none", 2), ("fsdp", "none", 2)]
        + [("tensor", "none", 4), ("tensor", "none", 8), ("split", "none", 4), ("hybrid4", "none", 8)]
    )
    assert len(found) == 7 and all(one.fits and one.remat == "none" for one in found)


def test_another_recomputation_is_compiled_where_arithmetic_was_wrong(root, monkeypatch):
    """Half of the room that arithmetic wants without recomputation, which the compiler then doubles a hundredfold."""
    single = {"mesh__placement": "single", "train__micro_batch": 8}
    whole = placement_search.choose(make_searched_config(root, **single), hardware(1, compile=None))[0]
    room = MemoryLimit(2 * whole.needs.peak, 1.0)
    measure = replace_compiler(monkeypatch, none=100.0)
    found = placement_search.choose(make_searched_config(root, **single), hardware(1, room))
    assert [remat for _, remat, _ in measure.asked] == ["none", "full"]
    assert [(one.remat, one.fits) for one in found] == [("none", False), ("full", True)]
    assert found[0].obstacle == (
        f"a micro-batch of 8 needs {memory.bytes_of(found[0].needs.peak)} of {memory.bytes_of(room.usable)}"
    )


def test_a_smaller_micro_batch_than_arithmetic_said_has_the_faster_recomputation_compiled_too(root, monkeypatch):
    """Weights are read with each micro-batch: several small ones of short texts take longer than one recomputing."""
    short = {"data__question_tokens": 4, "data__answer_tokens": 2, "encoder__slots": 1, "encoder__window": 16}
    cfg = make_searched_config(root, only="qwen", mesh__placement="single", **short)
    whole = placement_search.choose(cfg, hardware(1, compile=None))[0]
    measure = replace_compiler(monkeypatch, none=5.0)
    slow = dataclasses.replace(H100, bandwidth=H100.bandwidth // 1000)
    found = placement_search.choose(
        cfg, hardware(1, MemoryLimit(int(1.1 * whole.needs.peak), 1.0), target=gpus.Target(slow, 1))
    )
    assert [one.remat for one in found] == ["none", "full"]
    assert found[0].needs.micro_batch < found[1].needs.micro_batch == 8
    assert {remat for _, remat, _ in measure.asked} == {"none", "full"}
    assert placement_search.pick(found) is found[1]


def test_configured_recomputation_and_micro_batch_are_the_only_ones_compiled(root, measure):
    cfg = tiny.make_config(root, compute__remat="full", train__micro_batch=2)
    found = placement_search.choose(cfg, hardware(2))
    assert {(remat, micro) for _, remat, micro in measure.asked} == {("full", 2)}
    assert [one.needs.accumulation for one in found if one.fits] == [4, 2, 2, 4, 4]


def test_what_cannot_hold_its_weights_is_not_compiled(root, measure):
    found = placement_search.choose(make_searched_config(root), hardware(2, MemoryLimit(10**6, 0.3)))
    assert measure.asked == []
    alone = [one for one in found if one.strategy != "hybrid4"]
    assert len(alone) == 5
    for one in alone:
        assert one.obstacle.startswith("weights and optimizer alone take ") and one.obstacle.endswith(" of 0.3 MB")
        assert (one.remat, one.needs, one.fits) == ("-", None, False)


def test_an_estimate_compiles_nothing_and_takes_arithmetic(root, measure):
    found = placement_search.choose(tiny.make_config(root), hardware(2, compile=None))
    assert measure.asked == []
    fitting = [one for one in found if one.fits]
    assert [one.strategy for one in fitting] == ["single", "replicate", "fsdp", "tensor", "split"]
    for one in fitting:
        assert one.needs.peak == one.estimate.peak_bytes and one.seconds.total == one.estimate.step_seconds
        assert (one.flops, one.collective_bytes) == (one.estimate.flops, one.estimate.collective_bytes)


def test_where_speed_is_not_known_recomputation_is_taken_to_hold_more_at_once(root, measure):
    cfg = make_searched_config(root, only="qwen", mesh__placement="single", compute__dtype="fp32")
    peaks = {}
    for remat in config.REMATS["latentwire"]:
        own = tiny.change(cfg, compute__remat=remat, train__micro_batch=8)
        peaks[remat] = placement_search.choose(own, hardware(1, compile=None))[0].needs.peak
    assert peaks["full"] < peaks["none"]
    room = MemoryLimit(peaks["full"] + 1, 1.0)
    assert [one.remat for one in placement_search.choose(cfg, hardware(1, room, target=None))] == ["full"]
    assert [one.remat for one in placement_search.choose(cfg, hardware(1, target=None))] == ["none"]
    assert placement_search.choose(cfg, hardware(1, target=None))[0].seconds is None


# ---- what stands in the way


def test_every_candidate_above_the_limit_has_an_obstacle_and_no_other_has(root, measure):
    cfg, seen = tiny.make_config(root), set()
    for megabytes in (1, 6, 34):
        room = MemoryLimit(megabytes * 10**6, 0.8)
        for one in placement_search.choose(cfg, hardware(2, room)):
            within = one.needs is not None and one.needs.peak <= room.usable
            assert one.fits == within == (not one.obstacle), (megabytes, one)
            if one.needs is not None and one.needs.peak > room.usable:
                assert one.needs.micro_batch == 1, "the smallest is what is refused"
            seen.add((within, one.needs is None))
    assert seen == {(True, False), (False, False), (False, True)}


def test_placements_that_do_not_go_together_are_candidates_with_their_reason(root, measure):
    listed = placement_search.choose(tiny.make_config(root, train__global_batch=6), hardware(3))
    found = {one.strategy: one for one in listed[::-1]}  # of each the first
    assert "llms/qwen" in found["fsdp"].obstacle and "data=3" in found["fsdp"].obstacle
    assert "llms/qwen" in found["tensor"].obstacle and "model=3" in found["tensor"].obstacle
    assert "multiple of 2 devices" in found["split"].obstacle
    assert found["hybrid3"].fits and found["single"].fits and found["replicate"].fits


@pytest.mark.parametrize("batch", [1, 6])
def test_no_candidate_holds_less_than_one_example_a_device(batch, root, measure):
    found = placement_search.choose(tiny.make_config(root, train__global_batch=batch), hardware(8))
    for one in found:
        if one.needs is None:
            wanted = "does not divide mesh axis" if one.strategy == "fsdp" else "would have no example"
            assert wanted in one.obstacle
            continue
        data = one.program.placement.data
        rows = one.needs.micro_batch * one.needs.accumulation * data
        assert one.fits and one.needs.micro_batch >= 1 and batch <= rows < batch + data
    assert found[0].strategy == "single" and found[0].needs.micro_batch == batch, "one device takes any batch"
    refused = {one.mesh for one in found if one.strategy == "tensor" and not one.fits}
    assert refused == {mesh for mesh, data in (("4x2", 4), ("2x4", 2)) if batch < data}


def test_a_second_fsdp_is_tried_only_where_widths_do_not_divide(root, measure, monkeypatch):
    """Widths of 48 and 56 divide by 2, 4 and 8, not both by 3, 5, 6 or 7."""
    cfg, every = tiny.make_config(root, train__global_batch=64), placement_search.strategies
    monkeypatch.setattr(placement_search, "strategies", lambda *on: [one for one in every(*on) if one[0] == "fsdp"])
    tried = {
        count: [(one.mesh, one.fits) for one in placement_search.choose(cfg, hardware(count))] for count in (4, 6, 7)
    }
    assert tried == {4: [("4x1", True)], 6: [("6x1", False), ("4x1", True)], 7: [("7x1", False), ("4x1", True)]}


def test_micro_batch_beyond_a_devices_share_becomes_the_share(root, measure):
    found = placement_search.choose(tiny.make_config(root, train__micro_batch=8), hardware(2))
    assert {one.strategy: one.needs.micro_batch for one in found if one.fits} == {
        **{"single": 8, "replicate": 4, "fsdp": 4, "tensor": 8, "split": 8},
    }


@pytest.mark.parametrize("micro", [0, 4])
def test_a_step_that_the_compiler_finds_too_large_is_an_obstacle(micro, root, monkeypatch):
    def fail(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 7 bytes")

    monkeypatch.setattr(micro_batch_search.memory, "measure", fail)
    found = placement_search.choose(make_searched_config(root, train__micro_batch=micro), hardware(1))
    assert [one.remat for one in found] == ["none", "full"]
    assert all(one.obstacle.startswith("too large for the compiler: ") and not one.fits for one in found)


# ---- what the compiled step is said to take


@pytest.fixture(scope="module")
def apart(root):
    """One placement of readers on devices of their own, really compiled."""
    compiled = []

    def compile(lowered):
        compiled.append(lowered)
        return memory.compile_here(lowered)

    cfg = tiny.make_config(root, mesh__placement="split", train__micro_batch=4, compute__dtype="fp32")
    (found,) = placement_search.choose(cfg, hardware(2, compile=compile))
    return cfg, found, compiled


@pytest.mark.slow
def test_a_compiled_candidate_has_the_needs_that_are_measured(apart):
    cfg, found, compiled = apart
    program = tiny.outline(cfg, "split", 2)
    assert len(compiled) == len(found.needs.programs) > 3
    assert found.fits and found.needs == micro_batch_search.measure(program, program.recipe.batch_widths(), 4)
    guess = estimate.estimate(program, program.recipe.batch_widths(), 4, gpus.Target(H100, 2))
    told = Guess(guess.needs.peak, guess.flops, guess.collective_bytes, guess.times.total)
    assert found.estimate == told


@pytest.mark.slow
def test_readers_apart_work_at_once_and_all_else_follows(apart):
    _, found, _ = apart
    analysed = {name: (hlo_counts.analyse(one.as_text()), part) for name, (one, part) in found.needs.programs.items()}
    seconds = {
        name: part.runs * roofline.predict(one, gpus.Target(H100, 2)).total for name, (one, part) in analysed.items()
    }
    readers = [seconds.pop(name) for name in ("llama", "qwen")]
    assert found.seconds.total == pytest.approx(sum(seconds.values()) + max(readers), rel=EXACT)
    assert found.seconds.total < sum(seconds.values()) + sum(readers)
    flops = {}
    for one, part in analysed.values():
        flops[part.mesh] = flops.get(part.mesh, 0) + part.runs * one.flops
    assert len(flops) == 2 and found.flops == max(flops.values())
    assert {part.runs for name, (_, part) in analysed.items() if name in ("llama", "qwen")} == {2}
    assert found.collective_bytes == 0, "each reader is whole on its one device"
