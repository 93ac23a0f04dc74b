"""Python API of wires of kind "cache": messages that are their readers' own keys and values."""

import copy
import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

from lw_jax.core import tree
from lw_jax.core.errors import UserError
from lw_jax.core.eval_rows import RATIOS
from lw_jax.core.types import Example, Tree
from lw_jax.data import batches, prompt_tokens
from lw_jax.data.prompt_tokens import Layout
from lw_jax.evals import cache_functions, cache_rows
from lw_jax.evals.cache_functions import CacheFunctions
from lw_jax.inference.answering import Answering
from lw_jax.models import cache_codec, cache_message, decoder, kv_prefix, wire
from lw_jax.models.cache_codec import Coding, Section
from lw_jax.recipes.cache_wire import CacheWire
from sharding import place

COLUMNS = 32  # texts are padded to a multiple of it, so that their lengths share programs


class CodedWire(Answering):
    """Frozen readers, each of which writes its own part of a text's message, and answers from it."""

    functions: CacheFunctions

    def __init__(self, recipe: CacheWire, trainable: Tree, frozen: Tree, step: int):
        self.recipe, self.trainable, self.frozen, self.step = recipe, trainable, frozen, step
        self.functions = recipe.functions
        self.codes = recipe.codes(trainable)
        self.ratio: int | None = None  # of `at`

    @functools.cached_property
    def fingerprint(self) -> str:
        """16 hex digits of all codes; a message carries them."""
        return tree.digest(self.trainable["codes"])[:16]

    @functools.cached_property
    def codings(self) -> dict[str, Coding]:
        """Returns what the bytes of each reader's section are coded with."""
        return {name: cache_message.coding_of(code) for name, code in self.trainable["codes"].items()}

    def at(self, ratio: int | None) -> "CodedWire":
        """Returns this wire reading messages at one of the ratios that they were written for; None: their least."""
        clone = copy.copy(self)
        clone.ratio = None if ratio is None else check_ratio(ratio)
        return clone

    def write(self, text: str, *, ratio: int | Sequence[int] | None = None, readers: tuple[str, ...] = ()) -> bytes:
        """Returns the framed message of a text with a section for each reader, or for those that are named.

        `ratio`: positions of the text for one of the message, 1 to 16, or several from which `at` chooses when it is
        read: the numbers are then those of the least, so that a larger one answers less well than if it was written
        alone; None: config.encoder.ratio.
        """
        chosen = self.recipe.cfg.encoder.ratio if ratio is None else ratio
        ratios = sorted({check_ratio(value) for value in np.atleast_1d(chosen).tolist()})
        if not ratios:
            raise UserError("ratio=(): name one ratio or more")
        if not text.strip():
            raise UserError("write: empty; a text of at least one word is needed")
        sections = []
        for name in dict.fromkeys(readers or self.recipe.wire.readers):
            self._check_reader(name)
            sections.append((self.codings[name], self._encode(text.strip(), name, ratios)))
        return cache_codec.pack(sections, writer=self.fingerprint)

    def text_layout(self, reader: str) -> Layout:
        """Returns the layout of texts as long as those that `write` takes: data.context_tokens is of data sets."""
        layout, readers = super().text_layout(reader), self.recipe.wire.readers.values()
        longest = max(other.config.max_positions for other in readers)
        return dataclasses.replace(layout, data=dataclasses.replace(layout.data, context_tokens=longest))

    def _encode(self, text: str, name: str, ratios: list[int]) -> Section:
        layout, config = self.recipe.layout, self.recipe.wire.readers[name].config
        reader = layout.readers[name]
        frame = prompt_tokens.make_frame(name, reader, layout.prompt)
        ids = {
            "own": prompt_tokens.tokenize_contexts(reader.tokenizer, frame, [text])[0],
            "before": prompt_tokens.shared_prefix(name, reader, layout.prompt),
            "again": cache_rows.ask_again(name, layout),
        }
        length = len(ids["own"])
        decoder.check_positions(
            config,
            len(ids["before"]) + 2 * length + len(ids["again"]),
            what=f"reader {name!r}: a text of {length:,} tokens, read twice, takes",
            remedy="shorten the text, or choose another reader",
        )
        columns = {"own": place.round_up(length, COLUMNS)}
        fields = {
            key: batches.Field([tokens], columns.get(key, len(tokens)), reader.tokenizer.pad, left=False).collate([0])
            for key, tokens in ids.items()
        }
        placed, code = self._put(fields, name), self.codes[name]
        keep_queries = any(cache_functions.is_fitted(code, ratio) for ratio in ratios)
        reading = self.functions.read_twice(self.frozen[name], placed, name, keep_queries)
        sent = self.functions.write(code, reading, ratios, name)
        section = cache_message.to_section(dict(zip(ratios, jax.device_get(sent), strict=True)), 0)
        if not section.kept(ratios[-1]).any():
            rule = f"at ratio={ratios[-1]} nothing is kept of a text of {length} tokens"
            raise UserError(f"reader {name!r}: {rule}; give a smaller ratio or a longer text")
        return section

    def describe(self, message: bytes) -> str:
        """Returns the size of each reader's part of a message, in tokens of the text, positions and bytes."""
        sections, parts = cache_codec.read_frame(bytes(message)), []
        for name, coding in self.codings.items():
            if coding.fingerprint in sections:
                section = self.section(message, name)
                tokens, size = len(section.numbers), len(sections[coding.fingerprint])
                kept = (section.kept(ratio).mean(axis=(0, 2)).sum() for ratio in section.ratios)
                positions = " or ".join(f"{count:.1f}" for count in kept)
                parts.append(f"{name}: {tokens} tokens in {positions} positions, {size / tokens:.1f} bytes a token")
        return "; ".join(parts) or f"no part for {', '.join(self.codings)}"

    def section(self, message: bytes, reader: str) -> Section:
        """Returns a reader's part of a message. Raises UserError for one that it has no part in, or of another code."""
        self._check_reader(reader)
        return cache_codec.unpack(bytes(message), self.codings[reader])

    def _open(self, message: bytes, reader: str, *, whole: bool = False) -> Section:
        section = self.section(message, reader)
        tokens = len(section.numbers)
        decoder.check_positions(  # before their keys: few bytes may stand for so many that they take gigabytes
            self.recipe.wire.readers[reader].config,
            tokens,
            what=f"reader {reader!r}: a message of a text of {tokens:,} tokens takes",
            remedy="write a shorter text, or choose another reader",
        )
        if whole and (ratio := self._ratio_of(section)) > 1:
            raise UserError(
                f"prefix_kv: a message at ratio={ratio}: each head keeps tokens of its own, and caches of transformers "
                "have the same in all heads; write the text with ratio=1"
            )
        return section

    def _ratio_of(self, section: Section) -> int:
        if not section.ratios or (self.ratio is not None and self.ratio not in section.ratios):
            wanted = "any" if self.ratio is None else self.ratio
            raise UserError(f"ratio={wanted}: the message was written for {section.ratios or 'none'}; choose of these")
        return section.ratios[0] if self.ratio is None else self.ratio

    def prompt(
        self, opened: list[Section], questions: list[str], reader: str, rows: int = 1, *, whole: bool = False
    ) -> wire.Prompt:
        examples = [Example(question, "?", question, ()) for question in questions]
        batch = batches.encode_prompts(examples, layout=self.recipe.layout)
        fields = self._put(batch["readers"][reader], reader, rows)
        columns = place.round_up(max(len(section.numbers) for section in opened), COLUMNS)
        code, params = self.codes[reader], self.frozen[reader]
        width = self.trainable["codes"][reader]["variance"].shape[0]
        filled = opened + opened[-1:] * (len(fields["after"]["mask"]) - len(opened))
        ratios = [self._ratio_of(section) for section in filled]
        sent = cache_message.of_sections(filled, ratios, width, columns)
        sizes = None
        if not whole and kv_prefix.takes_packed(self.recipe.wire.readers[reader].config):
            sizes = cache_functions.sizes_of(code, columns, min(ratios))
        return self.functions.prompt_from_cache(params, code, fields, sent, reader, sizes)


def check_ratio(ratio: int, *, name: str = "ratio") -> int:
    """Returns the ratio; raises UserError for one that has no table."""
    if ratio not in range(1, RATIOS + 1):
        raise UserError(f"{name}={ratio}: a message has one of 1 to {RATIOS} positions of its text")
    return int(ratio)
