"""Latents as a message: sizes to the byte, errors to the last bit, and every refusal by name."""

import struct
import zlib

import numpy as np
import pytest

from lw_jax.core.errors import UserError
from lw_jax.models import codec

ENCODER = "0123456789abcdef" * 2
OTHER = "f" * 32
SLOTS, WIDTH = 7, 13  # 91 values: three groups of 32, the last one short
HEADER = 4 + 1 + 1 + 2 + 2 + 16 + 4
FP16 = 2.0**-11  # relative, half a unit in the last place


@pytest.fixture
def latents():
    drawn = np.random.default_rng(0).normal(size=(SLOTS, WIDTH)).astype(np.float32)
    drawn[:2] *= 40  # groups of different sizes
    return drawn


def relabel(message: bytes, **changes) -> bytes:
    """The message with other header fields and a checksum that fits: what another program might send."""
    names = ("magic", "version", "bits", "slots", "width", "encoder")
    layout = struct.Struct("<4sBBHH16sI")
    fields = dict(zip(names, layout.unpack_from(message), strict=False)) | changes
    head, payload = [fields[name] for name in names], message[layout.size :]
    return layout.pack(*head, zlib.crc32(layout.pack(*head, 0) + payload)) + payload


def test_sixteen_bits_keep_half_a_unit_in_the_last_place(latents):
    message = codec.pack(latents, bits=16, encoder=ENCODER)
    assert len(message) == HEADER + 2 * SLOTS * WIDTH
    back = codec.unpack(message, encoder=ENCODER)
    assert back.dtype == np.float32 and back.shape == (SLOTS, WIDTH)
    np.testing.assert_allclose(back, latents, rtol=FP16, atol=2.0**-25)
    assert not np.array_equal(back, latents)


def test_eight_bits_keep_half_a_step_of_each_group(latents):
    message = codec.pack(latents, bits=8, encoder=ENCODER)
    assert len(message) == HEADER + SLOTS * WIDTH + 2 * 3
    back = codec.unpack(message, encoder=ENCODER)
    flat, error = latents.reshape(-1), np.abs(back - latents).reshape(-1)
    for start in range(0, SLOTS * WIDTH, 32):
        group = slice(start, start + 32)
        step = np.abs(flat[group]).max() / 127
        # Half a step of the rounded scale, and what rounding the scale to fp16 takes from the largest value.
        assert error[group].max() <= step * (0.5 + 127 * FP16) * (1 + FP16)
    assert np.abs(flat[-27:]).max() < 5 < np.abs(flat[:20]).max(), "groups must differ for this to say anything"


@pytest.mark.parametrize("bits", codec.BITS)
def test_zero_latents_come_back_as_zeros(bits):
    zeros = np.zeros((3, 11), np.float32)
    np.testing.assert_array_equal(codec.unpack(codec.pack(zeros, bits=bits, encoder=ENCODER), encoder=ENCODER), zeros)


@pytest.mark.parametrize("bits", codec.BITS)
def test_values_too_small_for_a_scale_come_back_as_nearly_nothing(bits):
    tiny = np.full((2, 5), 1e-9, np.float32)
    back = codec.unpack(codec.pack(tiny, bits=bits, encoder=ENCODER), encoder=ENCODER)
    assert np.abs(back).max() <= 1e-7


@pytest.mark.parametrize("bits", codec.BITS)
def test_any_flipped_bit_is_noticed(bits):
    message = codec.pack(np.arange(6, dtype=np.float32).reshape(2, 3), bits=bits, encoder=ENCODER)
    for position in range(8 * len(message)):
        broken = bytearray(message)
        broken[position // 8] ^= 1 << position % 8
        with pytest.raises(UserError):
            codec.unpack(bytes(broken), encoder=ENCODER)


def test_another_encoder_is_refused_with_both_names(latents):
    message = codec.pack(latents, bits=8, encoder=ENCODER)
    with pytest.raises(UserError, match=f"message of encoder {ENCODER}, this wire has encoder {OTHER}"):
        codec.unpack(message, encoder=OTHER)


def test_later_version_is_refused_with_both_numbers(latents):
    message = relabel(codec.pack(latents, bits=8, encoder=ENCODER), version=2)
    with pytest.raises(UserError, match="message of version 2, this program reads 1"):
        codec.unpack(message, encoder=ENCODER)


def test_damage_is_named(latents):
    message = codec.pack(latents, bits=8, encoder=ENCODER)
    for broken in (message[:-1], message + b"\0", message[:40] + bytes([message[40] ^ 1]) + message[41:]):
        with pytest.raises(UserError, match="damaged message"):
            codec.unpack(broken, encoder=ENCODER)


@pytest.mark.parametrize("message", [b"", b"LWJX", b"hello, this is no latent message at all"])
def test_what_is_no_message_is_refused(message):
    with pytest.raises(UserError, match=f"not a latent message: {len(message)} bytes"):
        codec.unpack(message, encoder=ENCODER)


@pytest.mark.parametrize("bits", [2, 4, 6, 32])
def test_other_bits_are_refused_both_ways(latents, bits):
    with pytest.raises(UserError, match=f"bits={bits}: this version writes 16 or 8"):
        codec.pack(latents, bits=bits, encoder=ENCODER)
    message = relabel(codec.pack(latents, bits=8, encoder=ENCODER), bits=bits)
    with pytest.raises(UserError, match=f"message of {bits} bits a value, this program reads 16 or 8"):
        codec.unpack(message, encoder=ENCODER)


@pytest.mark.parametrize("bits", codec.BITS)
def test_frame_that_says_another_size_is_refused(latents, bits):
    message = relabel(codec.pack(latents, bits=bits, encoder=ENCODER), slots=SLOTS + 1)
    with pytest.raises(UserError, match=f"its frame, which says {SLOTS + 1} x {WIDTH} values"):
        codec.unpack(message, encoder=ENCODER)
