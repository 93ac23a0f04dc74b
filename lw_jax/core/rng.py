"""Named random streams: the numbers of one part never depend on those of another."""

import hashlib
from typing import Any

import jax

from lw_jax.core.errors import UserError

SEEDS = 2**32  # of a 32-bit key


def abstract() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))


def stream(seed: int, name: str, step: int | jax.Array = 0) -> jax.Array:
    """Returns the key of stream `name` at `step`: a function of these three values only.

    Raises UserError for a seed beyond 32 bits: two such seeds could give the same key.
    """
    if not 0 <= seed < SEEDS:
        raise UserError(f"seed={seed} is outside 0..{SEEDS - 1}; choose one inside")
    word = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), word), step)
