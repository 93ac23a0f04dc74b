"""The Python API on a random reader's folder and on a tiny trained run."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import lw_jax
from lw_jax.commands import train
from lw_jax.core.errors import UserError
from lw_jax.data import batches
from lw_jax.inference import language_model, trained_wire
from lw_jax.models import codec
from lw_jax.training import run_folder
from tests import tiny

ROOT = Path(__file__).resolve().parents[3]
LOGITS = 2e-5  # fp32 logits of unit size against torch: the same sums in another order
TEXT = "Mira keeps a copper lantern in the old mill."


@pytest.fixture(scope="module")
def lm(root):
    return lw_jax.load_lm(tiny.readers(root)["qwen"])


def trained(root, folder, seed):
    cfg = tiny.make_config(root, seed=seed, mesh__placement="single", train__steps=2, train__checkpoint_every=2)
    run_folder.write_workdir(folder, cfg=cfg, base={}, command=["test"])
    assert train.main(cfg, folder) == 0
    return lw_jax.load_wire(folder)


@pytest.fixture(scope="module")
def wire(root, tmp_path_factory):
    return trained(root, tmp_path_factory.mktemp("wire"), 0)


@pytest.fixture(scope="module")
def message(wire):
    return wire.write(TEXT)


# --- a frozen reader ---


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_equal_torch_with_padding_on_either_side(lm, root, side):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny.readers(root)["qwen"], dtype=torch.float32).eval()
    ids = np.random.default_rng(0).integers(0, lm.config.vocab, (3, 7))
    mask = np.ones(ids.shape, bool)
    for row, pads in enumerate((0, 2, 5)):
        mask[row, slice(0, pads) if side == "left" else slice(7 - pads, 7)] = False
    positions = torch.tensor(np.maximum(mask.cumsum(axis=1) - 1, 0))
    with torch.no_grad():
        out = model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask), position_ids=positions)
    found = np.asarray(lm.logits(ids, mask))
    assert found.dtype == np.float32 and found[mask].std() > 0.3, "logits too flat to compare"
    np.testing.assert_allclose(found[mask], out.logits.numpy()[mask], atol=LOGITS)


def test_no_mask_means_every_token_is_real(lm):
    ids = np.asarray([[5, 9, 2]])
    np.testing.assert_array_equal(lm.logits(ids), lm.logits(ids, np.ones((1, 3), bool)))


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


def test_sampling_follows_the_seed(lm):
    texts = ["Mira keeps"]
    drawn = [lm.generate(texts, max_new_tokens=5, temperature=3.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("texts", [[], ["Mira", ""]])
def test_texts_without_tokens_are_refused(lm, texts):
    with pytest.raises(UserError, match="texts="):
        lm.generate(texts)


@pytest.mark.parametrize(
    ("texts", "words", "named"),
    [
        ("Mira", {}, "a list of texts"),
        (["Mira"], {"max_new_tokens": 0}, "max_new_tokens=0"),
        (["Mira"], {"temperature": -1.0}, "temperature=-1.0"),
        (["Mira"], {"temperature": float("nan")}, "temperature=nan"),
    ],
)
def test_continuations_that_nobody_can_mean_are_refused(lm, texts, words, named):
    with pytest.raises(UserError, match=named):
        lm.generate(texts, **words)


def test_generation_beyond_the_model_s_positions_is_refused(lm):
    most = lm.config.max_positions
    with pytest.raises(UserError, match=rf"the longest text and its answer take {most + 1:,} positions.*on {most:,}; "):
        lm.generate(["Mara"], most + 1 - len([*lm.tokenizer.begin, *lm.tokenizer.encode("Mara")]))


def test_weights_of_other_kinds_are_refused_by_name(root):
    folder = tiny.readers(root)["qwen"]
    with pytest.raises(UserError, match="weights='fp16': known are fp32, bf16, nf4, awq, int8"):
        lw_jax.load_lm(folder, weights="fp16")
    with pytest.raises(UserError, match="arithmetic='int8': known are fp32, bf16"):
        lw_jax.load_lm(folder, weights="int8", arithmetic="int8")
    with pytest.raises(UserError, match="weights='nf4': q .*64"):
        lw_jax.load_lm(folder, weights="nf4")


def test_packed_weights_answer_nearly_as_the_whole_ones(root):
    folder = tiny.readers(root)["qwen"]
    ids = np.random.default_rng(0).integers(0, 200, (2, 9))
    whole = lw_jax.load_lm(folder).logits(ids)
    packed = lw_jax.load_lm(folder, weights="int8", arithmetic="fp32")
    assert packed.params["layers"]["gate"]["codes"].dtype == np.int8
    error = float(abs(packed.logits(ids) - whole).max() / abs(whole).max())
    assert 0 < error < 0.05


def test_importing_the_package_imports_no_jax():
    code = "import sys, lw_jax; print(sorted({'jax', 'flax', 'transformers'} & set(sys.modules)), lw_jax.__all__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[] ['__version__', 'evaluate', 'load_lm', 'load_wire']"
    assert lw_jax.load_lm is language_model.load_lm and lw_jax.load_wire is trained_wire.load_wire
    with pytest.raises(AttributeError, match="no attribute 'load_llm'"):
        lw_jax.load_llm  # noqa: B018


# --- a trained wire ---


def test_message_is_eight_bits_a_value_by_default_and_the_same_for_the_same_text(wire, message):
    slots, width = wire.recipe.cfg.encoder.slots, wire.recipe.cfg.encoder.width
    assert message == wire.write(TEXT)
    assert message != wire.write(TEXT + " It is warm.")
    assert len(message) == 22 + slots * width
    assert codec.read_frame(message) == (8, slots, width, wire.encoder_fingerprint)
    assert len(wire.encoder_fingerprint) == 16


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_a_message_in_another_buffer_is_one_message(wire, message, kind):
    assert wire.read(kind(message), "llama", "Who keeps it?") == wire.read(message, "llama", "Who keeps it?")
    np.testing.assert_array_equal(wire.prefix(kind(message), "llama"), wire.prefix(message, "llama"))


@pytest.mark.parametrize("bits", codec.BITS)
def test_message_of_fewer_bits_holds_the_same_latents_more_coarsely(wire, bits):
    exact = latents_of(wire, TEXT)
    message = wire.write(TEXT, bits=bits)
    assert len(message) == codec.framed_bytes(*exact.shape, bits)
    error = np.mean((codec.unpack(message, encoder=wire.encoder_fingerprint) - exact) ** 2)
    assert error < {16: 1e-6, 8: 8e-5, 6: 1.3e-3, 4: 0.019, 2: 0.24}[bits]  # twice the Gaussian's: few values


@pytest.mark.parametrize(("slots", "width"), [(3, None), (None, 11), (2, 7)])
def test_smaller_message_is_the_start_of_the_latents_in_unit_rms(wire, slots, width):
    message = wire.write(TEXT, bits=16, slots=slots, width=width)
    expected = latents_of(wire, TEXT, slots, width)[:slots, :width]
    expected /= np.sqrt(np.mean(expected**2, axis=1, keepdims=True))
    found = codec.unpack(message, encoder=wire.encoder_fingerprint)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=2**-10, atol=1e-4)


def latents_of(wire, text, slots=None, width=None):
    """What the encoder itself writes for that channel, before any message."""
    channel = trained_wire.resolve_channel(wire.recipe.cfg.encoder, bits=16, slots=slots, width=width)
    batch = batches.encode_prompt(text, "?", layout=wire.recipe.layout)
    source = batch["source"] | {"channel": np.asarray([channel], np.int32)}
    return np.array(wire.functions.encode(wire.trainable, source)[0])


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"bits": 3}, "bits=3.*16, 8, 6, 4, 2"),
        ({"slots": 6}, "slots=6.*encoder.slots=5"),
        ({"slots": 0}, "slots=0.*1 to 5"),
        ({"width": 25}, "width=25.*encoder.width=24"),
    ],
)
def test_channel_that_the_encoder_has_not_is_refused(wire, asked, words):
    with pytest.raises(UserError, match=words):
        wire.write(TEXT, **asked)


@pytest.mark.parametrize(
    ("text", "words"), [(" \n", "a prompt needs a context"), ("word " * 60, "299 .*config.encoder.window=256")]
)
def test_empty_text_and_one_beyond_the_window_are_refused(wire, text, words):
    with pytest.raises(UserError, match=words):
        wire.write(text)


def prompt_of(wire, monkeypatch, ask):
    """The prompt that a call hands to its reader."""
    caught = []
    monkeypatch.setattr(wire, "_answer", lambda reader, prompt, count: caught.append(prompt) or [""])
    ask()
    monkeypatch.undo()
    return caught[0].embeddings, caught[0].mask


@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_reader_is_given_the_message_s_latents_between_its_own_words(wire, message, name, monkeypatch):
    embeddings, mask = prompt_of(wire, monkeypatch, lambda: wire.read(message, name, "Who keeps it?"))
    latents = codec.unpack(message, encoder=wire.encoder_fingerprint)
    prefix = wire.recipe.wire.prefix(wire.trainable["adapters"][name], name, jnp.asarray(latents)[None], "answer")
    table, one = np.asarray(wire.frozen[name]["embed"]), wire.recipe.tokenizers[name]
    before = table[[*one.begin, *one.encode("Context:\n")]]
    after = table[one.encode("\nQuestion: Who keeps it?\nAnswer:")]
    expected = np.concatenate([before, prefix[0], after])
    np.testing.assert_allclose(np.asarray(embeddings)[np.asarray(mask)], expected, atol=LOGITS)


def test_reader_is_given_the_text_itself_tokenised_with_the_rest(wire, monkeypatch):
    embeddings, mask = prompt_of(wire, monkeypatch, lambda: wire.read_text(TEXT, "qwen", "Who keeps it?"))
    one = wire.recipe.tokenizers["qwen"]
    ids = [*one.begin, *one.encode(f"Context:\n{TEXT}\nQuestion: Who keeps it?\nAnswer:")]
    np.testing.assert_array_equal(
        np.asarray(embeddings)[np.asarray(mask)], np.asarray(wire.frozen["qwen"]["embed"])[ids]
    )


@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_reader_of_a_smaller_message_is_given_zeros_beyond_it(wire, name, monkeypatch):
    """The prompt is told the channel, and the latents are those of the message and zeros."""
    caught = {}

    def keep(trainable, params, fields, latents, reader):
        caught.update(channel=np.asarray(fields["channel"]), latents=np.asarray(latents))
        return None

    monkeypatch.setattr(wire.functions, "prompt_from_latents", keep)
    monkeypatch.setattr(wire, "_answer", lambda reader, prompt, count: [""])
    message = wire.write(TEXT, bits=4, slots=3, width=11)
    wire.read(message, name, "Who keeps it?")
    assert caught["channel"].tolist() == [[3, 11, 4]] and caught["latents"].shape == (1, 5, 24)
    np.testing.assert_array_equal(
        caught["latents"][0, :3, :11], codec.unpack(message, encoder=wire.encoder_fingerprint)
    )
    assert not caught["latents"][0, 3:].any() and not caught["latents"][0, :, 11:].any()


def test_empty_question_is_refused_by_name(wire, message):
    for questions in ("", " ", ["Who?", ""]):
        with pytest.raises(UserError, match="^question: empty"):
            wire.read(message, "llama", questions)
    with pytest.raises(UserError, match="^--question: empty"):
        tiny.ask(wire.recipe.cfg, Path("nowhere"), context="Mira.", question=["Who?", " "])


def test_message_larger_than_the_wire_is_refused(wire):
    message = codec.pack(np.ones((6, 24), np.float32), bits=8, encoder=wire.encoder_fingerprint)
    with pytest.raises(UserError, match="slots=6.*encoder.slots=5"):
        wire.read(message, "qwen", "Who?")


def test_answer_is_one_line_that_the_message_decides(wire, message):
    assert wire.read(message, "qwen", "Who?") == wire.read(message, reader="qwen", question="Who?")
    shape = (wire.recipe.cfg.encoder.slots, wire.recipe.cfg.encoder.width)
    said = set()
    for seed in range(8):
        latents = np.sign(np.random.default_rng(seed).normal(size=shape))  # of unit RMS
        said.add(wire.read(codec.pack(latents, bits=8, encoder=wire.encoder_fingerprint), "qwen", "Who?"))
    assert len(said) > 1
    assert not any("\n" in line for line in said)


def test_unknown_reader_is_refused_with_those_there_are(wire, message):
    with pytest.raises(UserError, match="reader 'gemma'.*llama, qwen"):
        wire.read(message, reader="gemma", question="Who?")
    with pytest.raises(UserError, match="reader 'gemma'.*llama, qwen"):
        wire.read_text(TEXT, reader="gemma", question="Who?")


def test_answers_beyond_a_reader_s_positions_are_refused(wire, message, monkeypatch):
    """The longest answer that fits is given; one more token is refused."""
    most = wire.recipe.wire.readers["llama"].config.max_positions
    sent = len(wire.prompt_embeds(message, "llama", "Where?"))
    text = batches.encode_prompt(TEXT, "Where?", layout=wire.recipe.layout, rows=("text",))["readers"]["llama"]["text"]
    for ask, prompt in (
        (lambda: wire.read(message, "llama", "Where?"), sent),
        (lambda: "".join(wire.read(message, "llama", "Where?", stream=True)), sent),
        (lambda: wire.read_text(TEXT, "llama", "Where?"), int(text["mask"].sum())),
    ):
        for new in (most - prompt, most - prompt + 1):
            options = dataclasses.replace(wire.recipe.cfg.eval, max_new_tokens=new)
            monkeypatch.setattr(wire.recipe, "cfg", dataclasses.replace(wire.recipe.cfg, eval=options))
            if prompt + new == most:
                assert isinstance(ask(), str)
                continue
            rule = rf"reader 'llama': the prompt and eval.max_new_tokens={new} take {most + 1:,} positions, .*;"
            with pytest.raises(UserError, match=rule):
                ask()


def test_message_of_another_wire_is_refused(wire, message, root, tmp_path):
    other = trained(root, tmp_path / "other", 1)
    with pytest.raises(UserError, match=f"{wire.encoder_fingerprint}"):
        other.read(message, reader="qwen", question="Who?")


def test_loaded_wire_is_the_one_that_was_trained(wire):
    assert wire.step == 2
    untrained = wire.recipe.build().trainable
    kernel = ("encoder", "head", "project", "kernel")
    ours, drawn = wire.trainable, untrained
    for key in kernel:
        ours, drawn = ours[key], drawn[key]
    assert not np.array_equal(ours, drawn)


def test_folder_without_a_run_or_without_a_checkpoint_is_refused(root, tmp_path):
    with pytest.raises(UserError, match=r"config\.json: missing"):
        lw_jax.load_wire(tmp_path)
    cfg = tiny.make_config(root, mesh__placement="single")
    run_folder.write_workdir(tmp_path, cfg=cfg, base={}, command=["test"])
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


def test_text_is_written_and_answered_at_once_with_its_own_row(wire, ask, capfdbinary, tmp_path):
    out, _ = ask(capfdbinary, context=TEXT, question=["Who?"], write=str(tmp_path / "m.lwjx"))
    assert (tmp_path / "m.lwjx").read_bytes() == wire.write(TEXT)
    assert f"  qwen from text:    {wire.read_text(TEXT, 'qwen', 'Who?')}" in out.decode().splitlines()


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
