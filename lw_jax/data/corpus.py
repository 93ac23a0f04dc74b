"""A text corpus as token ids on disk: tokenised once, packed without padding, read without loading it; its windows.

A corpus belongs to what its source is (`documents.identify`) and to a tokenizer; another of either is another folder.
Its meta.json is written last, so that it stands for a whole corpus; what a killed job left is written anew. Each node
writes a file of ids of its own, which meta.json names: the locks of some file systems hold within a node only.
"""

import dataclasses
import functools
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Annotated, Any, Literal, TypeGuard

import msgspec
import numpy as np

from lw_jax.core import schema
from lw_jax.core.errors import UserError
from lw_jax.core.files import content_hash, locked, remove_stale, whole
from lw_jax.core.progress import phase
from lw_jax.core.types import Task
from lw_jax.data import documents, row_sources
from lw_jax.data.batches import Batch
from lw_jax.data.data_schedule import DataSchedule, Stream
from lw_jax.data.documents import Piece
from lw_jax.data.tokens import ByteTokenizer, Tokenizer, marked

FORMAT = 3  # of the ids' file, and of how documents are cut and joined
INSIDE = 1  # of how tokenizers that add a blank to a text read a document's later pieces
BATCH = 1 << 22  # characters tokenised at once
NARROW = 1 << 16  # vocabularies up to it are kept as uint16
META, LOCK = "meta.json", "lock"
STALE = 3600  # seconds since a packer that stopped has written
_ANEW = "remove the folder, it is then packed anew"
_log = logging.getLogger(__name__)

TextTokenizer = Tokenizer | ByteTokenizer
Extra = Callable[[np.ndarray], Mapping[str, np.ndarray]]  # ids i32[b L+1] -> further fields [b ...]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class _Meta(msgspec.Struct, frozen=True):
    """Content of meta.json, of a complete corpus."""

    format: int
    source: str
    tokenizer: str  # its fingerprint
    begin: tuple[_Count, ...]
    eos: _Count
    dtype: Literal["uint16", "uint32"]
    documents: _Count = 0
    blank: _Count = 0  # documents without text, left out
    bytes: _Count = 0  # of text, UTF-8
    tokens: _Count = 0
    ids: Annotated[str, msgspec.Meta(pattern=r"^ids[^/]*\.bin$")] = "ids.bin"  # the file of all ids


class Corpus(_Meta, frozen=True, kw_only=True, dict=True):
    """A packed corpus: `tokens` ids one after the other, each document between BOS, if any, and EOS."""

    folder: Path

    def rows(self, starts: Iterable[int], count: int) -> np.ndarray:
        """Returns ids i32[n count] from each of the positions on. Raises IndexError beyond the ends."""
        starts = list(starts)
        if starts and not 0 <= min(starts) <= max(starts) <= self.tokens - count:
            raise IndexError(f"{self.folder}: {count} tokens from {starts} do not lie within {self.tokens}")
        rows = np.empty((len(starts), count), np.int32)
        for row, start in zip(rows, starts, strict=True):
            row[:] = self._ids[start : start + count]
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

    @functools.cached_property
    def _ids(self) -> np.ndarray:
        # As a plain array: a slice of a memmap itself takes ten times as long.
        return np.asarray(np.memmap(self.folder / self.ids, np.dtype(self.dtype).newbyteorder("<"), "r"))


@dataclasses.dataclass(frozen=True)
class Span:
    """Tokens [start, stop) of a corpus."""

    corpus: Corpus
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Windows(Stream):
    """All windows of `length` inputs and as many targets in a span; window i begins at token i * length of it.

    Neighbours share one token, the last target of one and first input of the next. Without padding and messages.
    """

    span: Span
    length: int
    name: str  # the model that a batch is for
    extra: Extra | None = None
    measure: bool = False  # the Task of every batch: a separate program with more measurements
    task: str = "text"

    def __len__(self) -> int:
        return (len(self.span) - 1) // self.length

    def collate(self, indices: Sequence[int], *, sizes: np.ndarray | None = None) -> Batch:
        """Returns ids i32[b L+1], weights f32[b 1], rate f32[b], task, the extra fields, and index i32[b]."""
        starts = [self.span.start + index * self.length for index in indices]
        ids = self.span.corpus.rows(starts, self.length + 1)
        fields = {
            "ids": ids,
            "weights": np.ones((len(ids), 1), np.float32),
            "rate": np.ones(len(ids), np.float32),
            "task": Task("measure" if self.measure else "train"),
            **(self.extra(ids) if self.extra else {}),
        }
        return {"source": {}, "readers": {self.name: fields}, "index": np.array(indices, np.int32)}

    def digest(self) -> str:
        return f"{self.span.corpus.folder.name} {self.span.start} {self.span.stop} {self.length}"

    def describe(self) -> list[str]:
        unused = len(self.span) - 1 - len(self) * self.length
        tail = f", {unused} tokens at the end not used" if unused else ""
        tail += f"; {self.span.corpus.blank:,} documents without text left out" if self.span.corpus.blank else ""
        return [
            f"{len(self):,} windows of {self.length:,} tokens: tokens {self.span.start:,} to {self.span.stop:,} of the "
            f"{self.span.corpus.tokens:,} in {self.span.corpus.source}{tail}"
        ]


@dataclasses.dataclass(frozen=True)
class WarmupSchedule(DataSchedule):
    """A schedule whose batches hold every row's "rate": linear from `start` to 1 at batch number `warmup`."""

    warmup: int = 0  # batches; 0: always 1
    start: float = 1.0

    def rate(self, number: int) -> float:
        return self.start + min(1.0, number / self.warmup) * (1.0 - self.start) if self.warmup else 1.0

    def batch(self, number: int, *, global_batch: int, seed: int, share: slice) -> Batch:
        batch = super().batch(number, global_batch=global_batch, seed=seed, share=share)
        for fields in batch["readers"].values():
            fields["rate"] = np.full_like(fields["rate"], self.rate(number))
        return batch


def pack(
    source: str, tokenizer: TextTokenizer, *, root: Path, split: str = "train", columns: Sequence[str] = ()
) -> Corpus:
    """Returns the corpus of a source, packed below root/"corpus" unless it is there; of two jobs one packs.

    `split` and `columns` are as in `documents.read`. A hub's data set that cannot be reached is used as last packed,
    and this is reported. Raises UserError for what `documents.read` refuses, a source without text, a folder that
    cannot be written, and a damaged corpus.
    """
    name = " ".join([source if split == "train" else row_sources.label(source, split), *columns])
    try:
        identity = documents.identify(source, split, columns)
    except row_sources.Unreachable as error:
        folder = _last_packed(root / "corpus", name, tokenizer)
        if folder is None:
            raise
        _log.warning("%s. Taken as it was packed in %s", error, folder)
        return _load(folder)
    key = [FORMAT, identity, tokenizer.fingerprint, tokenizer.eos, tokenizer.begin]
    key += [INSIDE] if _adds_blank(tokenizer) else []
    folder = root / "corpus" / content_hash(key, size=8)
    if not (folder / META).is_file():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder / LOCK):
                if not (folder / META).is_file():
                    _make(folder, name, documents.read(source, split, columns), tokenizer)
        except OSError as error:
            raise UserError(
                f"{folder}: {name} cannot be packed there ({error.strerror}); free space or name another cache folder"
            ) from error
    return msgspec.structs.replace(_load(folder), source=name)  # the same text may have been packed from another place


def _make(folder: Path, name: str, pieces: Iterable[Piece], tokenizer: TextTokenizer) -> None:
    dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.vocab <= NARROW else "uint32"
    counts = {"documents": 0, "blank": 0, "bytes": 0, "tokens": 0}
    inside, file = False, folder / f"ids-{os.uname().nodename}.bin"
    remove_stale(folder.glob("ids*.bin"), STALE)
    with phase(f"tokenising {name}", unit="MB of text") as progress, file.open("wb") as out:
        for batch in _batches(pieces, counts):
            ids = _encode(batch, tokenizer, inside=inside)
            out.write(ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
            counts["tokens"] += len(ids)
            inside = not batch[-1].ends
            progress.done = counts["bytes"] / 1e6
        _flush(out)
    if not counts["documents"]:
        raise UserError(f"{name}: no text in its {counts['blank']} documents; name another source")
    meta = _Meta(FORMAT, name, tokenizer.fingerprint, tokenizer.begin, tokenizer.eos, dtype, **counts, ids=file.name)
    with whole(folder / META) as partial, partial.open("wb") as out:
        out.write(msgspec.json.encode(meta))
        _flush(out)


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
    behind = [inside, *(not piece.ends for piece in pieces[:-1])]
    rows = _encode_texts([piece.text for piece in pieces], behind, tokenizer)
    for piece, later, ids in zip(pieces, behind, rows, strict=True):
        if piece.ends and tokenizer.eos in ids[-4:-1]:  # a line break may follow the document's own EOS
            (bare,) = _encode_texts([piece.text.rstrip()], [later], tokenizer)
            ids = bare if bare[-1] == tokenizer.eos else ids
        parts.append(marked(ids, () if later else tokenizer.begin, (tokenizer.eos,) if piece.ends else ()))
    return np.concatenate(parts).astype(np.uint32)


def _encode_texts(texts: list[str], behind: list[bool], tokenizer: TextTokenizer) -> list[np.ndarray]:
    """Returns each text's ids; one `behind` another of its document has no blank before it that is not there."""
    if not any(behind) or not _adds_blank(tokenizer):
        return tokenizer.encode_batch(texts)
    fresh = iter(tokenizer.encode_batch([text for text, later in zip(texts, behind, strict=True) if not later]))
    rest = iter(tokenizer.encode_behind([text for text, later in zip(texts, behind, strict=True) if later]))
    return [next(rest if later else fresh) for later in behind]


def _adds_blank(tokenizer: TextTokenizer) -> TypeGuard[Tokenizer]:
    return isinstance(tokenizer, Tokenizer) and tokenizer.adds_blank


def _flush(out: IO[Any]) -> None:
    out.flush()
    os.fsync(out.fileno())


def _load(folder: Path) -> Corpus:
    meta = schema.read(folder / META, _Meta, remedy=_ANEW)
    file, size = folder / meta.ids, meta.tokens * np.dtype(meta.dtype).itemsize
    actual_size = file.stat().st_size if file.is_file() else 0
    if actual_size != size:
        raise UserError(f"{file}: {actual_size} bytes, {META} has {size}; {_ANEW}")
    return Corpus(**msgspec.structs.asdict(meta), folder=folder)


def _last_packed(root: Path, source: str, tokenizer: TextTokenizer) -> Path | None:
    """Returns the newest corpus of a source's name and a tokenizer, whatever the source was then."""
    files = sorted(root.glob(f"*/{META}"), key=lambda file: file.stat().st_mtime, reverse=True)
    wanted = (FORMAT, source, tokenizer.fingerprint, tokenizer.eos, tokenizer.begin)
    for file in files:
        try:
            meta = schema.read(file, _Meta, remedy=_ANEW)
        except UserError:  # damaged, and perhaps of another source
            continue
        if (meta.format, meta.source, meta.tokenizer, meta.eos, meta.begin) == wanted:
            return file.parent
    return None
