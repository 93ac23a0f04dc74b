"""The gates of the wire as plain functions: the tests call them, and so do the mutation tests, which must see red."""

import jax
import jax.numpy as jnp
import numpy as np

from lw_jax.evals.wire_functions import WireFunctions
from lw_jax.losses import token_losses
from lw_jax.models import decoder, wire
from lw_jax.recipes.latentwire import LatentWire
from tests import tiny

REPLAY = 2e-5  # fp32 logits of unit size, the same sums in another order
KL = 1e-6  # nats per token: squares of the above


def build(recipe: LatentWire):
    """(frozen weights, batch) with the text row of six validation cards of mixed lengths."""
    encoded = recipe.data("validation", rows=("text",))
    batch = jax.tree.map(jnp.asarray, encoded.collate(range(6), rows=("text",)))
    return recipe.load_frozen(), batch


def replay_prompt(params, fields) -> wire.Prompt:
    """The wire's own layout, with the text's embeddings where latents would stand: [before][context][after].

    The context's embeddings are ragged, so pads stand in the middle of the sequence, as they may.
    """
    text, before, after = fields["text"], fields["before"], fields["after"]
    opening = before["mask"].sum(axis=1, keepdims=True)
    closing = after["mask"].sum(axis=1, keepdims=True)
    total = text["mask"].sum(axis=1, keepdims=True)
    place = jnp.cumsum(text["mask"], axis=1) - 1
    context = text["mask"] & (place >= opening) & (place < total - closing)
    middle = decoder.embed(params, text["ids"])
    edges = [decoder.embed(params, part["ids"]) for part in (before, after)]
    return wire.Prompt(
        jnp.concatenate([edges[0], middle, edges[1]], axis=1),
        jnp.concatenate([before["mask"], context, after["mask"]], axis=1),
    )


def replayed_embeddings_equal_ids(recipe: LatentWire) -> None:
    """B13 and B4: same logits, and so KL 0, whether the text comes as ids or as embeddings between the same words."""
    frozen, batch = build(recipe)
    for name, fields in batch["readers"].items():
        assert len({int(n) for n in fields["text"]["mask"].sum(axis=1)}) > 1, "the batch must be ragged"
        params = frozen[name]
        text = wire.text_prompt(params, fields["text"])
        by_ids = tiny.compiled(recipe.wire.answer_logits, params, name, text, fields)
        replayed = tiny.compiled(recipe.wire.answer_logits, params, name, replay_prompt(params, fields), fields)
        real = np.asarray(fields["weights"]) > 0
        assert np.asarray(by_ids)[real].std() > 0.3, "logits too flat to compare"
        np.testing.assert_allclose(np.asarray(replayed)[real], np.asarray(by_ids)[real], atol=REPLAY)
        divergence, weight = token_losses.kl(by_ids, replayed, fields["weights"])
        assert abs(float(divergence / weight)) < KL


def text_nll(recipe: LatentWire) -> dict[str, np.ndarray]:
    """Per-example NLL of the gold answer under the text prompt."""
    frozen, batch = build(recipe)
    found = {}
    for name, fields in batch["readers"].items():
        params = frozen[name]
        prompt = wire.text_prompt(params, fields["text"])
        answer = {key: fields[key] for key in ("answer_inputs", "targets", "weights")}
        found[name] = np.asarray(
            WireFunctions(recipe.wire, recipe.placement).score(params, prompt, answer, name)["nll"]
        )
    return found
