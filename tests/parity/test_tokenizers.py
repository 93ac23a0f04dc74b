"""Tokenizers rebuilt from GGUF metadata against transformers' own classes and conversion.

LW_JAX_SMOLLM2 names the real SmolLM2-135M-Instruct.Q4_1.gguf; without it the tests on it are skipped.
"""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from lw_jax.data.tokens import load_tokenizer
from lw_jax.hub import weights
from lw_jax.hub.gguf_header import read_header
from tests import tiny

TEXTS = [
    "It's 12345 o'clock; DON'T we'll see?",
    "  two  spaces\n\n\nlines\r\n\ttabs ",
    "naïve cafe\u0301 中文字 привет 🙂👍🏽",
    "def f(x):\n    return x**2 != 3.14  # ok",
    "<|im_start|>user\nhi<|im_end|>",
    "",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def read_fields(path):
    metadata = read_header(path).metadata
    names = {"tokenizer_type": "model", "pre_tokenizer_type": "pre"} | {
        k: k for k in ("tokens", "token_type", "merges")
    }
    return {name: metadata[f"tokenizer.ggml.{key}"] for name, key in names.items()}


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """A BPE learned from the texts with digits and punctuation joined, so that a wrong split shows."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\s+|\S+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([text for text in TEXTS if "<|" not in text] * 3, trainer)
    stored = tmp_path_factory.mktemp("bpe")
    backend.model.save(str(stored))
    merges = [line for line in (stored / "merges.txt").read_text("utf-8").splitlines() if not line.startswith("#")]
    vocab = backend.get_vocab()
    return sorted(vocab, key=vocab.__getitem__), merges


def write_gguf(path, pre, vocabulary):
    tokens, merges = vocabulary
    fields = {"model": "gpt2", "pre": pre, "tokens": [*tokens, *SPECIAL], "merges": merges, "add_bos_token": False}
    fields |= {"token_type": [1] * len(tokens) + [3] * len(SPECIAL), "eos_token_id": len(tokens) + 2}
    return tiny.write_gguf_tokenizer(path, fields)


@pytest.mark.parametrize("text", TEXTS)
def test_qwen2_ids_equal_those_of_its_transformers_class(tmp_path, vocabulary, text):
    tokens, merges = vocabulary
    path = write_gguf(tmp_path / "m.gguf", "qwen2", vocabulary)
    vocab = {token: i for i, token in enumerate([*tokens, *SPECIAL])}
    oracle = Qwen2Tokenizer(vocab=vocab, merges=[tuple(m.split()) for m in merges], eos_token=SPECIAL[2])
    oracle.add_special_tokens({"additional_special_tokens": SPECIAL})
    assert load_tokenizer(path).encode(text) == oracle.encode(text)


@pytest.mark.parametrize("text", TEXTS)
def test_llama_splits_text_as_transformers_conversion_does(tmp_path, vocabulary, text):
    path = write_gguf(tmp_path / "m.gguf", "llama-bpe", vocabulary)
    oracle, _ = convert_gguf_tokenizer("llama", read_fields(path))
    ours = load_tokenizer(path).backend.backend_tokenizer
    assert ours.pre_tokenizer.pre_tokenize_str(text) == oracle.pre_tokenizer.pre_tokenize_str(text)


@pytest.fixture(scope="module")
def smollm2():
    if not (named := os.environ.get("LW_JAX_SMOLLM2")):
        pytest.skip("LW_JAX_SMOLLM2 names no file")
    return Path(named)


@pytest.mark.parametrize("text", [text for text in TEXTS if not any(c.isdigit() for c in text)])
def test_smollm2_ids_equal_those_of_transformers_where_it_splits_alike(smollm2, text):
    # its conversion (5.23) does not know that this model takes digits one by one, so texts without digits
    oracle, _ = convert_gguf_tokenizer("llama", read_fields(smollm2))
    tokenizer = load_tokenizer(smollm2)
    assert tokenizer.encode(text) == oracle.encode(text, add_special_tokens=False).ids
    assert len(tokenizer.encode("12345")) == 5


def test_smollm2_has_its_published_size_and_special_tokens(smollm2):
    tokenizer = load_tokenizer(smollm2)
    assert (tokenizer.begin, tokenizer.eos, tokenizer.stops, tokenizer.vocab) == ((), 2, (2, 0), 49152)
    assert tokenizer.render_chat("hi").endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert len(read_header(smollm2).tensors) == 272
    params = weights.load(smollm2, dtype=jnp.bfloat16)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 134_515_008
