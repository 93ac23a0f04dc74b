"""Damaged and hostile model files: each is refused in one line that names file and field, before memory is taken."""

import json
import math
import struct
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from safetensors.numpy import save_file

from lw_jax.core.errors import UserError
from lw_jax.data.tokens import load_source_tokenizer, load_tokenizer
from lw_jax.hub import families, tensor_files, weights
from tests import tiny

DEEP = "[" * 100_000
FLAGS = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
FAR = {"id": 10**6, "content": "<far>", "special": True} | FLAGS


def refused(call, *named: str) -> None:
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 900 and all(one in message for one in named), message


# --- safetensors


@pytest.fixture
def three(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({name: np.full((2, 3), i, np.float32) for i, name in enumerate("abc")}, file)
    return file


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.replace(b"[24,48]", b"[ 0,24]"),  # two tensors of the same bytes
        lambda data: (int.from_bytes(data[:8], "little") - 1).to_bytes(8, "little") + data[8:],  # header a byte short
        lambda data: data + b"\0",
        lambda data: b"",
    ],
)
def test_file_that_the_library_refuses_is_refused_by_name(three, change):
    three.write_bytes(change(three.read_bytes()))
    refused(lambda: tensor_files.list_tensors(three.parent), str(three))


@pytest.mark.parametrize(
    "names",
    [5, {}, {"a": None}, *({"a": name} for name in ("../m.safetensors", "/m.safetensors", "m.bin", "m.safetensors\0"))],
)
def test_index_names_plain_files_of_its_own_folder(three, names):
    three.rename(three.with_name("m.safetensors"))
    index = three.with_name("model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": names}))
    refused(lambda: tensor_files.list_tensors(three.parent), str(index), "weight_map")


# --- finite weights


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("order", [None, np.array([1, 0])])
def test_value_that_is_not_finite_as_the_wanted_type_is_refused(three, dtype, order):
    for bad in (np.nan, np.inf, -np.inf, *([3.4e38] if np.dtype(dtype).itemsize > 2 else [])):
        array = np.ones((2, 3), dtype)
        array[1, 1] = bad
        save_file({"a": array, "b": np.ones(3, np.float32)}, three)
        found = tensor_files.list_tensors(three.parent)
        refused(lambda found=found: tensor_files.read_tensor(found["a"], jnp.bfloat16, order), str(three), "tensor a")
        assert tensor_files.read_tensor(found["b"], jnp.bfloat16).tolist() == [1, 1, 1]


# --- config.json


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    return tiny.write_reader(tmp_path_factory.mktemp("files") / "reader", "llama")


@pytest.fixture
def edited(reader):
    """Writes one file of the reader with other content, for a test's length."""
    kept = {}

    def write(name: str, content: str | dict | None) -> Path:
        file = reader / name
        kept.setdefault(file, file.read_bytes() if file.exists() else None)
        if isinstance(content, dict):
            content = json.dumps(json.loads(kept[file] or b"{}") | content)
        file.write_text(content)
        return reader

    yield write
    for file, data in kept.items():
        file.unlink() if data is None else file.write_bytes(data)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"head_dim": "x"}, "head_dim"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"vocab_size": 10**20}, "vocab_size"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_theta": [1]}, "rope_theta"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope"),
        ({"quantization_config": [4]}, "quantization_config"),
        ('{"model_type": "llama", "x": ' + DEEP, ""),
        ("[]", ""),
    ],
)
def test_config_of_other_types_or_sizes_is_refused_before_anything_is_built(edited, content, named):
    folder = edited("config.json", content)
    refused(lambda: families.tensor_map(weights.describe(folder)), "config.json", named)


def test_code_of_the_folder_s_own_is_never_run(edited, reader, tmp_path):
    mark = tmp_path / "ran"
    for module in ("configuration_evil", "modeling_evil", "tokenization_evil"):
        edited(f"{module}.py", f"open({str(mark)!r}, 'w').close()\nclass Evil:\n    pass\n")
    hooks = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    edited("config.json", {"auto_map": hooks, "trust_remote_code": True})
    hooks = {"auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"]}, "init_inputs": [5]}
    edited("tokenizer_config.json", hooks | {"tokenizer_class": "Evil", "vocab_file": "/etc/passwd"})
    with pytest.raises(UserError, match="trust_remote_code"):  # unknown to everybody
        weights.describe(reader)
    edited("config.json", {"auto_map": hooks["auto_map"]})
    weights.describe(reader)
    assert load_tokenizer(reader).encode("a") and not mark.exists()


# --- tokenizer files


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        *(("generation_config.json", {"eos_token_id": value}, "eos_token_id") for value in (-1, 352, [2, "x"])),
        ("tokenizer_config.json", {"eos_token": 5}, ""),
        ("tokenizer_config.json", {"added_tokens_decoder": {"352": {"content": "new"}}}, "vocab_size"),
        ("tokenizer_config.json", DEEP, ""),
        ("tokenizer.json", {"pre_tokenizer": {"type": "Nothing"}}, ""),
        ("tokenizer.json", {"added_tokens": [FAR]}, "1000000"),
    ],
)
def test_broken_tokenizer_file_is_refused(edited, reader, name, change, named):
    for load in (load_tokenizer, load_source_tokenizer):
        refused(lambda load=load: load(edited(name, change)), str(reader), named)


# --- GGUF


TOKENS = ["a", "b", "ab", "<e>"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("merges", value) for value in (["ab"], ["a b c"], ["a z"], [1, 2])),
        ("token_type", [1, 1]),
        ("tokens", ["a", "b"]),
        ("pre", ["smollm"]),
        *((f"{name}_token_id", value) for name in ("eos", "bos", "padding", "eot") for value in (-1, 4)),
    ],
)
def test_gguf_tokenizer_of_other_types_or_lengths_is_refused(tmp_path, key, value):
    fields = {"model": "gpt2", "pre": "smollm", "tokens": TOKENS, "token_type": [1, 1, 1, 3], "merges": ["a b"]}
    fields["eos_token_id"] = 3
    assert load_tokenizer(tiny.write_gguf_tokenizer(tmp_path / "good.gguf", fields)).encode("ab") == [2]
    path = tiny.write_gguf_tokenizer(tmp_path / "bad.gguf", fields | {key: value})
    refused(lambda: load_tokenizer(path), str(path))


def test_quantised_weights_are_decoded_into_any_type(tmp_path):
    values, kind = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32), GGMLQuantizationType.Q8_0
    path = tiny.write_gguf(tmp_path / "m.gguf", lambda w: w.add_tensor("one", quantize(values, kind), raw_dtype=kind))
    stored = tensor_files.list_tensors(path)["one"]
    np.testing.assert_array_equal(
        tensor_files.read_tensor(stored, np.float64), tensor_files.read_tensor(stored, np.float32)
    )


def test_gguf_weights_are_finite_too(tmp_path):
    def add(writer):
        for name in ("one", "two"):
            writer.add_tensor(name, np.ones((3, 5), np.float32))

    path = tiny.write_gguf(tmp_path / "m.gguf", add)
    data = path.read_bytes()
    path.write_bytes(data[:-32] + struct.pack("<f", math.nan) + data[-28:])
    found = tensor_files.list_tensors(path)
    tensor_files.read_tensor(found["one"], np.float32)
    refused(lambda: tensor_files.read_tensor(found["two"], np.float32), str(path), "tensor two")
