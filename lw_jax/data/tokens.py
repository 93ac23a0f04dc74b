"""Text to token ids and back, for every reader and for the bytes encoder.

A reader's tokenizer comes from a folder (`tokenizer.json`) or from the metadata of a .gguf file. It adds no token by
itself: `begin` is put in front where a prompt is built (`lw_jax/data/batches.py`). Only the tokenizer of a BERT-class
encoder puts marks around a text, because its body has learned with them.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from lw_jax.core.errors import UserError
from lw_jax.data import templates
from lw_jax.data.gguf_header import read_header

# Tokens by which the supported families end a turn or a document, where the vocabulary marks them special.
_ENDINGS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "</s>")
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type


BYTES_END = "<|endoftext|>"  # id 256 of the byte tokenizer
Marks = tuple[tuple[int, ...], tuple[int, ...]]  # ids before and after every text


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A reader's own tokenizer; special tokens written in a text are parsed, none is added."""

    backend: PreTrainedTokenizerFast
    begin: tuple[int, ...]  # what the tokenizer itself puts before a text: (BOS,) for Llama, () for Qwen
    eos: int  # ends a turn; the target after an answer
    stops: tuple[int, ...]  # ids at which generation ends, eos first
    pad: int
    vocab: int  # highest id + 1

    @property
    def special(self) -> Marks:
        """Returns the ids put before and after every text by `encode`: none."""
        return (), ()

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text."""
        return self.backend.backend_tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Returns the ids of each text, as `encode` does, on all cores."""
        return [e.ids for e in self.backend.backend_tokenizer.encode_batch(texts, add_special_tokens=False)]

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        """Returns what `encode_batch` does as arrays, for large amounts of text."""
        encoded = self.backend.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(e.ids, np.uint32) for e in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids, special tokens skipped, nothing tidied."""
        return self.backend.backend_tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def starts(self, text: str) -> list[int]:
        """Returns the place in the text at which each of its tokens begins, never falling."""
        offsets = self.backend.backend_tokenizer.encode(text, add_special_tokens=False).offsets
        return [start for start, _ in offsets]

    def render_chat(self, user: str, *, system: str = "") -> str:
        """Returns the prompt in the tokenizer's own chat template, up to where the answer begins.

        The text holds every special token that the template writes (BOS too), so `begin` is not put before it.
        """
        turns = [{"role": "system", "content": system}] if system else []
        return self.render([*turns, {"role": "user", "content": user}], reply=True)

    def render(self, turns: list[dict[str, str]], *, reply: bool) -> str:
        """Returns a conversation {"role", "content"} in the chat template; with `reply`, up to where one begins."""
        if not self.backend.chat_template:
            raise UserError(f'{self.backend.name_or_path}: the tokenizer has no chat template; use template="plain"')
        values = {"messages": turns, "tools": None, "documents": None, "add_generation_prompt": reply}
        return templates.render(
            self._chat_template(),
            {**self.backend.special_tokens_map, "date_string": f"{templates.DATE:%d %b %Y}", **values},
            where=f"{self.backend.name_or_path}: turns of {', '.join(turn['role'] for turn in turns)}",
            remedy='leave the system turn (prompt.system) out or use template="plain"',
        )

    def _chat_template(self) -> str:
        """Returns the chat template; of several the one named "default"."""
        try:
            found = self.backend.get_chat_template()
        except ValueError as error:
            raise UserError(f'{self.backend.name_or_path}: {error}; use template="plain"') from error
        if not isinstance(found, str):
            kind = type(found).__name__
            raise UserError(f'{self.backend.name_or_path}: chat_template must be a text, found {kind}; use "plain"')
        return found

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identifies everything that decides ids and prompts."""
        said = [self.backend.backend_tokenizer.to_str(), self.backend.chat_template, self.begin, self.eos, self.stops]
        return hashlib.blake2b(json.dumps([*said, self.pad]).encode(), digest_size=16).hexdigest()


@dataclasses.dataclass(frozen=True, eq=False)
class BertTokenizer:
    """A BERT-class encoder's own tokenizer; every text stands between the marks that the body has learned with."""

    backend: Backend
    pad: int
    vocab: int  # highest id + 1
    special: Marks  # ([CLS],), ([SEP],)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, marks included."""
        return self.backend.encode(text, add_special_tokens=True).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Returns the ids of each text, as `encode` does, on all cores."""
        return [e.ids for e in self.backend.encode_batch(texts, add_special_tokens=True)]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids, special tokens skipped; what the vocabulary does not keep (case, spaces) is lost."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identifies everything that decides ids."""
        said = json.dumps([self.backend.to_str(), self.special, self.pad])
        return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, 256 for padding and after a document: the tokenizer of the bytes encoder."""

    pad: int = 256
    eos: int = 256  # the padding's: texts that are packed have no padding
    vocab: int = 257
    fingerprint: str = "utf-8 bytes, pad 256"
    special: Marks = ((), ())

    def encode(self, text: str) -> list[int]:
        """Returns the bytes of a text."""
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Returns the bytes of each text."""
        return [self.encode(text) for text in texts]

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        """Returns what `encode_batch` does as arrays, for large amounts of text."""
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of bytes, padding skipped; a broken sequence becomes U+FFFD."""
        return bytes(int(i) for i in ids if i != self.pad).decode("utf-8", errors="replace")


def byte_backend() -> PreTrainedTokenizerFast:
    """Returns the tokenizer of `ByteTokenizer`'s ids as a file of its own can hold it."""
    table = {f"<0x{value:02X}>": value for value in range(256)}
    backend = Backend(models.BPE(vocab=table, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(BYTES_END, normalized=False, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=BYTES_END, pad_token=BYTES_END)


def load_tokenizer(location: Path) -> Tokenizer:
    """Loads a reader's tokenizer from a model folder or a .gguf file.

    Raises:
        UserError: no `tokenizer.json`, a GGUF vocabulary of unknown kind, or no EOS token.
    """
    if location.is_dir():
        return _from_folder(location)
    metadata = read_header(location).metadata
    stops = [metadata[key] for key in ("tokenizer.ggml.eot_token_id",) if key in metadata]
    return wrap(_from_gguf(location, metadata), location, stops)


def load_source_tokenizer(location: Path) -> Tokenizer | BertTokenizer:
    """Loads the tokenizer of an encoder's body: BERT-class where config.json says so, else as `load_tokenizer` does.

    Raises:
        UserError: no `tokenizer.json`, no padding token, or what `load_tokenizer` refuses.
    """
    if not _is_bert(location / "config.json"):
        return load_tokenizer(location)
    fast = _read_fast(location)
    backend, pad = _uncut(fast), fast.pad_token_id
    if not isinstance(pad, int):
        raise UserError(f"{location}: the tokenizer names no padding token; set pad_token in tokenizer_config.json")
    bare, full = (backend.encode("a", add_special_tokens=added).ids for added in (False, True))
    begin = full.index(bare[0])
    special = (tuple(full[:begin]), tuple(full[begin + len(bare) :]))
    return BertTokenizer(backend, pad, _size(backend), special)


def _is_bert(config: Path) -> bool:
    if not config.is_file():
        return False
    try:
        return json.loads(config.read_text("utf-8")).get("model_type") == "bert"
    except (ValueError, AttributeError) as error:
        raise UserError(f"{config}: no model_type can be read in it ({error}); fetch it again") from error


def _from_folder(folder: Path) -> Tokenizer:
    fast = _read_fast(folder)
    generation = folder / "generation_config.json"
    ends = json.loads(generation.read_text("utf-8")).get("eos_token_id") if generation.is_file() else None
    return wrap(fast, folder, ends if isinstance(ends, list) else [] if ends is None else [ends])


def _read_fast(folder: Path) -> PreTrainedTokenizerFast:
    if not (folder / "tokenizer.json").is_file():
        raise UserError(
            f"{folder}: no tokenizer.json; only fast tokenizers are read: save it there with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        )
    # Not AutoTokenizer: by model type it may rebuild normaliser and pre-tokenizer and ignore what tokenizer.json says
    # (transformers 5.23 does for every qwen2 folder), so other ids than the model was trained with.
    try:
        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder}: tokenizer files cannot be read ({error}); fetch them again") from error


def _uncut(fast: PreTrainedTokenizerFast) -> Backend:
    """Switches off the last user's cut and padding, which tokenizer.json may carry: texts are never cut here."""
    backend = fast.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return backend


def _size(backend: Backend) -> int:
    return max(backend.get_vocab(with_added_tokens=True).values()) + 1


def wrap(fast: PreTrainedTokenizerFast, location: Path | str = "", stops: Sequence[int] = ()) -> Tokenizer:
    """Returns a tokenizer of transformers as ours; `stops` beside EOS and the families' own endings.

    Raises:
        UserError: it names no EOS token.
    """
    fast.name_or_path = str(location)
    backend = _uncut(fast)
    eos, pad = fast.eos_token_id, fast.pad_token_id
    if not isinstance(eos, int):
        raise UserError(f"{location}: the tokenizer names no EOS token; set eos_token in tokenizer_config.json")
    special = {token.content: i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    endings = [special[name] for name in _ENDINGS if name in special]
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    return Tokenizer(
        backend=fast,
        begin=tuple(full[: full.index(bare[0])]),
        eos=eos,
        stops=tuple(dict.fromkeys([eos, *stops, *endings])),
        pad=pad if isinstance(pad, int) else eos,
        vocab=_size(backend),
    )


def _split(digits: str) -> Any:
    """The published split pattern of Llama 3 (digits "{1,3}") and Qwen2 (one by one), then the byte alphabet."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _pre_tokenizers() -> dict[str, Any]:
    """Maps `tokenizer.ggml.pre` to the pre-tokenizer that its model's tokenizer.json has."""
    smollm = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    return {"smollm": pre_tokenizers.Sequence(smollm), "qwen2": _split(""), "llama-bpe": _split("{1,3}")}


def _from_gguf(path: Path, metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Builds the byte-level BPE that a GGUF describes.

    transformers' own conversion (5.23) knows no "smollm" digits, no NFC of Qwen2 and no whole-word rule of Llama 3.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    known = _pre_tokenizers()
    if kind != "gpt2" or pre not in known:
        raise UserError(
            f"{path}: tokenizer.ggml.model={kind!r} with tokenizer.ggml.pre={pre!r} cannot be rebuilt faithfully; "
            f'known: "gpt2" with {sorted(known)}. Use the model\'s folder with its tokenizer.json instead'
        )
    if missing := [k for k in ("tokens", "merges", "token_type") if f"tokenizer.ggml.{k}" not in metadata]:
        raise UserError(f"{path}: no tokenizer.ggml.{missing[0]}; use the model's folder with its tokenizer.json")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise UserError(f"{path}: {len(tokens) - len(vocab)} tokens of tokenizer.ggml.tokens stand there twice")
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = known[pre]
    backend.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        marked = [t for t, kind in zip(tokens, types, strict=True) if kind == wanted]
        added = [AddedToken(token, normalized=False, special=special) for token in marked]
        backend.add_special_tokens(added) if special else backend.add_tokens(added)
    names = _named_tokens(metadata, tokens)
    # llama.cpp's rule: files that do not say get a BOS for Llama 3's vocabulary and none for the others
    if metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        if "bos_token" not in names:
            raise UserError(f"{path}: tokenizer.ggml.add_bos_token is true but tokenizer.ggml.bos_token_id is missing")
        bos = names["bos_token"]
        backend.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, vocab[bos])])
    template = metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **names)


def _named_tokens(metadata: dict[str, Any], tokens: list[str]) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None}
