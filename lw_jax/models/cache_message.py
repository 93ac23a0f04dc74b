"""A text's message of kind "cache": which keys each head keeps, the numbers of their code, and biases; and back."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from lw_jax.core.eval_rows import RATIOS
from lw_jax.core.types import Tree
from lw_jax.models import cache_choice, cache_code, cache_codec, kv_prefix
from lw_jax.models.attention import LEAST
from lw_jax.models.cache_choice import Reading
from lw_jax.models.cache_code import Code
from lw_jax.models.cache_codec import Coding, Section, Statistics
from lw_jax.models.decoder import DecoderConfig, KVPrefix, PackedPrefix
from lw_jax.models.kv_prefix import Sizes

ROOT = 0.5  # power of the squared attention to a key that weighs its numbers


class Sent(NamedTuple):
    """What a message says to one reader; zeros at padding."""

    numbers: Int[Array | np.ndarray, "b t w"]  # in units of the step
    kept: Bool[Array | np.ndarray, "l b t k"]
    bias: Float[Array | np.ndarray, "l b t k"]
    step: Float[Array | np.ndarray, " b"]
    mask: Bool[Array | np.ndarray, "b t"]  # the text's real tokens, which come first


class Wanted(NamedTuple):
    """What the numbers of a message should say."""

    text: KVPrefix
    kept: Bool[Array, "l b t k"]
    weights: Float[Array, "l b t k"]  # of `cache_code.solve`


def abstract(cfg: DecoderConfig, width: int) -> Tree:
    """Returns a reader's part of the tree as shapes; `width` is at most as large as its keys and values of a token."""
    heads, each = (cfg.layers, cfg.kv_heads), 2 * cfg.layers * cfg.kv_heads * cfg.head_dim
    width = min(width, each)
    shapes = {
        "mean": (2, *heads, cfg.head_dim),
        "scale": (2, cfg.layers),
        "basis": (width, each),
        "variance": (width,),
        "zero": (RATIOS, width),  # `cache_codec.Statistics` of messages at each ratio: whole numbers
        "decay": (RATIOS, width),
        "step": (RATIOS,),
        "tables": (RATIOS, *heads),
        "fitted": (RATIOS,),  # 1: values and biases are fitted, 0: exact values and no biases
    }
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def choose(fitted: Bool[Array, " b"], one: Sent, other: Sent) -> Sent:
    """Returns of each row the message that is fitted, `one`, or the other; both keep the same keys."""
    numbers = jnp.where(fitted[:, None, None], one.numbers, other.numbers)
    return one._replace(numbers=numbers, bias=jnp.where(fitted[None, :, None, None], one.bias, other.bias))


def want(cfg: DecoderConfig, reading: Reading, kept: Bool[Array, "l b t k"], *, sizes: Sizes | None) -> Wanted:
    """Returns what the numbers of a text's message should say.

    The kept keys, of each head `sizes` at most, have values that give what the whole text gave; None: their own.
    """
    text = reading.text
    if sizes is not None:
        assert reading.queries is not None, "a fit needs the repeating queries"
        v, _ = cache_choice.fit(cfg, reading.queries, text, kept, seen=reading.seen, sizes=sizes)
        text = text._replace(v=jnp.where(kept[..., None], v, text.v))
    return Wanted(text, kept, cache_code.importance(reading.power, kept, text.mask, ROOT))


def solve(params: Tree, wanted: Wanted, step: Float[Array, " b"], factors: str | None = None) -> Int[Array, "b t w"]:
    """Returns the numbers of a message in steps of `step`; `factors`: see `cache_code.solve`."""
    code, settings = _code(params), {"variance": params["variance"], "factors": factors}
    numbers = cache_code.solve(code, wanted.text, wanted.weights, step=step, **settings)
    return jnp.where(wanted.text.mask[..., None], numbers, 0)


def encode(  # noqa: PLR0913
    cfg: DecoderConfig,
    params: Tree,
    reading: Reading,
    kept: Sequence[Bool[Array, "l b t k"]],
    step: Float[Array, " b"],
    *,
    sizes: Sequence[Sizes | None],
    factors: str | None = None,
) -> list[Sent]:
    """Returns the message of a text for each choice of what is kept; the first has all keys of the others.

    The numbers are those of the first, the same in all. A choice with `sizes`, of each head at least as many keys as
    it keeps, has biases fitted to what the reader decodes; if the first has them, values are fitted to it as well.
    """
    numbers = solve(params, want(cfg, reading, kept[0], sizes=sizes[0]), step, factors)
    fit = functools.partial(fit_biases, cfg, params, reading, numbers=numbers, step=step)
    biases = (
        jnp.zeros(choice.shape) if size is None else fit(kept=choice, sizes=size)
        for choice, size in zip(kept, sizes, strict=True)
    )
    return [Sent(numbers, *pair, step, reading.text.mask) for pair in zip(kept, biases, strict=True)]


def fit_biases(  # noqa: PLR0913
    cfg: DecoderConfig,
    params: Tree,
    reading: Reading,
    kept: Bool[Array, "l b t k"],
    numbers: Int[Array, "b t w"],
    step: Float[Array, " b"],
    *,
    sizes: Sizes,
) -> Float[Array, "l b t k"]:
    """Returns the biases with which what the reader decodes from the numbers gives what the whole text gave."""
    assert reading.queries is not None, "a fit needs the repeating queries"
    decoded = _read(params, numbers, step)
    settings = {"seen": reading.seen, "sent": decoded, "sizes": sizes}
    _, bias = cache_choice.fit(cfg, reading.queries, reading.text, kept, **settings)
    levels = jnp.clip(jnp.rint(bias / cache_codec.BIAS), *cache_codec.BIASES)
    return jnp.where(kept, levels * cache_codec.BIAS, 0.0)


def decode(params: Tree, sent: Sent, dtype: jax.typing.DTypeLike) -> KVPrefix:
    """Returns a message as the keys and values that its reader attends to."""
    numbers, kept, bias, step, mask = map(jnp.asarray, sent)
    k, v = _read(params, numbers, step)
    return kv_prefix.choose(KVPrefix(k.astype(dtype), v.astype(dtype), mask), kept, bias)


def decode_packed(  # noqa: PLR0913
    cfg: DecoderConfig,
    params: Tree,
    sent: Sent,
    sizes: Sizes,
    *,
    seen: jax.Array | int,
    dtype: jax.typing.DTypeLike,
) -> PackedPrefix:
    """Returns the kept keys and values of a message, of each head as many as `sizes`, layer after layer."""
    numbers, kept, bias, step, mask = map(jnp.asarray, sent)
    code, z = _code(params), numbers.astype(jnp.float32) * step[:, None, None]

    def take(layer: jax.Array, head: jax.Array, places: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, v = cache_code.read_head(code, jnp.take_along_axis(z, places[:, :, None], axis=1), layer, head)
        return k.astype(dtype), v.astype(dtype)

    return kv_prefix.pack(cfg, mask, jnp.where(kept, bias, LEAST), sizes, take, seen=seen)


def _read(
    params: Tree, numbers: Int[Array, "b t w"], step: Float[Array, " b"]
) -> tuple[Float[Array, "l b t k e"], Float[Array, "l b t k e"]]:
    return cache_code.read(_code(params), numbers.astype(jnp.float32) * step[:, None, None])


def _code(params: Tree) -> Code:
    return Code(params["mean"], params["scale"], params["basis"])


# --- bytes


def coding_of(params: Tree) -> Coding:
    """Returns what the bytes of a message for this reader are coded with."""
    host = {name: np.asarray(leaf) for name, leaf in params.items()}
    by_step = {rate.step: rate for rate in (statistics_of(host, ratio) for ratio in range(1, RATIOS + 1))}
    rates = tuple(by_step.values())
    tables = {ratio: host["tables"][ratio - 1] for ratio in range(1, RATIOS + 1)}
    code = (host[name] for name in ("mean", "scale", "basis"))
    return Coding(cache_codec.fingerprint(code, rates, tables), rates, tables)


def statistics_of(params: Mapping[str, Any], ratio: int) -> Statistics:
    """Returns the statistics of a reader's numbers at the step of messages at a ratio."""
    zero, decay = (np.asarray(params[name][ratio - 1]).astype(np.uint16) for name in ("zero", "decay"))
    return Statistics(float(params["step"][ratio - 1]), zero, decay)


def to_section(sent: Mapping[int, Sent], row: int) -> Section:
    """Returns a row of messages on the host, by their ratios, as one that is packed for all of them."""
    ratios = tuple(sorted(sent))
    first = sent[ratios[0]]
    length = int(first.mask[row].sum())
    kept = sum(sent[ratio].kept[:, row, :length].astype(np.uint8) for ratio in ratios)
    biases = {ratio: np.asarray(sent[ratio].bias[:, row, :length], np.float32) for ratio in ratios}
    biases = {ratio: bias for ratio, bias in biases.items() if bias.any()}
    numbers = np.asarray(first.numbers[row, :length])
    return Section(numbers, float(first.step[row]), ratios, np.asarray(kept, np.uint8), biases)


def of_sections(sections: Sequence[Section], ratios: Sequence[int], width: int, columns: int) -> Sent:
    """Returns sections, each at one of its ratios, as messages of `columns` tokens of `width` numbers."""
    layers, _, heads = sections[0].levels.shape
    numbers = np.zeros((len(sections), columns, width), np.int32)
    kept = np.zeros((layers, len(sections), columns, heads), bool)
    bias, mask = np.zeros(kept.shape, np.float32), np.zeros(numbers.shape[:2], bool)
    for row, (section, ratio) in enumerate(zip(sections, ratios, strict=True)):
        length, count = section.numbers.shape
        numbers[row, :length, :count] = section.numbers
        kept[:, row, :length] = section.kept(ratio)
        bias[:, row, :length] = section.biases.get(ratio, 0.0)
        mask[row, :length] = True
    return Sent(numbers, kept, bias, np.array([section.step for section in sections], np.float32), mask)
