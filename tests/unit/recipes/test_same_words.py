"""Words that two tokenizers cut in other places."""

import jax.numpy as jnp
import numpy as np

from lw_jax.models import encoder
from lw_jax.recipes.kv_start import window_starts, window_weights


def test_windows_are_those_of_the_encoders_slots():
    starts = [0, 3, 5, 9, 10, 14, 20]
    for windows in (2, 3, 7, 9):
        mask = jnp.asarray([[True] * 7 + [False] * 2])
        pooled = np.asarray(encoder.window_weights(mask, windows, jnp.asarray([windows])))[0] > 0
        own = window_weights(starts, window_starts(starts, windows)) > 0
        np.testing.assert_array_equal(own, pooled[:, :7])


def test_a_window_inside_one_token_takes_that_token():
    found = window_weights([0, 10], window_starts([0, 3, 6, 9, 12], 5))
    np.testing.assert_array_equal(found, [[1, 0], [1, 0], [1, 0], [0, 1], [0, 1]])
