"""Byte messages of latents, and the same quantisation inside a training step.

A slot has unit RMS, so a message has no scales. Below 16 bits a slot is multiplied by a fixed rotation, after which
its values are near N(0, 1) whatever their directions were (the idea of QuIP#, arXiv 2402.04396), and each becomes the
index of the nearest level of the unit Gaussian's minimum-error quantiser (Lloyd 1957, Max 1960). Decoded slots are
scaled to unit RMS again. 16 bits are plain fp16.

Frame (little-endian): magic 4s, version u8, bits u8, slots u16, width u16, the encoder's fingerprint 8s, CRC-32 u32 of
all other bytes. Then the indices, `bits` each, most significant first, slot after slot, filled to a whole byte.
"""

import functools
import hashlib
import math
import statistics
import struct
import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lw_jax.core.config_sections import BITS, WIDEST
from lw_jax.core.errors import UserError
from lw_jax.core.validation import MOST_VALUES

MAGIC = b"LWJX"
VERSION = 1
RMS_TOLERANCE = 0.01  # of a slot's RMS from 1: far above rounding, far below what would cost precision
EPSILON = 1e-12  # under a mean square: keeps an all-zero slot zero and its gradient finite
_READS = ", ".join(map(str, BITS))
_FRAME = struct.Struct("<4sBBHH8sI")


class Frame(NamedTuple):
    """Header of a message."""

    bits: int
    slots: int
    width: int
    encoder: str  # 16 hex digits


def framed_bytes(slots: int, width: int, bits: int) -> int:
    """Returns the bytes of a message, its frame included."""
    return _FRAME.size + -(-slots * width * bits // 8)


def pack(latents: np.ndarray, *, bits: int, encoder: str) -> bytes:
    """Returns the message of latents [m w]; `encoder` is the encoder's fingerprint, 16 hex digits.

    Raises UserError where a slot's RMS is not 1.
    """
    values = np.asarray(latents, np.float32)
    _check_rms(values, "latents", "a message has no scales, so each slot must have RMS 1; divide it by its RMS")
    if bits == 16:
        payload = values.astype("<f2").tobytes()
    else:
        indices = np.searchsorted(_thresholds(bits), values @ rotation(values.shape[1])).astype(np.uint8)
        payload = np.packbits(np.unpackbits(indices.reshape(-1, 1), axis=1)[:, 8 - bits :]).tobytes()
    head = (MAGIC, VERSION, bits, *values.shape, bytes.fromhex(encoder))
    return _FRAME.pack(*head, zlib.crc32(_FRAME.pack(*head, 0) + payload)) + payload


def unpack(message: bytes, *, encoder: str) -> np.ndarray:
    """Returns fp32 latents [m w]; raises UserError as `read_frame` does, and where a slot's RMS is not 1."""
    frame = read_frame(message, encoder=encoder)
    shape = frame.slots, frame.width
    if frame.bits == 16:
        values = np.frombuffer(message, "<f2", offset=_FRAME.size).astype(np.float32).reshape(shape)
        _check_rms(values, "message", "damaged or foreign; write its text anew")
        return values
    payload = np.frombuffer(message, np.uint8, offset=_FRAME.size)
    places = np.unpackbits(payload, count=math.prod(shape) * frame.bits).reshape(-1, frame.bits)
    indices = np.packbits(np.pad(places, ((0, 0), (8 - frame.bits, 0))), axis=1)
    values = levels(frame.bits)[indices.reshape(shape)] @ rotation(frame.width).T
    return values / np.sqrt(np.mean(values * values, axis=1, keepdims=True))


def read_frame(message: bytes, *, encoder: str = "") -> Frame:
    """Returns the header of a complete, undamaged message.

    Raises UserError for other bytes, another version, bits that this program does not read, a message that is cut,
    followed by more, damaged or too large, and, where `encoder` is given, for a message of another encoder.
    """
    if message[:4] != MAGIC or len(message) < 5:
        raise UserError(f"not a latent message: {len(message)} bytes that do not begin with {MAGIC!r} and a version")
    if message[4] != VERSION:
        raise UserError(f"message of version {message[4]}, this program reads {VERSION}: read it with its program")
    if len(message) < _FRAME.size:
        raise UserError(f"message cut short: {len(message)} bytes, its frame alone has {_FRAME.size}; send it again")
    _, _, bits, slots, width, writer, crc = _FRAME.unpack_from(message)
    if bits not in BITS:
        raise UserError(
            f"message of {bits} bits a value, this program reads {_READS}: damaged or foreign; write it anew"
        )
    if width > WIDEST or slots * width > MOST_VALUES:
        rule = f"at most {WIDEST} values a slot and {MOST_VALUES} in all are read: damaged or foreign; write it anew"
        raise UserError(f"message of {slots} slots x {width} values, {rule}")
    expected, parts = framed_bytes(slots, width, bits), f"{slots} slots x {width} values of {bits} bits"
    if expected == _FRAME.size or len(message) < expected:
        raise UserError(f"message cut short: {len(message)} bytes, {parts} make {expected}; send it again")
    if len(message) > expected:
        raise UserError(f"message of {expected} bytes and {len(message) - expected} more after it: send it alone")
    if zlib.crc32(message[: _FRAME.size - 4] + bytes(4) + message[_FRAME.size :]) != crc:
        raise UserError("damaged message: its checksum does not match; send it again")
    if encoder not in ("", writer.hex()):
        raise UserError(
            f"message of encoder {writer.hex()}, this wire has encoder {encoder}: read it with the run that wrote it"
        )
    return Frame(bits, slots, width, writer.hex())


def normalise(latents: Float[Array, "*n z"]) -> Float[Array, "*n z"]:
    """Scales each slot to unit RMS; an all-zero slot stays zero."""
    return latents * jax.lax.rsqrt(jnp.mean(latents * latents, axis=-1, keepdims=True) + EPSILON)


def truncate(latents: Float[Array, "b m z"], widths: Int[Array, " b"]) -> Float[Array, "b m z"]:
    """Scales the first `width` values of each slot to unit RMS; the others, and slots of zeros, become or stay 0."""
    inside = jnp.arange(latents.shape[2], dtype=jnp.int32)[None, None, :] < widths[:, None, None]
    cut = jnp.where(inside, latents, 0.0)
    # The mean square is that of the first `width` values, not of the zeros beyond them.
    square = jnp.sum(cut * cut, axis=2, keepdims=True) / widths[:, None, None].astype(latents.dtype)
    return cut * jax.lax.rsqrt(square + EPSILON)


def quantise(latents: Float[Array, "*n z"], bits: int) -> Float[Array, "*n z"]:
    """Returns latents of unit RMS after quantisation, as `unpack(pack(...))`; an all-zero slot stays zero."""
    if bits == 16:
        return latents.astype(jnp.float16).astype(latents.dtype)
    turn = jnp.asarray(rotation(latents.shape[-1]))
    turned = jnp.matmul(latents.astype(jnp.float32), turn, precision="highest")
    nearest = jnp.searchsorted(jnp.asarray(_thresholds(bits)), turned)
    arrived = normalise(jnp.matmul(jnp.asarray(levels(bits))[nearest], turn.T, precision="highest"))
    arrived = arrived.astype(latents.dtype)
    return jnp.where(jnp.any(latents != 0, axis=-1, keepdims=True), arrived, jnp.zeros_like(latents))


def send(
    latents: Float[Array, "b m z"],
    widths: Int[Array, " b"],
    bits: Int[Array, " b"],
    *,
    choices: tuple[tuple[int, int], ...],
) -> Float[Array, "b m z"]:
    """Truncates and quantises each example to its own width and bits, with a straight-through gradient.

    Of each slot the first `width` values are kept and scaled to unit RMS, the others are zero. 16 bits are exact here.
    Every example's (width, bits) must be one of `choices`; those of another one become NaN.
    """
    cut = truncate(latents, widths)
    fixed = jax.lax.stop_gradient(cut)
    arrived = jnp.full_like(fixed, jnp.nan)
    for width, bit in dict.fromkeys(choices):
        chosen = ((widths == width) & (bits == bit))[:, None, None]
        quantised = fixed
        if bit < 16:
            quantised = jnp.pad(quantise(fixed[..., :width], bit), ((0, 0), (0, 0), (0, latents.shape[2] - width)))
        arrived = jnp.where(chosen, quantised, arrived)
    return cut + (arrived - fixed)


@functools.cache
def rotation(width: int) -> np.ndarray:
    """Returns the fixed orthogonal fp32 [w w] of a slot (x @ rotation), a constant of the format.

    Two rounds of sign flips and a Walsh-Hadamard transform. A width that is no power of two has a transform for each
    of its binary digits, in the second round from the other end, so that every value meets the others.
    """
    turn = np.eye(width)
    for label in (b"first", b"second"):
        bits = np.unpackbits(np.frombuffer(hashlib.shake_256(MAGIC + label).digest(-(-width // 8)), np.uint8))
        turn = ((turn * (1.0 - 2.0 * bits[:width])) @ _hadamard(width))[:, ::-1]
    turn = np.ascontiguousarray(turn, np.float32)
    turn.flags.writeable = False  # one array serves all callers
    return turn


@functools.cache
def levels(bits: int) -> np.ndarray:
    """Returns the 2^bits ascending fp32 levels that quantise N(0, 1) with the least mean squared error.

    Each is the mean of what is nearest to it; that condition is solved by Newton's method over the positive half.
    Six decimals are kept, so that another machine's error function gives the same numbers.
    """
    half = 2 ** (bits - 1)
    # The best density of levels is that of N(0, 3) where there are many (Panter and Dite 1951).
    start = statistics.NormalDist(0.0, math.sqrt(3.0))
    points = np.array([start.inv_cdf(0.5 + (i + 0.5) / (2 * half)) for i in range(half)])
    for _ in range(100):
        middles = (points[1:] + points[:-1]) / 2
        low = np.append(0.0, middles)
        tail = np.array([math.erfc(x / math.sqrt(2)) / 2 for x in low] + [0.0])
        mass = tail[:-1] - tail[1:]
        density = np.exp(-low * low / 2) / math.sqrt(2 * math.pi)
        mean = (density - np.append(density[1:], 0.0)) / mass
        # Derivatives of a mean by the middles on either side; the outermost, at 0 and at infinity, are fixed.
        below = density[1:] * (mean[1:] - middles) / mass[1:] / 2
        above = density[1:] * (middles - mean[:-1]) / mass[:-1] / 2
        slope = np.diag(np.append(0.0, below) + np.append(above, 0.0)) + np.diag(below, -1) + np.diag(above, 1)
        step = np.linalg.solve(np.eye(half) - slope, mean - points)
        points = points + step
        if np.abs(step).max() < 1e-12:
            break
    table = np.round(np.concatenate([-points[::-1], points]), 6).astype(np.float32)
    table.flags.writeable = False
    return table


@functools.cache
def _thresholds(bits: int) -> np.ndarray:
    table = levels(bits)
    return (table[1:] + table[:-1]) / np.float32(2)


def _hadamard(width: int) -> np.ndarray:
    """Returns orthonormal Walsh-Hadamard matrices of the width's binary digits, largest first, along a diagonal."""
    total, start = np.zeros((width, width)), 0
    for digit in reversed(range(width.bit_length())):
        if size := width & 1 << digit:
            places = np.arange(size)
            odd = np.bitwise_count(places[:, None] & places) % 2
            total[start : start + size, start : start + size] = (1.0 - 2.0 * odd) / math.sqrt(size)
            start += size
    return total


def _check_rms(values: np.ndarray, what: str, rule: str) -> None:
    """Refuses slots whose RMS is not 1; NaN and infinite values fail too."""
    square = np.einsum("mw,mw->m", values, values, dtype=np.float64) / values.shape[1]
    wrong = ~(np.abs(np.sqrt(square) - 1) <= RMS_TOLERANCE)
    if wrong.any():
        slot = int(np.argmax(wrong))
        raise UserError(f"{what} whose slot {slot} has RMS {math.sqrt(square[slot]):.4g}: {rule}")
