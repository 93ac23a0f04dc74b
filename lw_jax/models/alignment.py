"""Aligned initialisation: latents start as compressed token embeddings, adapters as their inverse.

The encoder's projection starts as the principal directions of its body's embedding table, each adapter's linear path
as the ridge regression from those latents to its reader's embeddings of the same token strings, whatever its
tokenizer. (LatentPress starts its linear map from the identity; this is the same for two widths and two
vocabularies.) The set of trainable parameters is unchanged.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lw_jax.models import decoder

EMBEDDING_SHARE = 0.8  # of the layer mix, for the state before the first layer
RIDGE = 1e-3  # relative to the latents' unit variance
EXACTLY = jax.default_matmul_precision("highest")  # decorates closed forms: a card would multiply fp32 as TF32
CHUNK = 4096  # vocabulary entries regressed at once: bounds memory at large widths


@EXACTLY
def principal_directions(table: Float[Array, "v d"], width: int) -> Float[Array, "d z"]:
    """Returns the first `width` (at most d) principal directions of unit-RMS embeddings, strongest first."""
    unit = decoder.unit_rms(table, 1e-6)
    _, vectors = jnp.linalg.eigh(unit.T @ unit / unit.shape[0])
    return vectors[:, ::-1][:, :width]


def mix_logits(states: int) -> Float[Array, " n"]:
    """Returns layer-mix logits whose softmax gives the first state EMBEDDING_SHARE and the others equal parts."""
    odds = EMBEDDING_SHARE / (1 - EMBEDDING_SHARE) * max(1, states - 1)
    return jnp.zeros((states,)).at[0].set(jnp.log(odds))


@EXACTLY
def linear_map(
    table: Float[Array, "v d"],
    directions: Float[Array, "d z"],
    target: Float[Array, "w o"],
    pieces: Int[Array, "v n"],
) -> Float[Array, "z o"]:
    """Returns the ridge regression from latents to a reader's embeddings, scaled to outputs of unit RMS.

    `pieces` holds, for each of the encoder's tokens, the reader's ids of the same string, -1 beyond its end; a token
    without any is ignored.
    """
    latents = decoder.unit_rms(decoder.unit_rms(table, 1e-6) @ directions, 1e-6)
    known = jnp.any(pieces >= 0, axis=1)
    latents = jnp.where(known[:, None], latents, 0.0)
    gram = latents.T @ latents
    rows = -(-pieces.shape[0] // CHUNK) * CHUNK - pieces.shape[0]
    chunks = (
        jnp.pad(latents, ((0, rows), (0, 0))).reshape(-1, CHUNK, latents.shape[1]),
        jnp.pad(pieces, ((0, rows), (0, 0)), constant_values=-1).reshape(-1, CHUNK, pieces.shape[1]),
    )

    def add(total: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        latents, pieces = chunk
        present = (pieces >= 0).astype(jnp.float32)[:, :, None]
        embedded = jnp.take(target, jnp.maximum(pieces, 0), axis=0).astype(jnp.float32) * present
        mean = embedded.sum(axis=1) / jnp.maximum(present.sum(axis=1), 1.0)
        return total + latents.T @ mean, None

    crossed, _ = jax.lax.scan(add, jnp.zeros((latents.shape[1], target.shape[1])), chunks)
    count = jnp.maximum(known.sum(dtype=jnp.int32).astype(jnp.float32), 1.0)
    kernel = jnp.linalg.solve(gram + RIDGE * count * jnp.eye(gram.shape[0]), crossed)
    power = jnp.einsum("zo,zy,yo->", kernel, gram, kernel) / (count * target.shape[1])
    return kernel / jnp.sqrt(power)
