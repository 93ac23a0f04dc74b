"""Start of a wire of kind "cache": each reader's basis, tables and step, in closed form from training texts.

Texts are read twice: what their keys are worth gives the tables, and their keys and values the basis. One in eight, at
most MOST_HELD_OUT, is held out: on these the steps of the numbers are found, and at which ratios values and biases are
fitted, which serves few positions and hurts many (docs/messages.md).
"""

import dataclasses
import errno
import functools
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from lw_jax.core.errors import UserError
from lw_jax.core.eval_rows import RATIOS
from lw_jax.core.progress import duration, phase
from lw_jax.core.types import Example, Tree
from lw_jax.data import batches, prompt_tokens
from lw_jax.data.examples import choose, spread
from lw_jax.evals import cache_rows
from lw_jax.models import cache_choice, cache_code, cache_message
from lw_jax.models.cache_code import Code
from lw_jax.models.cache_codec import Statistics
from lw_jax.models.cache_message import Sent
from lw_jax.recipes.cache_held_out import Answers, HeldOut, guess_step
from lw_jax.training import wire_tensors
from lw_jax.training.memory import bytes_of
from sharding import place
from sharding.placement import Placement

if TYPE_CHECKING:
    from lw_jax.recipes.cache_wire import CacheWire

_log = logging.getLogger(__name__)

PART_HELD_OUT = 8  # one of so many texts is held out
# Their numbers are found some twenty times. What was read of them stays on the device: on a card one batch.
MOST_HELD_OUT = {"cpu": 12, "gpu": 32}
# Ratios that have a step of their own, beside the run's; others take the next smaller one's.
RATES = {1: "all", 2: "half", 4: "quarter", 8: "eighth"}
# From one of so many positions on a fit is taken where answers diverge less from the text's at all: it brought them
# nearer wherever it was tried, which a dozen texts cannot always tell from chance. Below they must do so surely.
FEW = 4
ROWS = {"cpu": 4, "gpu": 32}  # texts at once
CHUNK = 1024  # tokens whose states are in memory at once
WEIGHED = 0.25  # power of a layer's share of the table at a quarter, which weighs its states


def start(recipe: "CacheWire", frozen: Tree) -> dict[str, Tree]:
    ratio, most = recipe.cfg.encoder.ratio, MOST_HELD_OUT[recipe.placement.platform]
    questions = recipe.curriculum.examples("train")
    train, held_out = _divide(questions, recipe.cfg.encoder.texts, most, seed=recipe.cfg.seed)
    if train == held_out:
        said = "steps, fits and nats below are of the text that the basis is fitted to, not of others"
        _log.warning("config.data.train: all questions are about one text, and nothing is held out: %s", said)
    read, encoded, codes = recipe.encode(train), recipe.encode(held_out), {}
    for what, texts in (("texts of the start", read), ("held out of them", encoded)):
        print(f"{what}: " + "\n".join(texts.describe()), flush=True)
    for name in recipe.wire.readers:
        _check_disk(recipe, name, sum(map(len, read.readers[name]["own"].ids)))
    for name in recipe.wire.readers:
        begun = time.monotonic()
        code, tokens = _fit(recipe, frozen[name], name, read.readers[name]["own"].ids)
        alone = dataclasses.replace(encoded, readers={name: encoded.readers[name]})
        in_batches = cache_rows.batches_by_length(alone, range(len(alone)), rows_of(recipe.placement))
        with phase(f"{name}: reading {len(alone)} held-out texts twice"):
            texts = HeldOut(recipe.functions, frozen[name], name, code, in_batches)
        codes[name] = code | _settle(texts, recipe.cfg.message.bytes, ratio)
        seconds = duration(time.monotonic() - begun)
        print(f"{name}: {tokens:,} tokens of {len(read)} texts, {seconds}", flush=True)
    return codes


def rows_of(placed: Placement) -> int:
    """Returns how many texts a start reads at once."""
    return place.round_up(ROWS[placed.platform], placed.data)


def _divide(questions: Sequence[Example], count: int, most: int, *, seed: int) -> tuple[list[Example], list[Example]]:
    """Returns one question of each text that is read: those to fit, and those held out; of another seed others."""
    texts = list({question.context: question for question in reversed(questions)}.values())[::-1]
    chosen = choose(texts, count, seed=seed)
    eighths = chosen[PART_HELD_OUT - 1 :: PART_HELD_OUT]
    held_out = [eighths[index] for index in spread(len(eighths), most)] or chosen[-1:]  # of every source
    contexts = {question.context for question in held_out}
    return [question for question in chosen if question.context not in contexts] or held_out, held_out


def _check_disk(recipe: "CacheWire", name: str, tokens: int, file: IO[bytes] | None = None) -> None:
    """Refuses a disk without room for `_States`, before hours of reading: a node's own may be small.

    Room for their `file` is taken at once: another start on the node may have found the same room free.
    """
    config, folder = recipe.wire.readers[name].config, tempfile.gettempdir()
    needed = 2 * config.layers * config.kv_heads * config.head_dim * tokens * jnp.dtype(jnp.bfloat16).itemsize
    full = needed > shutil.disk_usage(folder).free
    if file and not full and hasattr(os, "posix_fallocate"):  # not on macOS
        try:
            os.posix_fallocate(file.fileno(), 0, needed)
        except OSError as error:
            full = error.errno not in (errno.EOPNOTSUPP, errno.EINVAL)  # these two: the file system cannot
    if full:
        free = shutil.disk_usage(folder).free
        raise UserError(
            f"{folder}: keys and values of {tokens:,} tokens of reader {name!r} take {bytes_of(needed)} there until "
            f"its basis is found, {bytes_of(free)} are free: free space, or set TMPDIR to a folder with more"
        )


class _States:
    """Keys and values of all tokens, on disk: they are read again and again, and no memory holds those of 8B."""

    def __init__(self, file: IO[bytes], width: int):
        self.width, self.count, self._file = width, 0, file

    def add(self, y: np.ndarray) -> None:
        """Appends rows [r n] in bf16."""
        self._file.write(np.ascontiguousarray(y).tobytes())
        self.count += len(y)

    def replace(self, first: int, y: np.ndarray) -> None:
        """Writes rows over those from `first` on."""
        self._file.seek(first * self.width * y.itemsize)
        self._file.write(np.ascontiguousarray(y).tobytes())

    def chunks(self) -> Iterator[tuple[jax.Array, jax.Array]]:
        """Yields rows and which of them are real."""
        self._file.flush()
        stored = np.memmap(self._file, jnp.bfloat16, "r", shape=(self.count, self.width))
        for first in range(0, self.count, CHUNK):
            part = stored[first : first + CHUNK]
            filled = np.pad(part, ((0, CHUNK - len(part)), (0, 0)))
            yield jnp.asarray(filled), jnp.arange(CHUNK) < len(part)


class _Text(NamedTuple):
    """What the keys of a text's tokens are worth, of a `Reading`."""

    scores: Float[np.ndarray, "t l k"]
    power: Float[np.ndarray, "t l k"]


def _fit(recipe: "CacheWire", params: Tree, name: str, ids: Sequence[np.ndarray]) -> tuple[dict[str, Any], int]:
    """Returns a reader's basis and tables from its own keys and values of texts, and how many tokens they have.

    A first basis is that of all states; the basis is that of states in which what weighs little in a message is what
    the first one says of it.
    """
    config, cfg = recipe.wire.readers[name].config, recipe.cfg
    shape = (config.layers, config.kv_heads, config.head_dim)
    read: list[_Text] = []
    with tempfile.TemporaryFile() as file:
        _check_disk(recipe, name, sum(map(len, ids)), file)
        states = _States(file, 2 * math.prod(shape))
        with phase(f"{name}: reading texts twice", len(ids), "texts") as done:
            for y, text in done.track(_read(recipe, params, name, ids)):
                states.add(y)
                read.append(text)
        together = np.concatenate([text.scores for text in read])
        tables = [cache_choice.table_of(together, 1 / ratio) for ratio in range(1, RATIOS + 1)]
        by_layer = jnp.asarray(tables[3].mean(axis=1) ** WEIGHED, jnp.float32)
        width = min(cfg.encoder.width, states.width)
        with phase(f"{name}: fitting a basis of {width} numbers for {states.width:,} of a token's keys and values"):
            first = cache_code.fit_code(states.chunks, shape, width, weights=jnp.stack([by_layer, by_layer]))
            variance = _variance(first, states)
        step = guess_step(np.asarray(variance), 8 * cfg.message.bytes)
        settings = {"step": jnp.float32(step), "factors": recipe.wire.readers[name].mode.factors}
        weights = _weights(read, tables, cfg.encoder.ratio)
        with phase(f"{name}: what messages say of the states", states.count, "tokens") as done:
            for begin, (y, real) in zip(range(0, states.count, CHUNK), states.chunks(), strict=True):
                part = weights[begin : begin + CHUNK]
                padded = np.pad(part, ((0, CHUNK - len(part)), (0, 0), (0, 0)), mode="edge")
                filled = _fill(first, y, real, padded, variance=variance, **settings)
                states.replace(begin, np.asarray(filled)[: len(part)])
                done.advance(len(part))
        with phase(f"{name}: fitting the basis anew to that"):
            mean = jnp.asarray(wire_tensors.round_int8(np.asarray(first.mean)))
            code = cache_code.fit_basis(states.chunks, mean, first.scale, width)
            # In int8 an exported wire is the same code: its messages have the bytes that are found here.
            code = code._replace(basis=jnp.asarray(wire_tensors.round_int8(np.asarray(code.basis))))
            variance = _variance(code, states)
    return {**code._asdict(), "variance": variance, "tables": jnp.asarray(np.stack(tables), jnp.float32)}, states.count


def _weights(read: Sequence[_Text], tables: Sequence[np.ndarray], ratio: int) -> Float[np.ndarray, "n l k"]:
    """Returns what weighs a token's states in messages: of one text of all positions, of the next one at the ratio."""
    weights = []
    for number, text in enumerate(read):
        length = len(text.scores)
        padding = cache_rows.round_columns(length) - length
        count = cache_choice.count_kept(tables[(ratio if number % 2 else 1) - 1], np.array([length]))
        padded = (np.pad(values, ((0, padding), (0, 0), (0, 0))) for values in text)
        weights.append(np.asarray(_weigh(*padded, np.arange(length + padding) < length, count))[:length])
    return np.concatenate(weights)


@jax.jit
def _weigh(scores: jax.Array, power: jax.Array, mask: jax.Array, count: jax.Array) -> jax.Array:
    scores, power = (jnp.moveaxis(x, 0, 1)[:, None] for x in (scores, power))
    kept = cache_choice.choose(scores, mask[None], count)
    return jnp.moveaxis(cache_code.importance(power, kept, mask[None], cache_message.ROOT)[:, 0], 1, 0)


@functools.partial(jax.jit, static_argnames="factors")
def _fill(code: Code, y: jax.Array, real: jax.Array, weights: jax.Array, **settings: Any) -> jax.Array:
    return cache_code.fill(code, y.astype(jnp.float32), real, weights, **settings).astype(jnp.bfloat16)


def _read(
    recipe: "CacheWire", params: Tree, name: str, ids: Sequence[np.ndarray]
) -> Iterator[tuple[np.ndarray, _Text]]:
    """Yields of each text the states bf16[t n] of its tokens, and what their keys are worth."""
    layout, mesh = recipe.layout, recipe.functions.mesh_of(name)
    pad = layout.readers[name].tokenizer.pad
    before = prompt_tokens.shared_prefix(name, layout.readers[name], layout.prompt)
    again = cache_rows.ask_again(name, layout)
    longest = (recipe.wire.readers[name].config.max_positions - len(before) - len(again)) // 2
    limit = min(longest, recipe.cfg.data.context_tokens)
    ids = sorted((tokens[:limit] for tokens in ids), key=len)  # batches of texts alike in length have little padding
    around = {
        key: batches.field([text], pad, left=False).collate([0]) for key, text in (("before", before), ("again", again))
    }
    around = place.replicate(around, mesh)
    rows = rows_of(recipe.placement)
    for first in range(0, len(ids), rows):
        part = ids[first : first + rows]
        field = batches.Field(part, min(cache_rows.round_columns(max(map(len, part))), limit), pad, left=False)
        batch = place.rows(field.collate([min(i, len(part) - 1) for i in range(rows)]), mesh)
        y, *worth = jax.device_get(recipe.functions.read_states(params, {"own": batch} | around, name))
        for row, tokens in enumerate(part):
            yield y[row, : len(tokens)], _Text(*(np.moveaxis(leaf[:, row, : len(tokens)], 1, 0) for leaf in worth))


def _variance(code: Code, states: _States) -> jax.Array:
    total, seen = jnp.zeros(len(code.basis)), 0.0
    for y, real in states.chunks():
        total, seen = total + _squares(code, y, real), seen + int(real.sum())
    return total / seen


@jax.jit
def _squares(code: Code, y: jax.Array, real: jax.Array) -> jax.Array:
    """Returns the sum of the squared numbers of tokens [r n]."""
    k, v = cache_code.of_states(y, code.mean.shape[1:])
    z = cache_code.write(code, cache_code.KVPrefix(k, v, real[None]))[0]
    return jnp.square(jnp.where(real[:, None], z, 0.0)).sum(axis=0)


def _settle(texts: HeldOut, limit: float, run_ratio: int) -> dict[str, jax.Array]:
    """Returns steps and statistics of all ratios, and whether texts are fitted: where answers are nearer (`FEW`).

    The fewer positions, the more a fit gives: at the next smaller ratio it is tried where it served the larger one.
    `limit`: bytes a token of the text. `run_ratio`: the run's.
    """
    print(f"{texts.name}: steps for {limit} bytes a token, found on {texts.tokens:,} held-out tokens", flush=True)
    step, chosen, fits = guess_step(np.asarray(texts.code["variance"]), 8 * limit), {}, True
    for ratio in sorted({run_ratio, *RATES}, reverse=True):
        ways: dict[bool, tuple[Answers, Statistics, list[Sent]]] = {}
        for fitted in (False, True) if fits and ratio > 1 else (False,):
            rate, sent = texts.find_rate(ratio, limit, step, fitted=fitted)
            ways[fitted], step = (texts.answers(sent), rate, sent), rate.step
        if fits := True in ways:
            exact, answers = ways[False][0], ways[True][0]
            fits = answers.divergence < exact.divergence if ratio >= FEW else answers.is_surely_nearer(exact)
        chosen[ratio] = fits, *ways[fits]
        words = (
            f"{'values and biases fitted' if way else 'exact values'} {answers.nats:.3f} nats, "
            f"{answers.divergence:.3f} from the text's"
            for way, (answers, *_) in ways.items()
        )
        taken = f"{'fitted' if fits else 'exact'} ones are taken, step {ways[fits][1].step:.3g}"
        print(f"{texts.name}: one of {ratio} positions: {'; '.join(words)}; {taken}", flush=True)
    shown = {row: chosen[ratio][1] for ratio, row in RATES.items()}
    if texts.has_others:
        shown["another text's"] = texts.answers(chosen[run_ratio][-1], shuffled=True)
    shown |= {row: texts.answers_of_prompt(row) for row in ("none", "text")}
    rows = ", ".join(f"{row} {answers.nats:.3f}" for row, answers in shown.items())
    print(f"{texts.name}: nats a token of the answers to {len(texts)} held-out texts: {rows}", flush=True)
    # Of each ratio its own, or the next smaller one's.
    choices = [chosen[max(known for known in chosen if known <= ratio)] for ratio in range(1, RATIOS + 1)]
    rates = {key: np.stack([getattr(rate, key) for _, _, rate, _ in choices]) for key in ("step", "zero", "decay")}
    rates["fitted"] = np.array([fits for fits, *_ in choices])
    return {key: jnp.asarray(value, jnp.float32) for key, value in rates.items()}
