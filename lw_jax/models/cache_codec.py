"""Byte messages of kind "cache": the numbers of `cache_code`, which keys each head keeps, and their biases.

Frame (little-endian): magic 4s (the kind is in it), version u8, sections u8, the writer's fingerprint 8s, CRC-32 u32 of
all other bytes; for each section the fingerprint of its reader's code 8s and its bytes u32; then the sections.

Section: tokens u32, numbers a token u16, step f32, ratios u8; for each ratio, ascending, the ratio u8 and whether it
has biases u8; for those with biases the 8-bit shares of the biases' levels. Then 32-bit words of an ANS coder, whose
tables are of integers computed in integers: all machines decode the same. In order: of each layer and head at how many
of the ratios each token's key is kept; the biases of the kept keys, ratio after ratio; of each number all tokens'
integers, and behind them those that its table does not have, 16 bits each.
"""

import functools
import hashlib
import itertools
import math
import struct
import types
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt, UInt8

from lw_jax.core.errors import UserError

MAGIC = b"LWJC"
VERSION = 1
MOST_TOKENS = 2**17
MOST_NUMBERS = 2**27  # of a section: 256 MiB of integers; few bytes may stand for all of them
LARGEST = 2**15 - 1  # integer that a message can say
BIAS = 0.25  # step of a bias, the log of a factor of a key's share
BIASES = (-12, 18)  # first and last level: factors of 0.05 and 100
_PARTS = 2**16  # denominator of shares and decays
_WHOLE = 2**24  # of the coder's tables
_LONGEST = 1023  # integer of a table
_FRAME = struct.Struct("<4sBB8sI")
_ENTRY = struct.Struct("<8sI")
_HEAD = struct.Struct("<IHfB")
_BIAS_LEVELS = BIASES[1] - BIASES[0] + 1
_WRONG = "damaged or foreign; write its text anew"


class Statistics(NamedTuple):
    """How often each number's integers occur at a step: 0, and n + 1 beside n."""

    step: float  # fp32
    zero: UInt[np.ndarray, " w"]  # 16-bit fractions
    decay: UInt[np.ndarray, " w"]


class Coding(NamedTuple):
    """What the writer and the reader of a section both have."""

    fingerprint: str  # of the reader's code, statistics and tables: 16 hex digits
    rates: tuple[Statistics, ...]  # a message takes one
    tables: Mapping[int, Float[np.ndarray, "l k"]]  # ratio -> shares of the positions that heads keep


class Section(NamedTuple):
    """A text for one reader."""

    numbers: Int[np.ndarray, "n w"]  # x step: numbers of `cache_code`, all of a code or its first ones
    step: float
    ratios: tuple[int, ...] = ()  # ascending; none: all keys are kept
    levels: UInt8[np.ndarray, "l n k"] = np.zeros((0, 0, 0), np.uint8)  # at how many of the ratios a key is kept
    biases: Mapping[int, Float[np.ndarray, "l n k"]] = {}  # of some ratios; read of the kept keys, 0 elsewhere

    def kept(self, ratio: int) -> Bool[np.ndarray, "l n k"]:
        """Returns which keys are kept at one of the ratios."""
        return self.levels > self.ratios.index(ratio)


def fit_statistics(numbers: Int[np.ndarray, "n w"], step: float) -> Statistics:
    """Returns the statistics of integers of many tokens."""
    sizes = np.abs(np.asarray(numbers, np.int32))
    seen, others = len(sizes), np.count_nonzero(sizes, axis=0)
    beyond = sizes.sum(axis=0, dtype=np.int64) - others
    zero = (seen - others + 0.5) / (seen + 1.0)
    decay = (beyond + 0.3) / (beyond + others + 1.0)
    parts = (np.clip(np.rint(shares * _PARTS), 1, _PARTS - 1).astype(np.uint16) for shares in (zero, decay))
    return Statistics(float(np.float32(step)), *parts)


def bits(statistics: Statistics, numbers: Int[np.ndarray, "n w"]) -> float:
    """Returns the bits that the integers of some tokens take, by the tables that they are packed with."""
    total = 0.0
    for column, pair in zip(np.asarray(numbers, np.int32).T, _pairs(statistics), strict=False):
        table = _tail_table(*pair)
        lengths = math.log2(_WHOLE) - np.log2(np.array(table) + 1.0)
        lengths[-1] += 16  # what the table does not have
        total += float(lengths @ np.bincount(_symbols(column, len(table)), minlength=len(table)))
    return total


def fingerprint(code: Iterable[np.ndarray], rates: Sequence[Statistics], tables: Mapping[int, np.ndarray]) -> str:
    """Returns the fingerprint of a coding: of the code's arrays as they are stored, all its statistics and tables."""
    digest = hashlib.sha256()
    for array in itertools.chain(code, *rates, *((np.array(ratio), tables[ratio]) for ratio in sorted(tables))):
        array = np.ascontiguousarray(array)
        digest.update(f"{array.dtype.str} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()[:16]


def pack(sections: Sequence[tuple[Coding, Section]], *, writer: str) -> bytes:
    """Returns the message of a text for the readers with these codes. `writer`: a fingerprint, 16 hex digits."""
    names = [bytes.fromhex(coding.fingerprint) for coding, _ in sections]
    if not sections or len(set(names)) < len(names) or len(names) > 255:
        raise UserError(f"a message for readers {[name.hex() for name in names]}: it needs 1 to 255, each once")
    parts = [_pack_section(*pair) for pair in sections]
    entries = b"".join(_ENTRY.pack(name, len(part)) for name, part in zip(names, parts, strict=True))
    body = entries + b"".join(parts)
    head = (MAGIC, VERSION, len(parts), bytes.fromhex(writer))
    return _FRAME.pack(*head, zlib.crc32(_FRAME.pack(*head, 0) + body)) + body


def read_frame(message: bytes) -> dict[str, bytes]:
    """Returns the packed sections of a complete, undamaged message by the fingerprints of their readers' codes.

    Raises UserError for other bytes, another version, and a message that is cut, followed by more or damaged.
    """
    if message[:4] != MAGIC or len(message) < 5:
        raise UserError(f"not a cache message: {len(message)} bytes that do not begin with {MAGIC!r} and a version")
    if message[4] != VERSION:
        raise UserError(f"message of version {message[4]}, this program reads {VERSION}: read it with its program")
    count = message[5] if len(message) >= _FRAME.size else 0
    start = _FRAME.size + _ENTRY.size * count
    if len(message) < start:
        raise UserError(f"message cut short: {len(message)} bytes, its frame alone has {start}; send it again")
    *_, crc = _FRAME.unpack_from(message)
    entries = [_ENTRY.unpack_from(message, _FRAME.size + i * _ENTRY.size) for i in range(count)]
    ends = list(itertools.accumulate((size for _, size in entries), initial=start))
    if len(message) < ends[-1]:
        raise UserError(f"message cut short: {len(message)} bytes, its sections make {ends[-1]}; send it again")
    if len(message) > ends[-1]:
        raise UserError(f"message of {ends[-1]} bytes and {len(message) - ends[-1]} more after it: send it alone")
    if zlib.crc32(message[: _FRAME.size - 4] + bytes(4) + message[_FRAME.size :]) != crc:
        raise UserError("damaged message: its checksum does not match; send it again")
    parts = (message[a:b] for a, b in itertools.pairwise(ends))
    return {name.hex(): part for (name, _), part in zip(entries, parts, strict=True)}


def unpack(message: bytes, coding: Coding) -> Section:
    """Returns a reader's section; raises UserError as `read_frame` does, and for a section that is absent or wrong."""
    sections = read_frame(message)
    if coding.fingerprint not in sections:
        raise UserError(
            f"message for readers with codes {', '.join(sections) or 'of no kind'}, this one has "
            f"{coding.fingerprint}: write its text for this reader"
        )
    return _unpack_section(coding, sections[coding.fingerprint])


def _pack_section(coding: Coding, section: Section) -> bytes:
    numbers, ratios = np.asarray(section.numbers), section.ratios
    statistics = _find_rate(coding, section.step)
    _check_sizes(coding, statistics, numbers.shape, ratios)
    least, most = int(numbers.min()), int(numbers.max())
    if max(-least, most) > LARGEST:
        raise UserError(f"numbers of {least} to {most} steps of {section.step:g}: {LARGEST} at most are sent")
    head = _HEAD.pack(*numbers.shape, statistics.step, len(ratios))
    head += b"".join(struct.pack("BB", ratio, ratio in section.biases) for ratio in ratios)
    runs: list[tuple[np.ndarray, object]] = []  # in the order in which they are read
    if ratios:
        layers, heads = np.shape(coding.tables[ratios[0]])
        assert section.levels.shape == (layers, len(numbers), heads) and section.levels.max() <= len(ratios)
        by_head = section.levels.swapaxes(1, 2).reshape(-1, len(numbers))
        runs += zip(by_head, _level_models(coding, ratios), strict=True)
    for ratio in ratios:
        if ratio in section.biases:
            steps = np.rint(section.biases[ratio][section.kept(ratio)] / BIAS)
            chosen = np.clip(steps, *BIASES).astype(np.int32) - BIASES[0]
            shares = _byte_shares(np.bincount(chosen, minlength=_BIAS_LEVELS))
            head += shares
            runs.append((chosen, _as_model(_scale(shares))))
    beyond = _coders().model.Uniform(2 * LARGEST + 1)
    for column, pair in zip(np.ascontiguousarray(numbers.T, np.int32), _pairs(statistics), strict=False):
        size, model = _tail_model(*pair)
        symbols = _symbols(column, size)
        runs += (symbols, model), (column[symbols == size - 1] + LARGEST, beyond)
    coder = _coders().stack.AnsCoder()
    for symbols, model in reversed(runs):
        coder.encode_reverse(np.ascontiguousarray(symbols, np.int32), model)
    return head + coder.get_compressed().astype("<u4").tobytes()


def _unpack_section(coding: Coding, part: bytes) -> Section:
    head, body = part[: _HEAD.size], part[_HEAD.size :]
    tokens, width, step, count = _HEAD.unpack(head.ljust(_HEAD.size, b"\0"))
    ratios, with_biases = tuple(body[: 2 * count : 2]), np.flatnonzero(list(body[1 : 2 * count : 2]))
    statistics = _find_rate(coding, step)
    _check_sizes(coding, statistics, (tokens, width), ratios)
    body = body[2 * count :]
    shares = [body[_BIAS_LEVELS * i :][:_BIAS_LEVELS] for i in range(len(with_biases))]
    words = body[_BIAS_LEVELS * len(shares) :]
    if len(body) < _BIAS_LEVELS * len(shares) or not all(map(any, shares)) or len(words) % 4 or words[-4:] == bytes(4):
        raise UserError(f"message with a section of {len(part)} bytes, not its coder's: {_WRONG}")
    coder = _coders().stack.AnsCoder(np.frombuffer(words, "<u4").astype(np.uint32))
    levels, biases = Section._field_defaults["levels"], {}
    if ratios:
        layers, heads = np.shape(coding.tables[ratios[0]])
        levels = np.empty((layers, tokens, heads), np.uint8)
        for place, model in enumerate(_level_models(coding, ratios)):
            levels[place // heads, :, place % heads] = coder.decode(model, tokens)
        for place, table in zip(with_biases, shares, strict=True):
            kept = levels > place
            biases[ratios[place]] = bias = np.zeros(kept.shape, np.float32)
            bias[kept] = (coder.decode(_as_model(_scale(table)), int(kept.sum())) + BIASES[0]) * np.float32(BIAS)
    numbers, beyond = np.empty((width, tokens), np.int16), _coders().model.Uniform(2 * LARGEST + 1)
    for column, pair in zip(numbers, _pairs(statistics), strict=False):
        size, model = _tail_model(*pair)
        symbols = coder.decode(model, tokens)
        column[:] = symbols - (size // 2 - 1)
        others = symbols == size - 1
        column[others] = coder.decode(beyond, int(others.sum())) - LARGEST
    if not coder.is_empty():
        raise UserError(f"message with a section of more than its {tokens} tokens x {width} numbers: {_WRONG}")
    return Section(numbers.T, statistics.step, ratios, levels, biases)


@functools.cache
def _coders() -> types.ModuleType:
    try:
        from constriction import stream  # pyright: ignore[reportAttributeAccessIssue]  (compiled, without stubs)
    except ImportError as error:
        raise UserError(
            f"cache messages: {error}; `pip install constriction` where it has a wheel, not for Linux on ARM"
        ) from error
    return stream


def _find_rate(coding: Coding, step: float) -> Statistics:
    for statistics in coding.rates:
        if np.float32(statistics.step) == np.float32(step):
            return statistics
    known = ", ".join(f"{rate.step:g}" for rate in coding.rates)
    raise UserError(f"message in steps of {step:g}, the reader's code has {known}: write its text with this code")


def _check_sizes(coding: Coding, statistics: Statistics, shape: tuple[int, ...], ratios: tuple[int, ...]) -> None:
    """Refuses what the reader's code does not have, and more than is decoded."""
    tokens, width = shape
    widest = len(statistics.zero)
    if not (1 <= tokens <= MOST_TOKENS and 1 <= width <= widest and tokens * width <= MOST_NUMBERS):
        rule = f"1 to {MOST_TOKENS} of 1 to {widest} numbers, {MOST_NUMBERS} in all, can be read"
        raise UserError(f"message of {tokens} tokens of {width} numbers, {rule}: shorten the text, or write it anew")
    if list(ratios) != sorted(set(ratios) & set(coding.tables)):
        raise UserError(
            f"message of ratios {ratios}, the reader's code has {sorted(coding.tables)}: write its text anew"
        )


def _pairs(statistics: Statistics) -> Iterator[tuple[int, int]]:
    return zip(statistics.zero.tolist(), statistics.decay.tolist(), strict=True)


def _symbols(column: Int[np.ndarray, " n"], size: int) -> Int[np.ndarray, " n"]:
    """Returns places in a table of -m..m and, as the last one, all others."""
    last = size // 2 - 1
    return np.where(np.abs(column) <= last, column + last, size - 1)


@functools.lru_cache(maxsize=2**14)
def _tail_model(zero: int, decay: int) -> tuple[int, object]:
    table = _tail_table(zero, decay)
    return len(table), _as_model(table)


def _tail_table(zero: int, decay: int) -> list[int]:
    """Returns the table of -m..m and of all others: 0 and geometric tails on either side, in integers alone.

    It ends where less than 2^-14 lies beyond, or with the longest.
    """
    half, sizes = (_PARTS - zero) << 23, []  # of 2^40
    while not sizes or (half > 1 << 25 and len(sizes) < _LONGEST):
        beyond = half * decay // _PARTS
        sizes.append(half - beyond)
        half = beyond
    return _scale([*reversed(sizes), zero << 24, *sizes, max(2 * half, 1 << 22)])


def _scale(shares: Sequence[int]) -> list[int]:
    """Returns shares that sum to the coder's whole but for 1 each, which the coder adds: then it rounds nothing."""
    whole, total = _WHOLE - len(shares), sum(shares)
    table = [share * whole // total for share in shares]
    table[table.index(max(table))] += whole - sum(table)
    return table


def _as_model(table: Sequence[int]) -> object:
    return _coders().model.Categorical(np.array(table, np.float64), perfect=False)


def _level_models(coding: Coding, ratios: tuple[int, ...]) -> Iterator[object]:
    """Yields each layer's and head's model of at how many of the ratios a key is kept, by the tables' shares."""
    shares = [np.rint(np.asarray(coding.tables[ratio], np.float64) * _PARTS).astype(np.int64) for ratio in ratios]
    bounds = np.stack([np.full_like(shares[0], _PARTS), *shares, np.zeros_like(shares[0])])
    parts = np.maximum(bounds[:-1] - bounds[1:], 0) + _PARTS // 1024  # a text may differ from the table
    return (_as_model(_scale(row)) for row in parts.reshape(len(parts), -1).T.tolist())


def _byte_shares(counts: Int[np.ndarray, " s"]) -> bytes:
    """Returns shares of at most 255; what occurs has one."""
    counts = np.maximum(counts, counts.max() == 0)
    return bytes((-(-counts * 255 // counts.max())).tolist())
