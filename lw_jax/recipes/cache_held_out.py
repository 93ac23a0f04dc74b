"""Held-out texts of a cache wire's start: the steps of its messages' numbers, and answers from the messages."""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from lw_jax.core.errors import UserError
from lw_jax.core.types import Tree
from lw_jax.data.batches import Batch
from lw_jax.evals import cache_functions
from lw_jax.evals.cache_functions import CacheFunctions
from lw_jax.evals.control_rows import ANSWER
from lw_jax.models import cache_codec, cache_message, kv_prefix
from lw_jax.models.cache_choice import Reading
from lw_jax.models.cache_codec import Coding, Section, Statistics
from lw_jax.models.cache_message import Sent, Wanted
from lw_jax.models.kv_prefix import Sizes
from lw_jax.models.wire import Prompt
from sharding import place

_log = logging.getLogger(__name__)

TOLERANCE = 0.01  # of the bytes of a message
WARNED = 0.05
MOST_SOLVES = 6
HEADROOM = 1.5  # x the largest number of these texts: that of others
SURELY = 2.0  # standard errors


class Answers(NamedTuple):
    """What a reader gives the reference answers to texts, from what it is prompted with."""

    nll: Float[np.ndarray, " n"]  # negative log-likelihood in nats
    kl: Float[np.ndarray, " n"]  # divergence from what it gives behind the text, in nats
    tokens: Float[np.ndarray, " n"]

    @property
    def nats(self) -> float:
        """Returns the negative log-likelihood of a token."""
        return float(self.nll.sum() / self.tokens.sum())

    @property
    def divergence(self) -> float:
        """Returns the divergence of a token: it tells two messages apart on fewer texts than nats do."""
        return float(self.kl.sum() / self.tokens.sum())

    def is_surely_nearer(self, other: "Answers") -> bool:
        """Returns whether these diverge less beyond chance: by over SURELY standard errors over texts."""
        less = other.kl - self.kl
        return len(less) > 1 and bool(less.sum() > SURELY * math.sqrt(len(less)) * less.std(ddof=1))


@dataclasses.dataclass(frozen=True)
class _Batch:
    """Texts that were read twice."""

    reading: Reading
    fields: Mapping[str, Any]  # on the reader's devices
    text_logits: jax.Array  # [b t v] of the answers behind the texts
    mask: Bool[np.ndarray, "b t"]  # of the texts
    valid: Bool[np.ndarray, " b"]

    @property
    def tokens(self) -> Bool[np.ndarray, "b t"]:
        """Returns which are tokens of a text, not of one that is repeated to fill the batch."""
        return self.mask & self.valid[:, None]

    @property
    def has_others(self) -> bool:
        return int(self.valid.sum()) > 1

    def others(self) -> Int[np.ndarray, " b"]:
        """Returns for each text the row of another one."""
        return (np.arange(len(self.valid)) + 1) % int(self.valid.sum())


class HeldOut:
    """One reader's held-out texts, read once for all that is found on them."""

    def __init__(  # noqa: PLR0913
        self,
        functions: CacheFunctions,
        params: Tree,
        name: str,
        code: Mapping[str, Any],
        batches: Iterable[Batch],
    ):
        """Reads the texts of batches of `cache_rows.attach`."""
        self.functions, self.params, self.name, self.code, self._batches = functions, params, name, code, []
        for host in batches:
            fields = place.put_eval(host["readers"][name], functions.mesh_of(name))
            texts = {key: fields[key] for key in ("own", "before", "again")}
            reading = functions.read_twice(params, texts, name, True)
            prompt, answer = functions.prompt_from_text(params, fields["text"]), {key: fields[key] for key in ANSWER}
            text_logits = functions.answer_logits(params, prompt, answer, name)
            mask = host["readers"][name]["own"]["mask"]
            self._batches.append(_Batch(reading, fields, text_logits, mask, host["valid"]))
        self.tokens = sum(int(batch.tokens.sum()) for batch in self._batches)

    @property
    def has_others(self) -> bool:
        """Returns whether a batch has two texts, so that one can be read from another one's message."""
        return any(batch.has_others for batch in self._batches)

    def __len__(self) -> int:
        return sum(int(batch.valid.sum()) for batch in self._batches)

    def find_rate(self, ratio: int, limit: float, step: float, *, fitted: bool) -> tuple[Statistics, list[Sent]]:
        """Returns the step at which messages have `limit` bytes a token, its statistics, and each batch's messages.

        `step`: a first guess.
        """
        by_step: dict[np.float32, list[Sent]] = {}  # without biases
        wanted = [self._want(batch, ratio, fitted) for batch in self._batches]

        def write(step: float) -> tuple[np.ndarray, Callable[[], list[Section]]]:
            by_step[np.float32(step)] = sent = list(map(functools.partial(self._solve, step), self._batches, wanted))
            numbers = [one.numbers[batch.tokens] for one, batch in zip(sent, self._batches, strict=True)]
            return np.concatenate(numbers), lambda: self._sections(ratio, complete(sent))

        def complete(sent: list[Sent]) -> list[Sent]:
            return list(map(self._fit_biases, self._batches, sent)) if fitted else sent

        variance, tables = (np.asarray(self.code[name]) for name in ("variance", "tables"))
        found = find_rate(write, tables, limit, step, variance, of=f"{self.name}: one of {ratio} positions")
        return found, complete(by_step[np.float32(found.step)])

    def answers(self, sent: Sequence[Sent], *, shuffled: bool = False) -> Answers:
        """Returns what answers are given from each batch's messages; `shuffled`: each from another text's of its batch.

        Shuffled, a batch of one text is left out.
        """

        def prompts() -> Iterator[tuple[_Batch, Prompt]]:
            for batch, one in zip(self._batches, sent, strict=True):
                if shuffled:
                    if not batch.has_others:
                        continue
                    rows = batch.others()
                    one = Sent(one.numbers[rows], one.kept[:, rows], one.bias[:, rows], one.step, one.mask[rows])
                fields = self.params, self.code, batch.fields
                yield batch, self.functions.prompt_from_cache(*fields, one, self.name)

        return self._compare(prompts())

    def answers_of_prompt(self, field: str) -> Answers:
        """Returns what answers are given from a prompt without a message, "text" or "none"."""
        prompt = self.functions.prompt_from_text
        return self._compare((batch, prompt(self.params, batch.fields[field])) for batch in self._batches)

    def _compare(self, prompts: Iterable[tuple[_Batch, Prompt]]) -> Answers:
        per_batch = []
        for batch, prompt in prompts:
            answer = {key: batch.fields[key] for key in ANSWER}
            logits = self.functions.answer_logits(self.params, prompt, answer, self.name)
            scores = jax.device_get(self.functions.compare(batch.text_logits, logits, answer))
            per_batch.append([np.asarray(scores[key], np.float64)[batch.valid] for key in Answers._fields])
        return Answers(*map(np.concatenate, zip(*per_batch, strict=True)))

    def _want(self, batch: _Batch, ratio: int, fitted: bool) -> Wanted:
        count = cache_functions.count_kept(self.code, batch.tokens.sum(axis=1), ratio)
        wanted = self.functions.want(batch.reading, count, self.name, self._sizes(batch) if fitted else None)
        text = batch.reading.text  # not a second time in memory: it is there for all trials
        return wanted._replace(text=text._replace(v=wanted.text.v) if fitted else text)

    def _solve(self, step: float, batch: _Batch, wanted: Wanted) -> Sent:
        """Returns what is sent of a batch of texts, without biases."""
        steps = np.full(len(batch.mask), step, np.float32)
        numbers, kept = self.functions.solve(self.code, wanted, steps, self.name), np.asarray(wanted.kept)
        return Sent(np.asarray(numbers), kept, np.zeros(kept.shape, np.float32), steps, batch.mask)

    def _fit_biases(self, batch: _Batch, sent: Sent) -> Sent:
        given = self.code, batch.reading, sent.kept, sent.numbers, sent.step
        return sent._replace(bias=np.asarray(self.functions.fit_biases(*given, self.name, self._sizes(batch))))

    def _sizes(self, batch: _Batch) -> Sizes:
        """Returns the same for all ratios, so that these share their programs."""
        return kv_prefix.all_keys(self.functions.wire.readers[self.name].config, batch.mask.shape[1])

    def _sections(self, ratio: int, sent: Sequence[Sent]) -> list[Section]:
        return [
            cache_message.to_section({ratio: one}, row)
            for batch, one in zip(self._batches, sent, strict=True)
            for row in np.flatnonzero(batch.valid).tolist()
        ]


def find_rate(  # noqa: PLR0913
    write: Callable[[float], tuple[np.ndarray, Callable[[], list[Section]]]],
    tables: Float[np.ndarray, "r l k"],
    limit: float,
    step: float,
    variance: Float[np.ndarray, " w"],
    *,
    of: str,
) -> Statistics:
    """Returns the step at which messages have config.message.bytes a token, `limit`, and its statistics.

    Numbers are written for a step, so a few trials find it, or else the nearest, with a warning where messages are
    longer. The order of keys and the biases, which a message has beside its numbers, are in its bytes.

    Args:
        write: returns for a step the numbers i32[n w] of some texts and what makes what is sent of each; it is called
            once, as it fits biases.
        tables: of ratios 1, 2, ....
        limit: bytes.
        step: a first guess.
        variance: of the numbers, in which the second guess is found.
        of: the reader and the ratio, for what is said of them.

    Raises:
        UserError: the order of keys and the biases alone take more.
    """
    beside, tried = None, list[_Trial]()
    for _ in range(MOST_SOLVES):
        numbers, send = write(step)
        least = max(int(np.abs(numbers).max()), 1) * step * HEADROOM / cache_codec.LARGEST
        if least > step:
            step = least * (1 + TOLERANCE)
            continue
        beside = _bytes_beside(send(), tables) if beside is None else beside
        if beside >= limit:
            raise UserError(
                f"config.message.bytes = {limit:g}: {of}: the order of keys and the biases alone take {beside:.1f} "
                "bytes a token; allow more"
            )
        statistics = cache_codec.fit_statistics(numbers, step)
        tried.append(_Trial(step, beside + cache_codec.bits(statistics, numbers) / 8 / len(numbers), statistics))
        if abs(tried[-1].size / limit - 1) < TOLERANCE:
            break
        step = _secant(tried, limit) or _by_variance(tried[-1], limit, beside, variance)
        step = max(step, float(np.float32(least)))
        if step == tried[-1].step:  # the least one: no more can be said
            break
    assert tried, "a step that is too small is one only once"
    nearest = min(tried, key=lambda trial: abs(math.log(trial.size / limit)))
    if nearest.size > (1 + WARNED) * limit:
        _log.warning("%s: messages take %.0f bytes a token, not config.message.bytes = %g", of, nearest.size, limit)
    return nearest.found


class _Trial(NamedTuple):
    """A step, the bytes a token of messages that are written for it, and their statistics."""

    step: float
    size: float
    found: Statistics


def _by_variance(trial: _Trial, limit: float, beside: float, variance: np.ndarray) -> float:
    """Returns the step of `limit` bytes, if numbers take the same multiple of `gaussian_bits` at all steps."""
    bits = gaussian_bits(variance, trial.step)
    times = (trial.size - beside) / bits if bits else 1 / 8
    return float(np.float32(guess_step(variance, (limit - beside) / times)))


def _secant(tried: Sequence[_Trial], limit: float) -> float | None:
    """Returns the step of `limit` bytes by the line through the last two trials, of the logs of both.

    None where there is no such line: of one trial, or where nearly all numbers are 0.
    """
    if len(tried) < 2:
        return None
    before, last = tried[-2:]
    run, rise = math.log(last.step / before.step), math.log(last.size / before.size)
    if not run or not -4 < rise / run < -0.3:
        return None
    return float(np.float32(last.step * (limit / last.size) ** (run / rise)))


def _bytes_beside(sections: Sequence[Section], tables: Float[np.ndarray, "r l k"]) -> float:
    """Returns the bytes a token that messages have beside their numbers."""
    numbers = np.concatenate([section.numbers for section in sections])
    statistics = cache_codec.fit_statistics(numbers, sections[0].step)
    coding = Coding("0" * 16, (statistics,), {ratio: tables[ratio - 1] for ratio in sections[0].ratios})
    packed = sum(len(cache_codec.pack([(coding, section)], writer=coding.fingerprint)) for section in sections)
    return (packed - cache_codec.bits(statistics, numbers) / 8) / len(numbers)


def gaussian_bits(variance: Float[np.ndarray, " w"], step: float) -> float:
    """Returns the bits of Gaussian numbers in this step, where each is small beside its deviation."""
    each = 0.5 * np.log2(2 * np.pi * np.e * np.maximum(variance.astype(np.float64), 1e-30)) - math.log2(step)
    return float(np.maximum(each, 0).sum())


def guess_step(variance: Float[np.ndarray, " w"], bits: float) -> float:
    """Returns the step of so many `gaussian_bits`."""
    low, high = -40.0, 20.0  # powers of 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_bits(variance, 2.0**middle) > bits else (low, middle)
    return 2.0**high
