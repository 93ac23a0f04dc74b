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


def align_adapter(
    params: Tree, encoder: tuple[jax.Array, jax.Array], target: jax.Array, size: jax.Array, pieces: jax.Array
) -> Tree:
    """Returns an adapter whose linear path is the regression from single tokens' latents to a reader's table.

    `encoder` is the encoder's table and its projection's kernel, `target` the reader's table, `size` its RMS, `pieces`
    as `match_pieces` gives them.
    """
    kernel = jax.jit(alignment.linear_map)(*encoder, target, pieces)
    zeros = jax.tree.map(jnp.zeros_like, params["down"])
    return params | {"skip": {"kernel": kernel}, "down": zeros, "gain": size.reshape(())}


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
    """Returns the tree with every adapter aligned to its encoder, whose body has this table."""
    encoder = table.astype(jnp.float32), trainable["encoder"]["head"]["project"]["kernel"]
    adapters = {
        name: align_adapter(params, encoder, targets[name], sizes[name], pieces[name])
        for name, params in trainable["adapters"].items()
    }
    return trainable | {"adapters": adapters}
