"""The BERT body equals transformers' torch class on tiny random models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lw_jax.hub import bert_family, weights
from lw_jax.models import bert, decoder

torch = pytest.importorskip("torch", reason="parity needs torch: pip install -r requirements-dev.txt")
transformers = pytest.importorskip("transformers")

forward = jax.jit(bert.forward, static_argnames="cfg")

STATES = 1e-5  # fp32, states of unit size: sums of a few hundred products in another order
GRADIENTS = 1e-4  # relative to the largest gradient: the backward pass doubles the depth of the sums
SHAPES = {
    "narrow heads": {"num_attention_heads": 6, "layer_norm_eps": 1e-12},
    "one head, three types, wide eps": {"num_attention_heads": 1, "type_vocab_size": 3, "layer_norm_eps": 1e-3},
}
SIZES = {
    "vocab_size": 101,
    "hidden_size": 42,
    "num_hidden_layers": 3,
    "intermediate_size": 71,
    "max_position_embeddings": 29,
}


@pytest.fixture(scope="module", params=SHAPES, ids=lambda name: name.replace(" ", "-"))
def pair(request, tmp_path_factory):
    """(torch model, folder, our config, our params) with weights large enough that an error shows."""
    torch.manual_seed(7)
    config = transformers.BertConfig(**(SIZES | SHAPES[request.param]))
    model = transformers.BertModel(config, add_pooling_layer=True).eval().float()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("LayerNorm.weight"):
                value.add_(0.2 * torch.randn_like(value))
            elif name.endswith("bias"):
                value.copy_(0.3 * torch.randn_like(value))
            else:
                value.mul_(5.0)
    folder = tmp_path_factory.mktemp("bert")
    model.save_pretrained(folder)
    return model, folder, weights.describe_bert(folder), weights.load_bert(folder)


def ragged() -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(3).integers(0, 101, (3, 17)).astype(np.int32)
    mask = np.arange(17)[None, :] < np.asarray([17, 12, 3])[:, None]
    return ids, mask


def theirs(model, ids, mask):
    with torch.no_grad():
        return model(
            input_ids=torch.tensor(ids).long(),
            attention_mask=torch.tensor(mask).long(),
            output_hidden_states=True,
        )


def test_last_hidden_states_equal_in_ragged_batches(pair):
    model, _, cfg, params = pair
    ids, mask = ragged()
    want = theirs(model, ids, mask).last_hidden_state.numpy()
    assert want[mask].std() > 0.5, "states too flat for the comparison to mean anything"
    ours = forward(params, cfg, ids, mask=mask, mix=None)
    assert np.abs(np.asarray(ours) - want)[mask].max() < STATES


def test_each_layer_s_state_and_a_mix_of_all_equal(pair):
    model, _, cfg, params = pair
    ids, mask = ragged()
    states = np.stack([state.numpy() for state in theirs(model, ids, mask).hidden_states])
    states = np.asarray(decoder.unit_rms(jnp.asarray(states), cfg.norm_eps))
    for mix in (*np.eye(4, dtype=np.float32), np.array([0.1, 0.2, 0.3, 0.4], np.float32)):
        ours = forward(params, cfg, ids, mask=mask, mix=jnp.asarray(mix))
        assert np.abs(np.asarray(ours) - np.einsum("n,nbsd->bsd", mix, states))[mask].max() < STATES


def test_body_of_fewer_layers_ends_in_their_inner_state(pair):
    model, folder, _, _ = pair
    ids, mask = ragged()
    want = theirs(model, ids, mask).hidden_states[2].numpy()
    cut = weights.load_bert(folder, layers=2)
    cfg = weights.describe_bert(folder)
    ours = forward(cut, cfg, ids, mask=mask, mix=None)
    assert np.abs(np.asarray(ours) - want)[mask].max() < STATES


def test_gradients_of_every_weight_equal(pair):
    model, _, cfg, params = pair
    ids, mask = ragged()
    target = np.random.default_rng(11).standard_normal((3, 17, cfg.width)).astype(np.float32) * mask[:, :, None]

    def objective(params):
        return jnp.sum(bert.forward(params, cfg, jnp.asarray(ids), mask=jnp.asarray(mask), mix=None) * target)

    ours = jax.jit(jax.grad(objective))(params)
    model.zero_grad()
    out = model(input_ids=torch.tensor(ids).long(), attention_mask=torch.tensor(mask).long())
    (out.last_hidden_state * torch.tensor(target)).sum().backward()
    top = max(float(value.grad.abs().max()) for value in model.parameters() if value.grad is not None)
    named = dict(model.named_parameters())
    for name, slot in bert_family.tensor_map(cfg).items():
        leaf = ours[slot.path[0]] if slot.layer is None else ours[slot.path[0]][slot.path[1]][slot.layer]
        # torch keeps no gradient for the padding id's embedding
        got, want = np.asarray(leaf).reshape(slot.shape).copy(), named[name].grad.numpy()
        if name == "embeddings.word_embeddings.weight":
            got[model.config.pad_token_id] = 0
        assert np.abs(got - want).max() < GRADIENTS * top, name


def test_bf16_stays_close_to_fp32(pair):
    model, _, cfg, params = pair
    ids, mask = ragged()
    want = theirs(model, ids, mask).last_hidden_state.numpy()[mask]
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    ours = forward(half, cfg, ids, mask=mask, mix=None)
    # eight bits of precision, some thirty roundings on the way
    assert np.sqrt(np.mean((np.asarray(ours, np.float32)[mask] - want) ** 2)) < 0.05 * want.std()
