"""Costs of decoder passes on one device, of one micro-batch: bytes saved for backward, FLOPs, bytes sent."""

import dataclasses

from lw_jax.core import tree
from lw_jax.models import lora, memory_traffic, quant
from lw_jax.models.bert import BertConfig
from lw_jax.models.decoder import DecoderConfig
from lw_jax.models.encoder import BYTE_HEADS
from lw_jax.models.lora import Lora
from lw_jax.models.ttt import TTTConfig


@dataclasses.dataclass(frozen=True)
class Terms:
    """Costs of one micro-batch on one device: peak bytes (of it the logits), FLOPs, bytes sent, bytes moved.

    `traffic`: reads and writes of kernels other than matmuls. `read`: weights that matmuls read, which takes longer
    than their arithmetic where a micro-batch is small. `forward`: peak bytes of a forward pass, as in validation,
    logits included.
    """

    bytes: float = 0.0
    flops: float = 0.0
    wire: float = 0.0
    logits: float = 0.0
    traffic: float = 0.0
    read: float = 0.0
    forward: float = 0.0


# Reads and writes of a TTT layer's saved values in a step, by recomputation: from the compiled step of
# configs/ttt/ttt_125m.py for an H100 (docs/numbers.md). A scan over layers copies the saved values.
_MOVED = {"none": 12.0, "dots": 7.6, "full": 7.6}
_MOVED_UNROLLED = 5.5  # without recomputation and with all layers in one piece
_LOGITS_MOVED = 10.0

KV_COPIES = 4  # of a prefix' keys and values in a step's memory: tests/unit/test_pass_costs.py


@dataclasses.dataclass(frozen=True)
class Pass:
    """Shape of one teacher-forced pass: examples, their positions, and the positions with logits."""

    rows: int
    positions: int
    answers: int
    remat: str
    size: int  # bytes of a value
    model: int = 1  # devices that share the weights' products
    data: int = 1  # devices that share the weights' storage (fsdp)
    pieces: int = 1  # in which the rows' logits are made, one after the other
    before: int = 0  # positions in front that are attended to and not computed: of a shared prefix, and `slots`
    slots: int = 0  # positions of which keys and values are given

    def heads(self, cfg: DecoderConfig) -> int:
        """Returns the devices that share the attention's products: heads that do not divide stay whole on each."""
        return _share(cfg.heads, self.model)


def _share(heads: int, model: int) -> int:
    return 1 if heads % model else model


def frozen(cfg: DecoderConfig, one: Pass) -> Terms:
    """Returns the terms of a frozen decoder that passes gradients to its inputs; its own weights get none."""
    tokens, matrices = one.rows * one.positions, _matrices(cfg, one)
    forward = 2 * tokens * matrices
    head = 2 * one.rows * one.answers * cfg.vocab * cfg.width / one.model
    again = one.remat == "full"
    logits = one.rows // one.pieces * one.answers * cfg.vocab / one.model * 4
    wire = 0.0
    if one.model > 1:  # two sums a layer forward, two backward, and attention's of a recomputed forward pass
        sums = (4 + again) * cfg.layers
        wire += sums * 2 * (one.model - 1) / one.model * tokens * cfg.width * one.size
    if one.data > 1:  # each layer's weights are gathered forward and backward; what is recomputed shares the latter
        wire += 2 * (one.data - 1) / one.data * params(cfg) * one.size
    kept = one.rows * kept_bytes(cfg, one.positions, one.remat, one.size, one.model, slots=one.slots)
    moved = _moved(cfg, memory_traffic.FROZEN[one.remat], one) + memory_traffic.LOGITS * logits * one.pieces
    # Logits and their gradient; backward, the gradient of the inputs, costs as much as the forward pass.
    return Terms(
        bytes=kept + 2 * logits,
        flops=2 * forward + again * _recomputed(cfg, one) + 2 * head,
        wire=wire,
        logits=logits,
        traffic=moved,
        read=(2 + again) * matrices * one.size,
        forward=forward_bytes(cfg, one) + 2 * logits,
    )


def restored_bytes(cfg: DecoderConfig, weights: str, size: int) -> float:
    """Returns the bytes of one layer's matrices as floats, where they are packed and must be restored."""
    return body_params(cfg) / cfg.layers * size if weights in quant.RESTORED else 0.0


def forward_only(cfg: DecoderConfig, one: Pass) -> Terms:
    """Returns the FLOPs and the traffic of a pass without gradients, a teacher's."""
    head = 2 * one.rows * one.answers * cfg.vocab * cfg.width / one.model
    matrices = _matrices(cfg, one)
    flops = 2 * one.rows * one.positions * matrices + head
    alive = forward_bytes(cfg, one)
    return Terms(flops=flops, traffic=_moved(cfg, memory_traffic.FORWARD, one), read=matrices * one.size, forward=alive)


def shared_prefix(cfg: DecoderConfig, one: Pass) -> Terms:
    """Returns the terms of the shared prefix: one row, forward, without logits.

    Its matmuls are bound by the weights' bytes, which the rows' own pass has sliced.
    """
    sums = 2 * cfg.layers * 2 * (one.model - 1) / one.model  # two a layer over a model axis
    flops, weights = forward_only(cfg, one).flops, _matrices(cfg, one) * one.size
    return Terms(flops=flops, wire=sums * one.rows * one.positions * cfg.width * one.size, traffic=weights)


def kv_adapter(cfg: DecoderConfig, one: Pass, width: int, *, texts: int) -> Terms:
    """Returns the terms of keys and values made from `one.slots` latents of this width, by one linear layer.

    They are made once for each of the `texts` that the rows have and repeated.

    Alive at once are its output, keys and values as the layers take them, and the same turned; then their gradients.
    """
    values = one.rows * one.slots * 2 * cfg.layers * cfg.kv_heads * cfg.head_dim
    split = _share(cfg.kv_heads, one.model)
    alive = KV_COPIES * values * one.size / split
    return Terms(
        bytes=alive,
        flops=3 * 2 * values // one.rows * texts * width,
        traffic=3 * alive,
        read=3 * values // max(1, one.rows * one.slots) * width * one.size,
        forward=2 * values * one.size,
    )


def trained(cfg: DecoderConfig, one: Pass) -> Terms:
    """Returns the terms of a trainable decoder body in fp32: backward is twice the forward pass."""
    forward = 2 * one.rows * one.positions * body_params(cfg)
    cast = params(cfg) * one.size if one.size < 4 else 0  # the copy in the dtype of arithmetic
    kept = one.rows * kept_bytes(cfg, one.positions, one.remat, one.size, 1) + _attended_bytes(cfg, one)
    again = one.remat == "full"
    moved = _moved(cfg, memory_traffic.TRAINED[one.remat], one)
    read = (3 + again) * body_params(cfg) * one.size
    alive = forward_bytes(cfg, one) + cast
    return Terms(kept + cast, 3 * forward + again * _recomputed(cfg, one), traffic=moved, read=read, forward=alive)


def adapted(cfg: DecoderConfig, pairs: Lora, one: Pass) -> Terms:
    """Returns the terms of a frozen decoder body with trained pairs beside its matrices."""
    found, more = frozen(cfg, one), 3 * pair_flops(cfg, pairs, one)
    kept = found.bytes + ("o" in pairs.names) * _attended_bytes(cfg, one)
    return dataclasses.replace(found, bytes=kept, flops=found.flops + more)


def tapped_bytes(cfg: DecoderConfig, one: Pass) -> float:
    """Returns the bytes of the states that a pass returns of its layers, and of their gradients: all layers'."""
    return 2 * cfg.layers * one.rows * one.positions * cfg.width * one.size


def pair_flops(cfg: DecoderConfig, pairs: Lora, one: Pass) -> float:
    """Returns the FLOPs of the pairs in a forward pass."""
    return 2 * one.rows * one.positions * tree.count(lora.abstract(cfg, pairs))


def trained_bert(cfg: BertConfig, one: Pass) -> Terms:
    """Returns the same of a BERT-class body: a decoder of as many parameters and activations."""
    heads = cfg.heads
    alike = DecoderConfig(
        vocab=cfg.vocab,
        width=cfg.width,
        layers=cfg.layers,
        heads=heads,
        kv_heads=heads,
        head_dim=cfg.width // heads,
        ffn=2 * cfg.ffn // 3,  # two matrices instead of three
        rope_theta=1.0,
        norm_eps=cfg.norm_eps,
        max_positions=cfg.max_positions,
        tied=True,
        qkv_bias=True,
    )
    return trained(alike, one)


def trained_bytes(layers: int, width: int, one: Pass) -> Terms:
    """Returns the same of the byte encoder's layers, fp32: twelve z^2 parameters each for a width of z.

    Nine z values are saved of each, its input and products; of the current layer all.
    """
    tokens = one.rows * one.positions
    alive = tokens * (12 * width + 2 * BYTE_HEADS * one.positions) * 4
    kept = alive + tokens * layers * 9 * width * 4
    weights = layers * 12 * width * width * 4
    shape = memory_traffic.Layers(width, layers, BYTE_HEADS, width // BYTE_HEADS, 4 * width)
    share = memory_traffic.Share(one.rows, one.positions, one.positions, 4, weights)
    moved = memory_traffic.moved(shape, memory_traffic.TRAINED["none"], share)
    flops = 6 * tokens * layers * 12 * width * width
    return Terms(kept, flops, traffic=moved, read=3 * weights, forward=alive)


def _moved(cfg: DecoderConfig, often: memory_traffic.Moves, one: Pass) -> float:
    """Returns the traffic of a decoder's layers; slices of weights that lie over data are as small as their parts."""
    share = memory_traffic.Share(
        rows=one.rows,
        queries=one.positions,
        keys=one.before + one.positions,
        size=one.size,
        weights=_matrices(cfg, one) * one.size / one.data,
        heads=one.heads(cfg),
        ffn=one.model,
    )
    return memory_traffic.moved(
        memory_traffic.Layers(cfg.width, cfg.layers, cfg.heads, cfg.head_dim, cfg.ffn), often, share
    )


def learned_at_test_time(cfg: TTTConfig, tokens: int, remat: str, size: int, *, unrolled: bool) -> Terms:
    """Returns the terms of a TTT model, all of it trainable, over so many tokens; of its head only the traffic."""
    inner = cfg.head_dim * cfg.hidden * (2 if cfg.inner == "mlp" else 1)  # weights of one head's inner model
    matrices = (4 + cfg.gate) * cfg.width**2 + 3 * cfg.width * cfg.ffn
    forward = 2 * tokens * cfg.layers * matrices
    # Of each token and head: key and query through the inner model, its gradients back and onto its weights, and
    # twice the mixing of a chunk's tokens.
    deep = 2 if cfg.inner == "mlp" else 1
    forward += 2 * tokens * cfg.layers * cfg.heads * (3 * inner + (deep - 1) * inner // 2)
    forward += 2 * tokens * cfg.layers * cfg.heads * 2 * deep * cfg.chunk * cfg.hidden
    # Saved values of a layer for a token: norms, q, k, v, outputs and the feed-forward's parts; of the inner model, in
    # fp32, gradients, their norms' parts and outputs, and of a chunk the weights it began with.
    layer = size * (10 * cfg.width + 4 * cfg.ffn) + 4 * cfg.width * (12 if deep == 1 else 40)
    layer += 4 * cfg.heads * (inner / cfg.chunk + 3 * deep * cfg.chunk)
    products = size * (4 * cfg.width + 2 * cfg.ffn)
    kept = {"none": layer, "dots": products + size * cfg.width, "full": size * cfg.width}[remat] * cfg.layers
    again = 0 if remat == "none" else 1
    cast = size * cfg.layers * matrices if size < 4 else 0
    moved = layer * cfg.layers * (_MOVED_UNROLLED if unrolled and not again else _MOVED[remat])
    moved += _LOGITS_MOVED * 4 * (cfg.rows or cfg.vocab)
    return Terms(
        bytes=tokens * (kept + again * layer) + cast,
        flops=(3 + again) * forward,
        traffic=tokens * moved,
        forward=tokens * layer + cast,
    )


def _recomputed(cfg: DecoderConfig, one: Pass) -> float:
    """Returns the FLOPs of layers computed again for their backward pass, which needs no layer's last product."""
    last = cfg.layers * cfg.width * cfg.ffn / one.model
    return 2 * one.rows * one.positions * (_matrices(cfg, one) - last)


def _matrices(cfg: DecoderConfig, one: Pass) -> float:
    """Returns the parameters of `body_params` that one device multiplies with."""
    mlp = 3 * cfg.layers * cfg.width * cfg.ffn
    return (body_params(cfg) - mlp) / one.heads(cfg) + mlp / one.model


def forward_bytes(cfg: DecoderConfig, one: Pass) -> float:
    """Returns the bytes alive at once in one layer of a forward pass: in its attention or in its mlp."""
    heads = _head_values(cfg, one.model)
    scores = cfg.heads / one.heads(cfg) * one.positions * (one.before + one.positions) * (4 + one.size)
    mlp = one.positions * one.size * 3 * cfg.ffn / one.model
    return one.rows * (one.positions * one.size * (2 * cfg.width + heads) + max(scores, mlp))


def kept_bytes(  # noqa: PLR0913
    cfg: DecoderConfig, positions: int, remat: str, size: int, model: int, *, slots: int = 0
) -> float:
    """Returns the bytes of one example saved for the backward pass, and of the current layer.

    `slots`: positions before them whose keys and values are given.
    """
    heads, own = _head_values(cfg, model), cfg.heads / _share(cfg.heads, model)
    # Values of the current layer: outputs of both norms, of attention and of the mlp; q, k, v and the attended values;
    # gate, its sigmoid, up and the product; in fp32 the inputs of both norms; attention's scores.
    layer = positions * size * (4 * cfg.width + heads + own * cfg.head_dim + 4 * cfg.ffn / model)
    layer += positions * 2 * cfg.width * 4
    scores = own * positions * (slots + positions) * (4 + size)
    # Saved values of every layer: its input, and the outputs of its matmuls but the last, which no gradient needs.
    carried = positions * size * cfg.width
    products = positions * size * (cfg.width + heads + 2 * cfg.ffn / model)
    kept = {"none": products + carried, "full": carried}[remat] * cfg.layers
    return kept + scores + layer


def _head_values(cfg: DecoderConfig, model: int) -> float:
    """Returns the values of a position's queries, keys and values on one device."""
    return (cfg.heads / _share(cfg.heads, model) + 2 * cfg.kv_heads / _share(cfg.kv_heads, model)) * cfg.head_dim


def _attended_bytes(cfg: DecoderConfig, one: Pass) -> float:
    """Returns the bytes of attention's results, saved where the matrix behind it is trained or has a pair."""
    return 0.0 if one.remat == "full" else cfg.layers * one.rows * one.positions * cfg.heads * cfg.head_dim * one.size


def body_params(cfg: DecoderConfig) -> int:
    """Returns the parameters that every position passes through: all but embedding and head."""
    attention = cfg.width * cfg.head_dim * 2 * (cfg.heads + cfg.kv_heads)
    return cfg.layers * (attention + 3 * cfg.width * cfg.ffn)


def params(cfg: DecoderConfig) -> int:
    """Returns all parameters but norms and biases."""
    return body_params(cfg) + cfg.vocab * cfg.width * (1 if cfg.tied else 2)
