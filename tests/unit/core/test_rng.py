"""lw_jax/core/rng.py: streams are named, reproducible and distinct."""

import jax
import numpy as np

from lw_jax.core import rng


def bits(key: jax.Array) -> tuple[int, ...]:
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


def test_seed_name_and_step_each_give_another_key():
    keys = {bits(rng.stream(s, n, t)) for s in (0, 1, 2**32 - 1) for n in ("init", "data", "") for t in (0, 1, 97)}
    assert len(keys) == 3 * 3 * 3


def test_key_is_the_one_that_earlier_runs_drew():
    assert bits(rng.stream(5, "init", 2)) == (1748770670, 1241569574)
