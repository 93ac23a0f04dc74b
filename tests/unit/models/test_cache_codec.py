"""Cache messages: what was packed comes back, in few bytes more than its entropy; whatever else comes is refused."""

import struct
import sys
import time
import zlib

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lw_jax.core.errors import UserError
from lw_jax.models import cache_codec
from lw_jax.models.cache_codec import Coding, Section, Statistics

WRITER, READER, OTHER = "0123456789abcdef", "a" * 16, "b" * 16
LAYERS, HEADS = 3, 2
WIDTH, STEP = 12, 0.25
TABLES = {2: np.full((LAYERS, HEADS), 0.5), 4: np.full((LAYERS, HEADS), 0.25), 8: np.full((LAYERS, HEADS), 0.12)}
FRAME = struct.Struct("<4sBB8sI")


def draw(tokens, width=WIDTH, seed=0):
    """Integers as a basis gives them: the first ones large, most of the last ones 0."""
    sizes = 40.0 / np.arange(1, width + 1) ** 1.2
    return np.rint(np.random.default_rng(seed).laplace(size=(tokens, width)) * sizes).astype(np.int32)


CODING = Coding(READER, (cache_codec.fit_statistics(draw(500), STEP),), TABLES)


def choose(tokens, seed=0):
    rank = np.random.default_rng(seed).random((LAYERS, tokens, HEADS)).argsort(axis=1).argsort(axis=1)
    kept = np.stack([rank < np.rint(table * tokens)[:, None] for table in TABLES.values()])
    return kept.sum(axis=0).astype(np.uint8)


def section(tokens=9, biases=(4,), seed=0):
    bias = np.random.default_rng(seed).normal(size=(LAYERS, tokens, HEADS))
    return Section(draw(tokens, seed=seed), STEP, (2, 4, 8), choose(tokens, seed), dict.fromkeys(biases, bias))


def pack(*sections):
    return cache_codec.pack(sections or [(CODING, section())], writer=WRITER)


def seal(message):
    """The message with a checksum that fits: what another program might send."""
    *head, _ = FRAME.unpack_from(message)
    body = message[FRAME.size :]
    return FRAME.pack(*head, zlib.crc32(FRAME.pack(*head, 0) + body)) + body


def same(found, wanted):
    np.testing.assert_array_equal(found.numbers, wanted.numbers)
    np.testing.assert_array_equal(found.levels, wanted.levels)
    assert found.step == wanted.step and found.ratios == wanted.ratios and found.biases.keys() == wanted.biases.keys()
    for ratio, bias in wanted.biases.items():
        here = wanted.kept(ratio)
        assert not found.biases[ratio][~here].any()
        off = np.abs(found.biases[ratio] - np.clip(bias, -3, 4.5))[here]
        assert off.max(initial=0) <= cache_codec.BIAS / 2 + 1e-6


# --- what comes back ---


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_was_packed_comes_back(data):
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    tokens, width = data.draw(st.integers(1, 40)), data.draw(st.integers(1, WIDTH))
    size = data.draw(st.sampled_from([0, 1, 30, 3000, cache_codec.LARGEST]))  # far beyond the tables, and all 0
    numbers = rng.integers(-size, size + 1, (tokens, width))
    ratios = tuple(sorted(data.draw(st.sets(st.sampled_from(sorted(TABLES))))))
    levels = (
        rng.integers(0, len(ratios) + 1, (LAYERS, tokens, HEADS)).astype(np.uint8)
        if ratios
        else section().levels[:0, :0, :0]
    )
    biased = data.draw(st.sets(st.sampled_from(ratios))) if ratios else ()
    sent = Section(numbers, STEP, ratios, levels, {one: 9 * rng.normal(size=levels.shape) for one in biased})
    same(cache_codec.unpack(pack((CODING, sent)), CODING), sent)


def test_each_reader_takes_its_section_without_the_others():
    other = Coding(OTHER, (cache_codec.fit_statistics(draw(99, 5), 0.5),), {})
    second = Section(draw(4, 5, seed=1), 0.5)
    message = pack((CODING, section()), (other, second))
    same(cache_codec.unpack(message, CODING), section())
    same(cache_codec.unpack(message, other), second)
    assert list(cache_codec.read_frame(message)) == [READER, OTHER]
    # A section that nobody could decode does not disturb the first one.
    size = len(cache_codec.read_frame(message)[OTHER])
    damaged = seal(message[:-size] + b"\xff" * size)
    same(cache_codec.unpack(damaged, CODING), section())


def test_a_text_of_which_no_key_is_kept_comes_back():
    sent = section()._replace(levels=np.zeros_like(section().levels))
    same(cache_codec.unpack(pack((CODING, sent)), CODING), sent)


def test_every_ratio_keeps_its_best_keys_of_the_one_order():
    sent = section(40)
    found = cache_codec.unpack(pack((CODING, sent)), CODING)
    for ratio, table in TABLES.items():
        np.testing.assert_array_equal(found.kept(ratio).sum(axis=1), np.rint(40 * table))
    assert not (found.kept(8) & ~found.kept(4)).any() and not (found.kept(4) & ~found.kept(2)).any()


# --- bytes and seconds ---


def test_bytes_are_the_entropy_and_a_thousand_tokens_are_quick():
    calibration, text = (draw(1000, 2048, seed) for seed in (1, 2))
    coding = Coding(READER, (cache_codec.fit_statistics(calibration, STEP),), {})
    text[::100, :50] += 5000  # beyond the tables
    start = time.thread_time()
    message = pack((coding, Section(text, STEP)))
    found = cache_codec.unpack(message, coding)
    assert time.thread_time() - start < 3
    np.testing.assert_array_equal(found.numbers, text)
    expected = cache_codec.bits(coding.rates[0], text) / 8
    assert expected < len(message) < 1.002 * expected + 64


def test_order_and_biases_take_their_entropy():
    tokens = 2000
    sent = section(tokens)
    empty, ordered, whole = (
        len(pack((CODING, one))) for one in (Section(sent.numbers, STEP), sent._replace(biases={}), sent)
    )
    shares = np.bincount(sent.levels.ravel()) / sent.levels.size
    assert ordered - empty == pytest.approx(-sent.levels.size * float(shares @ np.log2(shares)) / 8, rel=0.02)
    assert (whole - ordered) * 8 / (sent.levels >= 2).sum() == pytest.approx(4.05, rel=0.03)  # of N(0, 1) in quarters


# --- the format ---


def read_in_integers(words, tables):
    """Symbols by an ANS decoder of Python's integers: 24-bit shares, 32-bit words, the last one first."""
    words = list(words)
    state = words.pop() << 32 | words.pop() if len(words) > 1 else words.pop()
    for table in tables:
        place, symbol = state & 0xFFFFFF, 0
        while place >= table[symbol] + 1:
            place, symbol = place - table[symbol] - 1, symbol + 1
        state = (state >> 24) * (table[symbol] + 1) + place
        if state < 1 << 32 and words:
            state = state << 32 | words.pop()
        yield symbol


def test_tables_are_the_coders_to_the_last_bit():
    numbers = draw(50)
    statistics = CODING.rates[0]
    tables = [cache_codec._tail_table(*pair) for pair in np.stack(statistics[1:]).T.tolist()]
    assert all(sum(table) + len(table) == 2**24 for table in tables)
    assert cache_codec._tail_table(60000, 1)[-1] + 1 == pytest.approx(2**24 * 2**-18, rel=0.1), "of what was never seen"
    last = np.array([len(table) // 2 - 1 for table in tables])
    numbers = np.clip(numbers, -last, last)
    part = cache_codec.read_frame(pack((CODING, Section(numbers, STEP))))[READER]
    words = np.frombuffer(part[cache_codec._HEAD.size :], "<u4").tolist()
    found = list(read_in_integers(words, [table for table in tables for _ in range(50)]))
    np.testing.assert_array_equal(found, (numbers + last).T.ravel())


def test_format_does_not_change():
    statistics = Statistics(0.5, np.array([20000, 60000], np.uint16), np.array([50000, 9], np.uint16))
    coding = Coding(READER, (statistics,), {2: np.array([[0.25]])})
    levels = np.array([[[1], [0], [1]]], np.uint8)
    sent = Section(np.array([[3, 0], [-900, 1], [0, -2]]), 0.5, (2,), levels, {2: np.array([[[0.5], [9.0], [-1.0]]])})
    head = "4c574a430101" + WRITER + "3e87363c" + READER + "38000000"
    ratios = "0300000002000000003f01" + "0201" + "00" * 8 + "ff" + "00" * 5 + "ff" + "00" * 16
    assert pack((coding, sent)).hex() == head + ratios + "183474ac7769cec50bca6d00"


def test_fingerprint_tells_codings_apart():
    arrays = [np.arange(3.0)]
    one = cache_codec.fingerprint(arrays, CODING.rates, TABLES)
    assert one == cache_codec.fingerprint([np.arange(3.0)], CODING.rates, dict(reversed(TABLES.items())))
    others = (
        ([np.arange(3)], CODING.rates, TABLES),
        (arrays, CODING.rates, {2: TABLES[2]}),
        (arrays, (CODING.rates[0]._replace(step=0.125),), TABLES),
    )
    assert len({one, *(cache_codec.fingerprint(*other) for other in others)}) == 4


# --- what is refused ---


@settings(max_examples=300, deadline=None)
@given(place=st.integers(0, 2**16), value=st.integers(0, 255), sealed=st.booleans(), cut=st.integers(-3, 40))
@example(place=FRAME.size + 12 + 10, value=0, sealed=True, cut=0)  # ratios: none
@example(place=FRAME.size + 12 + 10, value=255, sealed=True, cut=0)
def test_a_changed_message_is_refused_or_read(place, value, sealed, cut):
    """Only what another program sealed may be read, as some text: a checksum finds all that happens on the way."""
    message = bytearray(pack())
    message[place % len(message)] = value
    changed = bytes(message) + b"x" * -cut if cut < 0 else bytes(message[: len(message) - cut])
    if sealed and len(changed) >= FRAME.size:
        changed = seal(changed)
    try:
        found = cache_codec.unpack(changed, CODING)
    except UserError:
        return
    if changed == pack():
        same(found, section())
        return
    assert sealed
    assert found.numbers.shape[0] * found.numbers.shape[1] <= cache_codec.MOST_NUMBERS
    again = cache_codec.unpack(pack((CODING, found)), CODING)
    same(again, found)


def change_head(**changes):
    names = ("tokens", "width", "step", "ratios")
    message = pack()
    start = FRAME.size + 12
    fields = dict(zip(names, cache_codec._HEAD.unpack_from(message, start), strict=True)) | changes
    end = start + cache_codec._HEAD.size
    return seal(message[:start] + cache_codec._HEAD.pack(*fields.values()) + message[end:])


def change_part(change):
    part = change(cache_codec.read_frame(pack())[READER])
    name, body = bytes.fromhex(READER), bytes.fromhex(WRITER)
    return seal(FRAME.pack(b"LWJC", 1, 1, body, 0) + struct.pack("<8sI", name, len(part)) + part)


SHARES = 11 + 3 * 2  # where a section's first biases begin
FOREIGN = "not its coder's"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b"", "0 bytes"),
        (b"LWJX" + pack()[4:], "LWJC"),
        (seal(pack()[:4] + b"\x02" + pack()[5:]), "version 2"),
        (pack()[:12], "12 bytes"),
        (pack()[:-1], "cut short"),
        (pack() + b"x", "1 more"),
        (pack()[:-1] + bytes([pack()[-1] ^ 1]), "checksum"),
        (change_head(tokens=0), "0 tokens"),
        (change_head(tokens=2**32 - 1), str(2**32 - 1)),
        (change_head(tokens=cache_codec.MOST_TOKENS + 1), str(cache_codec.MOST_TOKENS)),
        (change_head(width=WIDTH + 1), str(WIDTH + 1)),
        (change_head(width=0), "0 numbers"),
        (change_head(step=float("nan")), "nan"),
        (change_head(step=0.5), "0.5"),
        (change_head(ratios=255), "ratios"),
        (change_head(tokens=8), "more than"),
        (change_part(lambda part: part[:3]), "steps of 0"),
        (change_part(lambda part: part[: SHARES + 30]), FOREIGN),
        (change_part(lambda part: part[:SHARES] + bytes(31) + part[SHARES + 31 :]), FOREIGN),
        (change_part(lambda part: part[:-4] + bytes(4)), FOREIGN),
        (change_part(lambda part: part[:-1]), FOREIGN),
    ],
    ids=lambda one: one if isinstance(one, str) else "message",
)
def test_one_error_for_each_wrong_message(message, words):
    with pytest.raises(UserError, match=words):
        cache_codec.unpack(message, CODING)


def test_messages_of_others_are_refused():
    with pytest.raises(UserError, match=f"{READER}.*{OTHER}"):
        cache_codec.unpack(pack(), CODING._replace(fingerprint=OTHER))
    with pytest.raises(UserError, match=r"ratios \(2, 4, 8\)"):
        cache_codec.unpack(pack(), CODING._replace(tables={2: TABLES[2]}))


def test_numbers_in_all_are_bounded(monkeypatch):
    monkeypatch.setattr(cache_codec, "MOST_NUMBERS", 9 * WIDTH - 1)
    with pytest.raises(UserError, match=str(9 * WIDTH - 1)):
        pack()


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ([(CODING, Section(np.full((2, 2), cache_codec.LARGEST + 1), STEP))], str(cache_codec.LARGEST)),
        ([(CODING, Section(draw(2), 0.3))], "0.3"),
        ([(CODING, section()), (CODING, section())], READER),
        ([(CODING, section()._replace(ratios=(4, 2)))], r"\(4, 2\)"),
    ],
)
def test_what_no_message_can_say_is_refused(sections, words):
    with pytest.raises(UserError, match=words):
        pack(*sections)


def test_a_machine_without_the_coder_says_what_it_lacks(monkeypatch):
    cache_codec._coders.cache_clear()
    monkeypatch.setitem(sys.modules, "constriction", None)
    with pytest.raises(UserError, match="constriction"):
        pack()
    monkeypatch.undo()
    cache_codec.unpack(pack(), CODING)
