"""Start of a wire of kind "cache": each reader's basis, tables and step, in closed form from training texts.

Of seven texts in eight the keys and values give the basis; one of four of them is read twice, and what its keys are
worth gives the tables. The eighth are held out: on them the steps of the numbers are found, and whether values and
biases are fitted, which serves one reader and hurts another (docs/messages.md).
"""

import dataclasses
import functools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from lw_jax.core.errors import UserError
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
from lw_jax.models import cache_choice, cache_code, cache_codec, cache_message
from lw_jax.models.cache_choice import Reading
from lw_jax.models.cache_code import Code
from lw_jax.models.cache_codec import Coding, Section, Statistics
from lw_jax.models.cache_message import Sent
from sharding import place

if TYPE_CHECKING:
    from lw_jax.recipes.cache_wire import CacheWire

HELD_OUT = 8  # one of so many texts
# Of the held-out texts, on which the rows are measured: each is read twice, and its numbers are found five times.
MOST_HELD_OUT = {"cpu": 16, "gpu": 64}
TWICE = 4  # one of so many texts is read twice: the tables have a few hundred shares, the basis millions of values
RATES = (1, 2, 4, 8)  # ratios that have a step of their own, beside the run's; others take the next smaller one's
# Of the held-out texts, on which steps are found: numbers of one token cost what 25 writings and readings cost.
STEP_TEXTS = {"cpu": 8, "gpu": 64}
TOLERANCE = 0.05  # of a step, between that for which the numbers were found and that to which they are rounded
MOST_SOLVES = 4
# Texts read at once, and what their lengths are rounded up to: on a card a program more costs ten seconds.
ROWS, ROUNDED = {"cpu": 4, "gpu": 32}, {"cpu": 32, "gpu": 128}
CHUNK = 1024  # tokens whose states are in memory at once
WEIGHED = 0.25  # power of a layer's share of the table at a quarter, which weighs its states
SHOWN = ("all", "half", "quarter", "eighth", "shuffled", "none", "text")


def start(recipe: "CacheWire", frozen: Tree) -> dict[str, Tree]:
    """Returns every reader's code."""
    most = MOST_HELD_OUT[recipe.placement.platform]
    train, held = _divide(recipe.examples("train"), recipe.cfg.encoder.texts, most)
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


def _divide(found: Sequence[Example], count: int, most: int) -> tuple[list[Example], list[Example]]:
    """Returns one question of each text that is read: those to fit, and those held out."""
    texts = list({one.context: one for one in reversed(found)}.values())[::-1]
    chosen = [texts[index] for index in spread(len(texts), count)]
    held = chosen[HELD_OUT - 1 :: HELD_OUT][:most] or chosen[-1:]
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
    scores, twice = [], texts[::TWICE]
    once = [text for i, text in enumerate(texts) if i % TWICE]
    with tempfile.TemporaryFile() as file:
        states = _States(file, 2 * math.prod(shape))
        for again, part in ((True, twice), (False, once)):
            with phase(f"{name}: reading texts {'twice' if again else 'once'}", len(part), "texts") as done:
                for y, worth in done.track(_read(recipe, functions, params, name, part, twice=again)):
                    states.add(y)
                    scores += [] if worth is None else [worth]
        together = np.concatenate(scores)
        tables = [cache_choice.table_of(together, 1 / ratio) for ratio in range(1, RATIOS + 1)]
        weights = jnp.asarray(tables[3].mean(axis=1) ** WEIGHED, jnp.float32)
        width = min(recipe.cfg.encoder.width, states.width)
        with phase(f"{name}: fitting a basis of {width} numbers for {states.width:,} of a token's keys and values"):
            code = cache_code.fit_code(states.chunks, shape, width, weights=jnp.stack([weights, weights]))
            variance = _variance(code, states)
    return {**code._asdict(), "variance": variance, "tables": jnp.asarray(np.stack(tables), jnp.float32)}, states.count


def _read(  # noqa: PLR0913
    recipe: "CacheWire", functions: CacheFunctions, params: Tree, name: str, texts: list[str], *, twice: bool
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Yields of each text the states bf16[t n] of its tokens, and what their keys are worth f32[t l k] or None."""
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
        y, worth = jax.device_get(functions.read_states(params, {"own": own} | around, name, twice))
        for row, one in enumerate(part):
            yield y[row, : len(one)], None if worth is None else np.moveaxis(worth[:, row, : len(one)], 1, 0)


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


class _Steps:
    """Finds the steps of a reader's messages on held-out texts, which are read once for all of them."""

    def __init__(  # noqa: PLR0913
        self,
        recipe: "CacheWire",
        functions: CacheFunctions,
        params: Tree,
        name: str,
        code: dict[str, Any],
        encoded: Encoded,
    ):
        self.functions, self.name, self.code = functions, name, code
        self.limit, fits = recipe.cfg.message.bytes, recipe.cfg.encoder.ratio > 1
        self.readings = []
        for host in batches_of(encoded, spread(len(encoded), STEP_TEXTS[recipe.placement.platform]), _rows(recipe)):
            fields = place.put_eval(host["readers"][name], functions.mesh_of(name))
            own = {key: fields[key] for key in ("own", "before", "again")}
            lengths = np.where(host["valid"], host["readers"][name]["own"]["mask"].sum(axis=1), 0)
            reading = functions.read_twice(params, own, name, fits)
            self.readings.append((reading, fields["before"]["mask"], lengths))
        self.tokens = sum(int(lengths.sum()) for _, _, lengths in self.readings)

    def find(self, ratio: int, step: float, *, fitted: bool) -> Statistics:
        """Returns the step at which messages have message.bytes a token, and its statistics; `step`: a first guess."""

        fitted = fitted and ratio > 1

        def write(step: float) -> tuple[np.ndarray, Callable[[], list[Section]]]:
            solved = [self._solve(one, ratio, step, fitted) for one in self.readings]
            numbers = [
                own[:length]
                for (z, _), (_, _, lengths) in zip(solved, self.readings, strict=True)
                for own, length in zip(z, lengths, strict=True)
            ]
            return np.concatenate(numbers), lambda: self._send(solved, ratio, step, fitted)

        return find_rate(write, np.asarray(self.code["tables"]), self.limit, step)

    def _solve(
        self, read: tuple[Reading, jax.Array, np.ndarray], ratio: int, step: float, fitted: bool
    ) -> tuple[np.ndarray, jax.Array]:
        """Returns the numbers f32[b t w] of a batch of texts, not rounded, and which keys are kept."""
        reading, before, lengths = read
        count = cache_functions.count_kept(self.code, lengths, ratio)
        steps, factors = np.full(len(lengths), step, np.float32), self.functions.wire.readers[self.name].mode.factors
        wanted = self.functions.want(reading, before, count, self.name, fitted)
        return np.asarray(self.functions.solve(self.code, wanted, steps, factors)), wanted.kept

    def _send(self, solved: list[tuple[np.ndarray, jax.Array]], ratio: int, step: float, fitted: bool) -> list[Section]:
        """Returns what is sent of each text."""
        sections = []
        for (reading, before, lengths), (z, kept) in zip(self.readings, solved, strict=True):
            numbers, bias, steps = _round(z, step), np.zeros(kept.shape), np.full(len(z), step, np.float32)
            if fitted:
                bias = self.functions.fit_biases(self.code, reading, before, kept, numbers, steps, self.name)
            rows = cache_message.rows_of(jax.device_get(Sent(numbers, kept, bias, steps)))
            sections += [
                cache_message.to_section({ratio: one}, length)
                for one, length in zip(rows, lengths.tolist(), strict=True)
                if length
            ]
        return sections


def find_rate(
    write: Callable[[float], tuple[np.ndarray, Callable[[], list[Section]]]],
    tables: Float[np.ndarray, "r l k"],
    limit: float,
    step: float,
) -> Statistics:
    """Returns the step at which messages have config.message.bytes a token, `limit`, and its statistics.

    Numbers depend little on the step for which they are found: a few of these find it. The order of keys and the
    biases, which a message has beside its numbers, are in its bytes.

    Args:
        write: returns for a step the numbers f32[n w] of some texts, not rounded, and what makes what is sent of each;
            it is called once, as it fits biases.
        tables: of ratios 1, 2, ....
        limit: bytes.
        step: a first guess.

    Raises:
        UserError: messages are longer however large the step is.
    """
    beside = found = None
    for _ in range(MOST_SOLVES):
        z, send = write(step)
        largest = max(float(np.abs(z).max()), 1e-30)
        if largest > cache_codec.LARGEST * step:
            step = largest / cache_codec.LARGEST * (1 + TOLERANCE)
            continue
        beside = _bytes_beside(send(), tables) if beside is None else beside
        between = (largest / cache_codec.LARGEST, largest)
        try:
            found = cache_codec.find_step(functools.partial(_round, z), limit - beside, between=between)
        except UserError as error:
            told = f"{beside:.1f} of them for the order of keys and biases"
            raise UserError(f"config.message.bytes = {limit:g}, {told}: {error}") from error
        if abs(found.step / step - 1) < TOLERANCE:
            break
        step = found.step
    assert found is not None, "a step that is too small is one only once"
    return found


def _bytes_beside(sections: Sequence[Section], tables: Float[np.ndarray, "r l k"]) -> float:
    """Returns the bytes a token that messages have beside their numbers."""
    numbers = np.concatenate([one.numbers for one in sections])
    statistics = cache_codec.fit_statistics(numbers, sections[0].step)
    coding = Coding("0" * 16, (statistics,), {ratio: tables[ratio - 1] for ratio in sections[0].ratios})
    packed = sum(len(cache_codec.pack([(coding, one)], writer=coding.fingerprint)) for one in sections)
    return (packed - cache_codec.bits(statistics, numbers) / 8) / len(numbers)


def _round(z: np.ndarray, step: float) -> np.ndarray:
    return np.clip(np.rint(z / step), -(2**30), 2**30).astype(np.int32)  # a first guess may be far too small


def _settle(  # noqa: PLR0913
    recipe: "CacheWire",
    functions: CacheFunctions,
    frozen: Tree,
    name: str,
    code: dict[str, Any],
    encoded: Encoded,
) -> dict[str, Any]:
    """Returns the code with its steps, and whether it is fitted: what gives the smaller NLL on held-out texts."""
    steps, own = _Steps(recipe, functions, frozen[name], name, code, encoded), recipe.cfg.encoder.ratio
    print(f"{name}: steps for {steps.limit} bytes a token, found on {steps.tokens:,} held-out tokens", flush=True)
    guess, found = _guess_step(np.asarray(code["variance"], np.float64), 8 * steps.limit), {}
    for fitted in (False, True) if own > 1 else (False,):
        rate = steps.find(own, guess, fitted=fitted)
        one = code | {"fitted": jnp.float32(fitted)} | _rates({own: rate})
        nats = _nll(_measure(recipe, functions, frozen, {name: one}, encoded, ("latents",)), "latents")
        way = "values and biases fitted" if fitted else "exact values"
        print(f"{name}: {way}: {nats:.3f} nats at a step of {rate.step:.4f}", flush=True)
        found[fitted], guess = (nats, rate), rate.step
    fitted = min(found, key=lambda way: found[way][0])
    rates, guess = {own: found[fitted][1]}, found[fitted][1].step
    for ratio in RATES:
        rates[ratio] = rates.get(ratio) or steps.find(ratio, guess, fitted=fitted)
    return code | {"fitted": jnp.float32(fitted)} | _rates(rates)


def _rates(rates: Mapping[int, Statistics]) -> dict[str, jax.Array]:
    """Returns steps and statistics of all ratios: of each its own, or the next smaller one's, or the least."""
    least = min(rates)
    chosen = [rates[max((one for one in rates if one <= ratio), default=least)] for ratio in range(1, RATIOS + 1)]
    shares = {key: np.stack([getattr(one, key) for one in chosen]) for key in ("zero", "decay")}
    steps = jnp.asarray([one.step for one in chosen], jnp.float32)
    return {"step": steps} | {key: jnp.asarray(value, jnp.int32) for key, value in shares.items()}


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
