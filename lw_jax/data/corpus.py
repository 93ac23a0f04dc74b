"""A text corpus as token ids on disk: tokenised once, packed without padding, read anywhere without loading it.

A corpus belongs to what its source is (`documents.identify`) and to a tokenizer; another of either is another folder.
Its meta.json is written last, so that it stands for a whole corpus; what a killed job left is written anew.
"""

import bisect
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Annotated, Any, Literal, Protocol

import msgspec
import numpy as np

from lw_jax.core import schema
from lw_jax.core.errors import UserError
from lw_jax.core.files import locked, whole
from lw_jax.core.progress import phase
from lw_jax.data import documents
from lw_jax.data.documents import Piece, read
from lw_jax.data.row_sources import Unreachable
from lw_jax.data.tokens import marked

__all__ = ["Corpus", "Span", "TextTokenizer", "pack", "read"]

FORMAT = 2  # of the shards, and of how documents are cut and joined
SHARD = 1 << 27  # tokens, at most
BATCH = 1 << 22  # characters tokenised at once
NARROW = 1 << 16  # vocabularies up to it are kept as uint16
META, LOCK = "meta.json", "lock"
_log = logging.getLogger(__name__)


class TextTokenizer(Protocol):
    """Tokenizer of a corpus."""

    @property
    def begin(self) -> tuple[int, ...]:
        """Precedes every document, as it precedes every text that the model will continue."""
        ...

    @property
    def eos(self) -> int:
        """Follows every document."""
        ...

    @property
    def vocab(self) -> int:
        """Returns the highest id + 1."""
        ...

    @property
    def fingerprint(self) -> str:
        """Identifies everything that decides ids."""
        ...

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        """Returns each text's ids, with nothing added."""
        ...


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A packed corpus: `tokens` ids one after the other, each document between BOS, if any, and EOS."""

    folder: Path
    source: str
    documents: int
    blank: int  # documents without text, left out
    tokens: int
    bytes: int  # of text, UTF-8
    dtype: str
    shards: tuple[int, ...]  # tokens in each
    tokenizer: str  # its fingerprint
    made: bool = False  # by this call of `pack`, not found

    def read(self, start: int, count: int) -> np.ndarray:
        """Returns ids i32[count] from a position on. Raises IndexError beyond the ends."""
        return self.rows([start], count)[0]

    def rows(self, starts: Iterable[int], count: int) -> np.ndarray:
        """Returns ids i32[n count] from each of the positions on. Raises IndexError beyond the ends."""
        starts = list(starts)
        if starts and not 0 <= min(starts) <= max(starts) <= self.tokens - count:
            raise IndexError(f"{self.folder}: {count} tokens from {starts} do not lie within {self.tokens}")
        rows = np.empty((len(starts), count), np.int32)
        for row, start in zip(rows, starts, strict=True):
            shard = bisect.bisect_right(self._begins, start) - 1
            done, at = 0, start - self._begins[shard]
            while done < count:
                part = self._maps[shard][at : at + count - done]
                row[done : done + len(part)] = part
                done, at, shard = done + len(part), 0, shard + 1
        return rows

    def split(self, held_out: float, *, length: int) -> "tuple[Span, Span]":
        """Returns the training span and the last share, held out, split at a multiple of `length`.

        They share one token: the last target of the first span is the first input of the second, and no target there.
        Raises UserError where either has less than one window of `length` inputs and as many targets.
        """
        border = math.floor((self.tokens - 1) * (1 - held_out) / length) * length
        if border < length or self.tokens - 1 - border < length:
            share = (length + 1) / self.tokens
            rule = f"between {share:.2g} and {1 - share:.2g}" if share < 0.5 else "of a larger corpus"
            raise UserError(
                f"held_out={held_out} of {self.source} ({self.tokens} tokens) leaves one side less than a window of "
                f"{length} + 1 tokens; hold out a share {rule}, or take shorter windows"
            )
        return Span(self, 0, border + 1), Span(self, border, self.tokens)

    def describe(self) -> list[str]:
        """Returns lines for people."""
        blank = f", {self.blank:,} without text left out" if self.blank else ""
        shards = f"{len(self.shards)} shard{'s' if len(self.shards) > 1 else ''} of {self.dtype}"
        return [
            f"{self.source}: {self.documents:,} documents{blank}, {self.tokens:,} tokens, "
            f"{self.bytes / self.tokens:.2f} bytes of text a token",
            f"{'packed now' if self.made else 'found packed'} in {self.folder} ({shards})",
        ]

    @functools.cached_property
    def _begins(self) -> list[int]:
        return [0, *itertools.accumulate(self.shards)][:-1]

    @functools.cached_property
    def _maps(self) -> list[np.ndarray]:
        # As plain arrays: a slice of a memmap itself takes ten times as long.
        files = [_shard(self.folder, i) for i in range(len(self.shards))]
        dtype = np.dtype(self.dtype).newbyteorder("<")
        return [np.asarray(np.memmap(file, dtype, "r")) for file in files]


@dataclasses.dataclass(frozen=True)
class Span:
    """Tokens [start, stop) of a corpus."""

    corpus: Corpus
    start: int
    stop: int

    def __len__(self) -> int:
        """Counts the tokens."""
        return self.stop - self.start

    def read(self) -> np.ndarray:
        """Returns all its ids, i32."""
        return self.corpus.read(self.start, len(self))


def pack(
    source: str, tokenizer: TextTokenizer, *, root: Path, split: str = "train", columns: Sequence[str] = ()
) -> Corpus:
    """Returns the corpus of a source, packed below root/"corpus" unless it is there; of two jobs one packs.

    `split` and `columns` are as in `documents.read`.

    A hub's data set that cannot be reached is used as last packed, and this is reported.

    Raises:
        UserError: what `documents.read` refuses, a source without text, a folder that cannot be written, or a damaged
            corpus.
    """
    name = documents.name(source, split, columns)
    try:
        identity = documents.identify(source, split, columns)
    except Unreachable as error:
        folder = _last_packed(root / "corpus", name, tokenizer)
        if folder is None:
            raise
        _log.warning("%s. Taken as it was packed in %s", error, folder)
        return _load(folder, made=False)
    begin = [list(tokenizer.begin)] if tokenizer.begin else []
    said = json.dumps([FORMAT, identity, tokenizer.fingerprint, tokenizer.eos, *begin])
    folder = root / "corpus" / hashlib.blake2b(said.encode(), digest_size=8).hexdigest()
    made = False
    if not (folder / META).is_file():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder / LOCK, waiting=lambda: _tell(f"waiting for another job that packs {name}")):
                if made := not (folder / META).is_file():
                    _make(folder, name, documents.read(source, split, columns), tokenizer)
        except OSError as error:
            raise UserError(
                f"{folder}: {name} cannot be packed there ({error.strerror}); free space or name another cache folder"
            ) from error
    return _load(folder, made=made)


def _make(folder: Path, name: str, found: Iterable[Piece], tokenizer: TextTokenizer) -> None:
    """Writes the shards, then meta.json, which marks them as complete."""
    for left in folder.iterdir():
        if left.name != LOCK:
            left.unlink()
    counts = {"documents": 0, "blank": 0, "bytes": 0}
    inside, shards = False, _Shards(folder, tokenizer.vocab)
    with phase(f"tokenising {name}", unit="MB of text") as told, contextlib.closing(shards):
        for pieces in _batches(found, counts):
            shards.write(_encode(pieces, tokenizer, inside=inside))
            inside = not pieces[-1].ends
            told.done = counts["bytes"] / 1e6
    if not counts["documents"]:
        raise UserError(f"{name}: no text in its {counts['blank']} documents; name another source")
    meta = {"format": FORMAT, "source": name, "tokenizer": tokenizer.fingerprint, "eos": tokenizer.eos, **counts}
    meta |= {"begin": list(tokenizer.begin)}
    meta |= {"tokens": sum(shards.counts), "dtype": shards.dtype.name, "shards": shards.counts}
    with whole(folder / META) as partial, partial.open("w", encoding="utf-8") as out:
        json.dump(meta, out, indent=1)
        _settle(out)


def _batches(pieces: Iterable[Piece], counts: dict[str, int]) -> Iterator[list[Piece]]:
    """Yields pieces with about BATCH characters together; counts documents and bytes, and leaves out blank ones."""
    batch: list[Piece] = []
    size, fresh = 0, True
    for piece in pieces:
        if fresh and piece.ends and not piece.text.strip():
            counts["blank"] += 1
            continue
        fresh = piece.ends
        counts["documents"] += piece.ends
        counts["bytes"] += len(piece.text) if piece.text.isascii() else len(piece.text.encode())
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(pieces: list[Piece], tokenizer: TextTokenizer, *, inside: bool) -> np.ndarray:
    """Returns the ids of all pieces, each document between BOS and EOS; the first piece may be `inside` a document."""
    parts: list[np.ndarray] = []
    for piece, ids in zip(pieces, tokenizer.encode_arrays([piece.text for piece in pieces]), strict=True):
        if piece.ends and tokenizer.eos in ids[-4:-1]:  # a line break may follow the document's own EOS
            (bare,) = tokenizer.encode_arrays([piece.text.rstrip()])
            ids = bare if bare[-1] == tokenizer.eos else ids
        parts.append(marked(ids, () if inside else tokenizer.begin, (tokenizer.eos,) if piece.ends else ()))
        inside = not piece.ends
    return np.concatenate(parts).astype(np.uint32)


class _Shards:
    """Files of at most SHARD tokens each, filled one after the other."""

    def __init__(self, folder: Path, vocab: int) -> None:
        self.folder, self.vocab = folder, vocab
        self.dtype = np.dtype(np.uint16 if vocab <= NARROW else np.uint32)
        self.counts: list[int] = []
        self._out: IO[Any] | None = None

    def write(self, ids: np.ndarray) -> None:
        """Appends ids; they must lie within the vocabulary, or a narrow type would change them."""
        if ids.max(initial=0) >= self.vocab:
            raise ValueError(f"token {ids.max()} of a tokenizer with a vocabulary of {self.vocab}")
        ids = ids.astype(self.dtype.newbyteorder("<"))
        while len(ids):
            if self._out is None or self.counts[-1] == SHARD:
                self.close()
                self._out = _shard(self.folder, len(self.counts)).open("wb")
                self.counts.append(0)
            part = ids[: SHARD - self.counts[-1]]
            self._out.write(part.tobytes())
            self.counts[-1] += len(part)
            ids = ids[len(part) :]

    def close(self) -> None:
        """Brings the last file to the disk."""
        if self._out is not None:
            with self._out:
                _settle(self._out)
            self._out = None


def _settle(out: IO[Any]) -> None:
    out.flush()
    os.fsync(out.fileno())


def _shard(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.bin"


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class _Meta(msgspec.Struct, frozen=True):
    """Content of meta.json, of a complete corpus."""

    format: int
    source: str
    tokenizer: str
    eos: _Count
    documents: _Count
    blank: _Count
    bytes: _Count
    tokens: _Count
    dtype: Literal["uint16", "uint32"]
    shards: tuple[_Count, ...]
    begin: tuple[_Count, ...]


def _load(folder: Path, *, made: bool) -> Corpus:
    meta = _read_meta(folder)
    for number, count in enumerate(meta.shards):
        file, size = _shard(folder, number), count * np.dtype(meta.dtype).itemsize
        found = file.stat().st_size if file.is_file() else 0
        if found != size:
            raise UserError(f"{file}: {found} bytes, {META} has {size}; remove the folder, it is then packed anew")
    if sum(meta.shards) != meta.tokens:
        rule = f"its shards have {sum(meta.shards)}; remove the folder, it is then packed anew"
        raise UserError(f"{folder / META}: tokens={meta.tokens}, {rule}")
    named = ("source", "documents", "blank", "tokens", "bytes", "dtype", "tokenizer", "shards")
    return Corpus(folder=folder, made=made, **{name: getattr(meta, name) for name in named})


def _read_meta(folder: Path) -> _Meta:
    return schema.read(folder / META, _Meta, remedy="remove the folder, it is then packed anew")


def _last_packed(root: Path, source: str, tokenizer: TextTokenizer) -> Path | None:
    """Returns the newest corpus of a source's name and a tokenizer, whatever the source was then."""
    found = sorted(root.glob(f"*/{META}"), key=lambda file: file.stat().st_mtime, reverse=True)
    wanted = (FORMAT, source, tokenizer.fingerprint, tokenizer.eos, tuple(tokenizer.begin))
    for file in found:
        try:
            meta = _read_meta(file.parent)
        except UserError:  # damaged, and perhaps of another source
            continue
        if (meta.format, meta.source, meta.tokenizer, meta.eos, meta.begin) == wanted:
            return file.parent
    return None


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
