"""Latents as a message: sizes to the byte, errors to the Gaussian figures, and every refusal by name."""

import math
import struct
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.core.errors import UserError
from lw_jax.models import codec

ENCODER = "0123456789abcdef"
SLOTS, WIDTH = 7, 13  # 91 values: no whole byte at 2, 4 or 6 bits, and no power of two
HEADER = 22
FEWER = tuple(bits for bits in codec.BITS if bits < 16)
# Least mean squared errors of N(0, 1): Max 1960, table I, at 2 and 4 bits; at 6 and 8 bits by the integration below.
DISTORTION = {16: 2.0**-22, 8: 4.12e-5, 6: 6.44e-4, 4: 0.009501, 2: 0.1175}  # of 16 bits: fp16's, relative
RMS_OF_FP16 = 2.0**-11
PUBLISHED = 1e-3  # relative: the four digits that the table prints
NEAR = 1.2  # times the Gaussian figure: few values a slot, and samples of them
SAME = 2e-6  # fp32 sums of unit values in another order


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    """Gaussian slots of unit RMS."""
    return unit(np.random.default_rng(seed).normal(size=shape))


def unit(values: np.ndarray) -> np.ndarray:
    return (values / np.sqrt(np.mean(values**2, axis=-1, keepdims=True))).astype(np.float32)


@pytest.fixture
def latents():
    return draw(SLOTS, WIDTH)


def arrive(latents: np.ndarray, bits: int) -> np.ndarray:
    return codec.unpack(codec.pack(latents, bits=bits, encoder=ENCODER), encoder=ENCODER)


def relabel(message: bytes, **changes) -> bytes:
    """The message with other header fields and a checksum that fits: what another program might send."""
    names = ("magic", "version", "bits", "slots", "width", "encoder")
    layout = struct.Struct("<4sBBHH8sI")
    fields = dict(zip(names, layout.unpack_from(message), strict=False)) | changes
    head, payload = [fields[name] for name in names], message[layout.size :]
    return layout.pack(*head, zlib.crc32(layout.pack(*head, 0) + payload)) + payload


def gaussian_error(levels: np.ndarray) -> tuple[float, np.ndarray]:
    """Mean squared error of N(0, 1) and each cell's mean, by a fine sum over the density."""
    x = np.linspace(-9, 9, 2_000_001)
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])
    cell = np.searchsorted((levels[1:] + levels[:-1]) / 2, x)
    mass = np.bincount(cell, density)
    return float(np.sum(density * (x - levels[cell]) ** 2)), np.bincount(cell, density * x) / mass


# --- the quantiser ---


@pytest.mark.parametrize("bits", FEWER)
def test_levels_reach_the_gaussian_distortion_and_are_their_cells_means(bits):
    levels = codec.levels(bits).astype(np.float64)
    assert levels.shape == (2**bits,) and np.all(np.diff(levels) > 0)
    np.testing.assert_array_equal(levels, -levels[::-1])
    error, means = gaussian_error(levels)
    assert error == pytest.approx(DISTORTION[bits], rel=PUBLISHED)
    np.testing.assert_allclose(levels, means, atol=1e-4)  # the sum's grid cuts cells at 1e-5


# --- the rotation ---


@pytest.mark.parametrize("width", [1, 2, 13, 64])
def test_rotation_is_orthogonal(width):
    turn = codec.rotation(width).astype(np.float64)
    np.testing.assert_allclose(turn @ turn.T, np.eye(width), atol=SAME)


def test_rotation_never_changes():
    """Messages outlive programs: these are the values of the first version that wrote them."""
    np.testing.assert_array_equal(
        np.rint(4 * codec.rotation(8))[:2], [[0, -2, 0, -2, 0, 2, 0, -2], [2, 0, 2, 0, -2, 0, 2, 0]]
    )
    found = {width: zlib.crc32(np.rint(1024 * codec.rotation(width)).astype("<i2").tobytes()) for width in (13, 64)}
    assert found == {13: 2099078786, 64: 1950473152}


@pytest.mark.parametrize("bits", FEWER)
@pytest.mark.parametrize("width", [24, 31, 256])
def test_error_is_near_the_gaussian_figure_whatever_the_directions(bits, width):
    values = np.random.default_rng(1).normal(size=(400, width))
    values[:, [1, 5, width - 1]] *= 2 * math.sqrt(width)  # together they carry more than nine tenths of the power
    values = unit(values)
    assert np.mean((arrive(values, bits) - values) ** 2) < NEAR * DISTORTION[bits]


# --- there and back ---


@pytest.mark.parametrize(("bits", "payload"), [(16, 182), (8, 91), (6, 69), (4, 46), (2, 23)])
def test_message_has_the_bytes_that_are_told(latents, bits, payload):
    message = codec.pack(latents, bits=bits, encoder=ENCODER)
    assert len(message) == HEADER + payload == codec.framed_bytes(SLOTS, WIDTH, bits)
    assert codec.read_frame(message) == (bits, SLOTS, WIDTH, ENCODER)
    assert message[4] == 1


def test_four_values_of_six_bits_lie_in_three_bytes_most_significant_first():
    values = draw(1, 4)
    indices = np.searchsorted((codec.levels(6)[1:] + codec.levels(6)[:-1]) / 2, (values @ codec.rotation(4))[0])
    expected = int("".join(f"{index:06b}" for index in indices), 2).to_bytes(3, "big")
    assert len(set(indices)) > 1
    assert codec.pack(values, bits=6, encoder=ENCODER)[HEADER:] == expected


@pytest.mark.parametrize("bits", codec.BITS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (5, 1), (SLOTS, WIDTH)])
def test_every_shape_comes_back_with_unit_rms(bits, shape):
    latents = draw(*shape)
    back = arrive(latents, bits)
    assert back.dtype == np.float32 and back.shape == shape
    np.testing.assert_allclose(np.sqrt(np.mean(back**2, axis=1)), 1, atol=SAME if bits < 16 else RMS_OF_FP16)
    assert np.mean((back - latents) ** 2) < 2 * DISTORTION[bits]


@pytest.mark.parametrize("bits", codec.BITS)
def test_training_sees_what_a_message_brings(bits):
    latents = draw(300, 64)
    found = np.asarray(jax.jit(codec.quantise, static_argnums=1)(jnp.asarray(latents), bits))
    # A value at a threshold may fall to either side, by the order of the rotation's sums: its slot differs by a step.
    apart = np.abs(found - arrive(latents, bits)).max(axis=1) > SAME * 4
    assert apart.mean() < 0.01
    assert found.dtype == np.float32


# --- sending inside a training step ---

CHOICES = ((WIDTH, 16), (5, 16), (5, 4), (WIDTH, 2))


def test_each_example_is_sent_by_its_own_width_and_bits():
    latents = draw(4, SLOTS, WIDTH)
    widths, bits = np.array(CHOICES, np.int32).T
    sent = np.asarray(jax.jit(codec.send, static_argnames="choices")(latents, widths, bits, choices=CHOICES))
    cut = unit(latents[..., :5])
    np.testing.assert_allclose(sent[0], latents[0], atol=SAME)
    np.testing.assert_allclose(sent[1, :, :5], cut[1], atol=SAME)
    np.testing.assert_allclose(sent[2, :, :5], codec.quantise(jnp.asarray(cut[2]), 4), atol=SAME)
    np.testing.assert_allclose(sent[3], codec.quantise(jnp.asarray(latents[3]), 2), atol=SAME)
    assert not sent[1:3, :, 5:].any() and np.abs(sent[2, :, :5] - cut[2]).max() > 0.01


def test_gradient_passes_the_quantiser_but_not_the_width():
    latents, cotangent = jnp.asarray(draw(2, SLOTS, WIDTH)), jnp.asarray(draw(2, SLOTS, WIDTH, seed=1))
    widths = jnp.array([5, 5], jnp.int32)

    def loss(x: jax.Array, bits: int) -> jax.Array:
        sent = codec.send(x, widths, jnp.full((2,), bits, jnp.int32), choices=((5, bits),))
        return jnp.sum(sent * cotangent)

    exact, coarse = (jax.jit(jax.grad(loss), static_argnums=1)(latents, bits) for bits in (16, 2))
    np.testing.assert_allclose(coarse, exact, atol=SAME)
    kept = latents[..., :5]

    def by_hand(x: jax.Array) -> jax.Array:
        return jnp.sum(x / jnp.sqrt(jnp.mean(x * x, axis=2, keepdims=True)) * cotangent[..., :5])

    np.testing.assert_allclose(exact[..., :5], jax.jit(jax.grad(by_hand))(kept), atol=10 * SAME)
    assert not np.any(exact[..., 5:]) and np.abs(exact[..., :5]).max() > 0.1


def test_empty_slots_are_sent_as_zeros_with_finite_gradients():
    latents = jnp.asarray(draw(1, 2, WIDTH)).at[0, 1].set(0.0)

    def total(x: jax.Array) -> jax.Array:
        sent = codec.send(x, jnp.array([5]), jnp.array([4]), choices=((5, 4),))
        return jnp.sum(sent), sent

    gradient, sent = jax.jit(jax.grad(total, has_aux=True))(latents)
    assert not np.any(sent[0, 1]) and np.any(sent[0, 0]) and np.all(np.isfinite(gradient))


# --- refusals ---


@pytest.mark.parametrize("size", [0, 0.9, np.nan])
def test_a_slot_of_another_size_is_not_written(size):
    values = draw(5, WIDTH)
    values[2] *= size
    with pytest.raises(UserError, match="slot 2"):
        codec.pack(values, bits=8, encoder=ENCODER)


@pytest.mark.parametrize("bits", [16, 2])
def test_any_flipped_bit_is_noticed(bits):
    message = codec.pack(draw(2, 3), bits=bits, encoder=ENCODER)
    for position in range(8 * len(message)):
        broken = bytearray(message)
        broken[position // 8] ^= 1 << position % 8
        with pytest.raises(UserError):
            codec.unpack(bytes(broken), encoder=ENCODER)


def sealed(bits: int, slots: int, width: int, payload: bytes) -> bytes:
    """A message of encoder 0 with a right checksum."""
    return relabel(codec._FRAME.pack(codec.MAGIC, codec.VERSION, bits, slots, width, bytes(8), 0) + payload)


def with_slot(value: float) -> bytes:
    values = np.ones((3, 5), np.float16)
    values[1] = value
    return sealed(16, 3, 5, values.tobytes())


WHOLE = sealed(8, SLOTS, WIDTH, bytes(range(SLOTS * WIDTH)))
REFUSED = [
    (relabel(WHOLE, encoder=b"\x12" * 8), f"{'12' * 8}.*{'0' * 16}"),
    *((message, f"{len(message)} bytes") for message in (b"", b"LWJX", b"hello, this is no latent message at all")),
    *((relabel(WHOLE, version=version)[:end], f"version {version}") for version in (0, 2) for end in (5, HEADER, 113)),
    *((relabel(WHOLE, bits=bits), f"of {bits} bits") for bits in (0, 3, 32)),
    (WHOLE[:40] + bytes([WHOLE[40] ^ 1]) + WHOLE[41:], "checksum"),
    (WHOLE[:-1], "112 bytes, .* 113"),
    (WHOLE[:9], f"9 bytes, .* {HEADER}"),
    (WHOLE + bytes(2), "113 bytes and 2 more"),
    (relabel(WHOLE, slots=SLOTS + 1), f"{SLOTS + 1} slots x {WIDTH}"),
    (relabel(relabel(WHOLE, slots=0)[:HEADER]), f"0 slots x {WIDTH}"),
    # Rotation and array are bounded before they are made.
    *((sealed(2, *size, bytes(9)), "{} slots x {}".format(*size)) for size in ((1, 65535), (1, 4097), (65535, 4096))),
    *((with_slot(value), "slot 1") for value in (np.nan, np.inf, -np.inf, 65504.0, 0.0)),
]


@pytest.mark.parametrize(("message", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_no_writer_sends_is_refused_by_name(message, words):
    with pytest.raises(UserError, match=words):
        codec.unpack(message, encoder="0" * 16)
