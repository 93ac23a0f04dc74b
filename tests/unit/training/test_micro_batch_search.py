"""lw_jax/training: bytes by hand, the largest micro-batch by search, errors that mean memory."""

import functools
import math
import random
import types

import jax
import pytest

from lw_jax.training import memory, memory_limit, micro_batch_search, out_of_memory
from lw_jax.training.memory import StepMemory
from lw_jax.training.memory_limit import MemoryLimit
from lw_jax.training.step_spec import StepSpec
from lw_jax.training.train_step import Part
from tests import tiny

pytestmark = pytest.mark.slow

UNDER, OVER = 0.01, 0.03  # of the bytes alive while programs run: latents that cross are not counted


def make_program(root, **changes) -> StepSpec:
    recipe = tiny.make_recipe(root, **changes)
    return StepSpec(recipe.cfg, recipe)


def needs(peak: int, micro: int = 1) -> StepMemory:
    return StepMemory(micro, 1, 0, 0, 0, 0, 0, (peak,))


SHAPES = {
    "affine": lambda size, base, slope: base + slope * size,
    "quadratic": lambda size, base, slope: base + slope * size * size,
    "root": lambda size, base, slope: base + int(100 * slope * math.sqrt(size)),
    "power of two": lambda size, base, slope: base + slope * 2 ** (size - 1).bit_length(),
    "constant": lambda size, base, slope: base,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_search_finds_what_trying_every_size_finds_in_few_tries(shape):
    chance = random.Random(shape)
    for _ in range(500):
        share = chance.choice([1, 2, 7, 12, 16, 60, 64, 97, 120, 360, 1024, 5040])
        legal = [size for size in range(1, share + 1) if share % size == 0]
        peak = functools.partial(SHAPES[shape], base=chance.randint(0, 10**6), slope=chance.randint(1, 10**4))
        limit = chance.randint(0, int(1.1 * peak(share)) + 1)
        broken = chance.choice([math.inf, limit, 2 * limit + 1])  # the compiler gives up beyond so many bytes
        tried = []

        def try_one(size, peak=peak, broken=broken, tried=tried):
            tried.append(size)
            return None if peak(size) > broken else needs(peak(size), size)

        fitting = [size for size in legal if peak(size) <= limit]
        if not fitting and peak(1) > broken:
            with pytest.raises(out_of_memory.OutOfMemory, match="not even a micro-batch of 1"):
                micro_batch_search.search(legal, try_one, limit)
            continue
        assert micro_batch_search.search(legal, try_one, limit).micro_batch == (fitting[-1] if fitting else 1)
        assert (
            len(tried) == len(set(tried)) <= micro_batch_search.LINE_TRIALS + 1 + math.ceil(math.log2(len(legal) + 1))
        )
        assert shape != "affine" or len(tried) <= 5


@pytest.mark.parametrize("word", ["RESOURCE_EXHAUSTED: Out of memory", "INTERNAL: Failed: out of memory"])
def test_errors_of_memory_become_out_of_memory_in_a_line(word):
    with pytest.raises(out_of_memory.OutOfMemory, match=word.split(":")[0]) as caught, out_of_memory.detect():
        raise jax.errors.JaxRuntimeError(word + "\n" + "details " * 200)
    assert len(str(caught.value)) <= 300 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error", [jax.errors.JaxRuntimeError("INTERNAL: NCCL operation failed"), ValueError("out of memory")]
)
def test_other_errors_pass_as_they_are(error):
    with pytest.raises(type(error)) as caught, out_of_memory.detect():
        raise error
    assert caught.value is error


def test_room_is_the_share_of_what_is_configured_or_reported(root, monkeypatch):
    cfg = tiny.make_config(root, mesh__memory_gb=40.0, mesh__target_utilisation=0.75)
    assert memory_limit.local(cfg) == MemoryLimit(40_000_000_000, 0.75)
    assert MemoryLimit(40_000_000_000, 0.75).usable == 30_000_000_000
    assert memory_limit.local(tiny.make_config(root)) is None, "CPUs tell no memory"
    monkeypatch.setattr(memory_limit.runtime, "device_memory", lambda: 81_559_000_000)
    assert memory_limit.local(tiny.make_config(root)) == MemoryLimit(81_559_000_000, 0.8)
    assert memory_limit.local(cfg) == MemoryLimit(40_000_000_000, 0.75), "what is configured goes before"


@pytest.mark.parametrize(("memory_gb", "usable"), [(0.0, 40e9), (45.0, 36e9), (70.0, 40e9)])
def test_users_smaller_share_of_the_card_is_not_exceeded(memory_gb, usable, root, monkeypatch):
    monkeypatch.setattr(memory_limit.runtime, "allocator_limit", lambda: 40_000_000_000)
    monkeypatch.setattr(memory_limit.runtime, "device_memory", lambda: 80_000_000_000)
    room = memory_limit.local(tiny.make_config(root, mesh__memory_gb=memory_gb))
    assert room is not None and abs(room.usable - usable) <= 1


COUNTERS = 3 * 4  # beside Adam's two moments: its own count, the schedule's and that of the stages' multiples
# One example: encoder ids and mask, channel, index; of each reader before, after, the answer's inputs, targets and
# weights, channel.
EXAMPLE = 256 * 5 + 3 * 4 + 4
READER = (40 + 64) * 5 + 23 * 4 + 24 * 4 + 24 * 4 + 3 * 4


def weightless(lowered):
    """Stands in for a compiled program that needs nothing, so that only what stays is counted."""
    del lowered
    nothing = types.SimpleNamespace(
        temp_size_in_bytes=0, output_size_in_bytes=0, alias_size_in_bytes=0, argument_size_in_bytes=0
    )
    return types.SimpleNamespace(memory_analysis=lambda: nothing)


@pytest.mark.parametrize(("strategy", "readers"), [("replicate", 2), ("split", 1)])
def test_bytes_that_stay_on_a_device_are_those_counted_by_hand(strategy, readers, root):
    program = make_program(root, devices=2, strategy=strategy)
    found = memory.measure(program, program.recipe.batch_widths(), 1, compile=weightless)
    learned = sum(4 * math.prod(leaf.shape) for leaf in jax.tree.leaves(program.recipe.abstract.trainable))
    rows = 8 // program.placement.data
    assert found.weights == program.frozen_bytes()[program.placement.learner]
    assert (found.trainable, found.optimizer) == (learned, 2 * learned + COUNTERS)
    assert (found.batch, found.micro_batch) == (rows * (EXAMPLE + READER * readers), rows)


@pytest.fixture(scope="module")
def measured(root):
    """StepMemory of every legal micro-batch of a global batch of 6, on one device."""
    program = make_program(root, train__global_batch=6)
    return [memory.measure(program, program.recipe.batch_widths(), 6 // micro) for micro in (1, 2, 3, 6)]


@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_largest_micro_batch_is_within_the_limit_and_the_next_is_not(index, root, measured):
    above = measured[index + 1].peak if index < 3 else 2 * measured[3].peak
    limit = (measured[index].peak + above) // 2
    program = make_program(root, train__global_batch=6, mesh__memory_gb=limit / 0.8 / 1e9)
    room = memory_limit.local(program.cfg)
    assert room is not None and abs(room.usable - limit) <= 2
    found = micro_batch_search.largest_micro_batch(program, program.recipe.batch_widths(), room)
    assert found == measured[index] and found.peak <= room.usable < above
    assert micro_batch_search.describe(found, room).startswith(f"micro-batch: {found.micro_batch} per device")


def test_memory_is_what_the_first_process_s_compiler_says(root, measure, second):
    program = make_program(root, train__global_batch=6)
    widths = program.recipe.batch_widths()
    own = micro_batch_search.measure(program, widths, 2)
    second(own.figures() | {"by_mesh": [own.peak + 5]}, "too large")
    assert micro_batch_search.measure(program, widths, 2).peak == own.peak + 5
    with pytest.raises(out_of_memory.OutOfMemory, match="too large"):
        micro_batch_search.measure(program, widths, 2)


class Watch:
    """Runs each compiled part of a step and keeps the bytes alive on a device at its fullest."""

    def __init__(self, compiled: dict[str, tuple[object, Part]], device: jax.Device):
        self.compiled, self.device, self.peak = compiled, device, 0
        self.before = {id(array) for array in jax.live_arrays()}
        self.kept = jax.live_arrays()  # so that no new array gets an old one's id

    def wrap(self, function, name: str):
        def run(*arguments):
            which = arguments[0] if name == "branch" else name
            program, part = self.compiled[which]
            if self.device in part.mesh.devices.flat:
                sizes = program.memory_analysis()
                fresh = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
                self.peak = max(self.peak, self.alive() + sizes.temp_size_in_bytes + fresh)
            return function(*arguments)

        return run

    def alive(self) -> int:
        """Counts each buffer once, however many arrays stand for it."""
        arrays = (array for array in jax.live_arrays() if id(array) not in self.before)
        shards = [shard.data for array in arrays for shard in array.addressable_shards if shard.device == self.device]
        return sum({data.unsafe_buffer_pointer(): data.nbytes for data in shards}.values())


def test_peak_of_readers_apart_is_what_is_alive_while_they_run(root):
    # Adapters of 12 MB, so that gradients kept between micro-batches would be missed.
    program = make_program(root, devices=2, strategy="split", train__global_batch=6, adapter__hidden=20_011)
    rows = program.recipe.data("train").collate(range(6))
    widths = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), rows)
    found = memory.measure(program, widths, 3)
    for index, device in enumerate(jax.devices()[:2]):
        watch = Watch(found.programs, device)
        own, state, frozen, batch = tiny.start_step(program.recipe, rows, accumulation=3)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("share", "branch", "pull", "update"):
                patch.setattr(own.step, f"_{name}", watch.wrap(getattr(own.step, f"_{name}"), name))
            state, values = own.step(state, frozen, batch)
            del frozen, batch
        jax.block_until_ready(values)
        assert watch.peak * (1 - UNDER) <= found.by_mesh[index] <= watch.peak * (1 + OVER)
        del state, values
