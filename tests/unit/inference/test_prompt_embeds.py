"""Prompts as embeddings or keys and values, many questions at once, streamed answers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.core.errors import UserError
from lw_jax.models import codec, decoder
from tests import tiny

TEXT, QUESTIONS = "Mara Ellis lives in Lisbon.", ["Who?", "Where does Mara Ellis live?", "Which city is it then?"]
SAME = 2e-5  # fp32 values of unit size: the same sums in another order
READER = "qwen"


@pytest.fixture(scope="module")
def wire(root):
    return tiny.make_wire(root, only=READER, eval__max_new_tokens=6, eval__batch=2)


@pytest.fixture(scope="module")
def kv(root):
    return tiny.make_wire(root, only=READER, eval__max_new_tokens=6, adapter__kind="kv")


@functools.partial(jax.jit, static_argnames="cfg")
def logits_behind(params, cfg, x, mask, cache):
    return decoder.logits(params, decoder.extend(params, cfg, x, mask=mask, cache=cache)[0])[0]


def greedy(wire, x, count, cache, *, width):
    """Ids by an argmax over whole passes, one token after the other, and their logits; `x` is filled up to a width."""
    params, cfg, ids, found = wire.frozen[READER], wire.recipe.wire.readers[READER].config, [], []
    for _ in range(count):
        mask = np.arange(width)[None] < len(x)
        filled = np.pad(x, ((0, width - len(x)), (0, 0)))[None]
        found.append(logits_behind(params, cfg, filled, mask, cache)[len(x) - 1])
        ids.append(int(jnp.argmax(found[-1])))
        x = np.concatenate([x, np.asarray(params["embed"])[ids[-1:]]])
    return ids, found


def test_whole_prompt_is_opening_prefix_and_question(wire):
    message = wire.write(TEXT, slots=3, width=11)
    found, prefix = wire.prompt_embeds(message, reader=READER, question=QUESTIONS[0]), wire.prefix(message, READER)
    assert prefix.shape == (4, 56) and found.dtype == prefix.dtype == np.float32
    latents = np.zeros((1, 5, 24), np.float32)
    latents[0, :3, :11] = codec.unpack(message, encoder=wire.encoder_fingerprint)
    adapter = wire.trainable["adapters"][READER]
    own = tiny.compiled(wire.recipe.wire.prefix, adapter, READER, latents, "answer")[0]
    np.testing.assert_allclose(prefix, np.concatenate([own[:3], own[5:]]), atol=SAME)
    table, one = np.asarray(wire.frozen[READER]["embed"]), wire.recipe.tokenizers[READER]
    before = table[[*one.begin, *one.encode("Context:\n")]]
    after = table[one.encode(f"\nQuestion: {QUESTIONS[0]}\nAnswer:")]
    np.testing.assert_allclose(found, np.concatenate([before, prefix, after]), atol=SAME)


def test_many_questions_and_messages_are_each_as_alone_and_nothing_is_encoded_again(wire, monkeypatch):
    messages = [wire.write(TEXT, slots=3), wire.write("The mill is old.", bits=16), wire.write("A lamp.", width=11)]
    monkeypatch.setattr(wire.functions, "encode", lambda *given: pytest.fail("encoded again"))
    for message in (messages[0], messages):
        each = messages if message is messages else [message] * 3
        for call in (wire.prompt_embeds, wire.read):
            together = call(message, READER, QUESTIONS)
            alone = [call(one, READER, question) for one, question in zip(each, QUESTIONS, strict=True)]
            assert len({len(one) for one in alone}) > 1 and len(together) == 3
            for one, other in zip(together, alone, strict=True):
                np.testing.assert_array_equal(one, other) if call == wire.read else np.testing.assert_allclose(
                    one, other, atol=SAME
                )
    for one, other in zip(wire.prefix(messages, READER), messages, strict=True):
        np.testing.assert_array_equal(one, wire.prefix(other, READER))


@pytest.mark.parametrize("kind", ["wire", "kv"])
def test_streamed_pieces_are_the_answer(kind, request):
    wire = request.getfixturevalue(kind)
    said = set()
    for seed in range(4):
        latents = np.sign(np.random.default_rng(seed).normal(size=(5, 24)))
        message = codec.pack(latents, bits=8, encoder=wire.encoder_fingerprint)
        pieces = list(wire.read(message, READER, QUESTIONS[1], stream=True))
        assert "".join(pieces) == wire.read(message, READER, QUESTIONS[1])
        said.add(tuple(pieces))
    assert max(map(len, said)) > 1 and len(said) > 1


def test_keys_and_values_with_what_follows_are_the_prompt(kv):
    message = kv.write(TEXT, slots=3)
    found = kv.prefix_kv([message] * 2, READER, QUESTIONS[:2])
    opening = len([*kv.recipe.tokenizers[READER].begin, *kv.recipe.tokenizers[READER].encode("Context:\n")])
    positions, width = opening + 3, max(len(prompt.embeddings) for prompt in found) + 3
    for prompt, question in zip(found, QUESTIONS, strict=False):
        assert prompt.keys_values.shape == (3, 2, 1, 4, positions, 6)
        assert prompt.keys_values.dtype == prompt.embeddings.dtype == np.float32
        room = positions + width
        # l 1 k t e -> l 1 t k e, and room for what follows
        k, v = np.pad(
            prompt.keys_values.swapaxes(3, 4), [(0, 0)] * 3 + [(0, room - positions)] + [(0, 0)] * 2
        ).swapaxes(0, 1)
        valid = jnp.arange(room)[None] < positions
        cache = decoder.Cache(jnp.asarray(k), jnp.asarray(v), valid, jnp.int32(positions))
        ids, (first, *_) = greedy(kv, prompt.embeddings, 3, cache, width=width)
        whole = next(kv._prompts([(message, question)], READER))[0]
        own, *_ = tiny.compiled(kv.recipe.wire.begin, kv.frozen[READER], READER, whole, max_new_tokens=1)
        np.testing.assert_allclose(first, own[0], atol=SAME)  # ids alone are the same for keys a place beside theirs
        said = kv.recipe.tokenizers[READER].decode(ids).strip().split("\n")[0].strip()
        assert said and kv.read(message, READER, question).startswith(said)


def test_what_cannot_be_given_is_refused_by_name(wire, kv, root):
    message, other = wire.write(TEXT), kv.write(TEXT)
    foreign = codec.pack(np.ones((5, 24), np.float32), bits=8, encoder="00" * 8)
    for call in (wire.prompt_embeds, lambda message, reader, question: wire.prefix(message, reader)):
        with pytest.raises(UserError, match="reader 'gemma'.*qwen"):
            call(message, "gemma", "Who?")
        with pytest.raises(UserError, match=wire.encoder_fingerprint):
            call(foreign, READER, "Who?")
    with pytest.raises(UserError, match=r"prefix_kv.*adapter\.kind='embeddings'.*prompt_embeds"):
        wire.prefix_kv(message, READER, "Who?")
    with pytest.raises(UserError, match=r"prompt_embeds.*adapter\.kind='kv'.*prefix_kv"):
        kv.prompt_embeds(other, READER, "Who?")
    with pytest.raises(UserError, match=r"prefix: .*adapter\.kind='kv'"):
        kv.prefix(other, READER)
    for messages, questions in (([message], "Who?"), ([message] * 2, ["Who?"]), (message, [])):
        with pytest.raises(UserError, match="message"):
            wire.read(messages, READER, questions)
    with pytest.raises(UserError, match="stream=True"):
        wire.read(message, READER, ["Who?", "Where?"], stream=True)
    with pytest.raises(UserError, match="question_tokens"):
        wire.read(message, READER, ["Who?", "where " * 400])
