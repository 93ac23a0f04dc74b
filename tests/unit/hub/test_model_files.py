"""Damaged and hostile model files: each is refused in one line that names file and field, before memory is taken."""

import json
import math
import struct
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from lw_jax.core.errors import UserError
from lw_jax.data.tokens import load_source_tokenizer, load_tokenizer
from lw_jax.hub import families, gguf_header, tensor_files, weights
from tests import tiny

DEEP = "[" * 100_000
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
LLAMA3 |= {"original_max_position_embeddings": 8192}
FLAGS = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
FAR = {"id": 10**6, "content": "<far>", "special": True} | FLAGS


def refused(call, *named: str) -> None:
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 900 and all(one in message for one in named), message


# --- safetensors


def split(file: Path) -> tuple[dict, bytes]:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(header: str | dict, body: bytes) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + body


def _set(**fields):
    return lambda header: header | {"b": header["b"] | fields}


DAMAGE = {
    "offset is a string": _set(data_offsets=["24", 48]),
    "offset is a list": _set(data_offsets=[[24], 48]),
    "one offset": _set(data_offsets=[24]),
    "negative": _set(data_offsets=[-24, 0]),
    "shape of floats": _set(shape=[2.0, 3]),
    "shape of strings": _set(shape="23"),
    "shape beyond memory": _set(shape=[2**62, 2**62]),
    "kind is a list": _set(dtype=["F32"]),
    "unknown kind": _set(dtype="X9"),
    "strange field": _set(more=1),
    "overlap": _set(data_offsets=[0, 24]),
    "shifted": _set(data_offsets=[28, 52]),
    "a gap": lambda header: {name: row for name, row in header.items() if name != "b"},
    "smaller than its bytes": _set(shape=[2, 2]),
    "metadata of numbers": lambda header: header | {"__metadata__": {"format": 1}},
    "no object": lambda header: json.dumps([header]),
    "begins with a space": lambda header: " " + json.dumps(header),
    "nested": lambda header: json.dumps(header)[:-1] + ', "c": ' + DEEP + "}",
}


@pytest.fixture
def three(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({name: np.full((2, 3), i, np.float32) for i, name in enumerate("abc")}, file)
    return file


@pytest.mark.parametrize("damage", DAMAGE)
def test_header_against_the_format_s_rules_is_refused_as_the_library_does(three, damage):
    header, body = split(three)
    three.write_bytes(join(DAMAGE[damage](header), body))
    if damage not in ("strange field", "begins with a space"):  # stricter here: the format's own text forbids both
        with pytest.raises(SafetensorError), safe_open(three, "np"):
            pass
    refused(lambda: tensor_files.list_tensors(three.parent), str(three))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: (int.from_bytes(data[:8], "little") - 1).to_bytes(8, "little") + data[8:],  # header a byte short
        lambda data: data + b"\0",
        lambda data: (2**63).to_bytes(8, "little") + data[8:],
        lambda data: b"",
    ],
)
def test_file_that_its_header_does_not_cover_exactly_is_refused(three, change):
    three.write_bytes(change(three.read_bytes()))
    refused(lambda: tensor_files.list_tensors(three.parent), str(three))


def test_name_of_several_lines_is_refused_in_one(three):
    header, body = split(three)
    three.write_bytes(join({"a\nb" if name == "b" else name: row for name, row in header.items()}, body))
    refused(lambda: tensor_files.list_tensors(three.parent), "'a\\nb'")


@pytest.mark.parametrize(
    "names",
    [["x"], 5, {}, {"a": 5}, {"a": None}]
    + [
        {"a": name}
        for name in ("../m.safetensors", "/m.safetensors", "x/m.safetensors", "m.bin", "", "m.safetensors\0")
    ],
)
def test_index_names_plain_files_of_its_own_folder(three, names):
    three.rename(three.with_name("m.safetensors"))
    index = three.with_name("model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": names}))
    refused(lambda: tensor_files.list_tensors(three.parent), str(index), "weight_map")


def test_index_that_puts_a_tensor_elsewhere_is_refused(three):
    three.rename(three.with_name("m.safetensors"))
    three.with_name("model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "m.safetensors", "z": "m.safetensors"}})
    )
    refused(lambda: tensor_files.list_tensors(three.parent), "tensor z")


# --- finite weights

KINDS = {np.float64: "f8", np.float32: "f4", np.float16: "f2", ml_dtypes.bfloat16: "bf16"}


@pytest.mark.parametrize("dtype", KINDS, ids=KINDS.values())
def test_the_check_by_bits_agrees_with_numpy_on_every_pattern(three, dtype):
    one = tensor_files.list_tensors(three.parent)["a"]
    width, rng = np.dtype(dtype).itemsize, np.random.default_rng(3)
    whole = np.arange(2**16, dtype=np.uint32).astype(
        np.uint16
    )  # every 16-bit pattern; or the upper ones of wider floats
    bits = (
        whole
        if width == 2
        else (whole.astype(f"u{width}") << (8 * width - 16)) | rng.integers(0, 2, 2**16, f"u{width}")
    )
    values = bits.view(dtype)
    with np.errstate(invalid="ignore"):  # NaN that signal
        finite = np.isfinite(values)
    tensor_files._require_finite(one, values[finite])
    for value in values[~finite][:: max(1, (~finite).sum() // 50)]:
        for place in (0, 6):
            some = values[finite][:7].copy()
            some[place] = value
            refused(lambda some=some: tensor_files._require_finite(one, some), str(three), "tensor a")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("order", [None, np.array([1, 0])])
def test_one_value_that_is_not_finite_is_refused_while_reading(three, dtype, order):
    for bad in (np.nan, np.inf, -np.inf):
        array = np.ones((2, 3), dtype)
        array[1, 1] = bad
        save_file({"a": array, "b": np.ones(3, np.float32)}, three)
        found = tensor_files.list_tensors(three.parent)
        refused(lambda found=found: tensor_files.read_tensor(found["a"], jnp.bfloat16, order), str(three), "tensor a")
        assert tensor_files.read_tensor(found["b"], jnp.bfloat16).tolist() == [1, 1, 1]


def test_value_that_the_wanted_type_cannot_hold_is_refused(three):
    save_file({"a": np.array([3.4e38], np.float32)}, three)
    one = tensor_files.list_tensors(three.parent)["a"]
    assert tensor_files.read_tensor(one, np.float32)[0] > 3e38
    refused(lambda: tensor_files.read_tensor(one, jnp.bfloat16), "not finite as bfloat16")


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
    ("key", "value"),
    [
        *[("head_dim", value) for value in ("x", 0, [4])],
        *[("num_hidden_layers", value) for value in (10**9, "2", None, 0)],
        ("vocab_size", 10**20),
        ("num_key_value_heads", "2"),
        *[("rms_norm_eps", value) for value in (0, "1e-6")],
        *[("rope_theta", value) for value in ([1], -1)],
        ("tie_word_embeddings", "no"),
        ("model_type", ["llama"]),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8}),
        ("rope_scaling", LLAMA3 | {"factor": -8}),
        ("rope_scaling", LLAMA3 | {"high_freq_factor": 1}),
        ("quantization_config", [4]),
    ],
)
def test_field_of_another_type_or_size_is_refused_before_anything_is_built(edited, key, value):
    folder = edited("config.json", {key: value})
    named = {"rope_scaling": "rope", "model_type": "model_type"}.get(key, key)
    refused(lambda: families.tensor_map(weights.describe(folder)), "config.json", named)


@pytest.mark.parametrize(
    "text", ['{"model_type": "llama", "x": ' + DEEP, '{"a": ' + "9" * 5000 + "}", "[]", '{"a": NaN}']
)
def test_config_that_is_no_plain_object_is_refused(edited, text):
    refused(lambda: weights.describe(edited("config.json", text)), "config.json")


def test_bert_has_the_same_bounds(tmp_path):
    tiny.write_bert(tmp_path / "bert", num_hidden_layers=10**9)
    refused(lambda: weights.describe_bert(tmp_path / "bert"), "num_hidden_layers=1000000000")


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
        *[
            ("generation_config.json", {"eos_token_id": value}, "eos_token_id")
            for value in (-1, 352, "2", True, [2, "x"])
        ],
        ("tokenizer_config.json", {"eos_token": 5}, ""),
        ("tokenizer_config.json", {"added_tokens_decoder": {"3": 5}}, ""),
        ("tokenizer_config.json", {"added_tokens_decoder": {"352": {"content": "new"}}}, "vocab_size"),
        ("tokenizer_config.json", DEEP, ""),
        ("tokenizer.json", "{}", ""),
        ("tokenizer.json", {"pre_tokenizer": {"type": "Nothing"}}, ""),
        ("tokenizer.json", {"added_tokens": [FAR]}, "1000000"),
    ],
)
def test_broken_tokenizer_file_is_refused(edited, reader, name, change, named):
    refused(lambda: load_tokenizer(edited(name, change)), str(reader), named)


def test_a_bert_tokenizer_goes_through_the_same_door(tmp_path):
    tiny.write_bert(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"pad_token": 5}')
    refused(lambda: load_source_tokenizer(tmp_path), str(tmp_path))


# --- GGUF


def write_gguf(path: Path, fields=lambda writer: None) -> Path:
    writer = GGUFWriter(str(path), "llama")
    fields(writer)
    for name in ("one", "two"):
        writer.add_tensor(name, np.ones((3, 5), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("value", [0, 1, 3, 48, 2**31, "32", 7.5, True, -32])
def test_alignment_that_is_no_power_of_two_is_refused(tmp_path, value):
    call = {bool: "add_bool", str: "add_string", float: "add_float32"}.get(type(value))
    call = call or ("add_int32" if value < 0 else "add_uint32")
    path = write_gguf(tmp_path / "m.gguf", lambda writer: getattr(writer, call)("general.alignment", value))
    refused(lambda: gguf_header.read_header(path), str(path), "general.alignment")


@pytest.mark.parametrize("offset", [0, 4, 32, 96, 2**40, 2**64 - 64])
def test_gguf_tensor_that_does_not_follow_the_one_before_is_refused(tmp_path, offset):
    path = write_gguf(tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    at = data.index(b"two") + 3 + 4 + 2 * 8 + 4  # name, axes, dims, kind
    assert struct.unpack_from("<Q", data, at)[0] == 64
    struct.pack_into("<Q", data, at, offset)
    path.write_bytes(data)
    refused(lambda: gguf_header.read_header(path), str(path), "tensor two")


@pytest.mark.parametrize("axes", [0, 5, 2**31])
def test_gguf_tensor_of_impossible_axes_is_refused(tmp_path, axes):
    path = write_gguf(tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, data.index(b"two") + 3, axes)
    path.write_bytes(data)
    refused(lambda: gguf_header.read_header(path), str(path))


@pytest.mark.parametrize("at", [8, 16])
@pytest.mark.parametrize("count", [2**32, 2**64 - 1])
def test_gguf_count_beyond_the_file_is_refused_at_once(tmp_path, at, count):
    path = write_gguf(tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    struct.pack_into("<Q", data, at, count)
    path.write_bytes(data)
    refused(lambda: gguf_header.read_header(path), str(path))


TOKENS = ["a", "b", "ab", "<e>"]


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.add_array("tokenizer.ggml.merges", ["ab"]),
        lambda w: w.add_array("tokenizer.ggml.merges", ["a b c"]),
        lambda w: w.add_array("tokenizer.ggml.merges", ["a z"]),
        lambda w: w.add_array("tokenizer.ggml.merges", [1, 2]),
        lambda w: w.add_array("tokenizer.ggml.token_type", [1, 1]),
        lambda w: w.add_string("tokenizer.ggml.token_type", "x"),
        lambda w: w.add_array("tokenizer.ggml.scores", [0.5]),
        lambda w: w.add_array("tokenizer.ggml.tokens", ["a", "b"]),
        lambda w: w.add_uint64("tokenizer.ggml.tokens", 2**60),
        lambda w: w.add_array("tokenizer.ggml.pre", ["smollm"]),
        lambda w: w.add_array("tokenizer.chat_template", ["x"]),
        *[
            lambda w, name=name, value=value: w.add_int32(f"tokenizer.ggml.{name}_token_id", value)
            for name in ("eos", "bos", "padding", "eot")
            for value in (-1, 4)
        ],
        lambda w: w.add_bool("tokenizer.ggml.eot_token_id", True),
        lambda w: w.add_float32("tokenizer.ggml.eos_token_id", 2.0),
    ],
)
def test_gguf_tokenizer_of_other_types_or_lengths_is_refused(tmp_path, change):
    def fields(writer):
        writer.add_string("tokenizer.ggml.model", "gpt2")
        writer.add_string("tokenizer.ggml.pre", "smollm")
        writer.add_array("tokenizer.ggml.tokens", TOKENS)
        writer.add_array("tokenizer.ggml.token_type", [1, 1, 1, 3])
        writer.add_array("tokenizer.ggml.merges", ["a b"])
        writer.add_uint32("tokenizer.ggml.eos_token_id", 3)

    def again(writer):  # the writer refuses a key twice, so the first is taken out
        fields(writer)
        had = dict(writer.kv_data[0])
        writer.kv_data[0].clear()
        change(writer)
        writer.kv_data[0] = had | writer.kv_data[0]

    assert load_tokenizer(write_gguf(tmp_path / "good.gguf", fields)).encode("ab") == [2]
    path = write_gguf(tmp_path / "bad.gguf", again)
    refused(lambda: load_tokenizer(path), str(path))


def test_gguf_weights_are_finite_too(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    data = path.read_bytes()
    path.write_bytes(data[:-32] + struct.pack("<f", math.nan) + data[-28:])
    found = tensor_files.list_tensors(path)
    tensor_files.read_tensor(found["one"], np.float32)
    refused(lambda: tensor_files.read_tensor(found["two"], np.float32), str(path), "tensor two")
