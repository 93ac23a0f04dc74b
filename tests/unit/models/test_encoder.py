"""Text into latents: what is pooled, what padding may not change, and that every parameter learns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.core.precision import Precision
from lw_jax.core.types import EXACT
from lw_jax.models import bert, codec, decoder, encoder
from lw_jax.models.wire import EncoderSpec, Reader, Wire
from tests import tiny

pytestmark = pytest.mark.slow

SAME = 2e-5  # fp32, values of unit size: the same sums in another order
APART = 1e-3
DEAD = 1e-4  # a leaf's largest gradient beside the largest of all: rounding noise stays below 1e-6
SLOTS, WIDTH = 5, 14

BODY = dataclasses.replace(tiny.DECODER, vocab=61, layers=2, heads=4, head_dim=6, tied=True)
BERT = bert.BertConfig(vocab=61, width=26, layers=2, heads=2, ffn=34, norm_eps=1e-12, max_positions=64, token_types=2)
KINDS = [
    *((kind, "windows") for kind in ("lm", "bert", "bytes")),
    *(("lm", "queries"), ("bert", "rare"), ("bytes", "queries")),
]


def make(kind, pooling, dtype="float32", *, slots=SLOTS, width=WIDTH, window=64):
    body = {"lm": BODY, "bert": BERT, "bytes": None}[kind]
    precision = Precision(dtype, dtype)
    spec = EncoderSpec(slots, width, pooling, layers=2, window=window, body=body, precision=precision)
    return Wire(spec, {"reader": Reader(BODY, 19, ())})


@pytest.fixture(scope="module")
def built():
    """(kind, pooling) -> (wire, trainable tree)."""
    weights = {"lm": encoder.keep_body(decoder.init(jax.random.key(5), BODY, jnp.float32, scale=0.3)), "bytes": None}
    shapes = bert.abstract(BERT, jnp.float32)
    weights["bert"] = jax.tree.map(lambda leaf: 0.3 * jax.random.normal(jax.random.key(leaf.size), leaf.shape), shapes)
    sizes = {"reader": jnp.asarray(0.1)}

    def build(kind, pooling):
        wire = make(kind, pooling)
        init = jax.jit(lambda key, body: wire.init(key, body=body, embedding_rms=sizes))
        return wire, init(jax.random.key(6), weights[kind])

    return {key: build(*key) for key in KINDS}


def source(lengths, width, *, pad=0, vocab=61, slots=SLOTS, latent=WIDTH):
    """Right-padded ids whose real part does not depend on the padding."""
    ids, mask = np.full((len(lengths), width), pad, np.int32), np.zeros((len(lengths), width), bool)
    for row, length in enumerate(lengths):
        ids[row, :length] = np.random.default_rng(row).integers(1, vocab, length)
        mask[row, :length] = True
    channel = np.tile(np.array([slots, latent, EXACT], np.int32), (len(lengths), 1))
    return {"ids": jnp.asarray(ids), "mask": jnp.asarray(mask), "channel": jnp.asarray(channel)}


def windows(mask, slots):
    """`window_weights` with all slots in use."""
    return np.asarray(encoder.window_weights(mask, slots, jnp.full(mask.shape[:1], slots, jnp.int32)))


@pytest.mark.parametrize(("length", "slots"), [(12, 4), (13, 5), (5, 5), (7, 1)])
def test_windows_are_contiguous_and_take_every_token_once(length, slots):
    rows = windows(source([length], 29)["mask"], slots)[0]
    np.testing.assert_allclose(rows.sum(axis=1), 1, atol=SAME)
    taken = rows > 0
    np.testing.assert_array_equal(taken.sum(axis=0), np.arange(29) < length)
    spans = [np.flatnonzero(row) for row in taken]
    np.testing.assert_array_equal(np.concatenate(spans), np.arange(length))
    assert max(map(len, spans)) - min(map(len, spans)) <= 1
    shorter = windows(source([3], 11)["mask"], 7)[0]
    assert (shorter.sum(axis=1) == 1).all() and shorter.max(axis=1).all(), "tokens are repeated, each slot has one"
    assert (np.diff(shorter.argmax(axis=1)) >= 0).all() and set(shorter.argmax(axis=1)) == {0, 1, 2}


@pytest.mark.parametrize("key", KINDS, ids="-".join)
def test_latents_are_fp32_of_unit_rms_of_their_text_whatever_the_padding(built, key):
    wire, trainable = built[key]
    run = jax.jit(wire.encode)
    latents = np.asarray(run(trainable, source([13, 4, 1], 13)))
    assert latents.shape == (3, SLOTS, WIDTH) and latents.dtype == np.float32
    np.testing.assert_allclose(np.sqrt(np.mean(np.square(latents), axis=2)), 1, atol=1e-3)
    assert np.abs(latents[0] - latents[1]).max() > APART
    np.testing.assert_allclose(run(trainable, source([13, 4, 1], 17, pad=29)), latents, atol=SAME)


@pytest.mark.parametrize("kind", ["lm", "bert", "bytes"])
def test_encoder_reads_in_both_directions(built, kind):
    wire, trainable = built[kind, "windows"]
    whole = source([13], 13)
    run = jax.jit(wire.encode)
    for changed, seen in ((12, 0), (0, SLOTS - 1)):  # last token -> first slot, first token -> last slot
        other = whole | {"ids": whole["ids"].at[0, changed].add(1)}
        change = np.abs(np.asarray(run(trainable, other) - run(trainable, whole)))[0, seen]
        assert change.max() > APART


def test_bytes_encoder_knows_the_order(built):
    wire, trainable = built["bytes", "queries"]  # window means would tell the order by themselves
    whole = source([9], 9)
    turned = whole | {"ids": whole["ids"][:, ::-1]}
    run = jax.jit(wire.encode)
    assert np.abs(np.asarray(run(trainable, turned) - run(trainable, whole))).max() > APART


def test_mix_weights_the_body_s_states(built):
    wire, trainable = built["lm", "windows"]
    text = source([7], 7)
    head = trainable["encoder"]["head"]
    first = trainable | {"encoder": trainable["encoder"] | {"head": head | {"mix": jnp.asarray([50.0, 0.0, 0.0])}}}
    x = np.asarray(trainable["encoder"]["body"]["embed"])[np.asarray(text["ids"])]
    x = x / np.sqrt(np.mean(np.square(x), axis=2, keepdims=True) + BODY.norm_eps)
    pooled = np.einsum("ms,bsd->bmd", windows(text["mask"], SLOTS)[0], x)
    y = pooled @ np.asarray(head["project"]["kernel"]) + np.asarray(head["project"]["bias"])
    expected = y / np.sqrt(np.mean(np.square(y), axis=2, keepdims=True))
    np.testing.assert_allclose(jax.jit(wire.encode)(first, text), expected, atol=1e-3)  # the norm's epsilon
    assert head["mix"].shape == (BODY.layers + 1,)


@pytest.mark.parametrize("key", KINDS, ids="-".join)
def test_gradient_reaches_every_trainable_leaf(built, key):
    wire, trainable = built[key]
    text = source([13, 8], 13)
    direction = jax.random.normal(jax.random.key(9), (2, SLOTS + 1, BODY.width))

    def loss(trainable):
        return jnp.sum(
            direction * wire.prefix(trainable["adapters"]["reader"], "reader", wire.encode(trainable, text), "answer")
        )

    largest = jax.tree_util.tree_leaves_with_path(
        jax.tree.map(lambda leaf: float(jnp.abs(leaf).max()), jax.jit(jax.grad(loss))(trainable))
    )
    top = max(value for _, value in largest)
    dead = [jax.tree_util.keystr(path) for path, value in largest if not value > DEAD * top]
    # A bias adds the same to every key's score: softmax does not see it, and a published BERT has it all the same.
    counted = ["['encoder']['head']['pool']['rarity']"] if key[1] == "rare" else []
    assert dead == (["['encoder']['body']['layers']['k_bias']"] if key[0] == "bert" else []) + counted


@pytest.mark.parametrize("kind", ["lm", "bert", "bytes"])
def test_each_window_of_a_long_text_is_read_as_if_it_stood_alone(built, kind):
    """12 tokens through a window of 8, pooled into 3 slots: two of the first window, one of the rest."""
    _, trainable = built[kind, "windows"]
    long = make(kind, "windows", slots=3, window=8)
    whole = source([12, 12], 16)
    latents = jax.jit(long.encode)(
        trainable, whole | {"channel": jnp.tile(jnp.asarray([[3, WIDTH, EXACT]], jnp.int32), (2, 1))}
    )
    parts = []
    for begin, end, slots in ((0, 8, 2), (8, 12, 1)):
        part = {key: whole[key][:, begin:end] for key in ("ids", "mask")}
        channel = jnp.tile(jnp.asarray([[slots, WIDTH, EXACT]], jnp.int32), (2, 1))
        run = jax.jit(make(kind, "windows", slots=slots).encode)
        parts.append(run(trainable, part | {"channel": channel}))
    np.testing.assert_allclose(latents, np.concatenate(parts, axis=1), atol=SAME)
    assert np.abs(latents[0] - latents[1]).max() > APART


def test_learned_queries_read_all_windows(built):
    _, trainable = built["lm", "queries"]
    run, whole = jax.jit(make("lm", "queries", window=8).encode), source([12], 16)
    latents = np.asarray(run(trainable, whole))
    for token in (0, 11):
        other = whole | {"ids": whole["ids"].at[0, token].add(1)}
        assert (np.abs(np.asarray(run(trainable, other)) - latents).max(axis=2) > APART / 10).all()


SENT = [(5, 14), (3, 14), (2, 9), (1, 1)]  # slots and width of each row


def cut(trainable, slots, width):
    """The parameters of an encoder with so many slots of that width."""
    head = trainable["encoder"]["head"]
    project = {"kernel": head["project"]["kernel"][:, :width], "bias": head["project"]["bias"][:width]}
    pool = {"pool": head["pool"] | {"queries": head["pool"]["queries"][:slots]}} if "pool" in head else {}
    return trainable | {"encoder": trainable["encoder"] | {"head": head | {"project": project} | pool}}


@pytest.mark.parametrize("pooling", ["windows", "queries"])
def test_slots_and_width_of_a_row_are_those_of_an_encoder_that_has_no_more(built, pooling):
    wire, trainable = built["lm", pooling]
    text = source([13, 8, 11, 4], 13)
    channel = jnp.asarray([[slots, width, EXACT] for slots, width in SENT], jnp.int32)
    latents = np.asarray(jax.jit(wire.encode)(trainable, text | {"channel": channel}))
    for row, (slots, width) in enumerate(SENT):
        small = make("lm", pooling, slots=slots, width=width)
        alone = {key: text[key][row : row + 1] for key in ("ids", "mask")} | {"channel": channel[row : row + 1]}
        expected = jax.jit(small.encode)(cut(trainable, slots, width), alone)[0]
        np.testing.assert_allclose(latents[row, :slots, :width], expected, atol=SAME)
        assert not latents[row, slots:].any() and not latents[row, :, width:].any()
        np.testing.assert_allclose(np.sqrt(np.mean(latents[row, :slots, :width] ** 2, axis=1)), 1, atol=1e-3)


def test_the_smallest_values_are_scaled_to_what_a_message_takes():
    """Of one value a slot, often."""
    values = jnp.asarray([[[1e-3], [-4e-3], [0.5]]])
    kept = codec.truncate(values, jnp.asarray([1], jnp.int32))
    np.testing.assert_allclose(np.abs(kept), 1.0, atol=1e-5)
    codec.pack(np.asarray(kept[0]), bits=8, encoder="0" * 16)
