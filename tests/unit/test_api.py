"""The Python API on a random reader's folder and on a tiny trained run."""

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import lw_jax
from lw_jax import api, train, workdir
from lw_jax.core.errors import UserError
from lw_jax.models import codec
from tests import tiny

ROOT = Path(__file__).resolve().parent.parent.parent
LOGITS = 2e-5  # fp32 logits of unit size against torch: the same sums in another order
TEXT = "Mira keeps a copper lantern in the old mill."


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.getbasetemp() / "readers"


@pytest.fixture(scope="module")
def lm(root):
    return lw_jax.load_lm(tiny.readers(root)["qwen"])


def trained(root, folder, seed):
    cfg = tiny.make_config(root, seed=seed, mesh__placement="single", train__steps=2, train__checkpoint_every=2)
    workdir.write_workdir(folder, cfg=cfg, base={}, command=["test"])
    assert train.main(cfg, resolved={}, workdir=folder) == 0
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
    with pytest.raises(UserError, match="each of at least one token"):
        lm.generate(texts)


@pytest.mark.parametrize("kind", ["int8", "nf4", "fp16"])
def test_weights_of_other_kinds_are_refused_by_name(root, kind):
    with pytest.raises(UserError, match=f"weights='{kind}': this version has fp32, bf16"):
        lw_jax.load_lm(tiny.readers(root)["qwen"], weights=kind)


def test_importing_the_package_imports_no_jax():
    code = "import sys, lw_jax; print(sorted({'jax', 'flax', 'transformers'} & set(sys.modules)), lw_jax.__all__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[] ['load_lm', 'load_wire']"
    assert lw_jax.load_lm is api.load_lm and lw_jax.load_wire is api.load_wire
    with pytest.raises(AttributeError, match="no attribute 'load_llm'"):
        lw_jax.load_llm  # noqa: B018


# --- a trained wire ---


def test_message_is_eight_bits_a_value_by_default_and_the_same_for_the_same_text(wire, message):
    slots, width = wire.recipe.cfg.encoder.slots, wire.recipe.cfg.encoder.width
    assert message == wire.write(TEXT)
    assert message != wire.write(TEXT + " It is warm.")
    assert len(message) == 30 + slots * width + 2 * -(-slots * width // 32)
    assert len(wire.write(TEXT, bits=16)) == 30 + 2 * slots * width
    latents = codec.unpack(message, encoder=wire.encoder_fingerprint)
    assert latents.shape == (slots, width)


def prompt_of(wire, monkeypatch, ask):
    """The prompt that a call hands to its reader."""
    caught = []
    monkeypatch.setattr(wire, "_answer", lambda reader, prompt: caught.append(prompt) or "")
    ask()
    monkeypatch.undo()
    return caught[0].embeddings, caught[0].mask


@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_reader_is_given_the_message_s_latents_between_its_own_words(wire, message, name, monkeypatch):
    embeddings, mask = prompt_of(wire, monkeypatch, lambda: wire.read(message, name, "Who keeps it?"))
    latents = codec.unpack(message, encoder=wire.encoder_fingerprint)
    prefix = wire.recipe.wire.prefix(wire.trainable["adapters"][name], name, jnp.asarray(latents)[None])
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


def test_answer_is_one_line_that_the_message_decides(wire, message):
    assert wire.read(message, "qwen", "Who?") == wire.read(message, reader="qwen", question="Who?")
    shape = (wire.recipe.cfg.encoder.slots, wire.recipe.cfg.encoder.width)
    said = set()
    for seed in range(8):
        latents = np.random.default_rng(seed).normal(size=shape)
        said.add(wire.read(codec.pack(latents, bits=8, encoder=wire.encoder_fingerprint), "qwen", "Who?"))
    assert len(said) > 1
    assert not any("\n" in line for line in said)


def test_unknown_reader_is_refused_with_those_there_are(wire, message):
    with pytest.raises(UserError, match="reader 'gemma': this wire has llama, qwen"):
        wire.read(message, reader="gemma", question="Who?")
    with pytest.raises(UserError, match="reader 'gemma': this wire has llama, qwen"):
        wire.read_text(TEXT, reader="gemma", question="Who?")


def test_message_of_another_wire_is_refused(wire, message, root, tmp_path):
    other = trained(root, tmp_path / "other", 1)
    with pytest.raises(UserError, match=f"message of encoder {wire.encoder_fingerprint}, this wire has encoder"):
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
    workdir.write_workdir(tmp_path, cfg=cfg, base={}, command=["test"])
    with pytest.raises(UserError, match="no checkpoint yet; train first"):
        lw_jax.load_wire(tmp_path)
