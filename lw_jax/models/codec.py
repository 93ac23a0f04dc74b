"""Latents as a framed byte message, and back.

Frame (little-endian): magic 4s, version u8, bits u8, slots u16, width u16, encoder fingerprint 16s, CRC-32 u32 of all
other bytes. Then the payload: 16 bits: fp16 values; 8 bits: per group of 32 values an fp16 scale, then int8 values.
"""

import struct
import zlib

import numpy as np

from lw_jax.core.errors import UserError

MAGIC = b"LWJX"
VERSION = 1
BITS = (16, 8)
GROUP = 32  # values that share one scale
_FRAME = struct.Struct("<4sBBHH16sI")


def pack(latents: np.ndarray, *, bits: int, encoder: str) -> bytes:
    """Returns the message of fp32 latents [m z]; `encoder` is the hex fingerprint (32 digits) of what wrote them."""
    if bits not in BITS:
        raise UserError(f"bits={bits}: this version writes {' or '.join(map(str, BITS))}; fewer come with a later one")
    values = np.asarray(latents, np.float32)
    payload = values.astype("<f2").tobytes() if bits == 16 else _pack_int8(values.reshape(-1))
    head = (MAGIC, VERSION, bits, *values.shape, bytes.fromhex(encoder))
    crc = zlib.crc32(_FRAME.pack(*head, 0) + payload)
    return _FRAME.pack(*head, crc) + payload


def unpack(message: bytes, *, encoder: str) -> np.ndarray:
    """Returns fp32 latents [m z]. Raises UserError for what is no message, a newer one, damage, another encoder."""
    if len(message) < _FRAME.size or message[:4] != MAGIC:
        raise UserError(f"not a latent message: {len(message)} bytes that do not begin with {MAGIC!r}")
    _, version, bits, slots, width, writer, crc = _FRAME.unpack_from(message)
    if version != VERSION:
        raise UserError(f"message of version {version}, this program reads {VERSION}: use the version that wrote it")
    payload = message[_FRAME.size :]
    if bits not in BITS:
        raise UserError(
            f"message of {bits} bits a value, this program reads {' or '.join(map(str, BITS))}: send it again"
        )
    if zlib.crc32(_FRAME.pack(MAGIC, version, bits, slots, width, writer, 0) + payload) != crc:
        raise UserError("damaged message: its checksum does not match; send it again")
    if writer.hex() != encoder:
        raise UserError(
            f"message of encoder {writer.hex()}, this wire has encoder {encoder}: read it with the run that wrote it"
        )
    if len(payload) != _payload_bytes(bits, slots * width):
        raise UserError(f"message of {len(payload)} bytes after its frame, which says {slots} x {width} values")
    if bits == 16:
        return np.frombuffer(payload, "<f2").astype(np.float32).reshape(slots, width)
    return _unpack_int8(payload, slots * width).reshape(slots, width)


def _payload_bytes(bits: int, count: int) -> int:
    return 2 * count if bits == 16 else count + 2 * -(-count // GROUP)


def _pack_int8(values: np.ndarray) -> bytes:
    groups = np.pad(values, (0, -len(values) % GROUP)).reshape(-1, GROUP)
    scales = (np.abs(groups).max(axis=1) / 127).astype("<f2")
    # What is divided by must be the rounded scale that travels, and an all-zero group needs some scale.
    divisors = np.where(scales > 0, scales, np.float16(1)).astype(np.float32)[:, None]
    integers = np.clip(np.rint(groups / divisors), -127, 127).astype(np.int8)
    return scales.tobytes() + integers.reshape(-1)[: len(values)].tobytes()


def _unpack_int8(payload: bytes, count: int) -> np.ndarray:
    groups = -(-count // GROUP)
    scales = np.frombuffer(payload, "<f2", groups).astype(np.float32)
    integers = np.frombuffer(payload, np.int8, count, offset=2 * groups)
    return integers.astype(np.float32) * np.repeat(scales, GROUP)[:count]
