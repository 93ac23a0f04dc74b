"""Preference pairs as strings: a prompt, the reply chosen and the one rejected; read from files, split by prompt.

Knows no tokenizer and no array; `lw_jax/data/preferences.py` encodes them.
"""

import dataclasses
import hashlib
import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from lw_jax.core import schema
from lw_jax.core.errors import UserError
from lw_jax.data import row_sources
from lw_jax.data.chat_templates import SAID, texts_of
from lw_jax.data.row_fields import Fields

_log = logging.getLogger(__name__)
_FIELDS = ("prompt", "chosen", "rejected")
_FORMATS = (
    'rows {"prompt": ..., "chosen": ..., "rejected": ...} (JSONL or a JSON array), all strings or all lists '
    'of {"role": ..., "content": ...} turns; without "prompt" whole conversations or "\\n\\nHuman: ... '
    '\\n\\nAssistant: ..." transcripts that begin alike'
)
_OURS = frozenset(("messages", "add_generation_prompt", "continue_final_message", "chat_template"))
HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"  # the marks of a transcript
_PLAIN, _TRANSCRIPT, _CONVERSATION = "plain", "a transcript without prompt", "conversational"

Turn = dict[str, Any]  # one message of a conversation: role, content and what else the row has for the template
Text = str | tuple[Turn, ...]


class Row(msgspec.Struct):
    """A row of preferences; the last three are the chat template's, as TRL gives them."""

    chosen: Text
    rejected: Text
    prompt: Text | None = None
    tools: list[dict[str, Any]] | str | None = None  # a string: JSON
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _Values(msgspec.Struct):
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None


class _Part(msgspec.Struct):
    type: Literal["text"]
    text: str


class _Turn(msgspec.Struct):
    role: Annotated[str, msgspec.Meta(min_length=1)]
    content: str | list[_Part] | None = None
    reasoning_content: str | None = None
    thinking: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    function_call: dict[str, Any] | None = None


class _Conversation(msgspec.Struct):
    chosen: tuple[_Turn, ...]
    rejected: tuple[_Turn, ...]
    prompt: tuple[_Turn, ...] = ()


@dataclasses.dataclass(frozen=True)
class Preference:
    """A prompt with the better and the worse reply to it: all three strings, or all three turns."""

    id: str  # file and row
    prompt: Text
    chosen: Text
    rejected: Text
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the chat template, beside the turns


def read(source: str, *, split: str = "train", columns: Sequence[str] = ()) -> list[Preference]:
    """Returns the pairs of sources with commas between; a pair of two equal replies is dropped and counted.

    `split` is as in `row_sources.read`, `columns` is data.columns. Raises UserError naming file, line or row, field and
    rule; also where plain and conversational rows are mixed.
    """
    fields = Fields.of(Row, columns, f"known form: {_FORMATS}", sparse=True)
    parts = (row_sources.read(name, fields, split=split) for name in row_sources.split_sources(source))
    pairs, first, count = [], None, 0
    for where, row in itertools.chain.from_iterable(parts):
        form, pair = _parse(row, where)
        first = first or (form, where)
        if form != first[0]:
            raise UserError(
                f"{where}: the row is {form}, but {first[1]} is {first[0]}: a source has one form; split it in two"
            )
        count += 1
        pairs += [dataclasses.replace(pair, values=_values(row, where))] if pair else []
    if len(pairs) < count:
        _log.warning(
            "%s: dropped %d of %d pairs: 'chosen' and 'rejected' are the same", source, count - len(pairs), count
        )
    if turns := sum(HUMAN in pair.chosen or HUMAN in pair.rejected for pair in pairs):
        _log.warning("%s: in %d of %d pairs a reply holds %r: it is trained too", source, turns, len(pairs), HUMAN)
    if doubled := sum(_repeats_prompt(pair) for pair in pairs):
        _log.warning(
            "%s: in %d of %d pairs both replies begin with their prompt: it is read twice and trained too; write the "
            "replies alone",
            source,
            doubled,
            len(pairs),
        )
    if not pairs:
        raise UserError(f"{source}: no pair left of {count}: 'chosen' and 'rejected' are the same in all of them")
    return pairs


def split(preferences: Sequence[Preference], share: float, seed: int) -> tuple[list[Preference], list[Preference]]:
    """Returns (training, held out): about `share` of the prompts are held out, each for itself.

    A prompt's side is a function of its words and the seed alone: equal prompts (but for white space) are never
    parted, and rows that are added or moved change no other's side. Raises UserError where a side would be empty.
    """
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
    for place, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            return place
    return min(len(first), len(second))


def prompt_key(prompt: Text) -> str:
    """Returns what tells a prompt from others, however its words are spaced."""
    turns = [{"role": "", "content": prompt}] if isinstance(prompt, str) else prompt
    parts = [[turn["role"], " ".join(" ".join(texts_of(turn)).split())] for turn in turns]
    for part, turn in zip(parts, turns, strict=True):
        part += [json.dumps(turn[key], sort_keys=True) for key in SAID[1:] if turn.get(key)]
    return json.dumps(parts)


def _draw(prompt: Text, seed: int) -> float:
    digest = hashlib.blake2b(f"{seed}:{prompt_key(prompt)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _parse(row: Row, where: str) -> tuple[str, Preference | None]:
    """Returns a row's form and its pair; none where both replies are the same."""
    texts = {name: text for name in _FIELDS if (text := getattr(row, name)) is not None}
    kinds = {name: "a string" if isinstance(text, str) else "a list of turns" for name, text in texts.items()}
    if len(set(kinds.values())) > 1:
        mixed = ", ".join(f"{name!r} {kind}" for name, kind in kinds.items())
        whole = "where 'chosen' and 'rejected' are whole conversations, leave the prompt out: data.columns=prompt:"
        raise UserError(f"{where}: mixed forms, {mixed}: all are strings or all are lists of turns; {whole}")
    prompt, chosen, rejected = (texts.get(name) for name in _FIELDS)
    if isinstance(chosen, str) and isinstance(rejected, str):
        form = _TRANSCRIPT if prompt is None else _PLAIN
        if chosen == rejected:
            return form, None
        if not isinstance(prompt, str):
            return form, _part_transcripts(chosen, rejected, where)
        if not prompt.strip():
            raise UserError(f"{where}: field 'prompt' is empty; fill it or remove the row")
        return form, Preference(where, prompt, chosen, rejected)
    _check_types(texts, where)
    if chosen == rejected:
        return _CONVERSATION, None
    prompt, chosen, rejected = (
        tuple(_without_none(turn) for turn in text or () if not isinstance(turn, str))
        for text in (prompt, chosen, rejected)
    )
    if row.prompt is None:  # turns may differ in what is no part of them, as an id
        end = shared(
            *([{key: turn.get(key) for key in ("role", *SAID)} for turn in text] for text in (chosen, rejected))
        )
        prompt, chosen, rejected = chosen[:end], chosen[end:], rejected[end:]
    return _CONVERSATION, _check_turns(where, prompt, chosen, rejected)


def _check_types(texts: Mapping[str, Any], where: str) -> None:
    """Raises UserError naming the field of a turn that is of another type, or the turn that says nothing."""
    conversation = schema.convert(texts, _Conversation, where=where, remedy=f"known form: {_FORMATS}")
    for name in texts:
        for number, turn in enumerate(getattr(conversation, name)):
            if turn.content is None and not (turn.tool_calls or turn.function_call or turn.refusal):
                raise UserError(
                    f"{where}: {name}[{number}]: object missing required field content, found "
                    f"{', '.join(map(repr, texts[name][number]))}; known form: {_FORMATS}"
                )


def _without_none(turn: Mapping[str, Any]) -> Turn:
    return {key: value for key, value in turn.items() if value is not None}


def _values(row: Row, where: str) -> dict[str, Any]:
    tools, remedy = row.tools, "write a list of JSON schemas, or the JSON text of one"
    if isinstance(tools, str):
        tools = schema.decode(tools or "[]", list[dict[str, Any]], where=f"{where}: tools", remedy=remedy)
    values = {"tools": tools or None, "documents": row.documents or None, **(row.chat_template_kwargs or {})}
    schema.convert(values, _Values, where=f"{where}: chat_template_kwargs", remedy="write lists of objects")
    if reserved := _OURS.intersection(values):
        raise UserError(f"{where}: chat_template_kwargs has {sorted(reserved)}, which the recipe sets; remove it")
    return _without_none(values)


def _repeats_prompt(pair: Preference) -> bool:
    texts = (pair.prompt, pair.chosen, pair.rejected)
    prompt, *replies = (text.strip() if isinstance(text, str) else "" for text in texts)
    return bool(prompt) and all(reply.startswith(prompt) for reply in replies)


def _part_transcripts(chosen: str, rejected: str, where: str) -> Preference:
    end = chosen[: shared(chosen, rejected)].rfind(ASSISTANT)
    if end < 0:
        raise UserError(
            f"{where}: field 'prompt' is missing, and 'chosen' and 'rejected' do not begin with the same words up to "
            f"{json.dumps(ASSISTANT)}; add the prompt, or name its column: data.columns=prompt:COLUMN"
        )
    end += len(ASSISTANT)
    return Preference(where, chosen[:end], chosen[end:], rejected[end:])


def _check_turns(
    where: str, prompt: tuple[Turn, ...], chosen: tuple[Turn, ...], rejected: tuple[Turn, ...]
) -> Preference:
    """Returns the pair where the prompt awaits a reply and the replies are the assistant's alone."""
    if not prompt or prompt[-1]["role"] == "assistant":
        fault = f"ends with a turn of {prompt[-1]['role']!r}" if prompt else "has no turn"
        raise UserError(
            f"{where}: the prompt (field 'prompt', or what 'chosen' and 'rejected' begin with alike) {fault}; "
            "it must end with the turn that is replied to"
        )
    for name, reply in (("chosen", chosen), ("rejected", rejected)):
        roles = [turn["role"] for turn in reply]
        if not roles or set(roles) != {"assistant"}:
            raise UserError(
                f"{where}: field {name!r} has behind the prompt the turns {roles}; a reply has turns of 'assistant' "
                "alone, and the other reply must not be its beginning"
            )
    return Preference(where, prompt, chosen, rejected)
