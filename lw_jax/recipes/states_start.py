"""Start of an encoder that takes states of several layers side by side: what its body's own keys and values need.

Reduced-rank regression (Izenman 1975) from the standardised states of every token to the keys (not rotated) and values
that the body as it was pretrained makes of it: latents are the directions that explain most of them, each of unit
variance.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from lw_jax.core.progress import phase
from lw_jax.core.types import SHARED, Tree
from lw_jax.data import batches, prompt_tokens
from lw_jax.models import decoder, encoder, kv_prefix
from lw_jax.models.alignment import EXACTLY
from lw_jax.models.decoder import DecoderConfig
from sharding import place

if TYPE_CHECKING:
    from lw_jax.recipes.latentwire import LatentWire

ROWS = 8  # texts read at once
SAMPLES = 14  # tokens read for each value of the states, at most; beyond, more change little
RIDGE = 1e-3  # relative to the states' unit variance
LEAST = 1e-6  # variance of a state's value that is taken for a constant


def start(recipe: "LatentWire", trainable: Tree, frozen: Tree) -> Tree:
    """Returns the tree with the projection, shift and scale of the regression over the texts' first windows."""
    wire, placement, layout, encoder_params = recipe.wire, recipe.placement, recipe.layout, trainable["encoder"]
    body, taps = wire.encoder.body, wire.encoder.taps
    assert isinstance(body, DecoderConfig), "validation allows states for a decoder only"
    tokenized = prompt_tokens.tokenize(layout.source, recipe.start_texts, limit=layout.window)
    ids = [row[: layout.window] for row in tokenized]
    limit = SAMPLES * taps * body.width
    ids = ids[: max(1, int(np.searchsorted(np.cumsum([len(row) for row in ids]), limit)))]
    field = batches.source_field(ids, layout)

    def read(p: Tree, ids: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        mode = decoder.Mode(factors=wire.mode.factors)
        x = decoder.embed(p, ids)
        empty = decoder.empty_cache(body, mask.shape[0], mask.shape[1], x.dtype)
        behind, cache = decoder.visit_attention(
            p, body, x, mask=mask, visit=lambda layer: layer.out, cache=empty, mode=mode
        )
        assert cache is not None, "a cache was given"
        prefix = kv_prefix.of_cache(body, cache, mask=mask)
        if wire.encoder.causal:
            before = jnp.concatenate([x[None], behind[:-1]])
            states = encoder.side_by_side(before[jnp.asarray(encoder.tapped_layers(taps, body.layers))], body)
        else:
            both_ways = dataclasses.replace(mode, causal=False)
            states = encoder.read_lm(p, body, None, ids=ids, mask=mask, mode=both_ways, taps=taps)
        both = jnp.stack([prefix.k, prefix.v], axis=1).astype(jnp.float32)
        return states.astype(jnp.float32), both.transpose(2, 3, 0, 1, 4, 5).reshape(*mask.shape, -1)

    @functools.partial(jax.jit, out_shardings=place.whole(placement.learner))
    def add_up(shift: Tree, p: Tree, ids: jax.Array, mask: jax.Array, used: jax.Array) -> Tree:
        states, targets = read(p, ids, mask)
        counts = (mask & used[:, None]).at[:, :1].set(False)  # a first token is unlike all others
        states, targets = (x - shift[name][None, None] for x, name in ((states, "states"), (targets, "targets")))
        return _multiply(states, targets, counts)

    body_params = frozen[SHARED] if SHARED in frozen else encoder_params["body"]
    sizes = {"states": taps * body.width, "targets": body.layers * 2 * body.kv_heads * body.head_dim}
    shift = place.replicate({name: np.zeros(size, np.float32) for name, size in sizes.items()}, placement.learner)
    starts, total = range(0, len(ids), place.round_up(ROWS, placement.data)), None
    with phase("initialising the encoder from its body's states of texts", len(starts), "batches") as done:
        for first in done.track(starts):
            chosen = np.arange(first, first + starts.step)
            batch = field.collate(np.minimum(chosen, len(ids) - 1).tolist()) | {"used": chosen < len(ids)}
            batch = place.rows(batch, placement.learner)
            inputs = body_params, batch["ids"], batch["mask"], batch["used"]
            if total is None:  # sums of squares around a mean are exact where those around 0 are not
                part = add_up(shift, *inputs)
                tokens = jnp.maximum(part["gram"][-1, -1], 1.0)
                shift = {"states": part["gram"][-1, :-1] / tokens, "targets": part["crossed"][-1] / tokens}
            part = add_up(shift, *inputs)
            total = jax.block_until_ready(part if total is None else jax.tree.map(jnp.add, total, part))  # as kv_start
    assert total is not None, "a run has texts"
    sums = {name: np.asarray(leaf, np.float64) for name, leaf in total.items()}
    with phase("solving for the encoder's projection"):
        moved, scale, kernel = fit(**sums, groups=body.layers * 2, width=wire.encoder.width)
    head = encoder_params["head"]
    project = {"kernel": _cast(kernel), "bias": jnp.zeros_like(head["project"]["bias"])}
    moved = np.asarray(shift["states"], np.float64) + moved
    head = head | {"shift": _cast(moved), "scale": _cast(scale), "project": project}
    return trainable | {"encoder": encoder_params | {"head": head}}


@EXACTLY
def _multiply(states: jax.Array, targets: jax.Array, counts: jax.Array) -> Tree:
    """Returns `gram`, `crossed` and `power` as `fit` takes them, over the tokens that count."""
    inputs = jnp.where(counts[:, :, None], jnp.concatenate([states, jnp.ones((*counts.shape, 1))], axis=2), 0.0)
    flat, wanted = inputs.reshape(-1, inputs.shape[2]), targets.reshape(-1, targets.shape[2])
    power = jnp.sum(jnp.where(counts.reshape(-1, 1), wanted, 0.0) ** 2, axis=0)
    return {"gram": flat.T @ flat, "crossed": flat.T @ wanted, "power": power}


def _cast(values: np.ndarray) -> jax.Array:
    return jnp.asarray(values, jnp.float32)


def fit(
    gram: np.ndarray, crossed: np.ndarray, power: np.ndarray, *, groups: int, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns shift [s], scale [s] and kernel [s z] of the reduced-rank regression.

    `gram` [s+1 s+1] and `crossed` [s+1 t] are sums over tokens of the states, a constant 1 behind them, with themselves
    and with the targets; `power` [t] of the targets' squares. Each of the `groups` equal parts of the targets, a
    layer's keys or values, counts alike.
    """
    count = gram[-1, -1]
    shift, mean = gram[-1, :-1] / count, crossed[-1] / count
    covariance = gram[:-1, :-1] / count - np.outer(shift, shift)
    deviation = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    scale = np.where(deviation**2 > LEAST, 1.0 / np.maximum(deviation, np.sqrt(LEAST)), 0.0)
    sizes = np.sqrt(np.maximum((power / count - mean**2).reshape(groups, -1).mean(axis=1), LEAST))
    targets = (crossed[:-1] / count - np.outer(shift, mean)) / np.repeat(sizes, len(mean) // groups)
    values, vectors = np.linalg.eigh(covariance * np.outer(scale, scale))
    whiten = (vectors / np.sqrt(np.maximum(values, 0.0) + RIDGE)) @ vectors.T
    explained = whiten @ (targets * scale[:, None])
    _, directions = np.linalg.eigh(explained @ explained.T)
    kernel = np.zeros((len(shift), width))
    directions = directions[:, ::-1][:, :width]
    directions = directions * np.sign(directions[np.abs(directions).argmax(axis=0), np.arange(directions.shape[1])])
    columns = whiten @ directions  # signs are settled, so that rounding on other devices turns none
    kernel[:, : columns.shape[1]] = columns
    return shift, scale, kernel
