"""Timing of programs: random arrays for shapes, blocked repeats, measured ceilings of the device."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lw_jax.core.types import Tree
from lw_jax.models import products
from lw_jax.training.step_spec import StepSpec

# Of a square product, and of the bytes that a copy reads: more than any cache holds, less than a second on two cores.
MATMUL = {"gpu": 8192, "cpu": 2048}
COPIED = {"gpu": 1 << 31, "cpu": 1 << 28}
WARM_SECONDS = 1.0  # until a card's clock is that of work that goes on


@dataclasses.dataclass(frozen=True)
class Spread:
    """Seconds of one thing done several times."""

    median: float
    least: float
    most: float
    repeats: int

    @staticmethod
    def of(seconds: Sequence[float]) -> "Spread":
        return Spread(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Measured ceilings of one device, the denominators of reported shares."""

    dtype: str
    matmul: float  # FLOP/s of a large square product
    bandwidth: float  # bytes/s, read and written, of a copy that is larger than the caches


def repeat(call: Callable[[], Any], *, repeats: int, warmup: int = 1, warm_seconds: float = 0.0) -> list[float]:
    """Returns the seconds of each call until its results are there, after some that are not counted."""
    samples, begun = [], time.perf_counter()
    while len(samples) < warmup + repeats:
        started = time.perf_counter()
        jax.block_until_ready(call())
        samples.append(time.perf_counter() - started)
        if len(samples) == warmup and time.perf_counter() - begun < warm_seconds:
            samples.pop()
    return samples[warmup:]


def ceilings(dtype: str, *, repeats: int = 20) -> Ceilings:
    """Measures the first device; `dtype` is JAX's name of the arithmetic's type."""
    kind = "gpu" if jax.default_backend() == "gpu" else "cpu"
    size = MATMUL[kind]
    copied = jnp.dtype(dtype if kind == "gpu" else jnp.float32)  # a CPU has no fast elementwise bf16
    # Random: a card multiplies constants with less power, so at a higher clock, than anything that is computed.
    square = jax.random.normal(jax.random.key(0), (size, size), jnp.dtype(dtype))
    long = jnp.tile(square[0].astype(copied), COPIED[kind] // copied.itemsize // size)
    # A CPU's fast products of bf16 factors are those with fp32 results.
    result = None if kind == "gpu" else jnp.float32
    product = jax.jit(lambda a: jnp.matmul(a, a, preferred_element_type=result))
    scaled = jax.jit(lambda a: a * 2)
    matmul = Spread.of(repeat(lambda: product(square), repeats=repeats, warm_seconds=WARM_SECONDS))
    moved = Spread.of(repeat(lambda: scaled(long), repeats=repeats, warm_seconds=WARM_SECONDS))
    return Ceilings(dtype, 2 * size**3 / matmul.median, 2 * long.nbytes / moved.median)


def fill(shapes: Tree, *, ids: int = 0) -> Tree:
    """Returns small random arrays for shapes with shardings, and ones for all else but matrices.

    Zeros would cost a card less power, and so time. `ids`: of how many different ones integers are drawn (0: all are
    1), for tables that learn, where equal tokens would meet in one row.
    """
    leaves, structure = jax.tree.flatten(shapes)
    arrays: list[Any] = [None] * len(leaves)
    groups: dict[Any, list[int]] = {}
    for number, leaf in enumerate(leaves):
        groups.setdefault(frozenset(leaf.sharding.device_set), []).append(number)  # a program's devices are the same
    for numbers in groups.values():
        part = [leaves[number] for number in numbers]
        drawn = jax.jit(lambda key, part=part: _draw(key, part, ids), out_shardings=[leaf.sharding for leaf in part])
        for number, value in zip(numbers, drawn(jax.random.key(0, impl="rbg")), strict=True):  # compiles soonest
            arrays[number] = value
    return structure.unflatten(arrays)


def _draw(key: jax.Array, leaves: Sequence[jax.ShapeDtypeStruct], ids: int) -> list[jax.Array]:
    def sample(key: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if leaf.dtype == products.BITS:
            return products.as_bits(jax.random.uniform(key, leaf.shape, jnp.bfloat16, 0.0, 0.02))
        if ids and leaf.ndim > 1 and jnp.issubdtype(leaf.dtype, jnp.integer):
            return jax.random.randint(key, leaf.shape, 0, ids, leaf.dtype)
        if leaf.ndim > 1 and jnp.issubdtype(leaf.dtype, jnp.floating):
            return jax.random.uniform(key, leaf.shape, leaf.dtype, 0.0, 0.02)
        return jnp.ones(leaf.shape, leaf.dtype)

    return [sample(subkey, leaf) for leaf, subkey in zip(leaves, jax.random.split(key, len(leaves)), strict=True)]


def stepper(program: StepSpec, call: Callable[..., Any], batch: Tree) -> Callable[[], Any]:
    """Returns the training step on random weights: -> the new state and what else `call` gives.

    `call` takes (state, frozen, batch) and gives the next state first, as the program's step does; it takes the state.
    """
    state, frozen = fill(program.state), fill(program.frozen)

    def step() -> Any:
        nonlocal state
        state, values = call(state, frozen, batch)
        return state, values

    return step


def peak_bytes() -> int | None:
    """Returns the peak memory of the fullest device; None where the runtime does not report it."""
    return max((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()) or None
