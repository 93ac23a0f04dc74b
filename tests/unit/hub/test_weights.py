import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

from lw_jax.core.errors import UserError
from lw_jax.data.tokens import byte_backend
from lw_jax.hub import gguf_family, tensor_files, weights
from lw_jax.models import decoder
from lw_jax.models.rotary import Llama3Scaling, llama3_factors
from tests import tiny
from tests.tiny import assert_equal_trees
from tests.tiny import edit_tensors as edit

LLAMA = dataclasses.replace(
    tiny.DECODER,
    width=32,  # one block of the quantised types
    heads=4,
    ffn=37,
    norm_eps=2.0**-17,  # exact in the fp32 that GGUF stores
    tied=True,
    qkv_bias=False,
)
QWEN = dataclasses.replace(LLAMA, tied=False, qkv_bias=True)
PHI3 = dataclasses.replace(LLAMA, tied=False, window=19, rotated=8)
STABLELM = dataclasses.replace(QWEN, width=40, norm="layer", rotated=4)  # its heads make up its width
FAMILIES = {"llama": LLAMA, "qwen2": QWEN, "phi3": PHI3, "stablelm": STABLELM}


@pytest.fixture
def llama(tmp_path):
    weights.save(tmp_path / "llama", tiny.draw_decoder(LLAMA), LLAMA, model_type="llama")
    return tmp_path / "llama"


# --- safetensors


SCALED = dataclasses.replace(LLAMA, rope_scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192))


@pytest.mark.parametrize(("family", "cfg"), [*FAMILIES.items(), ("llama", SCALED)])
def test_saved_reader_loads_back_unchanged(tmp_path, monkeypatch, family, cfg):
    params = tiny.draw_decoder(cfg)
    weights.save(tmp_path / "m", params, cfg, model_type=family)
    assert weights.describe(tmp_path / "m") == cfg
    assert_equal_trees(weights.load(tmp_path / "m", dtype=jnp.float32), params)
    monkeypatch.setattr(tensor_files, "_CHUNK_BYTES", 3 * 32 * 4)  # three rows at once
    assert_equal_trees(weights.load(tmp_path / "m", dtype=jnp.float32), params)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_saved_model_states_the_type_of_its_weights(tmp_path, dtype):
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), tiny.draw_decoder(LLAMA))
    weights.save(tmp_path / "m", params, LLAMA, model_type="llama")
    assert json.loads((tmp_path / "m" / "config.json").read_text())["torch_dtype"] == dtype


class Words:
    """Stands for a tokenizer, whose files may not fit on the disk."""

    bos_token_id, eos_token_id, pad_token_id = 1, 2, 3

    def __init__(self, text, *, fails=False):
        self.text, self.fails = text, fails

    def save_pretrained(self, folder):
        (Path(folder) / "templates").mkdir()
        (Path(folder) / "templates" / "tool.jinja").write_bytes(self.text)
        (Path(folder) / "tokenizer.json").write_bytes(self.text)
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps({"text": str(self.text)}))
        if self.fails:
            tiny.no_space()


def test_saved_model_leaves_no_file_of_an_earlier_one_beside_it(tmp_path):
    own = ["mine.txt", "README.md"]
    for name in ["generation_config.json", "chat_template.jinja", "added_tokens.json", *own]:
        (tmp_path / name).write_text("{}")
    weights.save(tmp_path, tiny.draw_decoder(LLAMA), LLAMA, model_type="llama")
    assert (tmp_path / "chat_template.jinja").exists(), "it may be of the tokenizer that is there"
    generation = {"eos_token_id": [2, 5], "pad_token_id": 4}
    words = Words(b"one")
    weights.save(tmp_path, tiny.draw_decoder(LLAMA), LLAMA, model_type="llama", tokenizer=words, generation=generation)
    names = {path.name for path in tmp_path.iterdir()}
    assert not names & {"chat_template.jinja", "added_tokens.json"} and names >= set(own)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert saved == {"bos_token_id": 1, "eos_token_id": [2, 5], "pad_token_id": 4}
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "mine.txt").stat().st_mode, "the umask's"


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_model_that_cannot_be_written_leaves_the_one_that_is_there(tmp_path, monkeypatch, file):
    params = tiny.draw_decoder(LLAMA)
    weights.save(tmp_path, params, LLAMA, model_type="llama", tokenizer=Words(b"one"))
    before = tiny.contents(tmp_path)
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "templates/tool.jinja"}
    assert before.keys() == {"config.json", "model.safetensors", *tokenizer}
    other, cfg = jax.tree.map(lambda x: 2 * x, params), dataclasses.replace(LLAMA, rope_theta=7.0)
    with monkeypatch.context() as patch:
        if file == "model.safetensors":
            patch.setattr(tensor_files, "save_file", tiny.no_space)
        elif file == "config.json":
            patch.setattr(Path, "write_text", tiny.no_space)
        words = Words(b"other", fails=file == "tokenizer.json")
        with pytest.raises(OSError, match="No space left"):
            weights.save(tmp_path, other, cfg, model_type="llama", tokenizer=words)
    assert tiny.contents(tmp_path) == before
    weights.save(tmp_path, other, cfg, model_type="llama", tokenizer=Words(b"other"))
    found = tiny.contents(tmp_path)
    assert found.keys() == before.keys() and not set(found.values()) & set(before.values())


def test_saved_tokenizer_states_what_transformers_4_knows(tmp_path):
    words = byte_backend()
    words.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    for name in ("one", "again"):  # the second from what was loaded
        weights.save(tmp_path / name, tiny.draw_decoder(LLAMA), LLAMA, model_type="llama", tokenizer=words)
        stated = json.loads((tmp_path / name / "tokenizer_config.json").read_text())
        assert stated["tokenizer_class"] == "PreTrainedTokenizerFast", "in 5 the other name of TokenizersBackend"
        assert stated["additional_special_tokens"] == ["<|im_start|>"]
        assert "token_type_ids" not in stated["model_input_names"], "no decoder takes them"
        assert not stated.keys() & {"backend", "is_local", "local_files_only", "extra_special_tokens"}
        words = AutoTokenizer.from_pretrained(tmp_path / name)
        assert words("<|im_start|>caf\u00e9").input_ids == [257, *"caf\u00e9".encode()]
        assert "<|im_start|>" in words.all_special_tokens


def test_several_files_give_the_same_as_one(llama):
    before = weights.fingerprint(llama)
    shard(llama)
    assert_equal_trees(weights.load(llama, dtype=jnp.float32), tiny.draw_decoder(LLAMA))
    assert weights.fingerprint(llama) == before


def test_weights_are_kept_and_cast_only_on_demand(tmp_path, llama):
    narrow = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16), tiny.draw_decoder(LLAMA))
    assert_equal_trees(weights.load(llama, dtype=jnp.bfloat16), narrow)  # rounded to the nearest
    weights.save(tmp_path / "m", narrow, LLAMA, model_type="llama")
    kept = weights.load(tmp_path / "m", dtype=jnp.bfloat16)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(kept))
    assert_equal_trees(kept, narrow)
    wide = weights.load(tmp_path / "m", dtype=jnp.float32)
    assert_equal_trees(wide, jax.tree.map(lambda x: x.astype(np.float32), narrow))


def test_first_layers_only(llama):
    got, want = weights.load(llama, dtype=jnp.float32, layers=2), tiny.draw_decoder(LLAMA)
    assert_equal_trees(got["layers"], jax.tree.map(lambda x: x[:2], want["layers"]))
    with pytest.raises(UserError, match="layers=4"):
        weights.load(llama, dtype=jnp.float32, layers=4)


@pytest.mark.parametrize("on_host", [0, 2**25], ids=["layer by layer", "stacked on the host"])
def test_weights_land_in_their_shards(llama, on_host, monkeypatch):
    monkeypatch.setattr(weights, "_STACKED_ON_HOST", on_host)
    mesh = jax.make_mesh((1, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    abstract = decoder.abstract(LLAMA, jnp.float32)
    shardings = jax.tree.map(lambda _: jax.NamedSharding(mesh, jax.P()), abstract)
    shardings["layers"]["q"] = jax.NamedSharding(mesh, jax.P(None, "model", None, None))
    shardings["layers"]["o"] = jax.NamedSharding(mesh, jax.P(None, None, "model", None))
    shardings["norm"] = jax.NamedSharding(mesh, jax.P("model"))
    got = weights.load(llama, dtype=jnp.float32, shardings=shardings)
    assert_equal_trees(got, tiny.draw_decoder(LLAMA))
    assert jax.tree.all(
        jax.tree.map(lambda leaf, want: leaf.sharding.is_equivalent_to(want, leaf.ndim), got, shardings)
    )
    assert got["layers"]["q"].addressable_shards[0].data.shape == (3, 1, 10, 32)


K_PROJ, EMBED, HEAD = "model.layers.1.self_attn.k_proj.weight", "model.embed_tokens.weight", "lm_head.weight"


def _tied(tensors, change):
    tensors[EMBED] = change(tensors[EMBED])
    tensors[HEAD] = tensors[EMBED].copy()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: one.pop(K_PROJ), r"k_proj\.weight is missing"),
        (lambda one: one.update({"model.layers.1.k_norm.weight": np.ones(10, np.float32)}), r"k_norm\.weight"),
        (lambda one: one.update({K_PROJ: one[K_PROJ].T.copy()}), r"k_proj\.weight .*\(32, 20\).*\(20, 32\)"),
        (lambda one: one.update({K_PROJ: one[K_PROJ].astype(np.int8)}), r"k_proj\.weight is stored as I8"),
        (lambda one: one.update({HEAD: one[EMBED] + 1}), r"lm_head\.weight differs"),
        (lambda one: _tied(one, lambda value: value[:0]), r"is empty, shape \(0, 32\)"),
    ],
)
def test_wrong_tensor_is_refused_by_name(llama, change, message):
    edit(llama, change)
    with pytest.raises(UserError, match=message):
        weights.load(llama, dtype=jnp.float32)


def _store_twice(folder):
    parts = [load_file(folder / file) for file in SHARDS]
    name = sorted(parts[0])[0]
    save_file(parts[1] | {name: parts[0][name]}, folder / SHARDS[1])


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda folder: (folder / SHARDS[1]).unlink(), "model-00002-of-00002"),
        (lambda folder: (folder / INDEX).unlink(), "2 .safetensors files"),
        (lambda folder: (folder / "config.json").unlink(), r"config\.json"),
        (_store_twice, "embed_tokens.weight .*model-00001"),
    ],
)
def test_folder_that_is_not_whole_is_refused(llama, damage, named):
    shard(llama)
    damage(llama)
    with pytest.raises(UserError, match=named):
        weights.load(llama, dtype=jnp.float32)


INDEX, SHARDS = "model.safetensors.index.json", ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def add_shards(folder, change=0.0):
    """Adds the same weights in two shards with their index; `change` is added to one value."""
    tensors = load_file(folder / "model.safetensors")
    tensors[K_PROJ][0, 0] += change
    place = {name: SHARDS[i % 2] for i, name in enumerate(sorted(tensors))}
    for file in SHARDS:
        save_file({name: tensors[name] for name in tensors if place[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": place}))


def shard(folder):
    add_shards(folder)
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("change", "absent", "named"),
    [
        (1.0, (), INDEX),
        (0.0, (SHARDS[1],), INDEX),  # not whole: what it would have held is not known
        (1.0, (INDEX,), SHARDS[0]),  # of a save that was cut off before it wrote the index
    ],
)
def test_two_sets_of_weights_in_one_folder_are_refused(llama, change, absent, named):
    add_shards(llama, change)
    for file in absent:
        (llama / file).unlink()
    for ask in (weights.fingerprint, lambda folder: weights.load(folder, dtype=jnp.float32)):
        with pytest.raises(UserError, match=rf"model\.safetensors and .*{re.escape(named)}"):
            ask(llama)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_adapter_beside_a_whole_model_is_refused(llama, name):
    shutil.copy(llama / ("config.json" if name.endswith("json") else "model.safetensors"), llama / name)
    with pytest.raises(UserError, match=f"{name} an adapter"):
        weights.load(llama, dtype=jnp.float32)


def _add_copies(folder):
    for name in ("pytorch_model.bin", "model.gguf", "consolidated.00.pth"):
        (folder / name).write_bytes(b"not read")
    save_file({"tok_embeddings.weight": np.ones(1, np.float32)}, folder / "consolidated.safetensors")


def _rename(folder):
    _add_copies(folder)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")


def _leave_index(folder):  # as transformers' save_pretrained leaves one that it wrote before into the folder
    add_shards(folder, 1.0)
    for file in SHARDS:
        (folder / file).unlink()


@pytest.mark.parametrize("add", [add_shards, _add_copies, _rename, _leave_index])
def test_folder_with_one_set_of_weights_is_read_whatever_stands_beside_it(llama, add):
    add(llama)
    assert_equal_trees(weights.load(llama, dtype=jnp.float32), tiny.draw_decoder(LLAMA))


def test_pickles_are_never_opened(llama):
    (llama / "model.safetensors").unlink()
    (llama / "pytorch_model.bin").write_bytes(b"would run code")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is a pickle"):
        weights.load(llama, dtype=jnp.float32)
    with pytest.raises(UserError, match="never opened"):
        weights.describe(llama / "pytorch_model.bin")


# --- GGUF

QUANTISED = GGMLQuantizationType.Q8_0
STORED_QUANTISED = ("q", "k", "gate", "embed")  # rows of 32, one block


def write_gguf(path, cfg, arch, *, change=lambda name, value: value, fields=lambda writer: None):
    """Writes a model as its converter would, q and k of llama interleaved; returns what must be read back."""
    params = jax.tree.map(np.array, tiny.draw_decoder(cfg))

    def add(writer):
        writer.add_block_count(cfg.layers)
        writer.add_context_length(cfg.max_positions)
        writer.add_embedding_length(cfg.width)
        writer.add_feed_forward_length(cfg.ffn)
        writer.add_head_count(cfg.heads)
        writer.add_head_count_kv(cfg.kv_heads)
        writer.add_key_length(cfg.head_dim)
        writer.add_value_length(cfg.head_dim)
        writer.add_rope_freq_base(cfg.rope_theta)
        writer.add_layer_norm_rms_eps(cfg.norm_eps)
        writer.add_array("tokenizer.ggml.scores", [0.5, -1.5])
        writer.add_array("tokenizer.ggml.tokens", ["a", "ü", ""])
        fields(writer)
        for name, (path_, layer, shape) in gguf_family.tensor_map(cfg).items():
            leaf = params[path_[0]] if layer is None else params[path_[0]][path_[1]][layer]
            value = leaf.reshape(shape)
            quantised = path_[-1] in STORED_QUANTISED
            if quantised:
                value = dequantize(quantize(value, QUANTISED), QUANTISED)
                leaf[...] = value.reshape(leaf.shape)
            if arch == "llama" and path_[-1] in ("q", "k"):
                halves = value.reshape(-1, 2, cfg.head_dim // 2, cfg.width)
                value = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(shape)
            value = change(name, value)
            raw = quantize(value, QUANTISED) if quantised else value
            writer.add_tensor(name, raw, raw_dtype=QUANTISED if quantised else None)
        if cfg.rope_scaling is not None:
            frequency = cfg.rope_theta ** -(np.arange(0, cfg.head_dim, 2) / cfg.head_dim)
            factors = llama3_factors(frequency, cfg.rope_scaling)
            writer.add_tensor("rope_freqs.weight", (1 / factors).astype(np.float32))

    tiny.write_gguf(path, add, arch=arch)
    return params


@pytest.mark.parametrize(
    ("arch", "cfg"),
    [(arch, FAMILIES[arch]) for arch in gguf_family.ARCHITECTURES]
    + [("llama", dataclasses.replace(LLAMA, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192)))],
)
def test_gguf_loads_back_with_its_rotary_order_undone(tmp_path, monkeypatch, arch, cfg):
    params = write_gguf(tmp_path / "m.gguf", cfg, arch)
    assert weights.describe(tmp_path / "m.gguf") == cfg
    assert_equal_trees(weights.load(tmp_path / "m.gguf", dtype=jnp.float32), params)
    monkeypatch.setattr(tensor_files, "_CHUNK_BYTES", 7 * 34)  # seven rows, across heads
    assert_equal_trees(weights.load(tmp_path / "m.gguf", dtype=jnp.float32), params)


UP = "blk.1.ffn_up.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"change": lambda name, value: value.astype(np.int8) if name == UP else value}, f"{UP} is stored as I8"),
        ({"fields": lambda writer: writer.add_type("adapter")}, "general.type"),
        ({"fields": lambda writer: writer.add_uint16("split.count", 3)}, "split.count"),
        ({"fields": lambda writer: writer.add_expert_count(8)}, "expert_count"),
        ({"fields": lambda writer: writer.add_string("llama.rope.scaling.type", "yarn")}, "rope.scaling.type"),
    ],
)
def test_wrong_gguf_tensor_or_field_is_refused_by_name(tmp_path, change, named):
    write_gguf(tmp_path / "m.gguf", LLAMA, "llama", **change)
    with pytest.raises(UserError, match=named):
        weights.load(tmp_path / "m.gguf", dtype=jnp.float32)


@pytest.mark.parametrize("keep", [3, 300, -33])
def test_cut_off_gguf_is_refused(tmp_path, keep):
    path = tmp_path / "m.gguf"
    write_gguf(path, LLAMA, "llama")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"m\.gguf.*(cut off|no GGUF)"):
        weights.describe(path)


# --- identity


def test_fingerprint_is_of_the_configuration_and_samples_of_every_tensor(tmp_path):
    cfg = dataclasses.replace(LLAMA, ffn=211)  # 6752 values of 4 bytes in a matrix, three samples of 1024
    weights.save(tmp_path / "m", tiny.draw_decoder(cfg), cfg, model_type="llama")
    shutil.copytree(tmp_path / "m", tmp_path / "copy")
    before, name = weights.fingerprint(tmp_path / "m"), "model.layers.2.mlp.down_proj.weight"
    assert weights.fingerprint(tmp_path / "copy") == before
    assert weights.identify(tmp_path / "copy") == weights.identify(tmp_path / "m")
    for where, seen in ((0, True), (2000, False), (3376, True), (5000, False), (-1, True)):
        shutil.copy(tmp_path / "m" / "model.safetensors", tmp_path / "copy")
        edit(tmp_path / "copy", lambda tensors, at=where: np.add.at(tensors[name].reshape(-1), [at], 1))
        assert (weights.fingerprint(tmp_path / "copy") != before) == seen, where
        assert weights.identify(tmp_path / "copy") != weights.identify(tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_theta": 5e4}))
    assert weights.fingerprint(tmp_path / "m") != before


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_opens_what_is_saved(tmp_path, family):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    weights.save(tmp_path, tiny.draw_decoder(FAMILIES[family]), FAMILIES[family], model_type=family)
    model, told = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(told.values())
    state, stored = model.state_dict(), load_file(tmp_path / "model.safetensors")
    for name, value in stored.items():
        np.testing.assert_array_equal(state[name].numpy(), value)
    assert set(state) - set(stored) <= {"lm_head.weight"}


# --- memory


BIG = dataclasses.replace(
    LLAMA, vocab=8192, width=640, layers=11, heads=10, kv_heads=5, head_dim=64, ffn=2560, tied=True
)
# Compiled programs, allocator slack, the piece of a tensor being converted. Measured in all, with the largest tensor of
# 21 MB: 23 to 33 MB beyond the arrays; a second copy of the model would be 291 MB.
CONSTANT_BYTES = 48e6
MEASURE = """
import json, pathlib, re, sys
import jax, jax.numpy as jnp
from lw_jax.hub import weights

def status(key):
    return 1024 * int(re.search(key + r":\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])

weights.load(pathlib.Path(sys.argv[1]), dtype=jnp.float32)  # threads, caches, first allocations
for packed in ("", "nf4"):
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back
    before = status("VmRSS")
    tree = weights.load(pathlib.Path(sys.argv[2]), dtype=jnp.float32, packed=packed)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    print(json.dumps({"peak": status("VmHWM") - before, "held": held}))
    del tree
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_loading_needs_the_arrays_and_little_more(tmp_path, llama):
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), decoder.abstract(BIG, jnp.bfloat16))
    weights.save(tmp_path / "big", zeros, BIG, model_type="llama")
    command = [sys.executable, "-c", MEASURE, str(llama), str(tmp_path / "big")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    for line, held in zip(done.stdout.splitlines(), (290e6, 57e6), strict=True):
        told = json.loads(line)
        assert told["held"] == pytest.approx(held, rel=0.03)
        assert told["peak"] - told["held"] <= 2 * 4 * BIG.vocab * BIG.width + CONSTANT_BYTES, told
