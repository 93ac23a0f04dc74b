"""The Python API on a random reader's folder and on an untrained wire; test_wire_folder.py opens trained ones."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import lw_jax
from lw_jax.core.errors import UserError
from lw_jax.data import batches
from lw_jax.inference import trained_wire
from lw_jax.models import codec
from tests import tiny

TEXT = "Mira keeps a copper lantern in the old mill."


@pytest.fixture(scope="module")
def lm(root):
    return lw_jax.load_lm(tiny.readers(root)["qwen"])


@pytest.fixture(scope="module")
def wire(root):
    return tiny.make_wire(root)


@pytest.fixture(scope="module")
def message(wire):
    return wire.write(TEXT)


# --- a frozen reader ---


def test_generate_returns_the_continuation_alone_and_each_text_for_itself(lm):
    texts = ["Mira keeps", "The copper lantern stands in the old mill beside the river"]
    together = lm.generate(texts, max_new_tokens=5)
    assert together == [lm.generate([text], max_new_tokens=5)[0] for text in texts]
    assert together[0] != together[1]
    # Greedy by hand: the argmax after the prompt, one token at a time.
    ids = [*lm.tokenizer.begin, *lm.tokenizer.encode(texts[0])]
    length = len(ids)
    for _ in range(5):
        padded = np.asarray([ids + [0] * (length + 5 - len(ids))])
        best = int(jnp.argmax(lm.logits(padded)[0, len(ids) - 1]))
        if best in lm.tokenizer.stops:
            break
        ids.append(best)
    assert together[0] == lm.tokenizer.decode(ids[length:]) != ""


@pytest.mark.parametrize(
    ("texts", "words", "named"),
    [
        ([], {}, "texts="),
        (["Mira", ""], {}, "texts="),
        ("Mira", {}, "list of texts"),
        (["Mira\ud83d"], {}, "half of a surrogate pair"),
        (["Mira"], {"max_new_tokens": 0}, "max_new_tokens=0"),
        (["Mira"], {"temperature": -1.0}, "temperature=-1.0"),
        (["Mira"], {"temperature": float("nan")}, "temperature=nan"),
        (["Mira"], {"max_new_tokens": 512}, "512"),
    ],
)
def test_continuations_that_nobody_can_mean_are_refused(lm, texts, words, named):
    with pytest.raises(UserError, match=named):
        lm.generate(texts, **words)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ({"ids": np.array([[5, 2**32 + 1]])}, "id 4294967297"),
        ({"ids": [[5.0, 1.7]]}, "type float"),
        ({"ids": [5, 1]}, r"shape \(2,\)"),
        ({"ids": [[5, 1]], "mask": [[True]]}, r"mask of shape \(1, 1\)"),
        ({"ids": np.ones((1, 10**6), np.int32)}, "1,000,000 positions"),
    ],
)
def test_logits_are_of_ids_and_a_mask_of_their_shape(lm, words, named):
    with pytest.raises(UserError, match=f"^logits: .*{named}"):
        lm.logits(**words)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ({"weights": "fp16"}, "weights='fp16'"),
        ({"weights": "int8", "arithmetic": "int8"}, "arithmetic='int8'"),
        ({"weights": "nf4"}, "weights='nf4'"),
    ],
)
def test_weights_of_other_kinds_are_refused_by_name(root, words, named):
    with pytest.raises(UserError, match=named):
        lw_jax.load_lm(tiny.readers(root)["qwen"], **words)


def test_packed_weights_answer_nearly_as_the_whole_ones(root):
    folder = tiny.readers(root)["qwen"]
    ids = np.random.default_rng(0).integers(0, 200, (2, 9))
    whole = lw_jax.load_lm(folder).logits(ids)
    packed = lw_jax.load_lm(folder, weights="int8", arithmetic="fp32")
    assert packed.params["layers"]["gate"]["codes"].dtype == np.int8
    error = float(abs(packed.logits(ids) - whole).max() / abs(whole).max())
    assert 0 < error < 0.05


# --- a trained wire ---


def test_message_is_eight_bits_a_value_by_default_and_the_same_for_the_same_text(wire, message):
    slots, width = wire.recipe.cfg.encoder.slots, wire.recipe.cfg.encoder.width
    assert message == wire.write(TEXT)
    assert message != wire.write(TEXT + " It is warm.")
    assert len(message) == 22 + slots * width
    assert codec.read_frame(message) == (8, slots, width, wire.encoder_fingerprint)
    assert len(wire.encoder_fingerprint) == 16


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_messages_in_buffers_are_read_as_their_bytes(wire, message, kind):
    """As a socket or a mapped file gives them, one or several."""
    questions, several = ["Who?", "Where?"], [kind(message), kind(message)]
    assert wire.read(several, "llama", questions) == wire.read(kind(message), "llama", questions)
    (of_buffer,), of_bytes = wire.prefix(several[:1], "llama"), wire.prefix(message, "llama")
    np.testing.assert_array_equal(of_buffer, of_bytes)


REFUSED = [
    ("write", (TEXT,), {"bits": 3}, "bits=3"),
    ("write", (TEXT,), {"slots": 6}, "slots=6.*encoder.slots=5"),
    ("write", (TEXT,), {"slots": 0}, "slots=0"),
    ("write", (TEXT,), {"slots": 2.5}, "slots=2.5"),
    ("write", (TEXT,), {"width": 25}, "width=25.*encoder.width=24"),
    ("write", (" \n",), {}, "context"),
    ("write", ("word " * 60,), {}, "299 .*config.encoder.window=256"),
    ("write", (TEXT + "\ud83d",), {}, r"mill.*ud83d' is half of a surrogate pair"),
    ("read", (None, "llama", "Who\ud83d?"), {}, r"Who.*ud83d' is half of a surrogate pair"),
    ("read", (None, "gemma", "Who?"), {}, "reader 'gemma'.*llama, qwen"),
    ("read", (None, "llama", ["Who?", ""]), {}, "^question: empty"),
    ("read_text", (TEXT, "gemma", "Who?"), {}, "reader 'gemma'.*llama, qwen"),
]


@pytest.mark.parametrize(("call", "given", "words", "named"), REFUSED, ids=[f"{one[0]} {one[3]}" for one in REFUSED])
def test_what_the_wire_cannot_do_is_refused_by_name(wire, message, call, given, words, named):
    with pytest.raises(UserError, match=named):
        getattr(wire, call)(*(message if one is None else one for one in given), **words)


@pytest.mark.parametrize("kind", ["encoder", "slots"])
def test_message_that_is_not_of_this_wire_is_refused(wire, kind):
    own = wire.encoder_fingerprint
    shape, encoder, named = {"encoder": ((5, 24), "00" * 8, own), "slots": ((6, 24), own, "slots=6")}[kind]
    with pytest.raises(UserError, match=named):
        wire.read(codec.pack(np.ones(shape, np.float32), bits=8, encoder=encoder), "qwen", "Who?")


def test_a_text_is_read_by_one_reader_whatever_it_is_to_another(wire, monkeypatch):
    layout, whole = wire.recipe.layout, wire.read_text(TEXT, "llama", "Who?")
    unread = dataclasses.replace(layout, readers=layout.readers | {"qwen": None})
    monkeypatch.setattr(wire.recipe, "layout", unread)
    assert wire.read_text(TEXT, "llama", "Who?") == whole


def test_answers_beyond_a_reader_s_positions_are_refused(wire, message, monkeypatch):
    """The longest answer that fits is given; with one position less it is refused."""
    reader, new = wire.recipe.wire.readers["llama"], wire.recipe.cfg.eval.max_new_tokens
    sent = len(wire.prompt_embeds(message, "llama", "Where?"))
    text = batches.encode_prompt(TEXT, "Where?", layout=wire.recipe.layout, rows=("text",))["readers"]["llama"]["text"]
    for ask, prompt in (
        (lambda: wire.read(message, "llama", "Where?"), sent),
        (lambda: wire.read_text(TEXT, "llama", "Where?"), int(text["mask"].sum())),
    ):
        for most in (prompt + new, prompt + new - 1):
            config = dataclasses.replace(reader.config, max_positions=most)
            monkeypatch.setitem(wire.recipe.wire.readers, "llama", dataclasses.replace(reader, config=config))
            if most == prompt + new:
                assert isinstance(ask(), str)
                continue
            with pytest.raises(UserError, match=rf"'llama'.*eval.max_new_tokens={new} .*{prompt + new:,}"):
                ask()


def test_folder_without_a_run_or_without_a_checkpoint_is_refused(root, tmp_path):
    with pytest.raises(UserError, match=r"config\.json: missing"):
        lw_jax.load_wire(tmp_path)
    tiny.start_folder(tmp_path, tiny.make_config(root, mesh__placement="single"))
    with pytest.raises(UserError, match="checkpoint"):
        lw_jax.load_wire(tmp_path)


# --- the verb ---


@pytest.fixture
def ask(wire, monkeypatch, tmp_path):
    """Runs `answer` on the wire that is already open; returns what goes to standard output, as bytes, and to stderr."""
    monkeypatch.setattr(trained_wire, "open_wire", lambda cfg, path, readers: wire)

    def start(capture, **asked):
        assert tiny.ask(wire.recipe.cfg, tmp_path, **asked) == 0
        return capture.readouterr()

    return start


def test_message_that_is_piped_is_alone_on_standard_output_and_answers_like_its_text(wire, ask, capfdbinary):
    out, told = ask(capfdbinary, context=TEXT, write="-", bits=4, slots=3, width=11)
    assert out == wire.write(TEXT, bits=4, slots=3, width=11)
    assert f"message: {len(out)} bytes (3 x 11 values of 4 bits) for {len(TEXT)} bytes of text" in told.decode()
    answered, _ = ask(capfdbinary, message=out, question=["Who keeps it?", "Where?"])
    lines = answered.decode().splitlines()
    said = [f"  {name} from latents: {wire.read(out, name, 'Who keeps it?')}" for name in ("llama", "qwen")]
    assert lines[:4] == [f"message: {len(out)} bytes (3 x 11 values of 4 bits)", "question: Who keeps it?", *said]
    assert len(lines) == 7 and not any("from text" in line for line in lines)


def test_a_text_too_long_for_a_reader_loses_neither_message_nor_answers(wire, ask, capfdbinary, tmp_path, monkeypatch):
    def refuse(text, reader, question):
        raise UserError("361 tokens, config.data.context_tokens=256")

    monkeypatch.setattr(wire, "read_text", refuse)
    out, _ = ask(capfdbinary, context=TEXT, question=["Who?"], write=str(tmp_path / "m.lwjx"))
    assert (tmp_path / "m.lwjx").read_bytes() == wire.write(TEXT)
    lines = out.decode().splitlines()
    for name in ("llama", "qwen"):
        assert f"  {name} from text:    not read: 361 tokens, config.data.context_tokens=256" in lines
        assert f"  {name} from latents: {wire.read(wire.write(TEXT), name, 'Who?')}" in lines


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"message": TEXT.encode()}, "message.*44 bytes"),
        ({"context": TEXT, "bits": 5}, "bits=5"),
        ({"context": TEXT, "width": 25}, "width=25"),
    ],
)
def test_what_cannot_be_sent_or_read_is_refused_before_the_wire_is_opened(wire, monkeypatch, asked, words):
    monkeypatch.setattr(trained_wire, "open_wire", lambda cfg, path, readers: pytest.fail("opened"))
    with pytest.raises(UserError, match=words):
        tiny.ask(wire.recipe.cfg, Path(), **asked)


def test_answers_find_the_programs_compiled_that_were_compiled_together(root, message, compiled, monkeypatch):
    wire, question = tiny.make_wire(root), "Where is it?"
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        # JAX describes a lowered Prompt's fields in a Prompt.
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        wire.compile_answers(message, question, wire.recipe.wire.readers, text=TEXT)
    assert compiled.count("jit(_generate)") >= 2 * len(wire.recipe.wire.readers)
    compiled.clear()
    for name in wire.recipe.wire.readers:
        wire.read(message, name, question)
        wire.read_text(TEXT, name, question)
    assert "jit(_generate)" not in compiled
