"""Named random streams: what one part draws never depends on what another drew before."""

import hashlib

import jax

from lw_jax.core.errors import UserError

SEEDS = 2**32  # what a 32-bit key can tell apart


def stream(seed: int, name: str, step: int | jax.Array = 0) -> jax.Array:
    """Returns the key of stream `name` at `step`: a function of these three alone.

    Raises UserError for a seed that 32 bits do not hold, because two such seeds could be the same one.
    """
    if not 0 <= seed < SEEDS:
        raise UserError(f"seed={seed} is outside 0..{SEEDS - 1}; choose one inside")
    word = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), word), step)
