"""A text's message of kind "cache": which keys each head keeps, the numbers of their code, and biases; and back."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from lw_jax.core.eval_rows import RATIOS
from lw_jax.core.types import Tree
from lw_jax.models import cache_choice, cache_code, cache_codec, kv_prefix
from lw_jax.models.cache_choice import Reading
from lw_jax.models.cache_code import Code
from lw_jax.models.cache_codec import Coding, Section, Statistics
from lw_jax.models.decoder import DecoderConfig, KVPrefix

ROOTS = {True: 1.0, False: 0.5}  # fitted or not: the power of a key's worth that weighs its numbers


class Sent(NamedTuple):
    """What a message says to one reader; zeros at padding."""

    numbers: Int[Array | np.ndarray, "b t w"]  # in units of the step
    kept: Bool[Array | np.ndarray, "l b t k"]
    bias: Float[Array | np.ndarray, "l b t k"]


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
        "zero": (width,),  # `cache_codec.Statistics`
        "decay": (width,),
        "step": (),
        "tables": (RATIOS, *heads),
        "fitted": (),  # 1: values and biases are fitted, 0: exact values and no biases
    }
    whole = ("zero", "decay")
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.int32 if name in whole else jnp.float32) for name, shape in shapes.items()
    }


def want(
    cfg: DecoderConfig, reading: Reading, kept: Bool[Array, "l b t k"], *, seen: jax.Array, fitted: bool
) -> Wanted:
    """Returns what the numbers of a text that was read behind `seen` tokens should say.

    Where it is `fitted`, the kept keys have values that give what the whole text gave.
    """
    text = reading.text
    if fitted:
        assert reading.queries is not None, "a fit needs the repeating queries"
        v, _ = cache_choice.fit(cfg, reading.queries, text, kept, seen=seen)
        text = text._replace(v=jnp.where(kept[..., None], v, text.v))
    return Wanted(text, kept, cache_code.importance(reading.power, kept, text.mask, ROOTS[fitted]))


def number(params: Tree, wanted: Wanted) -> Int[Array, "b t w"]:
    """Returns the numbers of a message in units of the step."""
    step = params["step"]
    z = cache_code.solve(_code(params), wanted.text, wanted.weights, step=step, variance=params["variance"])
    return jnp.where(wanted.text.mask[..., None], jnp.rint(z / step), 0.0).astype(jnp.int32)


def encode(  # noqa: PLR0913
    cfg: DecoderConfig,
    params: Tree,
    reading: Reading,
    kept: Sequence[Bool[Array, "l b t k"]],
    *,
    seen: jax.Array,
    fitted: bool,
) -> list[Sent]:
    """Returns the message of a text for each choice of what is kept; the first has all keys of the others.

    The numbers are those of the first, the same in all. Where it is `fitted`, biases fit what the reader decodes.
    """
    numbers = number(params, want(cfg, reading, kept[0], seen=seen, fitted=fitted))
    if not fitted:
        return [Sent(numbers, one, jnp.zeros(one.shape)) for one in kept]
    assert reading.queries is not None, "a fit needs the repeating queries"
    decoded = cache_code.read(_code(params), numbers.astype(jnp.float32) * params["step"])
    found = []
    for one in kept:
        _, bias = cache_choice.fit(cfg, reading.queries, reading.text, one, seen=seen, sent=decoded)
        levels = jnp.clip(jnp.rint(bias / cache_codec.BIAS), *cache_codec.BIASES)
        found.append(Sent(numbers, one, jnp.where(one, levels * cache_codec.BIAS, 0.0)))
    return found


def decode(params: Tree, sent: Sent, mask: Bool[Array, "b t"], dtype: jax.typing.DTypeLike) -> KVPrefix:
    """Returns a message as the keys and values that its reader attends to."""
    k, v = cache_code.read(_code(params), sent.numbers.astype(jnp.float32) * params["step"])
    return kv_prefix.choose(
        KVPrefix(k.astype(dtype), v.astype(dtype), mask), jnp.asarray(sent.kept), jnp.asarray(sent.bias)
    )


def _code(params: Tree) -> Code:
    return Code(params["mean"], params["scale"], params["basis"])


# --- bytes


def coding_of(params: Tree) -> Coding:
    """Returns what the bytes of a message for this reader are coded with."""
    host = {name: np.asarray(leaf) for name, leaf in params.items()}
    rates = (statistics_of(host),)
    tables = {ratio: host["tables"][ratio - 1] for ratio in range(1, RATIOS + 1)}
    code = (host[name] for name in ("mean", "scale", "basis"))
    return Coding(cache_codec.fingerprint(code, rates, tables), rates, tables)


def statistics_of(params: Mapping[str, Any]) -> Statistics:
    """Returns the statistics of a reader's numbers at its step."""
    zero, decay = (np.asarray(params[name]).astype(np.uint16) for name in ("zero", "decay"))
    return Statistics(float(params["step"]), zero, decay)


def to_section(sent: Mapping[int, Sent], length: int, step: float) -> Section:
    """Returns messages of one row, `length` tokens, by their ratios, as one that is packed for all of them."""
    ratios = tuple(sorted(sent))
    kept = sum(np.asarray(sent[ratio].kept)[:, 0, :length].astype(np.uint8) for ratio in ratios)
    biases = {ratio: np.asarray(sent[ratio].bias, np.float32)[:, 0, :length] for ratio in ratios}
    biases = {ratio: bias for ratio, bias in biases.items() if bias.any()}
    return Section(np.asarray(sent[ratios[0]].numbers)[0, :length], step, ratios, np.asarray(kept, np.uint8), biases)


def of_section(section: Section, width: int, columns: int, ratio: int) -> tuple[Sent, Bool[np.ndarray, "1 t"]]:
    """Returns a section at one of its ratios as a message of one row of `columns` tokens, and its mask."""
    length, own = section.numbers.shape
    rest = columns - length
    numbers = np.pad(section.numbers.astype(np.int32), ((0, rest), (0, width - own)))[None]
    around = ((0, 0), (0, rest), (0, 0))
    kept = np.pad(section.levels > section.ratios.index(ratio), around)[:, None]
    bias = section.biases.get(ratio, np.zeros(section.levels.shape, np.float32))
    return Sent(numbers, kept, np.pad(bias, around)[:, None]), (np.arange(columns) < length)[None]
