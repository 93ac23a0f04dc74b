"""BERT body for encoders: bidirectional, post-norm, with learned absolute positions.

Parameters are a plain nested dict, layers stacked on a leading axis, file layout [out, in] kept, as in `decoder`.
Semantics follow transformers' BertModel without its pooler; every token has type 0.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lw_jax.core.types import Tree
from lw_jax.models import decoder
from lw_jax.models.attention import attention
from lw_jax.models.products import narrow, product


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Architecture of a BERT body; any other setting of a checkpoint is refused at loading."""

    vocab: int
    width: int
    layers: int
    heads: int
    ffn: int
    norm_eps: float
    max_positions: int
    token_types: int


def abstract(cfg: BertConfig, dtype: jax.typing.DTypeLike) -> Tree:
    d, h, f, n = cfg.width, cfg.heads, cfg.ffn, cfg.layers
    e = d // h
    layers = {f"{name}_norm{part}": (n, d) for name in ("attn", "mlp") for part in ("", "_bias")}
    layers |= {name: (n, h, e, d) for name in "qkv"} | {f"{name}_bias": (n, h, e) for name in "qkv"}
    layers |= {"o": (n, d, h, e), "o_bias": (n, d)}
    layers |= {"up": (n, f, d), "up_bias": (n, f), "down": (n, d, f), "down_bias": (n, d)}
    shapes = {
        "embed": (cfg.vocab, d),
        "position_embed": (cfg.max_positions, d),
        "type_embed": (cfg.token_types, d),
        "embed_norm": (d,),
        "embed_norm_bias": (d,),
        "layers": layers,
    }
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype), shapes, is_leaf=lambda node: isinstance(node, tuple)
    )


def forward(
    params: Tree,
    cfg: BertConfig,
    ids: Int[Array, "b s"],
    *,
    mask: Bool[Array, "b s"],
    mix: Float[Array, " n"] | None,
    mode: decoder.Mode = decoder.Mode(),
) -> Float[Array, "b s d"]:
    """Returns the body's states, mixed over its layers; rows are right-padded, no longer than its positions.

    `mix` (layers + 1 weights, with a softmax by the caller) weighs, summed in fp32, the RMS-normalised output of the
    embeddings and of each layer. With None the last layer's output is returned.
    """
    length = ids.shape[1]
    x = jnp.take(params["embed"], ids, axis=0) + params["type_embed"][:1][None]
    x = x + params["position_embed"][:length][None]
    x = decoder.layer_norm(x, params["embed_norm"], params["embed_norm_bias"], cfg.norm_eps)
    attend = jnp.broadcast_to(mask[:, None, None, :], (ids.shape[0], 1, length, length))
    layer = decoder.checkpoint_layer(functools.partial(_layer, cfg, attend, mode), mode.saves_products)

    def body(carry, inputs):
        x, mixed = carry
        weights, share = inputs
        if share is not None:
            mixed = mixed + decoder.weigh(x, share, cfg.norm_eps)
        return (layer(x, weights), mixed), None

    mixed, shares = (None, None) if mix is None else (jnp.zeros(x.shape, jnp.float32), mix[:-1])
    (x, mixed), _ = jax.lax.scan(body, (x, mixed), (params["layers"], shares))
    return x if mix is None else (mixed + decoder.weigh(x, mix[-1], cfg.norm_eps)).astype(x.dtype)


def _layer(
    cfg: BertConfig, attend: jax.Array, mode: decoder.Mode, x: Float[Array, "b s d"], weights: Tree
) -> Float[Array, "b s d"]:
    factors, multiply = mode.factors, functools.partial(product, saved=mode.saves_products)
    weights = weights if factors is None else narrow(weights, factors)
    q, k, v = (
        multiply("bsd,hed->bshe", x, weights[name]) + weights[f"{name}_bias"][None, None] for name in ("q", "k", "v")
    )
    attended = multiply("bshe,dhe->bsd", attention(q, k, v, mask=attend, factors=factors), weights["o"])
    x = x + attended + weights["o_bias"][None, None]
    x = decoder.layer_norm(x, weights["attn_norm"], weights["attn_norm_bias"], cfg.norm_eps)
    up = multiply("bsd,fd->bsf", x, weights["up"]) + weights["up_bias"][None, None]
    down = multiply("bsf,df->bsd", jax.nn.gelu(up, approximate=False), weights["down"])
    x = x + down + weights["down_bias"][None, None]
    return decoder.layer_norm(x, weights["mlp_norm"], weights["mlp_norm_bias"], cfg.norm_eps)
