"""Gradients cross devices once a step and in fp32, for any number of micro-batches and any arithmetic."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lw_jax.core.types import LossTerms
from lw_jax.planning import hlo_counts
from lw_jax.training import train_step
from lw_jax.training.recipe import Recipe, Weights
from sharding import place, placement, shards

WIDTHS = {"small": 24, "large": 40}  # of two readers, which "hybrid3" tells apart by their bytes
TEXT, LATENT, ROWS, STEPS = 16, 8, 32, 5
TRAINED = 4 * (TEXT * LATENT + LATENT * sum(WIDTHS.values()))  # bytes: the encoder and an adapter for each reader
SCALARS = 4 * (2 + 2 * 2)  # sum and weight, and of each reader's metric
SUMS = 1e-6  # relative: fp32 sums in another order
CURVE = 1e-4  # relative, after five steps: the same bf16 products of four rows each, fp32 sums in another order
ROUNDING = 4e-3  # relative: bf16's, where XLA rounds products of other shapes elsewhere
PLACED = {
    "single": ("single", 1, 1),
    "replicate 2": ("replicate", 2, 1),
    "replicate 4": ("replicate", 4, 1),
    "fsdp 4": ("fsdp", 4, 1),
    "tensor 2 x data 2": ("tensor", 4, 2),
    "split 4": ("split", 4, 1),
    "hybrid4 of 8": ("hybrid4", 8, 2),
}
TABLES = {"replicate": P(), "fsdp": P(None, "data"), "tensor": P(None, "model")}


class Toy(Recipe):
    """A wire of three matrices in bf16, in front of frozen readers of one each."""

    has_branches = True

    def __init__(self, name: str):
        strategy, count, model = PLACED[name]
        sizes = {reader: width**2 for reader, width in WIDTHS.items()}
        self.at = placement.place(strategy, sizes, model=model, devices=jax.devices()[:count])

    @property
    def placement(self):
        return self.at

    @functools.cached_property
    def shardings(self) -> Weights:
        whole = NamedSharding(self.at.learner, P())
        trainable = jax.tree.map(lambda _: whole, self.weights().trainable)
        return Weights(
            trainable, {name: NamedSharding(at.mesh, TABLES[at.table]) for name, at in self.at.readers.items()}
        )

    def weights(self) -> Weights:
        rng = np.random.default_rng(0)

        def draw(*dims: int) -> np.ndarray:
            return (rng.normal(size=dims) / dims[0] ** 0.5).astype(np.float32)

        adapters = {name: draw(LATENT, width) for name, width in WIDTHS.items()}
        return Weights(
            {"encoder": draw(TEXT, LATENT), "adapters": adapters}, {name: draw(w, w) for name, w in WIDTHS.items()}
        )

    def batch(self) -> dict:
        """Every step's rows [b ...]; not all of them count."""
        rng = np.random.default_rng(1)
        readers = {
            name: {"y": rng.normal(size=(ROWS, width)).astype(np.float32), "counts": rng.integers(0, 2, ROWS)}
            for name, width in WIDTHS.items()
        }
        return {"source": rng.normal(size=(ROWS, TEXT)).astype(np.float32), "readers": readers}

    def share(self, trainable, source, rng, frozen=None):
        return shards.keep_rows(self.at.learner)(jnp.tanh(_bf16(source) @ _bf16(trainable["encoder"])))

    def part(self, name, trainable):
        return trainable["adapters"][name]

    def branch(self, name, part, frozen, fields, shared, rng):
        states = shards.keep_rows(self.at.readers[name].mesh)(jnp.tanh(shared @ _bf16(part)))
        missed = ((states @ _bf16(frozen)).astype(jnp.float32) - fields["y"]) ** 2
        counted = fields["counts"].astype(jnp.float32)
        total, weight = jnp.sum(missed.mean(axis=1) * counted), jnp.sum(counted)
        return LossTerms(total, weight, {f"missed/{name}": (total, weight)})

    def loss(self, trainable, frozen, batch, rng):
        shared = self.share(trainable, batch["source"], rng)
        one, other = (
            self.branch(name, self.part(name, trainable), frozen[name], batch["readers"][name], shared, rng)
            for name in WIDTHS
        )
        return one + other


def _bf16(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16)


def make(name: str, micro_batches: int):
    """(recipe, its step, state, frozen weights, batch) with so many micro-batches a step."""
    recipe, optimizer = Toy(name), optax.sgd(0.1, momentum=0.9)
    step = train_step.make(recipe, recipe.placement, optimizer, seed=0)
    weights, placed = recipe.weights(), recipe.shardings
    trainable = jax.device_put(weights.trainable, placed.trainable)
    opt_state = place.replicate(optimizer.init(trainable), recipe.placement.learner)
    count = place.replicate(np.int32(0), recipe.placement.learner)
    state = {"trainable": trainable, "opt_state": opt_state, "step": count}
    batch = place.put_parts(
        recipe.batch(), recipe.placement, lambda part, mesh: place.put_batch(part, mesh, accumulation=micro_batches)
    )
    return step, state, jax.device_put(weights.frozen, placed.frozen), batch


def collectives(name: str, micro_batches: int) -> list[hlo_counts.Collective]:
    """What crosses the data axis in a step; of a program that runs several times, as often."""
    found = []
    step, *given = make(name, micro_batches)
    for part in step.lower(*given).values():
        groups = {tuple(column) for column in np.arange(part.mesh.size).reshape(part.mesh.devices.shape).T.tolist()}
        for one in hlo_counts.analyse(part.lowered.compile().as_text()).collectives:
            if {tuple(sorted(group)) for group in one.groups} == groups:
                found += [dataclasses.replace(one, executed=one.executed * part.runs)]
    return found


@pytest.mark.optimized
@pytest.mark.parametrize("name", ["replicate 4", "tensor 2 x data 2", "split 4"])
def test_what_devices_send_does_not_depend_on_the_number_of_micro_batches(name):
    data = Toy(name).placement.data
    for micro_batches in (1, 8):
        found = collectives(name, micro_batches)
        assert {one.kind for one in found} == {"all-reduce"}
        sent = sum(one.wire_bytes * one.executed for one in found)
        assert 2 * (data - 1) / data * TRAINED <= sent <= 2 * (data - 1) / data * (TRAINED + SCALARS)


@pytest.mark.optimized
def test_frozen_weights_over_data_are_gathered_with_every_micro_batch_and_gradients_are_not():
    reduced = [[one for one in collectives("fsdp 4", count) if one.kind == "all-reduce"] for count in (1, 8)]
    sums = [sum(one.operand_bytes * one.executed for one in found) for found in reduced]
    assert all(TRAINED <= one <= TRAINED + SCALARS for one in sums)


@pytest.mark.parametrize("name", ["replicate 2", "split 4"])
def test_the_sum_over_devices_is_asked_for_in_fp32(name):
    step, *given = make(name, 1)
    text = "\n".join(part.lowered.compile().as_text() for part in step.lower(*given).values())
    reduced = re.findall(r"= \(?(\w+)\[.* all-reduce(?:-start)?\(", text)
    assert reduced and set(reduced) == {"f32"}
    # A CPU sums bf16 in fp32 of its own accord, and says so in the name.
    assert "promoted" not in text


def curve(name: str, micro_batches: int) -> tuple[list[float], dict]:
    step, state, frozen, batch = make(name, micro_batches)
    seen = []
    for _ in range(STEPS):
        state, values = step(state, frozen, batch)
        seen.append([float(values[key]) for key in ("loss", "grad_norm", "missed/large")])
    jax.tree.map(np.testing.assert_array_equal, frozen, Toy(name).weights().frozen)  # which do not move
    return seen, jax.device_get(state["trainable"])


@pytest.fixture(scope="module")
def of_two():
    """The curve of two devices: sums of four rows each in bf16, all others in fp32."""
    return curve("replicate 2", 4)


def hold(found: tuple[list[float], dict], wanted: tuple[list[float], dict], tolerance: float) -> None:
    np.testing.assert_allclose(found[0], wanted[0], rtol=tolerance)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance), found[1], wanted[1]
    )


@pytest.mark.parametrize(
    ("name", "micro_batches"),
    [("replicate 4", 2), ("fsdp 4", 2), ("split 4", 4)],
)
def test_a_curve_in_bf16_is_the_same_however_rows_lie(name, micro_batches, of_two):
    found = curve(name, micro_batches)
    assert found[0][-1][0] < found[0][0][0]
    hold(found, of_two, CURVE)


@pytest.mark.parametrize(("name", "micro_batches"), [("single", 8), ("tensor 2 x data 2", 4), ("hybrid4 of 8", 4)])
def test_a_curve_in_bf16_is_the_same_but_for_rounding_where_products_are_cut_otherwise(name, micro_batches, of_two):
    hold(curve(name, micro_batches), of_two, ROUNDING)


def test_shards_keep_every_row_and_sum_each_once():
    mesh = Toy("replicate 4").placement.learner
    over, x = shards.Shards(mesh), np.arange(24.0, dtype=np.float32).reshape(8, 3)

    @jax.jit
    def run(x):
        assert shards.row_devices(mesh) == 4
        back = over.map(lambda rows: (rows, jnp.float32(shards.row_devices(mesh))))(over.split(x))
        return over.join(back[0]), over.sum((back[0].sum(axis=1), back[1]))

    rows, (total, devices) = run(place.rows(x, mesh))
    np.testing.assert_array_equal(rows, x)
    np.testing.assert_allclose(total, x.sum(axis=0), rtol=SUMS)
    assert devices == 4 and total.sharding.is_fully_replicated
    one = shards.Shards(mesh, separate=False)
    assert one.map(run) is run and one.split(x) is x and one.sum(x) is x
