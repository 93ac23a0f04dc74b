"""Start of a wire of kind "cache": each reader's basis, tables and step, in closed form from training texts.

Seven of eight texts are read twice: what their keys are worth gives the tables, their keys and values the basis. The
eighth are held out: on them the step of the numbers is found, and whether values and biases are fitted, which serves
one reader and hurts another (docs/messages.md).
"""

import dataclasses
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from lw_jax.core.eval_rows import RATIOS
from lw_jax.core.progress import duration, phase
from lw_jax.core.types import Example, Tree
from lw_jax.data import batches, prompt_tokens
from lw_jax.data.batches import Encoded
from lw_jax.data.examples import spread
from lw_jax.data.loader import batches_of
from lw_jax.evals import cache_functions, cache_rows
from lw_jax.evals.cache_functions import CacheFunctions
from lw_jax.evals.comparison import Record
from lw_jax.models import cache_choice, cache_code, cache_codec
from lw_jax.models.cache_code import Code
from sharding import place

if TYPE_CHECKING:
    from lw_jax.recipes.cache_wire import CacheWire

HELD_OUT = 8  # one of so many texts
MOST_HELD_OUT = 64
# Of them, on which the step is found: each step tried costs what 50 passes over the code cost.
STEP_TEXTS = {"cpu": 4, "gpu": 64}
TOLERANCE = 0.02  # of the step
LARGEST_NUMBER = 24.0  # x its deviation, which a message can say at the least step
# Texts read at once, and what their lengths are rounded up to: on a card a program more costs ten seconds.
ROWS, ROUNDED = {"cpu": 4, "gpu": 32}, {"cpu": 32, "gpu": 128}
CHUNK = 1024  # tokens whose states are in memory at once
WEIGHED = 0.25  # power of a layer's share of the table at a quarter, which weighs its states
SHOWN = ("all", "half", "quarter", "eighth", "shuffled", "none", "text")


def start(recipe: "CacheWire", frozen: Tree) -> dict[str, Tree]:
    """Returns every reader's code."""
    train, held = _divide(recipe.examples("train"), recipe.cfg.encoder.texts)
    encoded = recipe.encode(held)
    functions = CacheFunctions(recipe.wire, recipe.placement)
    found = {}
    for name in recipe.wire.readers:
        begun = time.monotonic()
        code, tokens = _fit(recipe, functions, frozen[name], name, [one.context for one in train])
        alone = dataclasses.replace(encoded, readers={name: encoded.readers[name]})
        code = _settle(recipe, functions, frozen, name, code, alone)
        found[name] = code
        records = _measure(recipe, functions, frozen, {name: code}, alone, SHOWN)
        seconds = duration(time.monotonic() - begun)
        told = ", ".join(f"{row} {_nll(records, row):.3f}" for row in SHOWN)
        way = "values and biases fitted" if code["fitted"] else "exact values"
        print(f"{name}: {tokens:,} tokens of {len(train)} texts, {way}, {seconds}", flush=True)
        print(f"{name}: nats a token of the answers to {len(alone)} held-out texts: {told}", flush=True)
    return found


def _rows(recipe: "CacheWire") -> int:
    """Returns how many texts are read at once."""
    return place.round_up(ROWS[recipe.placement.platform], recipe.placement.data)


def _divide(found: Sequence[Example], count: int) -> tuple[list[Example], list[Example]]:
    """Returns one question of each text that is read: those to fit, and those held out."""
    texts = list({one.context: one for one in reversed(found)}.values())[::-1]
    chosen = [texts[index] for index in spread(len(texts), count)]
    held = chosen[HELD_OUT - 1 :: HELD_OUT][:MOST_HELD_OUT] or chosen[-1:]
    own = {one.context for one in held}
    return [one for one in chosen if one.context not in own] or held, held


class _States:
    """Keys and values of all tokens, on disk: they are read again and again, and no memory holds those of 8B."""

    def __init__(self, file: IO[bytes], width: int):
        self.width, self.count, self._file = width, 0, file

    def add(self, y: np.ndarray) -> None:
        """Appends rows [r n] in bf16."""
        self._file.write(np.ascontiguousarray(y).tobytes())
        self.count += len(y)

    def chunks(self) -> Iterator[tuple[jax.Array, jax.Array]]:
        """Yields rows and which of them are real."""
        self._file.flush()
        stored = np.memmap(self._file, jnp.bfloat16, "r", shape=(self.count, self.width))
        for first in range(0, self.count, CHUNK):
            part = stored[first : first + CHUNK]
            filled = np.pad(part, ((0, CHUNK - len(part)), (0, 0)))
            yield jnp.asarray(filled), jnp.arange(CHUNK) < len(part)


def _fit(
    recipe: "CacheWire", functions: CacheFunctions, params: Tree, name: str, texts: list[str]
) -> tuple[dict[str, Any], int]:
    """Returns a reader's basis and tables from its own keys and values of texts, and how many tokens they have."""
    config = recipe.wire.readers[name].config
    shape = (config.layers, config.kv_heads, config.head_dim)
    scores = []
    with tempfile.TemporaryFile() as file:
        states = _States(file, 2 * math.prod(shape))
        with phase(f"{name}: reading texts twice", len(texts), "texts") as done:
            for y, worth in done.track(_read(recipe, functions, params, name, texts)):
                states.add(y)
                scores.append(worth)
        together = np.concatenate(scores)
        tables = [cache_choice.table_of(together, 1 / ratio) for ratio in range(1, RATIOS + 1)]
        weights = jnp.asarray(tables[3].mean(axis=1) ** WEIGHED, jnp.float32)
        width = min(recipe.cfg.encoder.width, states.width)
        with phase(f"{name}: fitting a basis of {width} numbers for {states.width:,} of a token's keys and values"):
            code = cache_code.fit_code(states.chunks, shape, width, weights=jnp.stack([weights, weights]))
            variance = _variance(code, states)
    return {**code._asdict(), "variance": variance, "tables": jnp.asarray(np.stack(tables), jnp.float32)}, states.count


def _read(
    recipe: "CacheWire", functions: CacheFunctions, params: Tree, name: str, texts: list[str]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields of each text the states bf16[t n] of its tokens and what their keys are worth f32[t l k]."""
    layout, mesh = recipe.layout, functions.mesh_of(name)
    pad = layout.readers[name].tokenizer.pad
    before = prompt_tokens.shared_prefix(name, layout.readers[name], layout.prompt)
    again = cache_rows.ask_again(name, layout)
    longest = (recipe.wire.readers[name].config.max_positions - len(before) - len(again)) // 2
    limit = min(longest, recipe.cfg.data.context_tokens)
    ids = [one[:limit] for one in prompt_tokens.tokenize(layout.readers[name].tokenizer, texts, limit=limit)]
    ids.sort(key=len)  # batches of texts alike in length have little padding
    around = {
        key: batches.field([one], pad, left=False).collate([0]) for key, one in (("before", before), ("again", again))
    }
    around = place.replicate(around, mesh)
    rows = _rows(recipe)
    for first in range(0, len(ids), rows):
        part = ids[first : first + rows]
        width = place.round_up(max(map(len, part)), ROUNDED[recipe.placement.platform])
        field = batches.Field(part, width, pad, left=False)
        own = place.rows(field.collate([min(i, len(part) - 1) for i in range(rows)]), mesh)
        reading = functions.read_twice(params, {"own": own} | around, name, False)
        y, worth = jax.device_get((_states(reading.text.k, reading.text.v), reading.scores))
        for row, one in enumerate(part):
            yield y[row, : len(one)], np.moveaxis(worth[:, row, : len(one)], 1, 0)


@jax.jit
def _states(k: jax.Array, v: jax.Array) -> jax.Array:
    return cache_code.states(k, v).astype(jnp.bfloat16)


def _variance(code: Code, states: _States) -> jax.Array:
    """Returns the variance of each number of the code."""
    total, seen = jnp.zeros(len(code.basis)), 0.0
    for y, real in states.chunks():
        total, seen = total + _squares(code, y, real), seen + int(real.sum())
    return total / seen


@jax.jit
def _squares(code: Code, y: jax.Array, real: jax.Array) -> jax.Array:
    """Returns the sum of the squared numbers of tokens [r n]."""
    k, v = y.astype(jnp.float32).reshape(len(y), 1, *code.mean.shape).transpose(2, 3, 1, 0, 4, 5)
    z = cache_code.write(code, cache_code.KVPrefix(k, v, real[None]))[0]
    return jnp.square(jnp.where(real[:, None], z, 0.0)).sum(axis=0)


def _settle(  # noqa: PLR0913
    recipe: "CacheWire",
    functions: CacheFunctions,
    frozen: Tree,
    name: str,
    code: dict[str, Any],
    encoded: Encoded,
) -> dict[str, Any]:
    """Returns the code with its step, and whether it is fitted: what gives the smaller NLL on held-out texts."""
    found = {}
    for fitted in (False, True) if recipe.cfg.encoder.ratio > 1 else (False,):
        one = _find_step(recipe, functions, frozen[name], name, code | {"fitted": jnp.float32(fitted)}, encoded)
        found[fitted] = _nll(_measure(recipe, functions, frozen, {name: one}, encoded, ("latents",)), "latents"), one
        way = "values and biases fitted" if fitted else "exact values"
        print(f"{name}: {way}: steps of {float(one['step']):.4f}, {found[fitted][0]:.3f} nats", flush=True)
    return min(found.values(), key=lambda each: each[0])[1]


def _find_step(  # noqa: PLR0913
    recipe: "CacheWire",
    functions: CacheFunctions,
    params: Tree,
    name: str,
    code: dict[str, Any],
    encoded: Encoded,
) -> dict[str, Any]:
    """Returns the code with the step at which messages have message.bytes a token, and its statistics."""
    cfg, fitted, wanted = recipe.cfg, bool(code["fitted"]), []
    indices = spread(len(encoded), STEP_TEXTS[recipe.placement.platform])
    for host in batches_of(encoded, indices, _rows(recipe)):
        fields = place.put_eval(host["readers"][name], functions.mesh_of(name))
        own = {key: fields[key] for key in ("own", "before", "again")}
        real = host["readers"][name]["own"]["mask"] & host["valid"][:, None]
        count = cache_functions.count_kept(code, real.sum(axis=1), cfg.encoder.ratio)
        reading = functions.read_twice(params, own, name, fitted)
        wanted.append((functions.want(reading, fields["before"]["mask"], count, name, fitted), real))

    def integers(step: float) -> np.ndarray:
        own = code | {"step": jnp.float32(step)}
        return np.concatenate([np.asarray(functions.number(own, one))[real] for one, real in wanted])

    variance = np.asarray(code["variance"], np.float64)
    least = LARGEST_NUMBER * np.sqrt(variance.max()) / cache_codec.LARGEST
    tokens = sum(int(real.sum()) for _, real in wanted)
    print(f"{name}: finding the step of {cfg.message.bytes} bytes a token on {tokens:,} held-out tokens", flush=True)
    middle = max(_guess_step(variance, 8 * cfg.message.bytes), 8 * least)
    between = (middle / 8, middle * 8)
    step, statistics = cache_codec.find_step(integers, cfg.message.bytes, between=between, tolerance=TOLERANCE)
    shares = {key: jnp.asarray(getattr(statistics, key), jnp.int32) for key in ("zero", "decay")}
    return code | shares | {"step": jnp.float32(step)}


def _guess_step(variance: np.ndarray, bits: float) -> float:
    """Returns the step at which Gaussian numbers would take so many bits, where each is small beside its deviation."""
    low, high = -40.0, 20.0  # powers of 2
    for _ in range(60):
        middle = (low + high) / 2
        each = 0.5 * np.log2(2 * np.pi * np.e * np.maximum(variance, 1e-30)) - middle
        low, high = (middle, high) if np.maximum(each, 0).sum() > bits else (low, middle)
    return 2.0**high


def _measure(  # noqa: PLR0913
    recipe: "CacheWire",
    functions: CacheFunctions,
    frozen: Tree,
    codes: dict[str, Tree],
    encoded: Encoded,
    rows: Sequence[str],
) -> list[Record]:
    bench = recipe.bench(codes, frozen, functions)
    return cache_rows.measure(
        bench,
        encoded,
        range(len(encoded)),
        rows=rows,
        batch=_rows(recipe),
    )


def _nll(records: Sequence[Record], row: str) -> float:
    own = [one for one in records if one["row"] == row]
    return sum(one["nll"] for one in own) / sum(one["tokens"] for one in own)
