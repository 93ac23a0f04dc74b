"""Preference pairs as token ids: tokenised once, then collated into static-shape batches of numpy arrays.

The only module that decides the end of a prompt and cuts; cut and dropped pairs are counted and reported. A flag is at
its own token: the loss shifts by one.
"""

import dataclasses
import logging
from collections.abc import Sequence

import numpy as np

from lw_jax.core.config_sections import DPO
from lw_jax.core.files import content_hash
from lw_jax.data import example_counts, prompt_tokens
from lw_jax.data.batches import Batch, width_of
from lw_jax.data.data_schedule import Stream
from lw_jax.data.example_counts import DropCounts
from lw_jax.data.frozen_cache import CachedRows, key_of
from lw_jax.data.pair_texts import Writer, Written
from lw_jax.data.pairs import Preference, shared
from lw_jax.data.prompt_tokens import Reader
from lw_jax.data.tokens import Tokenizer

_log = logging.getLogger(__name__)

_REASONS = {
    "max_prompt": "dropped: the prompt is longer than max_prompt",
    "prompt": "dropped: the prompt alone fills max_length",
    "length": "dropped: prompt and longer reply exceed max_length, and truncation does not help",
    "same": "dropped: both replies have the same tokens (as they are, or as they are cut)",
    "nothing": "dropped: the prompt has no token of its own, its only one is shared with a reply",
    "past": "prompts without reasoning of earlier turns, which the chat template leaves out",
    "prompt_cut": "prompts cut",
    "reply_cut": "pairs with a reply cut at its end, which then has no terminator",
    "boundary": "pairs split before the last token of their prompt, because it grows together with a reply",
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """Token ids i32 of a prompt and of two replies with their end."""

    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray

    @property
    def length(self) -> int:
        """Counts the tokens of the prompt with the longer reply."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


@dataclasses.dataclass(frozen=True)
class Preferences(Stream):
    """A tokenised data set of pairs; `index` in a batch is a position in `examples`. Nothing is sent."""

    examples: tuple[Preference, ...]
    pairs: tuple[Pair, ...]
    counts: dict[str, int]  # of all buckets together: given, kept, and what was dropped or cut for which reason
    pad: int
    name: str  # the reader that a batch is for
    length: int  # static, of every row
    bucket: tuple[int, int] = (1, 1)  # which of how many
    training: bool = False  # in every batch: dropout is for training only
    reference: CachedRows | None = None  # what a frozen model gives each pair: "reference" f32[b 2]
    task: str = "preference"

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def padding(self) -> float:
        """Returns which share of all slots of all rows holds no token."""
        tokens = sum(2 * len(pair.prompt) + len(pair.chosen) + len(pair.rejected) for pair in self.pairs)
        return 1 - tokens / (2 * len(self) * self.length)

    def collate(self, indices: Sequence[int], *, sizes: np.ndarray | None = None) -> Batch:
        """Returns ids i32[b 2 t], mask and completion bool[b 2 t] (chosen, rejected), weights f32[b 1] and index.

        With them training f32[b], 0 or 1, and, where it is kept, reference f32[b 2].
        """
        shape = (len(indices), 2, self.length)
        ids, mask, completion = np.full(shape, self.pad, np.int32), np.zeros(shape, bool), np.zeros(shape, bool)
        for row, index in enumerate(indices):
            pair = self.pairs[index]
            start = len(pair.prompt)
            for side, reply in enumerate((pair.chosen, pair.rejected)):
                end = start + len(reply)
                ids[row, side, :start] = pair.prompt
                ids[row, side, start:end] = reply
                mask[row, side, :end] = True
                completion[row, side, start:end] = True
        weights = np.ones((len(indices), 1), np.float32)
        fields = {"ids": ids, "mask": mask, "completion": completion, "weights": weights}
        fields["training"] = np.full(len(indices), self.training, np.float32)
        if self.reference is not None:
            fields |= self.reference(indices)
        return {"source": {}, "readers": {self.name: fields}, "index": np.array(indices, np.int32)}

    def probe(self) -> Batch:
        reference = self.reference and dataclasses.replace(self.reference, blank=True)
        return dataclasses.replace(self, reference=reference).collate([0])

    def digest(self) -> str:
        ids = (each for pair in self.pairs for each in (pair.prompt, pair.chosen, pair.rejected))
        return content_hash([self.length, key_of(*ids).hex()])

    def describe(self) -> list[str]:
        number, buckets = self.bucket
        lines = example_counts.describe(self.counts, "preference pairs", _REASONS) if number == 1 else []
        named = self.name + (f", lengths {number} of {buckets}" if buckets > 1 else "")
        prompt = max(len(pair.prompt) for pair in self.pairs)
        longest = max(pair.length for pair in self.pairs)
        lines.append(
            f"  {named}: {len(self):,} pairs, longest prompt {prompt:,} tokens, longest pair {longest:,}, padded to "
            f"{self.length:,} ({self.padding:.0%} padding)"
        )
        return lines


def encode(
    preferences: Sequence[Preference],
    *,
    tokenizer: Tokenizer,
    template: str,
    limits: DPO,
    name: str = "policy",
) -> Preferences:
    """Returns the pairs as token ids.

    `template` is "plain" (strings as they are, one EOS behind a reply) or "chat" (the tokenizer's own template, a reply
    ends with its turn's terminator); of `limits` lengths and truncation are read. Raises UserError where no pair is
    left, and for rows that do not fit the template.
    """
    writer = Writer(tokenizer, template == "chat")
    # Where a prompt is cut, its end or what follows it is still read.
    cuts = limits.truncation == "keep_end" or (limits.truncation == "keep_start" and limits.max_prompt)
    limit = None if cuts else max(limits.max_length, limits.max_prompt)
    split = _tokenize([writer.write(pair) for pair in preferences], Reader(tokenizer, template), limit)
    for (file, key), count in writer.unread.items():
        _log.warning("%s: not read by the chat template: %r (%d rows)", file, key, count)
    pairs, counts = _apply_limits(preferences, split, limits, tokenizer)
    counts["past"] = writer.past
    return Preferences(
        examples=tuple(preferences[i] for i in pairs),
        pairs=tuple(pairs.values()),
        counts=counts,
        pad=tokenizer.pad,
        name=name,
        length=width_of(max(pair.length for pair in pairs.values()), limits.max_length),
    )


def part(whole: Preferences, buckets: int) -> list[Preferences]:
    """Returns a data set in so many, no more than it has pairs, the shortest first, about as many in each."""
    order = sorted(range(len(whole)), key=lambda i: whole.pairs[i].length)
    parts = [sorted(chunk.tolist()) for chunk in np.array_split(np.array(order), buckets)]
    return [
        dataclasses.replace(
            whole,
            examples=tuple(whole.examples[i] for i in indices),
            pairs=tuple(whole.pairs[i] for i in indices),
            length=width_of(max(whole.pairs[i].length for i in indices), whole.length),
            bucket=(number, buckets),
        )
        for number, indices in enumerate(parts, 1)
    ]


def _tokenize(written: Sequence[Written], reader: Reader, limit: int | None) -> list[tuple[Pair, bool]]:
    """Returns each pair's ids, and whether its prompt lost tokens to the replies; far beyond a limit, some beyond it.

    A reply is tokenised after its prompt: alone, SentencePiece would mark it as the start of a word. Where
    that changes the prompt's own last tokens, the prompt ends where all three still agree.
    """

    def read(texts: list[str]) -> list[np.ndarray]:
        return prompt_tokens.with_begin(reader, prompt_tokens.tokenize(reader.tokenizer, texts, limit=limit))

    prompts = read([row.prompt for row in written])
    chosen = read([row.prompt + row.chosen.text for row in written])
    rejected = read([row.prompt + row.rejected.text for row in written])
    pairs = []
    for row, prompt, better, worse in zip(written, prompts, chosen, rejected, strict=True):
        ids = prompt.tolist()  # numpy's own numbers compare several times as slowly
        end = min(shared(ids, better.tolist()), shared(ids, worse.tolist()))
        replies = ((better, row.chosen), (worse, row.rejected))
        pair = Pair(prompt[:end], *(np.append(ids[end:], np.int32(reply.end)) for ids, reply in replies))
        pairs.append((pair, end < len(prompt)))
    return pairs


def _apply_limits(
    preferences: Sequence[Preference],
    split: Sequence[tuple[Pair, bool]],
    limits: DPO,
    tokenizer: Tokenizer,
) -> tuple[dict[int, Pair], dict[str, int]]:
    """Returns the pairs kept by position, within the limits, and what was done how often."""
    within = f"dpo.max_length={limits.max_length}, max_prompt={limits.max_prompt}, truncation={limits.truncation!r}"
    drops = DropCounts([preference.id for preference in preferences], _REASONS, f"pairs within {within}")
    pairs: dict[int, Pair] = {}
    for i, (pair, merged) in enumerate(split):
        fitted = _fit(pair, limits, _opening(pair.prompt, tokenizer))
        if isinstance(fitted, str):
            sizes = (
                f"prompt {len(pair.prompt)}, chosen {len(pair.chosen)}, rejected {len(pair.rejected)} tokens at least"
            )
            drops.drop(i, fitted, sizes)
            continue
        pairs[i] = fitted
        cut = {
            "prompt_cut": len(fitted.prompt) < len(pair.prompt),
            "reply_cut": len(fitted.chosen) < len(pair.chosen) or len(fitted.rejected) < len(pair.rejected),
            "boundary": merged,
        }
        for reason in filter(cut.get, cut):
            drops.cut[reason].add(i)
    drops.apply_policy("drop")
    return pairs, drops.counts()


def _opening(prompt: np.ndarray, tokenizer: Tokenizer) -> int:
    """Counts what a cut leaves at the beginning of a prompt: BOS, also where only the template writes it."""
    begin = tokenizer.begin or (tokenizer.backend.bos_token_id,)
    return len(begin) if tuple(prompt[: len(begin)].tolist()) == begin else 0


def _fit(pair: Pair, limits: DPO, head: int) -> Pair | str:
    """Returns the pair within the limits, or the reason why it is dropped."""
    if not len(pair.prompt):
        return "nothing"
    if limits.max_prompt and len(pair.prompt) > limits.max_prompt:
        if limits.truncation == "drop" or limits.max_prompt <= head:
            return "max_prompt"
        size = limits.max_prompt
        prompt = pair.prompt[:size] if limits.truncation == "keep_start" else _keep_end(pair.prompt, size, head)
        pair = dataclasses.replace(pair, prompt=prompt)
    room = limits.max_length - len(pair.prompt)
    if room <= 0:
        return "prompt"
    if pair.length > limits.max_length:
        left = limits.max_length - (pair.length - len(pair.prompt))  # for the prompt, beside a whole reply
        if limits.truncation == "drop" or (limits.truncation == "keep_end" and left <= head):
            return "length"
        if limits.truncation == "keep_start":
            pair = dataclasses.replace(pair, chosen=pair.chosen[:room], rejected=pair.rejected[:room])
        else:
            pair = dataclasses.replace(pair, prompt=_keep_end(pair.prompt, left, head))
    return "same" if np.array_equal(pair.chosen, pair.rejected) else pair


def _keep_end(prompt: np.ndarray, size: int, head: int) -> np.ndarray:
    head = min(head, size)
    return np.concatenate([prompt[:head], prompt[len(prompt) - (size - head) :]])
