"""Preference pairs as texts: prompts and replies in a chat template or as they are, and where a reply ends.

What a row says must stand in what its chat template writes; a row of which something is left out is refused.
"""

import re
from collections import Counter
from typing import NamedTuple

from lw_jax.core.errors import UserError
from lw_jax.data import chat_templates
from lw_jax.data.chat_templates import described, texts_of
from lw_jax.data.pairs import HUMAN, Preference, Text, Turn, shared
from lw_jax.data.tokens import Tokenizer

_OPENED = re.compile(r"<[^<>|]*>\s*\Z")
_ROW = re.compile(r"(:\d+|\[\d+\])\Z")  # of a file
_SHOWN = 60  # characters of a text in a message


class Reply(NamedTuple):
    """A reply as the text that is tokenised."""

    text: str  # without what ends it
    end: int  # the id that does


class Written(NamedTuple):
    """A pair as texts."""

    prompt: str
    chosen: Reply
    rejected: Reply


class Writer:
    """Writes pairs as the texts that are tokenised, each reply without the one token that ends it."""

    def __init__(self, tokenizer: Tokenizer, chat: bool) -> None:
        self.tokenizer, self.chat = tokenizer, chat
        tokens = tokenizer.backend.convert_ids_to_tokens(list(tokenizer.stops))
        self.ends = {token: i for token, i in zip(tokens, tokenizer.stops, strict=True) if token}
        any_end = "|".join(map(re.escape, self.ends))
        self.opening = re.compile(rf".*(?:{any_end})(.+)\Z", re.DOTALL)  # what stands behind the last end
        self.tail = re.compile(rf"({any_end})(?:\s|{any_end})*\Z")  # the first end with nothing but ends behind it
        self.begin = str(tokenizer.backend.bos_token or "")
        self.past = 0  # pairs of which the template leaves out earlier reasoning
        self.unread = Counter[tuple[str, str]]()  # file and key that changes nothing -> rows

    def write(self, pair: Preference) -> Written:
        """Returns the texts of a pair. Raises UserError naming its row where they do not fit the template."""
        if self.chat:
            return self._write_chat(pair)
        if isinstance(pair.prompt, str) and isinstance(pair.chosen, str) and isinstance(pair.rejected, str):
            if pair.values:
                raise UserError(f'{pair.id}: {sorted(pair.values)} are for a chat template; use template="chat"')
            chosen, rejected = (self._finish(reply.removeprefix(self.begin)) for reply in (pair.chosen, pair.rejected))
            return Written(pair.prompt, chosen, rejected)
        raise UserError(f'{pair.id}: conversational rows are written by a chat template; use template="chat"')

    def _write_chat(self, pair: Preference) -> Written:
        if isinstance(pair.prompt, str) and pair.prompt.startswith(HUMAN):
            raise UserError(
                f"{pair.id}: a transcript would be one turn of the user in the chat template; "
                'use template="plain", or write the rows as turns'
            )
        turns = self._turns(pair.prompt, "user")
        prompt = self._render(pair, turns, reply=True)
        self._check(pair, prompt, [*described(pair.values), *chat_templates.said(turns, "prompt", earlier=True)])
        opened = _OPENED.search(prompt)  # the prompt may end with the tag that opens the reply's reasoning
        replies, read = [], set()
        for name, text in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            answer = self._turns(text, "assistant")
            if isinstance(answer[0].get("content"), str):
                answer[0]["content"] = answer[0]["content"].removeprefix(self.begin)
            if isinstance(answer[-1].get("content"), str):
                answer[-1]["content"] = self.tail.sub("", answer[-1]["content"])  # the template writes its own
            whole = self._render(pair, turns + answer, reply=False)
            if not whole.startswith(prompt):
                start = shared(whole, prompt)
                raise UserError(
                    f"{pair.id}: the chat template of {self.tokenizer.backend.name_or_path} writes the prompt with "
                    f"{name!r} other than the prompt alone ({_shorten(whole[start:])} in place of "
                    f"{_shorten(prompt[start:])} at its character {start}), so it is not known where the reply begins; "
                    'use template="plain"'
                )
            reply = whole.removeprefix(prompt)
            self._check(pair, (opened[0] if opened else "") + reply, chat_templates.said(answer, name))
            read |= self._find_read(pair, turns + answer, prompt, whole)
            # A template that opens a turn whatever it is asked, as Llama 3's first one did, opens one here too.
            opened_again = self.opening.match(reply)
            if opened_again and prompt.endswith(opened_again[1]):
                reply = reply.removesuffix(opened_again[1])
            replies.append(self._finish(reply))
        self.unread.update((_ROW.sub("", pair.id), key) for key in _beside(pair) - read)
        return Written(prompt, *replies)

    def _turns(self, text: Text, role: str) -> list[Turn]:
        """Returns turns for the template, parts joined where it does not read them."""
        turns = [{"role": role, "content": text}] if isinstance(text, str) else [dict(turn) for turn in text]
        for turn in turns:
            if isinstance(turn.get("content"), list) and not self.tokenizer.reads_parts:
                turn["content"] = "".join(texts_of(turn))
        return turns

    def _render(self, pair: Preference, turns: list[Turn], *, reply: bool, without: str = "") -> str:
        turns = [{key: value for key, value in turn.items() if key != without} for turn in turns]
        values = {key: value for key, value in pair.values.items() if key != without}
        try:
            return self.tokenizer.render(turns, reply=reply, values=values)
        except UserError as error:
            raise UserError(f"{pair.id}: {error}") from error

    def _check(self, pair: Preference, written: str, texts: list[chat_templates.Said]) -> None:
        """Raises UserError where the template leaves out what the row says; reasoning of earlier turns is counted."""
        lost = chat_templates.find_lost(written, texts)
        self.past += any(item.thought for item in lost)
        for item in lost:
            if not item.thought:
                raise UserError(
                    f"{pair.id}: {item.where}: {_shorten(item.text)} is not in what the chat template of "
                    f"{self.tokenizer.backend.name_or_path} writes ({_shorten(written)}); take it out of the row, or "
                    "give the model's folder a template that writes it (chat_template.jinja)"
                )

    def _find_read(self, pair: Preference, turns: list[Turn], prompt: str, whole: str) -> set[str]:
        """Returns which further keys of the row and its turns change what the template writes."""
        read = set()
        for key in _beside(pair):
            try:
                bare = self._render(pair, turns, reply=False, without=key)
                bare_prompt = self._render(pair, self._turns(pair.prompt, "user"), reply=True, without=key)
            except UserError:  # it needs the key
                bare = bare_prompt = ""
            if (bare_prompt, bare) != (prompt, whole):
                read.add(key)
        return read

    def _finish(self, text: str) -> Reply:
        if match := self.tail.search(text):
            return Reply(text[: match.start()], self.ends[match[1]])
        return Reply(text.rstrip() if self.chat else text, self.tokenizer.eos)


def _beside(pair: Preference) -> set[str]:
    """Returns the keys of a row's turns, and of its template's values, that `find_lost` does not look for."""
    texts = [text for text in (pair.prompt, pair.chosen, pair.rejected) if not isinstance(text, str)]
    keys = {key for text in texts for turn in text for key in turn}
    return (keys | set(pair.values)) - {"role", "tools", "documents", *chat_templates.SAID}


def _shorten(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
