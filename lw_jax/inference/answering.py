"""What every wire that is read has in common: questions, batches, answers and streams."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np

from lw_jax.core.compiling import compile_together
from lw_jax.core.errors import UserError
from lw_jax.core.types import Tree
from lw_jax.data import batches
from lw_jax.data.prompt_tokens import Layout
from lw_jax.evals import answers
from lw_jax.models import decoder, wire
from sharding import place

Several = list[bytes] | tuple[bytes, ...]
SINGLE = bytes | bytearray | memoryview  # one message, not several
Questions = list[str] | tuple[str, ...]


class KVPrompt(NamedTuple):
    """Prompt of a wire of keys and values: those of its first t positions, embeddings of the others.

    `keys_values`: f32 [layers, 2, 1, kv_heads, t, head_dim], the layout of transformers' caches: of each layer, in
    order, keys and values of one row. The first positions are the opening's, then the message's follow. Keys are
    rotated at positions 0 to t - 1.
    `embeddings`: f32 [n, d], of positions t to t + n - 1: task vector and question.
    """

    keys_values: np.ndarray
    embeddings: np.ndarray


def check_questions(questions: Iterable[str], *, name: str = "question") -> None:
    """Raises UserError for an empty one; `name` is the argument's or the flag's."""
    if not all(question.strip() for question in questions):
        raise UserError(f"{name}: empty; a question of at least one word is needed")


class Answering:
    """Frozen readers that answer questions from a message or from the text itself.

    A subclass has `recipe`, `frozen` and `functions`, opens its kind of messages and makes prompts of them.
    """

    recipe: Any
    frozen: Tree
    functions: Any  # `WireFunctions`, or those of a kind

    def text_layout(self, reader: str) -> Layout:
        """Returns the layout of a text that a reader reads itself: other readers' tokens of it are no matter."""
        layout = self.recipe.layout
        return dataclasses.replace(layout, readers={reader: layout.readers[reader]})

    def _open(self, message: bytes, reader: str, *, whole: bool = False) -> Any:
        """Returns what a message says to a reader.

        Raises UserError for one that is not of this wire; `whole`: or that has not the same keys in all heads.
        """
        raise NotImplementedError

    def prompt(
        self, opened: list[Any], questions: list[str], reader: str, rows: int = 1, *, whole: bool = False
    ) -> wire.Prompt:
        """Returns a reader's prompt of opened messages, each with its question, filled up to so many rows.

        `whole`: its memory is that of all keys, where it might be that of the kept ones alone.
        """
        raise NotImplementedError

    def _prompts(
        self, pairs: list[tuple[bytes, str]], reader: str, *, whole: bool = False
    ) -> Iterator[tuple[wire.Prompt, int]]:
        """Yields a reader's prompts on its mesh and how many of their rows are real, config.eval.batch at a time."""
        self._check_reader(reader)
        check_questions(question for _, question in pairs)
        different = dict.fromkeys(message for message, _ in pairs)
        opened = {message: self._open(message, reader, whole=whole) for message in different}
        data = self.recipe.placement.data
        most = max(1, self.recipe.cfg.eval.batch // data) * data
        for start in range(0, len(pairs), most):
            part = pairs[start : start + most]
            # Powers of two, so that numbers of questions share programs.
            rows = min(most, place.round_up(1 << (len(part) - 1).bit_length(), data))
            messages, questions = [opened[message] for message, _ in part], [question for _, question in part]
            yield self.prompt(messages, questions, reader, rows, whole=whole), len(part)

    @overload
    def read(self, message: bytes, reader: str, question: str, *, stream: Literal[False] = False) -> str: ...
    @overload
    def read(self, message: bytes, reader: str, question: str, *, stream: Literal[True]) -> Iterator[str]: ...
    @overload
    def read(self, message: bytes | Several, reader: str, question: Questions) -> list[str]: ...
    def read(
        self, message: bytes | Several, reader: str, question: str | Questions, *, stream: bool = False
    ) -> str | list[str] | Iterator[str]:
        """Returns a reader's answer from a message alone.

        `question`: several for one message, or one for each of several messages: a list of answers, computed
        config.eval.batch at a time. A message is the text encoded: nothing is encoded again.
        `stream`: yields the answer of one question in pieces of text as they are decoded.
        """
        if not stream:
            pairs = pair(message, question)
            prompts = self._prompts(pairs, reader)
            texts = [text for prompt, count in prompts for text in self._answer(reader, prompt, count)]
            return texts[0] if isinstance(question, str) else texts
        if not isinstance(question, str):
            raise UserError(f"read: stream=True with {len(question)} questions: an answer is streamed alone; ask one")
        return self._stream(reader, next(self._prompts(pair(message, question), reader))[0])

    def read_text(self, text: str, reader: str, question: str) -> str:
        self._check_reader(reader)
        return self._answer(reader, self.text_prompt(text, reader, question), 1)[0]

    def text_prompt(self, text: str, reader: str, question: str) -> wire.Prompt:
        batch = batches.encode_prompt(text, question, layout=self.text_layout(reader), rows=("text",))
        fields = self._put(batch["readers"][reader], reader)
        return self.functions.prompt_from_text(self.frozen[reader], fields["text"])

    def compile_answers(self, message: bytes, question: str, readers: Iterable[str], *, text: str = "") -> None:
        """Compiles at once what `read` and, of a text, `read_text` run for a question."""
        compile_together(self._answer_programs(message, question, readers, text))

    def _answer_programs(self, message: bytes, question: str, readers: Iterable[str], text: str) -> Iterator[tuple]:
        for reader in readers:
            prompts = [next(self._prompts([(message, question)], reader))[0]]
            with contextlib.suppress(UserError):  # `read_text` raises it
                prompts += [self.text_prompt(text, reader, question)] if text else []
            for prompt in prompts:
                args = self.frozen[reader], prompt, reader, self.recipe.cfg.eval.max_new_tokens
                yield self.functions.generate_program(reader), args

    @overload
    def prefix_kv(self, message: bytes, reader: str, question: str) -> KVPrompt: ...
    @overload
    def prefix_kv(self, message: bytes | Several, reader: str, question: Questions) -> list[KVPrompt]: ...
    def prefix_kv(self, message: bytes | Several, reader: str, question: str | Questions) -> KVPrompt | list[KVPrompt]:
        """Returns the keys and values that `read` puts before a reader's prompt, and the embeddings behind them.

        Shapes: `KVPrompt`. Several questions (as in `read`): a list. Raises UserError for an unknown reader, a message
        of another encoder, a wire with adapter.kind="embeddings", and of encoder.kind="cache" a message of fewer
        positions than its text: there each head has tokens of its own.
        """
        kv_prompts = []
        for prompt, count in self._prompts(pair(message, question), reader, whole=True):
            cache = self.functions.open_cache(self.frozen[reader], prompt, reader)
            both, valid = np.stack([to_host(cache.k), to_host(cache.v)], axis=1), np.asarray(cache.valid)
            x, mask = to_host(prompt.embeddings), np.asarray(prompt.mask)
            for row in range(count):
                keys_values = both[:, :, row, valid[row]].swapaxes(2, 3)[:, :, None]
                kv_prompts.append(KVPrompt(np.ascontiguousarray(keys_values), x[row, mask[row]]))
        return kv_prompts[0] if isinstance(question, str) else kv_prompts

    def _check_reader(self, reader: str) -> None:
        known = self.recipe.wire.readers
        if reader not in known:
            raise UserError(f"reader {reader!r}: this wire has {', '.join(known)}")

    def _put(self, host: Tree, reader: str | None, rows: int = 1) -> Tree:
        """Places examples for a reader (None: the encoder), the last one repeated up to `rows` and to the data axis."""
        rows = place.round_up(rows, self.recipe.placement.data)
        filled = jax.tree.map(lambda leaf: leaf[np.minimum(np.arange(rows), len(leaf) - 1)], host)
        return self.functions.place(filled, reader)

    def _check_positions(self, reader: str, prompt: wire.Prompt) -> None:
        """Counts real positions: padding takes none."""
        masks = [part.mask for part in (prompt.shared_prefix, prompt.kv_prefix, prompt) if part is not None]
        packed = 0 if prompt.packed is None else prompt.packed.length[:, 0]
        longest = int(jnp.max(sum(jnp.sum(mask, axis=1) for mask in masks) + packed))
        new = self.recipe.cfg.eval.max_new_tokens
        decoder.check_positions(
            self.recipe.wire.readers[reader].config,
            longest + new,
            what=f"reader {reader!r}: the prompt and eval.max_new_tokens={new} take",
            remedy="shorten the text or the question, or choose another reader",
        )

    def _answer(self, reader: str, prompt: wire.Prompt, count: int) -> list[str]:
        self._check_positions(reader, prompt)
        ids = self.functions.generate(self.frozen[reader], prompt, reader, self.recipe.cfg.eval.max_new_tokens)
        rows = ([int(token) for token in row if token >= 0] for row in np.asarray(ids)[:count])
        return [answers.first_line(self.recipe.tokenizers[reader].decode(tokens)) for tokens in rows]

    def _stream(self, reader: str, prompt: wire.Prompt) -> Iterator[str]:
        """Yields the pieces of the answer to a prompt's first row; joined they are what `_answer` returns."""
        self._check_positions(reader, prompt)
        params, tokenizer = self.frozen[reader], self.recipe.tokenizers[reader]
        most, stops = self.recipe.cfg.eval.max_new_tokens, self.recipe.wire.readers[reader].stops
        tokens, streamed = [], ""
        for token in self.functions.tokens(params, prompt, reader, most):
            token_id = int(token[0])
            if token_id in stops:
                break
            tokens.append(token_id)
            text = tokenizer.decode(tokens)
            line = answers.first_line(text)
            if "\n" in text.strip():
                break
            # A piece of a character may wait for its other bytes.
            piece = line.rstrip("\ufffd")[len(streamed) :]
            if piece:
                yield piece
                streamed += piece
        tail = answers.first_line(tokenizer.decode(tokens))[len(streamed) :]
        if tail:
            yield tail


def pair(message: bytes | Several, question: str | Questions) -> list[tuple[bytes, str]]:
    if isinstance(question, str):
        if not isinstance(message, SINGLE):
            raise UserError(f"{len(message)} messages and one question: give a list with a question for each message")
        return [(bytes(message), question)]
    messages = [message] * len(question) if isinstance(message, SINGLE) else message
    if len(messages) != len(question) or not question:
        raise UserError(f"{len(messages)} messages and {len(question)} questions: give one for each, at least one")
    return list(zip(map(bytes, messages), question, strict=True))


def to_host(array: jax.Array) -> np.ndarray:
    """Returns a device's array in fp32."""
    return np.asarray(array).astype(np.float32)
