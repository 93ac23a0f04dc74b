"""Start of adapters of kind "kv": at the reader's own keys and values of training texts.

A random start takes their mean and their size. The aligned one is the ridge regression, over the slots of a few hundred
texts, from the latents that the encoder writes at the start to the reader's own keys (rotation removed) and values of
the same words, whatever its tokenizer; its strength is the best of `RIDGES` on held-out texts. What is computed depends
on no placement: sums run over all texts, and one of `HELD_OUT` is held out by its number.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from lw_jax.core.progress import phase
from lw_jax.core.types import EXACT, SHARED, Tree
from lw_jax.data import batches, prompt_tokens
from lw_jax.data.tokens import Tokenizer
from lw_jax.models import decoder, kv_prefix
from lw_jax.models.adapter import KVAdapter, rms
from lw_jax.models.alignment import EXACTLY
from lw_jax.models.modules import Pure
from lw_jax.models.wire import Reader, Wire, embed_shared_prefix
from sharding import place
from sharding.placement import Placement

if TYPE_CHECKING:
    from lw_jax.recipes.latentwire import LatentWire

TEXTS = 512  # read at most
SAMPLES = 64  # of the encoder's tokens for each value of a latent, at most
ROWS = 8  # texts read at once
HELD_OUT = 4
RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)  # relative to the latents' unit variance


@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over windows, float64, of fitted and held-out texts: [2 ...]; z + 1 counts a constant behind the latents."""

    gram: np.ndarray  # [2 z+1 z+1]
    crossed: np.ndarray  # [2 z+1 l 2 k e], keys and values less their `shift`
    power: np.ndarray  # [2 l 2], squares of the same
    shift: np.ndarray  # [l 2 k e]


@dataclasses.dataclass(frozen=True)
class Fit:
    """A linear map from latents to keys and values, and what it explains of held-out texts."""

    kernel: np.ndarray  # [z l 2 k e]
    mean: np.ndarray  # [l 2 k e]: with a kernel, of latents of zero
    size: np.ndarray  # [l 2], RMS around the mean
    explained: np.ndarray  # [l 2], share of the variance


def start(recipe: "LatentWire", trainable: Tree, frozen: Tree) -> Tree:
    """Returns the tree with every reader's adapter started."""
    wire, layout, aligned = recipe.wire, recipe.layout, recipe.cfg.adapter.start == "aligned"
    chosen = _choose(recipe.start_texts, layout, aligned=aligned)
    latents = np.zeros((len(chosen), layout.slots, 0), np.float32)
    if aligned:
        if wire.encoder.pooling == "rare":  # every token is a sample of what a slot may hold
            tokens = max(len(text.ids) for text in chosen)
            wire = dataclasses.replace(wire, encoder=dataclasses.replace(wire.encoder, slots=tokens))
            layout = dataclasses.replace(layout, slots=tokens, ratio=1)
        latents = _encode(wire, recipe.placement, layout, [text.ids for text in chosen], (trainable, frozen))
    adapters = {}
    for name, reader in wire.readers.items():
        params, mesh = trainable["adapters"][name], recipe.placement.readers[name].mesh
        sums = _add_up(reader, mesh, frozen[name], layout, name, texts=chosen, latents=latents)
        if not aligned:
            adapters[name] = calibrate(reader.adapter(wire.encoder.width), params, sums)
            continue
        with phase(f"solving for {name}'s adapter"):
            fitted = fit(sums)
        if len(chosen) >= HELD_OUT:
            keys, values = fitted.explained.mean(axis=0)
            shares = f"the keys of unseen texts to {keys:.0%} and their values to {values:.0%} (share of variance)"
            print(f"{name}: adapter initialised from {len(chosen):,} texts: untrained it gives {shares}", flush=True)
        adapters[name] = align(params, fitted)
    return trainable | {"adapters": adapters}


@dataclasses.dataclass(frozen=True)
class _Text:
    """A text, the encoder's ids of it, and the places where they begin (for the aligned start)."""

    text: str
    ids: np.ndarray
    starts: list[int] | None


def _choose(texts: Sequence[str], layout: prompt_tokens.Layout, *, aligned: bool) -> list[_Text]:
    """Returns the first texts within the limits, cut as the encoder reads them."""
    limit = layout.window * layout.windows
    chosen, tokens = [], 0
    for text, whole in zip(texts, prompt_tokens.tokenize(layout.source, list(texts), limit=limit), strict=True):
        ids, starts = prompt_tokens.to_windows(whole, layout), None
        tokens += len(ids)
        if tokens > SAMPLES * layout.width and len(chosen) >= HELD_OUT:
            break
        if aligned:
            assert isinstance(layout.source, Tokenizer), "validation allows the aligned start for a decoder's body"
            starts = layout.source.starts(text)
            text = text[: starts[limit]] if len(starts) > limit else text
        chosen.append(_Text(text, ids, None if starts is None else starts[:limit]))
    return chosen


def _encode(
    wire: Wire, placement: Placement, layout: prompt_tokens.Layout, ids: list[np.ndarray], weights: tuple[Tree, Tree]
) -> np.ndarray:
    """Returns the texts' latents f32 [n m z]."""
    trainable, frozen = weights
    field = batches.source_field(ids, layout)
    rows = place.round_up(ROWS, placement.data)
    encode = jax.jit(wire.encode, out_shardings=place.whole(placement.learner))
    latents = []
    batched = _batches(len(ids), rows)
    with phase("encoding texts to initialise the adapters", len(batched), f"batches of {rows}") as done:
        for chosen in done.track(batched):
            channel = np.tile(np.array([0, layout.width, EXACT], np.int32), (rows, 1))
            channel[:, 0] = layout.count_slots([ids[number] for number in chosen])
            source = place.rows(field.collate(chosen.tolist()) | {"channel": channel}, placement.learner)
            latents.append(np.asarray(encode(trainable, source, frozen.get(SHARED))))
    return np.concatenate(latents)[: len(ids)]


def _batches(count: int, rows: int) -> list[np.ndarray]:
    """Returns the numbers of `count` texts by batches, the last one filled with its last text."""
    return [np.minimum(np.arange(first, first + rows), count - 1) for first in range(0, count, rows)]


def _add_up(  # noqa: PLR0913
    reader: Reader,
    mesh: Mesh,
    params: Tree,
    layout: prompt_tokens.Layout,
    name: str,
    *,
    texts: Sequence[_Text],
    latents: np.ndarray,
) -> Sums:
    """Returns a reader's sums over the windows of texts with latents f32 [n m z]."""
    config, tokenizer = reader.config, layout.readers[name].tokenizer
    assert isinstance(tokenizer, Tokenizer), "a reader's"
    before = prompt_tokens.shared_prefix(name, layout.readers[name], layout.prompt)[None]
    limit = config.max_positions - before.size
    ids = [tokens[:limit] for tokens in prompt_tokens.tokenize(tokenizer, [text.text for text in texts])]
    field = batches.field(ids, tokenizer.pad, left=False)
    slots = layout.count_slots([text.ids for text in texts]).tolist()
    weights = np.zeros((len(texts), layout.slots, field.width), np.float32)
    for rows, text, count, windows in zip(weights, texts, map(len, ids), slots, strict=True):
        starts = tokenizer.starts(text.text)
        if text.starts is None:  # windows of as many of the reader's own tokens
            starts = starts[:count]
        places = window_starts(text.starts or starts, windows)
        rows[:windows, :count] = window_weights(starts, places, count)
    if not before.size:
        weights[:, :, 0] = 0.0  # a text's first token, to which a reader attends for want of anything else
    weights /= np.maximum(weights.sum(axis=2, keepdims=True), 1.0)
    held_out = np.arange(len(texts)) % HELD_OUT == HELD_OUT - 1
    used = np.any(weights, axis=2)[:, :, None] * np.stack([~held_out, held_out], axis=1)[:, None, :].astype(np.float32)
    inputs = np.concatenate([latents, np.ones((*latents.shape[:2], 1), np.float32)], axis=2)

    run = jax.jit(functools.partial(_sum, reader), out_shardings=place.whole(mesh))
    shared = place.replicate({"ids": before, "mask": np.ones_like(before, bool)}, mesh)
    zeros = np.zeros((config.layers, 2, config.kv_heads, config.head_dim), np.float32)
    shift, total = place.replicate(zeros, mesh), None
    batched = _batches(len(texts), place.round_up(ROWS, mesh.shape["data"]))
    with phase(f"initialising {name}'s adapter from its keys and values of texts", len(batched), "batches") as done:
        for chosen in done.track(batched):
            real = np.append(True, np.diff(chosen) > 0)[:, None, None]
            batch = field.collate(chosen.tolist()) | {"weights": weights[chosen], "used": used[chosen] * real}
            batch = place.rows(batch | {"inputs": inputs[chosen]}, mesh)
            if total is None:  # sums of squares around a mean are exact where those around 0 are not
                crossed, _ = run(params, shared, batch, shift)
                shift = crossed[:, -1].sum(axis=0) / np.float32((used[chosen] * real).sum())
            sums = run(params, shared, batch, shift)
            # Waits: of many queued programs the virtual devices of a CPU may not all reach the same sum.
            total = jax.block_until_ready(sums if total is None else jax.tree.map(jnp.add, total, sums))
    assert total is not None, "a run has texts"
    crossed, power = (np.asarray(x, np.float64) for x in total)
    wide = inputs.astype(np.float64)
    gram = np.stack([np.einsum("nmz,nmy->zy", wide * used[:, :, g, None], wide) for g in range(2)])
    return Sums(gram, crossed, power, np.asarray(shift, np.float64))


def window_starts(starts: Sequence[int], windows: int) -> np.ndarray:
    """Returns the characters [windows 2] between which each window of a text's tokens stands, the last one open.

    `starts` are the places of its tokens; the windows are those of `models.encoder.window_weights`.
    """
    length, slot = len(starts), np.arange(windows)
    first = slot * length // windows
    last = np.maximum((slot + 1) * length // windows, first + 1)
    places = np.append(np.asarray(starts, np.int64), np.iinfo(np.int64).max)
    return np.stack([places[first], places[last]], axis=1)


def window_weights(starts: Sequence[int], windows: np.ndarray, count: int) -> np.ndarray:
    """Returns rows f32 [windows count] of ones at the tokens that begin in each window, or that reaches into it.

    `starts` are the places of a reader's tokens in the same text, of which it reads the first `count`: a window with
    others has none. `windows` as `window_starts` gives them.
    """
    places = np.asarray(starts, np.int64)[None, :]
    inside = (places >= windows[:, :1]) & (places < windows[:, 1:])
    reaching = np.maximum(np.searchsorted(places[0], windows[:, 0], side="right") - 1, 0)
    none = ~inside.any(axis=1)
    inside[none, reaching[none]] = True
    return (inside[:, :count] & ~inside[:, count:].any(axis=1, keepdims=True)).astype(np.float32)


def _sum(
    reader: Reader, params: Tree, before: Mapping[str, jax.Array], batch: Mapping[str, jax.Array], shift: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns `Sums.crossed` and `Sums.power` of a batch."""
    x, shared = decoder.embed(params, batch["ids"]), embed_shared_prefix(params, before)
    prefix = kv_prefix.take(params, reader.config, x, mask=batch["mask"], shared_prefix=shared, mode=reader.mode)
    both = jnp.stack([prefix.k, prefix.v], axis=1).astype(jnp.float32)
    return _multiply(batch, both, shift)


@EXACTLY
def _multiply(batch: Mapping[str, jax.Array], both: jax.Array, shift: jax.Array) -> tuple[jax.Array, jax.Array]:
    centred = jnp.einsum("bmt,lsbtke->bmlske", batch["weights"], both) - shift[None, None]
    crossed = jnp.einsum("bmg,bmz,bmlske->gzlske", batch["used"], batch["inputs"], centred)
    return crossed, jnp.einsum("bmg,bmlske->gls", batch["used"], centred * centred)


def fit(sums: Sums) -> Fit:
    """Returns the ridge regression of all texts, as strong as serves held-out texts best."""
    _, inputs, *shape = sums.crossed.shape
    crossed = sums.crossed.reshape(2, inputs, -1)
    mean, size = moments(sums)
    # A layer's keys and values count alike.
    each = 1.0 / np.broadcast_to(size[:, :, None, None] ** 2, shape).reshape(-1)

    def solve(which: slice, ridge: float) -> np.ndarray:
        gram = sums.gram[which].sum(axis=0)
        penalty = ridge * gram[-1, -1] * np.diag(np.append(np.ones(inputs - 1), 0.0))
        return np.linalg.solve(gram + penalty, crossed[which].sum(axis=0))

    def unexplained(kernel: np.ndarray) -> np.ndarray:
        """Returns the squared error of held-out texts, of each value, less its own power."""
        return np.sum(kernel * (sums.gram[1] @ kernel - 2 * crossed[1]), axis=0)

    errors = [(unexplained(solve(slice(0, 1), ridge)) * each).sum() for ridge in RIDGES]
    best = RIDGES[int(np.argmin(errors))]
    error = unexplained(solve(slice(0, 1), best)).reshape(shape).sum(axis=(2, 3)) + sums.power[1]
    count = sums.gram[1, -1, -1]
    centre = sums.crossed[1, -1] / max(count, 1.0)
    variance = sums.power[1] - count * np.sum(centre * centre, axis=(2, 3))
    solution = solve(slice(0, 2), best).reshape(inputs, *shape)
    explained = 1.0 - error / np.maximum(variance, 1e-30)
    return Fit(solution[:-1], solution[-1] + sums.shift, size, explained)


def moments(sums: Sums) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean [l 2 k e] and the RMS around it [l 2] of the windows' keys and values."""
    count, (_, _, heads, width) = sums.gram[:, -1, -1].sum(), sums.crossed.shape[2:]
    centre = sums.crossed[:, -1].sum(axis=0) / count
    variance = sums.power.sum(axis=0) / (count * heads * width) - np.mean(centre * centre, axis=(2, 3))
    return centre + sums.shift, np.sqrt(np.maximum(variance, 1e-12))


def align(params: Tree, fit: Fit) -> Tree:
    """Returns an adapter whose linear layer is the regression, its hidden path silent."""
    size = fit.size[:, :, None, None]
    kernel, bias = params["read"]["kernel"], params["read"]["bias"]
    read = {
        "kernel": jnp.asarray(fit.kernel / size, jnp.float32).reshape(kernel.shape),
        "bias": jnp.asarray(fit.mean / size, jnp.float32).reshape(bias.shape),
    }
    silent = jax.tree.map(jnp.zeros_like, params["down"])
    return params | {"read": read, "down": silent, "gain": jnp.asarray(fit.size, jnp.float32)}


def calibrate(adapter: Pure[KVAdapter], params: Tree, sums: Sums) -> Tree:
    """Returns a random adapter whose outputs have the mean and the size of the reader's keys and values."""
    mean, size = moments(sums)
    read = params["read"] | {"bias": jnp.zeros_like(params["read"]["bias"])}
    width = params["norm"]["scale"].shape[0]
    latents = jax.random.normal(jax.random.key(0), (8, 8, width))
    drawn = adapter.bind(params | {"read": read})(latents, "answer")
    size = size / np.asarray(jnp.stack([rms(x, axis=(1, 2, 3, 4)).reshape(-1) for x in (drawn.k, drawn.v)], axis=1))
    read = read | {"bias": jnp.asarray(mean / size[:, :, None, None], jnp.float32).reshape(read["bias"].shape)}
    return params | {"read": read, "gain": jnp.asarray(size, jnp.float32)}
