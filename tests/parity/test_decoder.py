"""The decoder equals transformers' torch classes on tiny random models of every shape that we claim."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.hub import weights
from lw_jax.models import decode, decoder

torch = pytest.importorskip("torch", reason="parity needs torch: pip install -r requirements-dev.txt")
transformers = pytest.importorskip("transformers")

LOGITS = 1e-5  # fp32, logits of unit size: sums of a few hundred products in another order
GRADIENTS = 1e-4  # relative to the largest gradient: the backward pass doubles the depth of the sums

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.0, 2.2, 5.0, 9.0],
    "original_max_position_embeddings": 64,
}
PHI3 = {"num_attention_heads": 6, "pad_token_id": 0}
SHAPES = {
    "phi-3 fused": ("phi3", PHI3 | {"num_key_value_heads": 6}),
    "phi-3 window": ("phi3", PHI3 | {"sliding_window": 7}),
    "phi-3 longrope": ("phi3", PHI3 | {"rope_parameters": LONG, "original_max_position_embeddings": 64}),
    "phi-4 partial": ("phi3", PHI3 | {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    "stablelm-2": ("stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.25, "num_key_value_heads": 6}),
    "stablelm gqa": ("stablelm", {"use_qkv_bias": False, "partial_rotary_factor": 0.5}),
    "llama-2 mha": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "llama-3 gqa": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "llama-3.1 scaled": ("llama", {"rope_parameters": LLAMA3}),
    "llama-3.2 tied": ("llama", {"rope_parameters": LLAMA3 | {"factor": 32.0}, "tie_word_embeddings": True}),
    "llama mqa": ("llama", {"num_key_value_heads": 1}),
    "llama odd head_dim": ("llama", {"head_dim": 22}),
    "qwen2 biased": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2 tied mqa": ("qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
}


QUICK = ("phi-4 partial", "stablelm-2", "llama-3.1 scaled", "qwen2 tied mqa")  # one of each family


def shapes(*, slow: bool = True) -> list:
    """Every shape; those that are not of `make test` marked so."""
    named = [name for name in SHAPES if slow or name in QUICK]
    marks = {name: () if name in QUICK else (pytest.mark.slow,) for name in named}
    return [pytest.param(name, marks=marks[name], id=name.replace(" ", "-")) for name in named]


@pytest.fixture(scope="module", params=shapes())
def pair(request, tmp_path_factory):
    return make_pair(request.param, tmp_path_factory.mktemp("reader"))


def make_pair(name, folder):
    """(torch model, our config, our params) with weights large enough that an error shows in the logits."""
    family, extra = SHAPES[name]
    sizes = {
        "vocab_size": 101,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 72,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | extra
    classes = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "phi3": "Phi3Config", "stablelm": "StableLmConfig"}
    if family == "stablelm":
        sizes["layer_norm_eps"] = sizes.pop("rms_norm_eps")
    config = getattr(transformers, classes[family])(**sizes)
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("norm.weight"):
                value.add_(0.2 * torch.randn_like(value))
            elif name.endswith("bias"):
                value.copy_(0.3 * torch.randn_like(value))
            else:
                value.mul_(5.0)
    model.save_pretrained(folder)
    return model, weights.describe(folder), weights.load(folder, dtype=jnp.float32)


def ragged(side: str) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(3).integers(0, 101, (3, 17)).astype(np.int32)
    mask = np.ones_like(ids, dtype=bool)
    for row, pads in enumerate((0, 5, 9)):
        mask[row, slice(0, pads) if side == "left" else slice(17 - pads, 17)] = False
    return ids, mask


@functools.partial(jax.jit, static_argnames=("cfg", "mode"))
def our_logits(cfg, params, ids, mask, mode=decoder.Mode()):
    out = decoder.forward(params, cfg, decoder.embed(params, ids), mask=mask, mode=mode)
    return decoder.logits(params, out.hidden)


generate = jax.jit(decode.generate, static_argnames=("cfg", "sampling"))


def their_logits(model, ids, mask) -> np.ndarray:
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    with torch.no_grad():
        out = model(
            input_ids=torch.tensor(ids).long(),
            attention_mask=torch.tensor(mask).long(),
            position_ids=torch.tensor(positions).long(),
        )
    return out.logits.numpy()


def worst(ours, theirs, mask) -> float:
    theirs = theirs[mask]
    return float(np.abs(np.asarray(ours)[mask] - theirs).max() / max(1.0, np.abs(theirs).std()))


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_equal_in_ragged_batches(pair, side):
    model, cfg, params = pair
    ids, mask = ragged(side)
    theirs = their_logits(model, ids, mask)
    assert theirs[mask].std() > 0.5, "logits too flat for the comparison to mean anything"
    assert worst(our_logits(cfg, params, ids, mask), theirs, mask) < LOGITS


def test_logits_equal_far_beyond_the_scaled_context(pair):
    model, cfg, params = pair
    ids = np.random.default_rng(5).integers(0, 101, (1, 400)).astype(np.int32)
    mask = np.ones_like(ids, dtype=bool)
    # Angles of several hundred radians are rounded before the cosine: both sides keep fp32, as transformers does.
    assert worst(our_logits(cfg, params, ids, mask), their_logits(model, ids, mask), mask) < 5 * LOGITS


def test_gradients_with_respect_to_embeddings_equal_recomputed_or_not(pair):
    model, cfg, params = pair
    ids, mask = ragged("left")
    target = np.random.default_rng(11).standard_normal((3, 17, 101)).astype(np.float32) * mask[:, :, None]

    def objective(x, remat):
        out = decoder.forward(params, cfg, x, mask=jnp.asarray(mask), mode=decoder.Mode(remat=remat))
        return jnp.sum(decoder.logits(params, out.hidden) * target)

    x = model.get_input_embeddings()(torch.tensor(ids).long()).detach().requires_grad_()
    positions = torch.tensor(np.maximum(mask.cumsum(1) - 1, 0)).long()
    out = model(inputs_embeds=x, attention_mask=torch.tensor(mask).long(), position_ids=positions)
    (out.logits * torch.tensor(target)).sum().backward()
    theirs = x.grad.numpy()
    for remat in ("none", "full"):
        ours = jax.jit(jax.grad(objective), static_argnums=1)(decoder.embed(params, jnp.asarray(ids)), remat)
        assert np.abs(np.asarray(ours)[mask] - theirs[mask]).max() / np.abs(theirs[mask]).max() < GRADIENTS


def test_twenty_greedy_tokens_equal(pair):
    model, cfg, params = pair
    ids, mask = ragged("left")
    sampling = decode.Sampling(max_new_tokens=20, stops=(2,))
    x = decoder.embed(params, jnp.asarray(ids))
    ours = generate(params, cfg, x, mask=jnp.asarray(mask), sampling=sampling, key=jax.random.key(0))
    with torch.no_grad():
        theirs = model.generate(
            input_ids=torch.tensor(ids).long(),
            attention_mask=torch.tensor(mask).long(),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=2,
            pad_token_id=0,
        ).numpy()[:, 17:]
    for row in range(3):
        stop = np.flatnonzero(theirs[row] == 2)
        length = int(stop[0]) if stop.size else theirs.shape[1]
        np.testing.assert_array_equal(np.asarray(ours)[row, :length], theirs[row, :length])
        assert (np.asarray(ours)[row, length:] == -1).all()


def test_generation_across_the_switch_of_frequencies_equals(tmp_path):
    """Rows that stay below the switch at 64 tokens, cross it or begin beyond it, each as transformers has it alone."""
    model, cfg, params = make_pair("phi-3 longrope", tmp_path)
    lengths, width = (40, 50, 58, 63, 64, 65), 65
    drawn = np.random.default_rng(2).integers(3, 101, (len(lengths), width)).astype(np.int32)
    mask = np.arange(width)[None] >= width - np.array(lengths)[:, None]
    x = decoder.embed(params, jnp.asarray(drawn))
    theirs = []
    for row, length in enumerate(lengths):
        ids = torch.tensor(drawn[row : row + 1, width - length :]).long()
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
        theirs.append(out[0, length:].numpy())
    for unstacked in (False, True):
        sampling = decode.Sampling(20, (), unstacked=unstacked)
        ours = generate(params, cfg, x, mask=jnp.asarray(mask), sampling=sampling, key=jax.random.key(0))
        np.testing.assert_array_equal(ours, theirs)


def test_cached_steps_equal_the_full_pass(pair):
    _, cfg, params = pair
    ids, mask = ragged("left")
    full = our_logits(cfg, params, ids, mask)
    cache = decoder.empty_cache(cfg, 3, 17, jnp.float32)
    extend, parts = jax.jit(decoder.extend, static_argnames="cfg"), []
    for start, stop in ((0, 8), (8, 16), (16, 17)):
        x = decoder.embed(params, jnp.asarray(ids[:, start:stop]))
        hidden, cache = extend(params, cfg, x, mask=mask[:, start:stop], cache=cache)
        parts.append(decoder.logits(params, hidden))
    assert worst(jnp.concatenate(parts, axis=1), np.asarray(full), mask) < LOGITS


@pytest.mark.parametrize("pair", shapes(slow=False), indirect=True)
def test_bfloat16_stays_close_to_fp32(pair):
    model, cfg, params = pair
    ids, mask = ragged("right")
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    theirs = their_logits(model, ids, mask)[mask]
    ours = np.asarray(our_logits(cfg, half, ids, mask))[mask]
    # ecosystem figure of torch's own bf16 against its fp32 on such models: 7.8e-3 of the logits' size
    assert np.sqrt(np.mean((ours - theirs) ** 2)) < 0.05 * theirs.std()
