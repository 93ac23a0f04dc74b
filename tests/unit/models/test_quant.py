"""lw_jax/models/quant.py: what the packed bytes mean, held to formulas written again here and to qwix."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lw_jax.core.errors import UserError
from lw_jax.hub import weights
from lw_jax.models import decoder, lora, quant
from sharding import mesh as meshes
from sharding import rules, tables
from tests import tiny

CFG = dataclasses.replace(tiny.DECODER, vocab=101, width=128, heads=8, kv_heads=4, head_dim=16, ffn=256)
SAME = 1e-5  # fp32 logits of unit size: the same numbers, in another program
AWQ = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 128, "zero_point": True}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ: nibble i of a word holds column order[i]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def nibbles(codes):
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)


@functools.cache
def our_params(scale=0.2):
    return tiny.compiled(decoder.init, jax.random.key(1), CFG, jnp.float32, scale=scale)


def logits(params, ids, cfg=CFG):
    def run(params, ids):
        out = decoder.forward(params, cfg, decoder.embed(params, ids), mask=jnp.ones(ids.shape, bool))
        return decoder.logits(params, out.hidden)

    return jax.jit(run)(params, ids)


# --- the codes


def test_nf4_and_int8_equal_qwix_to_the_bit():
    qwix = pytest.importorskip("qwix", reason="needs requirements-dev.txt")
    matrix = np.array(normal(128, 24, seed=3))
    for block in range(2):  # block maxima that bf16 holds, so that both divide by the same scale
        rows = slice(64 * block, 64 * block + 64)
        matrix[rows] /= np.abs(matrix[rows]).max(0)
    theirs = qwix.quantize(jnp.asarray(matrix), "nf4", tiled_axes={0: 64}, channelwise_axes=(1,))
    ours = quant.pack(matrix.T, "nf4")
    np.testing.assert_array_equal(nibbles(np.asarray(ours["codes"])).T, np.asarray(theirs.qvalue, np.uint8))
    for dtype in (jnp.float32, jnp.bfloat16):
        np.testing.assert_array_equal(quant.restore(ours, dtype).T, qwix.dequantize(theirs.astype(dtype)))
    whole = qwix.quantize(jnp.asarray(matrix), jnp.int8, channelwise_axes=(1,))
    ours = {"codes": whole.qvalue.T, "scale": whole.scale.T}
    np.testing.assert_array_equal(quant.restore(ours, jnp.float32).T, qwix.dequantize(whole))


@pytest.mark.parametrize(("kind", "error"), [("nf4", 0.095), ("int8", 0.01), ("w8a8", 0.01), ("fp8", 0.03)])
def test_a_normal_matrix_comes_back_with_the_known_error_and_zeros_as_zeros(kind, error):
    matrix = normal(64, 1024)
    matrix[0] = 0.0
    back = np.asarray(quant.restore(quant.pack(matrix, kind), jnp.float32))
    found = np.sqrt(np.mean((back - matrix)[1:] ** 2))  # nf4 in blocks of 64: 9.19 % by qwix
    assert error / 2 < found < error and not back[0].any()


# --- products in 8 bits


def rounded(rows, kind):
    """Rows as 8-bit numbers in fp64, and what one of each row means, by a formula of its own."""
    step = np.abs(rows).max(axis=-1, keepdims=True) / {"w8a8": 127, "fp8": 448}[kind]
    if kind == "w8a8":
        return np.rint(rows / step), step
    return (rows / step).astype(ml_dtypes.float8_e4m3fn).astype(np.float64), step


@pytest.mark.parametrize("kind", ["w8a8", "fp8"])
def test_multiply_is_the_product_of_rounded_rows_and_so_is_its_gradient(kind):
    x, matrix, gradient = normal(2, 5, 96, seed=1), normal(3, 8, 96, seed=2), normal(2, 5, 3, 8, seed=3)
    packed = quant.pack(matrix, kind)
    y, back = jax.vjp(lambda x: quant.multiply(x, packed), jnp.asarray(x))
    (x_codes, x_step), (codes, row) = rounded(x, kind), rounded(matrix.reshape(24, 96), kind)
    wanted = (x_codes @ codes.T) * x_step * row[:, 0]
    np.testing.assert_allclose(y, wanted.reshape(2, 5, 3, 8), rtol=1e-5, atol=1e-5)
    assert float(np.abs(y - np.einsum("bti,hei->bthe", x, matrix)).max()) > 0.01, "inputs are rounded too"
    g_codes, g_step = rounded(gradient.reshape(2, 5, 24) * row[:, 0], kind)
    np.testing.assert_allclose(back(jnp.asarray(gradient))[0], (g_codes @ codes) * g_step, rtol=1e-5, atol=1e-5)


# --- in the decoder

# kind -> the least and the largest error beside restored matrices, relative; factors and sums of products in 8 bits
NEAR = {
    "nf4": (0.0, SAME, "", ""),
    "int8": (0.0, SAME, "", ""),
    "w8a8": (100 * SAME, 0.03, "xi8>", "xi32>"),
    "fp8": (100 * SAME, 0.1, "xf8E4M3FN>", "xf32>"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", NEAR)
def test_packed_decoder_computes_what_its_restored_matrices_say_in_8_bits_nearly(kind, tmp_path):
    least, most, factors, sums = NEAR[kind]
    weights.save(tmp_path, our_params(0.05), CFG, model_type="qwen2")
    packed = weights.load(tmp_path, dtype=jnp.float32, packed=kind)
    ids = jnp.arange(22).reshape(2, 11)
    assert float(jnp.abs(logits(packed, ids) - logits(our_params(0.05), ids)).max()) > 100 * SAME

    def objective(x, params):
        out = decoder.forward(params, CFG, x, mask=jnp.ones((2, 11), bool))
        return jnp.sum(jnp.sin(out.hidden)), out.hidden

    x = decoder.embed(packed, ids)
    gradient = jax.jit(jax.grad(objective, has_aux=True))
    found, exact = (gradient(x, params) for params in (packed, lora.unpack(packed, CFG, jnp.float32)))
    for ours, theirs in zip(found, exact, strict=True):
        error = float(jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs))
        assert least <= error < most, error
    if factors:
        text = gradient.lower(x, packed).as_text()
        products = [line for line in text.splitlines() if "dot_general" in line and factors in line]
        assert len(products) == 2 * len(quant.MATRICES) and all(sums in line for line in products)


@pytest.mark.parametrize(("kind", "remat"), [("nf4", "full"), ("w8a8", "none"), ("fp8", "none")])
def test_neither_forward_nor_backward_ever_holds_more_than_a_few_restored_layers(kind, remat):
    """The stack as floats would be 8 x 4 MiB x 7 matrices, about 150 MiB; packed it is 20 or 40."""
    cfg = dataclasses.replace(CFG, width=1024, ffn=2048, layers=8, head_dim=128, qkv_bias=False)
    dense = decoder.abstract(cfg, jnp.float32)
    shapes = quant.abstract(dense, kind)
    x = jax.ShapeDtypeStruct((1, 8, 1024), jnp.float32)

    def objective(x, params):
        mode = decoder.Mode(remat=remat)
        return jnp.sum(decoder.forward(params, cfg, x, mask=jnp.ones((1, 8), bool), mode=mode).hidden)

    def temporary(params):
        return jax.jit(jax.grad(objective)).lower(x, params).compile().memory_analysis().temp_size_in_bytes

    layer = sum(leaf.size * 4 for leaf in jax.tree.leaves(dense["layers"])) / cfg.layers
    assert temporary(shapes) < 3 * layer + (8 << 20)


@pytest.mark.parametrize(
    ("strategy", "kind", "same"),
    [
        ("fsdp", "nf4", 5 * SAME),
        ("tensor", "w8a8", 0.05),
        ("tensor", "fp8", 0.2),
    ],  # what is rounded may fall either way
)
def test_shards_of_packed_matrices_compute_the_same(strategy, kind, same, tmp_path, monkeypatch):
    weights.save(tmp_path, our_params(), CFG, model_type="qwen2")
    mesh = meshes.make(data=4, model=1) if strategy == "fsdp" else meshes.make(data=1, model=4)
    shapes = quant.abstract(decoder.abstract(CFG, jnp.float32), kind)
    placed = rules.shardings(tables.reader_table(strategy, packed=True), shapes, mesh, name=strategy)
    with monkeypatch.context() as patch:
        patch.setattr(weights, "_STACKED_ON_HOST", 0)  # layer by layer, as a large model
        params = weights.load(tmp_path, dtype=jnp.float32, packed=kind, shardings=placed)
    assert {leaf.sharding for leaf in jax.tree.leaves(params)} == set(jax.tree.leaves(placed))
    assert params["layers"]["down"]["codes"].addressable_shards[0].data.size < params["layers"]["down"]["codes"].size
    whole = weights.load(tmp_path, dtype=jnp.float32, packed=kind)
    ids = jnp.arange(22).reshape(2, 11)
    np.testing.assert_allclose(jax.jit(logits)(params, ids), logits(whole, ids), atol=same)


# --- AWQ folders


@pytest.fixture(scope="module")
def awq(tmp_path_factory):
    """An AutoAWQ folder of CFG, and the floats that its matrices mean, by name."""
    folder = tmp_path_factory.mktemp("awq")
    weights.save(folder, our_params(), CFG, model_type="qwen2")
    tensors, meant, rng = load_file(folder / "model.safetensors"), {}, np.random.default_rng(5)
    for name in [name for name in tensors if "_proj.weight" in name]:
        out, size = tensors.pop(name).shape
        codes = rng.integers(0, 16, (size, out)).astype(np.uint32)
        zeros = rng.integers(0, 16, (size // 128, out)).astype(np.uint32)
        scales = rng.uniform(0.01, 0.05, zeros.shape).astype(np.float16)
        stem = name.removesuffix(".weight")
        for part, values in (("qweight", codes), ("qzeros", zeros)):
            words = np.zeros((len(values), out // 8), np.uint32)
            for i, column in enumerate(AWQ_ORDER):
                words |= values.reshape(len(values), -1, 8)[:, :, column] << np.uint32(4 * i)
            tensors[f"{stem}.{part}"] = words.view(np.int32)
        tensors[f"{stem}.scales"] = scales
        steps = codes.astype(np.float32) - np.repeat(zeros, 128, axis=0).astype(np.float32)
        meant[name] = (steps * np.repeat(scales.astype(np.float32), 128, axis=0)).T
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, folder / "model.safetensors")
    write_config(folder, AWQ)
    return folder, meant


def write_config(folder, quantization):
    told = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(told))


def test_awq_folder_is_kept_as_it_is_and_means_what_autoawq_says(awq):
    folder, meant = awq
    params = weights.load(folder, dtype=jnp.float32, packed="awq")
    whole = lora.unpack(params, CFG, jnp.float32)["layers"]
    for layer in range(CFG.layers):
        for ours, theirs in (("q", "self_attn.q"), ("o", "self_attn.o"), ("up", "mlp.up"), ("down", "mlp.down")):
            wanted = meant[f"model.layers.{layer}.{theirs}_proj.weight"]
            np.testing.assert_array_equal(np.asarray(whole[ours][layer]).reshape(wanted.shape), wanted)
    ids = jnp.arange(22).reshape(2, 11)
    np.testing.assert_allclose(logits(params, ids), logits(lora.unpack(params, CFG, jnp.float32), ids), atol=SAME)


def replace(part, value):
    """A change of one tensor of a folder; None removes it."""

    def change(tensors):
        name = f"model.layers.1.mlp.down_proj.{part}"
        del tensors[name]
        if value is not None:
            tensors[name] = value

    return change


@pytest.mark.parametrize(
    ("packed", "change", "fields", "named"),
    [
        ("awq", None, {"version": "gemv"}, "quantization_config.version='gemv'"),
        ("awq", None, {"quant_method": "gptq"}, "quant_method='gptq'"),
        ("awq", None, {"group_size": 64}, "group_size=64"),
        ("awq", None, {"zero_point": False}, "zero_point=False"),
        ("awq", None, {"modules_to_not_convert": ["o_proj"]}, "modules_to_not_convert"),
        ("nf4", None, {}, "'awq'"),
        ("awq", replace("qzeros", None), {}, "down_proj.qzeros"),
        ("awq", replace("scales", np.zeros((2, 128), np.float32)), {}, r"scales is F32 \(2, 128\)"),
        ("awq", replace("qweight", np.zeros((128, 16), np.int32)), {}, r"qweight is I32 \(128, 16\)"),
    ],
)
def test_what_is_no_awq_folder_of_this_form_is_refused_by_name(tmp_path, awq, packed, change, fields, named):
    folder = shutil.copytree(awq[0], tmp_path / "awq")
    write_config(folder, AWQ | fields)
    if change:
        tiny.edit_tensors(folder, change)
    with pytest.raises(UserError, match=named):
        weights.load(folder, dtype=jnp.float32, packed=packed)


def test_what_cannot_be_packed_so_is_refused_by_name(tmp_path):
    shapes = decoder.abstract(dataclasses.replace(CFG, ffn=250), jnp.float32)
    with pytest.raises(UserError, match=r"weights='nf4': down .*250.* 64"):
        quant.abstract(shapes, "nf4")
    weights.save(tmp_path, our_params(), CFG, model_type="qwen2")
    with pytest.raises(UserError, match="AWQ"):
        weights.load(tmp_path, dtype=jnp.float32, packed="awq")
