"""Named random streams: the numbers of one part never depend on those of another."""

import hashlib
from typing import Any

import jax


def abstract() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))


def stream(seed: int, name: str, step: int | jax.Array = 0) -> jax.Array:
    """Returns the key of stream `name` at `step`: a function of these three values only.

    `seed` is below 2**32, as in a configuration: two that differ beyond 32 bits would give the same key.
    """
    word = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), word), step)
