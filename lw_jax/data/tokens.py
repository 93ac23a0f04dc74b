"""Text to token ids and back, for every reader and for the bytes encoder.

A reader's tokenizer comes from a folder (`tokenizer.json`) or from the metadata of a .gguf file. It adds no token by
itself: `begin` is put in front where a prompt is built (`marked`). Only the tokenizer of a BERT-class
encoder puts marks around a text, because its body has learned with them.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from lw_jax.core.errors import UserError
from lw_jax.core.files import content_hash
from lw_jax.data import chat_templates
from lw_jax.hub import tokenizer_files
from lw_jax.hub.config_json import Kind, read_or_default

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Tokens by which the supported families end a turn or a document, where the vocabulary marks them special.
_ENDINGS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "</s>")

# Letters of several scripts, numbers, blanks, code: tokenizers that differ give it different ids.
_PROBE = (
    "Mara Ellis' 3rd caf\u00e9 costs 1,234.50\u20ac?  \u6771\u4eac \u041f\u0440\u0438\n\tdef f(x_1): return x**2\n\n"
)
BYTES_END = "<|endoftext|>"  # id 256 of the byte tokenizer
Marks = tuple[tuple[int, ...], tuple[int, ...]]  # ids before and after every text


def marked(ids: Sequence[int] | np.ndarray, begin: Sequence[int], end: Sequence[int] = ()) -> np.ndarray:
    """Returns ids i32 between first and last ones, each put there unless the text has brought them itself.

    The one rule of BOS and EOS: whatever adds them calls it.
    """
    ids, first, last = (np.asarray(part, np.int32) for part in (ids, begin, end))
    parts = [
        *([] if np.array_equal(ids[: len(first)], first) else [first]),
        ids,
        *([] if len(last) and np.array_equal(ids[-len(last) :], last) else [last]),
    ]
    return np.concatenate(parts) if len(parts) > 1 else ids


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A reader's own tokenizer; special tokens written in a text are parsed, none is added."""

    backend: "PreTrainedTokenizerFast"
    begin: tuple[int, ...]  # what the tokenizer itself puts before a text: (BOS,) for Llama, () for Qwen
    eos: int  # ends a document, and a turn where no chat template writes another of `stops`
    stops: tuple[int, ...]  # ids at which generation ends, eos first
    pad: int
    vocab: int  # highest id + 1

    @property
    def special(self) -> Marks:
        return (), ()

    def encode(self, text: str) -> list[int]:
        return self.backend.backend_tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Returns each text's ids, i32."""
        encoded = self.backend.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(e.ids, np.int32) for e in encoded]

    def encode_behind(self, texts: list[str]) -> list[np.ndarray]:
        """Returns the ids of texts that follow another one: without the blank that SentencePiece puts before a text."""
        if not self.adds_blank:
            return self.encode_batch(texts)
        # It puts none behind a break; breaks and blanks may be one token.
        marks = ["a" if text[:1].isspace() else "\n" for text in texts]
        starts = {mark: self.encode(mark) for mark in "a\n"}
        rows = self.encode_batch([mark + text for mark, text in zip(marks, texts, strict=True)])
        for i, (mark, text) in enumerate(zip(marks, texts, strict=True)):
            size = len(starts[mark])
            joint = rows[i][:size].tolist() != starts[mark]  # a token of mark and text
            rows[i] = self.encode_batch([text])[0] if joint else rows[i][size:]
        return rows

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids, special tokens skipped, nothing tidied."""
        return self.backend.backend_tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    @functools.cached_property
    def adds_blank(self) -> bool:
        """Returns whether a text's first word is encoded as one behind a blank, as SentencePiece does."""
        first = self.backend.convert_ids_to_tokens(self.encode("a")[:1])
        return bool(first) and first[0].startswith("\u2581")

    def starts(self, text: str) -> list[int]:
        """Returns the place in the text at which each of its tokens begins, never falling.

        That is the blank before a word, which some tokenizers (GPT-NeoX's) leave out of its token's place.
        """
        offsets = self.backend.backend_tokenizer.encode(text, add_special_tokens=False).offsets
        reached = itertools.accumulate((end for _, end in offsets), max, initial=0)
        return [min(start, before) for (start, _), before in zip(offsets, reached, strict=False)]

    def encode_spans(self, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns each text's ids i32[n] and their characters i32[n 2]: the first, and the one after the last."""
        encoded = self.backend.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        return [(np.array(e.ids, np.int32), np.array(e.offsets, np.int32).reshape(-1, 2)) for e in encoded]

    def render_chat(self, user: str, *, system: str = "") -> str:
        """Returns the prompt in the tokenizer's own chat template, up to where the answer begins.

        The text holds every special token that the template writes (BOS too), so `begin` is not put before it.
        """
        turns = [{"role": "system", "content": system}] if system else []
        return self.render([*turns, {"role": "user", "content": user}], reply=True)

    def render(
        self, turns: Sequence[Mapping[str, Any]], *, reply: bool, values: Mapping[str, Any] | None = None
    ) -> str:
        """Returns a conversation in the chat template; with `reply`, up to where the assistant's begins.

        `turns` and `values`, as "tools", are given to the template as transformers gives them.
        """
        context = {"tools": None, "documents": None, "date_string": f"{chat_templates.DATE:%d %b %Y}", **(values or {})}
        context |= {"messages": chat_templates.as_given(turns), "add_generation_prompt": reply}
        roles = [turn["role"] for turn in turns]
        change = "leave the system turn (prompt.system) out" if "system" in roles else "change the turns"
        try:  # of several templates the one named "default", or with tools "tool_use"; there may be none
            template = self.backend.get_chat_template(None, context["tools"])
        except ValueError as error:
            raise UserError(f'{self.backend.name_or_path}: {error}; use template="plain"') from error
        return chat_templates.render(
            template,
            {**self.backend.special_tokens_map, **context},
            where=f"{self.backend.name_or_path}: turns of {', '.join(roles)}",
            remedy=f'{change} or use template="plain"',
        )

    @functools.cached_property
    def reads_parts(self) -> bool:
        """Returns whether the chat template writes the texts of a content that is a list of parts."""
        parts = [{"type": "text", "text": text} for text in ("\ue000", "\ue001")]
        try:
            written = self.render([{"role": "user", "content": parts}], reply=True)
        except UserError:  # it adds the content to a text, which a list does not allow
            return False
        return "\ue000" in written and "\ue001" in written and "'type'" not in written

    @functools.cached_property
    def fingerprint(self) -> str:
        rules = self.backend.backend_tokenizer.to_str(), self.backend.chat_template
        return content_hash([*rules, self.begin, self.eos, self.stops, self.pad])


@dataclasses.dataclass(frozen=True, eq=False)
class BertTokenizer:
    """A BERT-class encoder's own tokenizer; every text has the first and last marks of the body's training."""

    backend: Backend
    pad: int
    special: Marks  # ([CLS],), ([SEP],)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Returns each text's ids between the marks, i32."""
        encoded = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [marked(e.ids, *self.special) for e in encoded]


@functools.lru_cache(maxsize=8)  # a start asks more than once, and a vocabulary is long
def identify(tokenizer: Tokenizer | BertTokenizer, *, template: str = "plain") -> str:
    """Identifies what a text's ids and, of template "chat", a prompt are, whatever library's version read the files.

    A hash of the vocabulary, of the ids of one text and of the special ids; `fingerprint` covers every rule, in the
    words of the library's version.
    """
    vocab = sorted(tokenizer.backend.get_vocab().items())
    (ids,) = tokenizer.encode_batch([_PROBE])
    content: list[Any] = [vocab, [ids.tolist()], tokenizer.special, tokenizer.pad]
    if isinstance(tokenizer, Tokenizer):
        content += [tokenizer.begin, tokenizer.eos, tokenizer.stops]
        if template == "chat":
            content.append(prompt := tokenizer.render_chat(_PROBE))
            # Until 1 December 2026 prompts had the first ids also where the template does not write them.
            if tokenizer.encode(prompt)[: len(tokenizer.begin)] != list(tokenizer.begin):
                content.append("no first ids")
    return content_hash(content)


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, 256 for padding and after a document: the tokenizer of the bytes encoder."""

    pad: int = 256
    eos: int = 256  # the padding's: texts that are packed have no padding
    begin: tuple[int, ...] = ()
    special: Marks = (), ()
    vocab: int = 257
    fingerprint: str = "utf-8 bytes, pad 256"

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Returns each text's ids, i32."""
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of bytes, padding skipped; a broken sequence becomes U+FFFD."""
        return bytes(int(i) for i in ids if i != self.pad).decode("utf-8", errors="replace")


def byte_backend() -> "PreTrainedTokenizerFast":
    """Returns the tokenizer of `ByteTokenizer`'s ids as a tokenizer file."""
    from transformers import PreTrainedTokenizerFast

    # GPT-2's letters: a printable byte's is its own, the others have those from 256 on. Of tokens "<0xC3>", which
    # ByteFallback reads, one broken character makes all around it U+FFFD.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {letter: ord(letter) for letter in letters if ord(letter) < 256}
    others = zip(letters[len(own) :], sorted(set(range(256)) - set(own.values())), strict=True)
    backend = Backend(models.BPE(vocab=own | dict(others), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(BYTES_END, normalized=False, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=BYTES_END, pad_token=BYTES_END)


def load_tokenizer(location: Path) -> Tokenizer:
    """Loads a reader's tokenizer from a model folder or a .gguf file.

    Raises UserError where there is no `tokenizer.json`, a GGUF vocabulary of unknown kind, or no EOS token.
    """
    fast, stops, rows = tokenizer_files.load(location)
    return wrap(fast, location, stops, rows)


def load_source_tokenizer(location: Path) -> Tokenizer | BertTokenizer:
    """Loads the tokenizer of an encoder's body: BERT-class by its config.json, else as `load_tokenizer` does.

    Raises UserError where there is no padding token, and for what `load_tokenizer` refuses.
    """
    kind = read_or_default(location / "config.json", Kind) if location.is_dir() else Kind()
    if kind.model_type != "bert":
        return load_tokenizer(location)
    fast, _, rows = tokenizer_files.load(location)
    # Google's files name no token: transformers has it in its class.
    backend, pad = _uncut(fast), kind.pad_token_id if fast.pad_token_id is None else fast.pad_token_id
    if not isinstance(pad, int):
        raise UserError(f"{location}: the tokenizer names no padding token; set pad_token in tokenizer_config.json")
    vocab, special = _size(backend), _marks(backend, location)
    tokenizer_files.check_ids((pad, *special[0], *special[1]), vocab=vocab, rows=rows, where=str(location))
    return BertTokenizer(backend, pad, special)


def _uncut(fast: "PreTrainedTokenizerFast") -> Backend:
    """Switches off the last user's cut and padding, which tokenizer.json may carry: texts are never cut here."""
    backend = fast.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return backend


def _size(backend: Backend) -> int:
    return max(backend.get_vocab(with_added_tokens=True).values()) + 1


def _marks(backend: Backend, location: Path | str) -> Marks:
    bare, full = (backend.encode("a", add_special_tokens=added).ids for added in (False, True))
    for begin in range(len(full) - len(bare) + 1):
        if bare and full[begin : begin + len(bare)] == bare:
            return tuple(full[:begin]), tuple(full[begin + len(bare) :])
    raise UserError(f"{location}: the tokenizer makes {bare} of 'a', and {full} with its marks; fetch it again")


def wrap(
    fast: "PreTrainedTokenizerFast", location: Path | str = "", stops: Sequence[int] = (), rows: int | None = None
) -> Tokenizer:
    """Returns a tokenizer of transformers as ours; `stops` beside EOS and the families' own endings.

    Raises UserError where it names no EOS token, or ids that it or the model's table of so many `rows` does not have.
    """
    fast.name_or_path = str(location)
    backend = _uncut(fast)
    eos, pad = fast.eos_token_id, fast.pad_token_id
    assert pad is None or isinstance(pad, int), "of one token"
    if not isinstance(eos, int):
        raise UserError(f"{location}: the tokenizer names no EOS token; set eos_token in tokenizer_config.json")
    special = {token.content: i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    endings = [special[name] for name in _ENDINGS if name in special]
    begin, vocab = _marks(backend, location)[0], _size(backend)
    tokenizer_files.check_ids((eos, pad, *stops, *begin), vocab=vocab, rows=rows, where=str(location))
    return Tokenizer(
        backend=fast,
        begin=begin,
        eos=eos,
        stops=tuple(dict.fromkeys([eos, *stops, *endings])),
        pad=eos if pad is None else pad,
        vocab=vocab,
    )
