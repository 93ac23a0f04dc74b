"""Preference pairs as strings: a prompt, the reply chosen and the one rejected; read from files, split by prompt.

Knows no tokenizer and no array; `lw_jax/data/preferences.py` encodes them.
"""

import dataclasses
import hashlib
import itertools
import json
import logging
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from lw_jax.core.errors import UserError
from lw_jax.data import row_sources
from lw_jax.data.row_fields import Fields

_log = logging.getLogger(__name__)
_FIELDS = ("prompt", "chosen", "rejected")
_FORMATS = (
    'rows {"prompt": ..., "chosen": ..., "rejected": ...} (JSONL or a JSON array), all strings or all lists '
    'of {"role": ..., "content": ...} turns; without "prompt" whole conversations or "\\n\\nHuman: ... '
    '\\n\\nAssistant: ..." transcripts that begin alike'
)
HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"  # the marks of a transcript
_PLAIN, _TRANSCRIPT, _CONVERSATION = "plain", "a transcript without prompt", "conversational"


@dataclasses.dataclass(frozen=True)
class Turn:
    """One message of a conversation."""

    role: Annotated[str, msgspec.Meta(min_length=1)]
    content: str


Text = str | tuple[Turn, ...]


class Row(msgspec.Struct):
    """A row of preferences."""

    chosen: Text
    rejected: Text
    prompt: Text | None = None


@dataclasses.dataclass(frozen=True)
class Preference:
    """A prompt with the better and the worse reply to it: all three strings, or all three turns."""

    id: str  # file and row
    prompt: Text
    chosen: Text
    rejected: Text


def read(source: str, *, split: str = "train", columns: Sequence[str] = ()) -> list[Preference]:
    """Returns the pairs of sources with commas between; a pair of two equal replies is dropped and counted.

    `split` is as in `row_sources.read`, `columns` is data.columns. Raises UserError naming file, line or row, field and
    rule; also where plain and conversational rows are mixed.
    """
    fields = Fields.of(Row, columns, f"known form: {_FORMATS}")
    parts = (row_sources.read(name, fields, split=split) for name in row_sources.split_sources(source))
    found, first, count = [], None, 0
    for where, row in itertools.chain.from_iterable(parts):
        form, pair = _parse(row, where)
        first = first or (form, where)
        if form != first[0]:
            raise UserError(
                f"{where}: the row is {form}, but {first[1]} is {first[0]}: a source has one form; split it in two"
            )
        count += 1
        found += [pair] if pair else []
    if len(found) < count:
        _log.warning(
            "%s: dropped %d of %d pairs: 'chosen' and 'rejected' are the same", source, count - len(found), count
        )
    if not found:
        raise UserError(f"{source}: no pair left of {count}: 'chosen' and 'rejected' are the same in all of them")
    return found


def split(preferences: Sequence[Preference], share: float, seed: int) -> tuple[list[Preference], list[Preference]]:
    """Returns (training, held out): about `share` of the prompts are held out, each for itself.

    A prompt's side is a function of its words and the seed alone: equal prompts (but for white space) are never
    parted, and rows that are added or moved change no other's side. Raises UserError where a side would be empty.
    """
    if not 0 < share < 1:
        raise UserError(f"a held-out share of {share} is not between 0 and 1: name a part of the prompts, as 0.1")
    sides: tuple[list[Preference], list[Preference]] = ([], [])
    for pair in preferences:
        sides[_draw(pair.prompt, seed) < share].append(pair)
    if not all(sides):
        count = len({prompt_key(pair.prompt) for pair in preferences})
        side = "held out" if sides[0] else "left to train on"
        raise UserError(
            f"of {count} different prompts none is {side} with a held-out share of {share} and seed {seed}: "
            "take another share or seed, more prompts, or a file of held-out pairs"
        )
    return sides


def shared(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Counts the items with which both begin."""
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return min(len(first), len(second))


def prompt_key(prompt: Text) -> str:
    """Returns what tells a prompt from others, however its words are spaced."""
    turns = [("", prompt)] if isinstance(prompt, str) else [(turn.role, turn.content) for turn in prompt]
    return json.dumps([(role, " ".join(words.split())) for role, words in turns])


def _draw(prompt: Text, seed: int) -> float:
    """Returns a prompt's place in 0..1."""
    digest = hashlib.blake2b(f"{seed}:{prompt_key(prompt)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _parse(row: Row, where: str) -> tuple[str, Preference | None]:
    """Returns a row's form and its pair; none where both replies are the same."""
    texts = {name: text for name in _FIELDS if (text := getattr(row, name)) is not None}
    kinds = {name: "a string" if isinstance(text, str) else "a list of turns" for name, text in texts.items()}
    if len(set(kinds.values())) > 1:
        mixed = ", ".join(f"{name!r} {kind}" for name, kind in kinds.items())
        raise UserError(f"{where}: mixed forms, {mixed}: all are strings or all are lists of turns")
    prompt, chosen, rejected = (texts.get(name) for name in _FIELDS)
    if isinstance(chosen, str) and isinstance(rejected, str):
        form = _TRANSCRIPT if prompt is None else _PLAIN
        if chosen == rejected:
            return form, None
        if isinstance(prompt, str):
            return form, Preference(where, _nonempty(prompt, where), chosen, rejected)
        return form, _part_transcripts(chosen, rejected, where)
    assert isinstance(chosen, tuple) and isinstance(rejected, tuple)
    if chosen == rejected:
        return _CONVERSATION, None
    if prompt is None:
        end = shared(chosen, rejected)
        prompt, chosen, rejected = chosen[:end], chosen[end:], rejected[end:]
    assert isinstance(prompt, tuple)
    return _CONVERSATION, _check_turns(where, prompt, chosen, rejected)


def _part_transcripts(chosen: str, rejected: str, where: str) -> Preference:
    end = chosen[: shared(chosen, rejected)].rfind(ASSISTANT)
    if end < 0:
        raise UserError(
            f"{where}: field 'prompt' is missing, and 'chosen' and 'rejected' do not begin with the same words up to "
            f"{json.dumps(ASSISTANT)}; add the prompt"
        )
    end += len(ASSISTANT)
    return Preference(where, _nonempty(chosen[:end], where), chosen[end:], rejected[end:])


def _check_turns(
    where: str, prompt: tuple[Turn, ...], chosen: tuple[Turn, ...], rejected: tuple[Turn, ...]
) -> Preference:
    """Returns the pair where the prompt awaits a reply and the replies are the assistant's alone."""
    if not prompt or prompt[-1].role == "assistant":
        found = f"ends with a turn of {prompt[-1].role!r}" if prompt else "has no turn"
        raise UserError(
            f"{where}: the prompt (field 'prompt', or what 'chosen' and 'rejected' begin with alike) {found}; "
            "it must end with the turn that is replied to"
        )
    for name, reply in (("chosen", chosen), ("rejected", rejected)):
        roles = [turn.role for turn in reply]
        if not roles or set(roles) != {"assistant"}:
            raise UserError(
                f"{where}: field {name!r} has behind the prompt the turns {roles}; a reply has turns of 'assistant' "
                "alone, and the other reply must not be its beginning"
            )
    return Preference(where, prompt, chosen, rejected)


def _nonempty(prompt: str, where: str) -> str:
    if not prompt.strip():
        raise UserError(f"{where}: field 'prompt' is empty; fill it or remove the row")
    return prompt
