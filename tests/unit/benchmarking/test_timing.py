"""lw_jax/benchmarking/timing.py: what is counted and drawn; a step that is timed is a step that is taken."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lw_jax.benchmarking import timing
from lw_jax.benchmarking.measurement import padded
from lw_jax.training.step_spec import StepSpec
from sharding import mesh as meshes
from tests import tiny


def test_padding_counts_texts_answers_and_packed_questions_and_no_other_weights():
    mask, segments = np.arange(8) < 6, np.array([[1, 1, 2, 0], [1, 0, 0, 0]])
    reader = {"targets": np.zeros(3, int), "weights": np.array([1.0, 1.0, 0.0]), "packed": {"segments": segments}}
    batch = {"source": {"mask": mask}, "readers": {"a": reader}, "weights": np.ones(7)}
    assert padded(batch) == pytest.approx(1 - (6 + 2 + 4) / (8 + 3 + 8))
    assert padded({"readers": {"text": {"ids": segments}}}) == 0


def test_warm_up_is_called_and_not_counted():
    called = []
    taken = timing.repeat(lambda: called.append(1) or jnp.ones(()), repeats=3, warmup=2)
    assert len(called) == 5 and len(taken) == 3 and min(taken) > 0
    begun = time.perf_counter()
    assert len(timing.repeat(lambda: called.append(1) or jnp.ones(()), repeats=3, warm_seconds=0.1)) == 3
    assert time.perf_counter() - begun >= 0.1 and len(called) > 5 + 4


def test_drawn_arrays_lie_where_their_shapes_say_and_are_never_zero():
    here = NamedSharding(meshes.make(data=2, model=1, devices=jax.devices()[:2]), P("data"))
    there = NamedSharding(meshes.make(data=1, model=1, devices=jax.devices()[2:3]), P())
    shapes = {
        "matrix": jax.ShapeDtypeStruct((4, 6), jnp.bfloat16, sharding=here),
        "norm": jax.ShapeDtypeStruct((6,), jnp.float32, sharding=there),
        "ids": jax.ShapeDtypeStruct((4, 60), jnp.int32, sharding=there),
        "mask": jax.ShapeDtypeStruct((4, 6), bool, sharding=here),
    }
    found = timing.fill(shapes, ids=50)
    for name, shape in shapes.items():
        one = found[name]
        assert (one.shape, one.dtype, one.sharding) == (shape.shape, shape.dtype, shape.sharding)
    assert len(set(np.asarray(found["ids"]).flat)) > 20 and found["ids"].min() >= 0 and found["ids"].max() < 50
    assert found["mask"].all() and (found["norm"] == 1).all()
    assert 0 < np.asarray(found["matrix"], np.float32).std() < 0.02
    assert (timing.fill({"ids": shapes["ids"]})["ids"] == 1).all()


@pytest.mark.slow
def test_timed_steps_are_steps(root):
    recipe = tiny.make_recipe(root, train__global_batch=2)
    program = StepSpec(recipe.cfg, recipe)
    seen = []

    def call(state, frozen, batch):
        after, values = program.step(state, frozen, batch)
        seen.append(int(after["step"]))
        return after, values

    batch = timing.fill(program.batch(recipe.batch_widths(), 1))
    taken = timing.repeat(timing.stepper(program, call, batch), repeats=2, warmup=2)
    assert len(taken) == 2 and seen == [2, 3, 4, 5], "the state is handed on, and two steps warm up"
