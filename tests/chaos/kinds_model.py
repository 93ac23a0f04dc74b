"""A model's files: safetensors and their index, config.json, tokenizer files, GGUF."""

import dataclasses
import functools
import json
import math
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGUFWriter
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from lw_jax.data import tokens
from lw_jax.hub import gguf_family, weights
from lw_jax.models import decoder
from lw_jax.models.decoder import DecoderConfig
from tests import tiny
from tests.chaos import gguf_bytes, mutations
from tests.chaos.cases import Kind, Sample
from tests.chaos.mutations import Files

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
INDEX, GENERATION, TOKENIZER_CONFIG = "model.safetensors.index.json", "generation_config.json", "tokenizer_config.json"
SENTENCE = "Mara Ellis lives in Lisbon since 2019."


def _write(folder: Path) -> None:
    tiny.write_reader(folder, "llama", layers=1, width=32, ffn=40)
    (folder / GENERATION).write_text(
        json.dumps({"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0}), "utf-8"
    )


def _write_index(folder: Path) -> None:
    """Two files and an index."""
    _write(folder)
    header, data = part((folder / WEIGHTS).read_bytes())
    names = sorted(header.keys() - {"__metadata__"})
    half, table = len(names) // 2, {}
    for number, chosen in enumerate((names[:half], names[half:]), 1):
        name, body, own = f"model-{number:05}-of-00002.safetensors", b"", {}
        for one in chosen:
            begin, end = header[one]["data_offsets"]
            own[one] = header[one] | {"data_offsets": [len(body), len(body) + end - begin]}
            body, table[one] = body + data[begin:end], name
        (folder / name).write_bytes(join(json.dumps(own).encode(), body))
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": len(data)}, "weight_map": table}), "utf-8")


def part(file: bytes) -> tuple[dict[str, Any], bytes]:
    """Returns (header, data) of a safetensors file."""
    (length,) = struct.unpack_from("<Q", file)
    return json.loads(file[8 : 8 + length]), file[8 + length :]


def join(header: bytes, data: bytes, *, extra: int = 0) -> bytes:
    """Returns a safetensors file; `extra` is added to the length that it says its header has."""
    return struct.pack("<Q", len(header) + extra) + header + data


@st.composite
def changed_safetensors(draw: Any, sample: bytes) -> bytes:
    """Draws a file with a changed header, a wrong length of it, or other data."""
    header, data = part(sample)
    what = draw(st.sampled_from(("header", "header", "header", "offsets", "length", "data")))
    if what == "header":
        text = draw(mutations.json_text(header)).encode("utf-8", "surrogatepass")
        return join(text, data)
    if what == "offsets":
        name = draw(st.sampled_from(sorted(header.keys() - {"__metadata__"})))
        shift = draw(st.sampled_from((-64, -4, -1, 1, 4, 64)))
        begin, end = header[name]["data_offsets"]
        moved = draw(
            st.sampled_from(([begin + shift, end + shift], [begin, end + shift], [begin + shift, end], [end, begin]))
        )
        header[name]["data_offsets"] = moved
        return join(json.dumps(header).encode(), data)
    if what == "length":
        return join(json.dumps(header).encode(), data, extra=draw(st.sampled_from((-8, -1, 1, 7, 2**20, 2**40, 2**62))))
    changed = bytearray(data)
    at = 4 * draw(st.integers(0, len(data) // 4 - 1))
    changed[at : at + 4] = struct.pack("<f", draw(st.sampled_from((math.nan, math.inf, -math.inf, 1e38))))
    end = draw(st.sampled_from((len(changed), len(changed), at)))
    return join(json.dumps(header).encode(), bytes(changed[:end]) + b"\0" * draw(st.sampled_from((0, 0, 0, 1, 8))))


def is_finite(params: Any) -> bool:
    """Says whether every weight is a finite number."""
    return all(bool(np.isfinite(np.asarray(leaf, np.float32)).all()) for leaf in jax.tree.leaves(params))


def _load(folder: Path) -> Any:
    return weights.describe(folder), weights.load(folder, dtype=jnp.float32)


def _judge_weights(value: Any, folder: Path, changed: bool) -> str:
    del changed
    if not is_finite(value[1]):
        return "weights that are NaN or infinite"
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "numpy") as opened:
                opened.keys()
        except SafetensorError as error:
            return f"{file.name} loaded, which the safetensors library refuses: {error}"
    return ""


def judge_config(value: Any, folder: Path, changed: bool) -> str:
    """Says which field of a described model has another type than it is declared with, or is no finite number."""
    del folder, changed
    cfg = value[0]
    for field in dataclasses.fields(cfg):
        found = getattr(cfg, field.name)
        if isinstance(found, float) and not math.isfinite(found):
            return f"{field.name} = {found}"
        named = {"int": int, "float": (int, float), "bool": bool, "str": str}.get(str(field.type), object)
        if isinstance(field.type, type):
            named = (int, float) if field.type is float else field.type
        if not isinstance(found, named) or (named is int and isinstance(found, bool)):
            return f"{field.name} = {found!r:.40}, a {type(found).__name__}"
        if isinstance(found, int) and abs(found) >= 2**31:
            return f"{field.name} = {found}"
    return ""


def _write_bert(folder: Path) -> None:
    tiny.write_bert(folder)


def _load_bert(folder: Path) -> Any:
    return weights.describe_bert(folder), weights.load_bert(folder, dtype=jnp.float32)


def judge_tokenizer(tokenizer: Any, folder: Path, changed: bool) -> str:
    """Encodes a sentence and looks at every id that is told."""
    del folder, changed
    ids = tokenizer.encode(SENTENCE)
    special = [*getattr(tokenizer, "stops", ()), *getattr(tokenizer, "begin", ()), tokenizer.pad]
    for one in (*ids, *special):
        if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < tokenizer.vocab:
            return f"id {one!r} of a vocabulary of {tokenizer.vocab}"
    if hasattr(tokenizer, "decode"):
        tokenizer.decode(ids).encode()
    return ""


def _config(sample: Sample, **changes: Any) -> Files:
    return {CONFIG: mutations.text_of(json.loads(sample[CONFIG]) | changes).encode("utf-8", "surrogatepass")}


def _explicit_config(sample: Sample) -> dict[str, Files]:
    changes: dict[str, dict[str, Any]] = {
        "head_dim text": {"head_dim": "x"},
        "layers 10^9": {"num_hidden_layers": 10**9},
        "layers 10^20": {"num_hidden_layers": 10**20},
        "layers true": {"num_hidden_layers": True},
        "heads 0": {"num_attention_heads": 0},
        "heads negative": {"num_attention_heads": -4},
        "vocabulary 10^20": {"vocab_size": 10**20},
        "positions 10^20": {"max_position_embeddings": 10**20},
        "eps NaN": {"rms_norm_eps": "@nan"},
        "theta infinite": {"rope_theta": "@overflow"},
        "theta 0": {"rope_theta": 0},
        "type number": {"model_type": 5},
        "type unknown": {"model_type": "nothing"},
        "deep": {"rope_scaling": "@deep"},
        "scaling text": {"rope_scaling": "x"},
        "remote code": {"auto_map": {"AutoConfig": "evil.Config"}},
    }
    return {name: _config(sample, **told) for name, told in changes.items()}


def _explicit_weights(sample: Sample) -> dict[str, Files]:
    header, data = part(sample[WEIGHTS])
    names = sorted(header.keys() - {"__metadata__"}, key=lambda name: header[name]["data_offsets"])

    def changed(name: str, **fields: Any) -> bytes:
        return join(mutations.text_of(header | {name: header[name] | fields}).encode(), data)

    first, last = names[0], names[-1]
    begin, end = header[first]["data_offsets"]
    told: dict[str, bytes] = {
        "offsets text": changed(first, data_offsets=["0", "4"]),
        "offsets float": changed(first, data_offsets=[float(begin), float(end)]),
        "offsets list": changed(first, data_offsets=[[begin], [end]]),
        "offsets three": changed(first, data_offsets=[begin, end, end]),
        "offsets huge": changed(first, data_offsets=[begin, 2**70]),
        "shape text": changed(first, shape="32"),
        "shape float": changed(first, shape=[float(size) for size in header[first]["shape"]]),
        "shape negative": changed(first, shape=[-size for size in header[first]["shape"]]),
        "overlapping": changed(
            last, data_offsets=[begin, begin + header[last]["data_offsets"][1] - header[last]["data_offsets"][0]]
        ),
        "header a byte short": join(json.dumps(header).encode(), data, extra=-1),
        "header a byte long": join(json.dumps(header).encode() + b" ", data, extra=0),
        "bytes after the last": join(json.dumps(header).encode(), data + b"\0" * 8),
        "NaN": join(json.dumps(header).encode(), struct.pack("<f", math.nan) + data[4:]),
    }
    return {name: {WEIGHTS: value} for name, value in told.items()}


def _explicit_tokenizer(sample: Sample) -> dict[str, Files]:
    told = json.loads(sample[TOKENIZER])
    generation: dict[str, Any] = {
        "eos beyond the vocabulary": 10**6,
        "eos negative": -1,
        "eos text": "2",
        "eos list of texts": ["x"],
        "eos nested": [[2]],
        "eos true": True,
        "eos digits": "@digits",
    }
    found: dict[str, Files] = {
        name: {GENERATION: mutations.text_of({"eos_token_id": value}).encode()} for name, value in generation.items()
    }
    found["generation list"] = {GENERATION: b"[1]"}
    found["generation broken"] = {GENERATION: b"{"}
    found["deep"] = {TOKENIZER: b"[" * 100_000}
    found["no model"] = {TOKENIZER: json.dumps({key: told[key] for key in told if key != "model"}).encode()}
    found["no vocabulary"] = {TOKENIZER: json.dumps(told | {"model": told["model"] | {"vocab": {}}}).encode()}
    for template in (
        "{{ 1/0 }}",
        "{% include 'x' %}",
        "{% for i in range(10**9) %}{% endfor %}",
    ):
        config = json.loads(sample[TOKENIZER_CONFIG]) | {"chat_template": template}
        found[f"template {template[:12]}"] = {TOKENIZER_CONFIG: json.dumps(config).encode()}
    return found


def _load_chat(folder: Path) -> Any:
    """Loads a tokenizer; writes a turn in its template where it has one."""
    tokenizer = tokens.load_tokenizer(folder)
    if tokenizer.backend.chat_template:
        tokenizer.render_chat("Hello.")
    return tokenizer


GGUF = "model.gguf"


def _write_gguf(folder: Path) -> None:
    """A model of one layer with a byte-level vocabulary."""
    folder.mkdir(exist_ok=True)
    alphabet = [*sorted(_alphabet()), "he", "<|endoftext|>"]
    cfg = DecoderConfig(
        **{"vocab": len(alphabet), "width": 32, "layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 40},
        **{"rope_theta": 1e4, "norm_eps": 2.0**-17, "max_positions": 59, "tied": True, "qkv_bias": False},
        rope_scaling=None,
    )
    params = decoder.init(jax.random.key(0), cfg, jnp.float32, scale=0.1)
    writer = GGUFWriter(str(folder / GGUF), "llama")
    for key, value in (
        *(("block_count", cfg.layers), ("context_length", cfg.max_positions), ("embedding_length", cfg.width)),
        *(
            ("feed_forward_length", cfg.ffn),
            ("attention.head_count", cfg.heads),
            ("attention.head_count_kv", cfg.kv_heads),
        ),
        *(
            ("attention.key_length", cfg.head_dim),
            ("attention.value_length", cfg.head_dim),
            ("rope.dimension_count", 8),
        ),
        ("vocab_size", cfg.vocab),
    ):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_rope_freq_base(cfg.rope_theta)
    writer.add_layer_norm_rms_eps(cfg.norm_eps)
    writer.add_uint32("general.alignment", 32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(alphabet)
    writer.add_token_types([1] * (len(alphabet) - 1) + [3])
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(len(alphabet) - 1)
    writer.add_add_bos_token(False)
    for name, slot in gguf_family.tensor_map(cfg).items():
        leaf = functools.reduce(lambda node, key: node[key], slot.path, params)
        value = np.array(leaf if slot.layer is None else leaf[slot.layer], np.float32).reshape(slot.shape)
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel.alphabet()


def _load_gguf(folder: Path) -> Any:
    file = folder / GGUF
    return weights.describe(file), weights.load(file, dtype=jnp.float32), _load_chat(file)


def _judge_gguf(value: Any, folder: Path, changed: bool) -> str:
    cfg, params, tokenizer = value
    if not is_finite(params):
        return "weights that are NaN or infinite"
    return judge_config((cfg,), folder, changed) or judge_tokenizer(tokenizer, folder, changed)


def _explicit_gguf(sample: Sample) -> dict[str, Files]:
    file, parsed = sample[GGUF], gguf_bytes.Parsed(sample[GGUF])
    alignment = b"general.alignment"
    told = {
        "alignment 0": gguf_bytes.with_field(file, alignment, 4, 0),
        "alignment negative": gguf_bytes.with_field(file, alignment, 5, -32),
        "alignment text": gguf_bytes.with_field(file, alignment, 8, b"32"),
        "alignment 3": gguf_bytes.with_field(file, alignment, 4, 3),
        "eos beyond the vocabulary": gguf_bytes.with_field(file, b"tokenizer.ggml.eos_token_id", 4, 10**6),
        "eos text": gguf_bytes.with_field(file, b"tokenizer.ggml.eos_token_id", 8, b"x"),
        "layers 2^32": gguf_bytes.with_field(file, b"llama.block_count", 4, 2**32 - 1),
    }
    parsed.tensors[1][3] += 4
    told["unaligned offset"] = parsed.write()
    return {name: {GGUF: value} for name, value in told.items()}


KINDS = [
    Kind(
        row="safetensors and its index",
        name="safetensors",
        write=_write,
        mutate=lambda sample: mutations.files(
            sample,
            {
                WEIGHTS: [changed_safetensors(sample[WEIGHTS])] * 2
                + [mutations.changed_bytes(sample[WEIGHTS], near=900)]
            },
        ),
        load=_load,
        judge=_judge_weights,
        explicit=_explicit_weights,
    ),
    Kind(
        row="safetensors and its index",
        name="index",
        write=_write_index,
        mutate=lambda sample: mutations.files(
            sample,
            {INDEX: [mutations.json_file(sample[INDEX])] * 4 + [mutations.changed_bytes(sample[INDEX])]}
            | {name: [changed_safetensors(sample[name])] for name in sample if name.startswith("model-00001")},
        ),
        load=_load,
        judge=_judge_weights,
        weight=0.6,
    ),
    Kind(
        row="config.json of a model",
        name="config",
        write=_write,
        mutate=lambda sample: mutations.files(
            sample, {CONFIG: [mutations.json_file(sample[CONFIG])] * 5 + [mutations.changed_bytes(sample[CONFIG])]}
        ),
        load=_load,
        judge=judge_config,
        explicit=_explicit_config,
    ),
    Kind(
        row="config.json of a model",
        name="config-bert",
        write=_write_bert,
        mutate=lambda sample: mutations.files(
            sample, {CONFIG: [mutations.json_file(sample[CONFIG])] * 5 + [mutations.changed_bytes(sample[CONFIG])]}
        ),
        load=_load_bert,
        judge=judge_config,
        weight=0.25,
    ),
    Kind(
        row="tokenizer files, generation_config",
        name="tokenizer",
        write=_write,
        mutate=lambda sample: mutations.files(
            sample,
            {
                name: [mutations.json_file(sample[name])] * 5 + [mutations.changed_bytes(sample[name])]
                for name in (TOKENIZER, TOKENIZER_CONFIG, GENERATION)
            },
        ),
        load=_load_chat,
        judge=judge_tokenizer,
        explicit=_explicit_tokenizer,
    ),
    Kind(
        row="tokenizer files, generation_config",
        name="tokenizer-bert",
        write=_write_bert,
        mutate=lambda sample: mutations.files(
            sample,
            {
                name: [mutations.json_file(sample[name])] * 5 + [mutations.changed_bytes(sample[name])]
                for name in (TOKENIZER, TOKENIZER_CONFIG)
            },
        ),
        load=tokens.load_source_tokenizer,
        judge=judge_tokenizer,
        weight=0.25,
    ),
    Kind(
        row="GGUF and its tokenizer",
        name="gguf",
        write=_write_gguf,
        mutate=lambda sample: mutations.files(
            sample, {GGUF: [gguf_bytes.changed(sample[GGUF])] * 3 + [mutations.changed_bytes(sample[GGUF], near=4000)]}
        ),
        load=_load_gguf,
        judge=_judge_gguf,
        explicit=_explicit_gguf,
    ),
]
