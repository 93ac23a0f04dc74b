"""Aligned initialisation of a wire's trainable tree; `models.alignment` has the mathematics."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from lw_jax.core.types import Tree
from lw_jax.data.tokens import Tokenizer
from lw_jax.models import alignment

PIECES = 4  # ids of a token string in another vocabulary, whose embeddings are averaged


def align_encoder(params: Tree, table: jax.Array, width: int) -> Tree:
    """Returns an lm encoder whose projection is the principal directions of its table and whose mix the embeddings."""
    head, table = params["head"], table.astype(jnp.float32)
    directions = jax.jit(alignment.principal_directions, static_argnames="width")(table, width)
    project = jax.tree.map(jnp.zeros_like, head["project"])
    project["kernel"] = project["kernel"].at[:, : directions.shape[1]].set(directions)
    return params | {"head": head | {"project": project, "mix": alignment.mix_logits(head["mix"].shape[0])}}


def match_pieces(own: Tokenizer, reader: Tokenizer, count: int) -> jax.Array:
    """Returns i32 [v n]: a reader's ids of each of the encoder's `count` token strings, -1 beyond their end."""
    texts = [own.decode([index]) if index < own.vocab else "" for index in range(count)]
    pieces = np.full((count, PIECES), -1, np.int32)
    for row, ids in zip(pieces, reader.encode_batch(texts), strict=True):
        row[: len(ids)] = ids[:PIECES]
    return jnp.asarray(pieces)


def align(
    trainable: Tree,
    table: jax.Array,
    targets: Mapping[str, jax.Array],
    sizes: Mapping[str, jax.Array],
    pieces: Mapping[str, jax.Array],
) -> Tree:
    """Returns the tree with adapters whose linear path is the regression from tokens' latents to their readers' tables.

    `table` is that of the encoder's body, `targets` are the readers', `sizes` their RMS; `pieces` as `match_pieces`.
    """
    encoder, adapters = (table.astype(jnp.float32), trainable["encoder"]["head"]["project"]["kernel"]), {}
    for name, params in trainable["adapters"].items():
        kernel = jax.jit(alignment.linear_map)(*encoder, targets[name], pieces[name])
        zeros = jax.tree.map(jnp.zeros_like, params["down"])
        adapters[name] = params | {"skip": {"kernel": kernel}, "down": zeros, "gain": sizes[name].reshape(())}
    return trainable | {"adapters": adapters}
