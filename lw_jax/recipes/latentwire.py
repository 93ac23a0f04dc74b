"""The wire's recipe: one encoder and an adapter per reader learn; the readers stay frozen and read."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lw_jax import losses, sources, weights
from lw_jax.core import rng as rngs
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.types import DTYPES, LossTerms, Tree
from lw_jax.data import batches, examples
from lw_jax.data.tokens import ByteTokenizer, Tokenizer, load_tokenizer
from lw_jax.models import adapter, alignment, decoder, encoder, wire
from lw_jax.models.decoder import DecoderConfig
from lw_jax.recipes import selfmade
from lw_jax.recipes.base import Weights
from sharding import rules, tables

PIECES = 4  # ids of a token string in another vocabulary that the aligned start averages


def locate(cfg: Config, source: str, sha256: str) -> Path:
    """Returns where a model's files lie; a self-made reader's folder must have been written before."""
    if source.startswith(selfmade.PREFIX):
        return selfmade.finished_folder(cfg, source)
    return sources.locate(source, sha256=sha256)


class LatentWire:
    """See `recipes.base.Recipe`; parameters: {"encoder", "adapters"} learn, {reader's name: decoder} are frozen."""

    def __init__(self, cfg: Config, mesh: Mesh):
        self.cfg, self.mesh = cfg, mesh
        self.locations = {name: locate(cfg, llm.source, llm.sha256) for name, llm in cfg.llms.items()}
        self.tokenizers: dict[str, Tokenizer] = {name: load_tokenizer(at) for name, at in self.locations.items()}
        self.body_location = locate(cfg, cfg.encoder.source, cfg.encoder.sha256) if cfg.encoder.kind == "lm" else None
        self.wire = _wire(cfg, mesh, locations=self.locations, tokenizers=self.tokenizers, body=self.body_location)
        # A pretrained body moves more slowly than what starts from noise.
        body_rate = cfg.encoder.rate if self.body_location else 1.0
        self.rates = (("encoder/body/.*", body_rate), ("encoder/head/.*", 1.0), ("adapters/.*", cfg.adapter.rate))

    def abstract(self) -> Weights:
        """Returns both trees as shapes."""
        body = None
        if self.wire.encoder.body:
            body = encoder.keep_body(decoder.abstract(self.wire.encoder.body, jnp.float32))
        sizes = {name: jax.ShapeDtypeStruct((), jnp.float32) for name in self.wire.readers}
        key = jax.eval_shape(lambda: jax.random.key(0))
        trainable = jax.eval_shape(
            lambda key, body, sizes: self.wire.init(key, body=body, embedding_rms=sizes), key, body, sizes
        )
        frozen = {
            name: decoder.abstract(reader.config, DTYPES[self.cfg.llms[name].weights])
            for name, reader in self.wire.readers.items()
        }
        return Weights(trainable, frozen)

    def shardings(self) -> Weights:
        """Returns both trees as NamedShardings: readers by the config's placement, what learns replicated."""
        shapes = self.abstract()
        table = tables.reader_table(self.cfg.mesh.placement)
        frozen = {
            name: rules.shardings(table, tree, self.mesh, name=f"llms/{name}") for name, tree in shapes.frozen.items()
        }
        trainable = rules.shardings(tables.TRAINABLE, shapes.trainable, self.mesh, name="trainable")
        return Weights(trainable, frozen)

    def build(self) -> Weights:
        """Streams the frozen weights into their shards and initialises what learns."""
        placed, frozen = self.shardings(), self.load_frozen()
        body = None
        if self.body_location and self.wire.encoder.body:
            body = weights.load(self.body_location, dtype="float32", layers=self.wire.encoder.body.layers)
            body = encoder.keep_body(body)
        sizes = {name: adapter.rms(tree["embed"].astype(jnp.float32), axis=None) for name, tree in frozen.items()}
        key = rngs.stream(self.cfg.seed, "trainable")
        init = jax.jit(
            lambda key, body, sizes: self.wire.init(
                key, body=body, embedding_rms={name: size.reshape(()) for name, size in sizes.items()}
            ),
            out_shardings=placed.trainable,
        )
        replicated = NamedSharding(self.mesh, P())
        trainable = init(*jax.device_put((key, body, sizes), replicated))
        if self.cfg.adapter.start == "aligned":
            trainable = jax.device_put(self._align(trainable, frozen, sizes), placed.trainable)
        return Weights(trainable, frozen)

    def _align(self, trainable: Tree, frozen: Tree, sizes: Mapping[str, jax.Array]) -> Tree:
        """Replaces the random start of projection, layer mix and adapters' linear paths; see `models.alignment`."""
        encoder_params = trainable["encoder"]
        table, head = encoder_params["body"]["embed"], encoder_params["head"]
        width = self.wire.encoder.width
        directions = jax.jit(alignment.principal_directions, static_argnames="width")(table, width)
        project = jax.tree.map(jnp.zeros_like, head["project"])
        project["kernel"] = project["kernel"].at[:, : directions.shape[1]].set(directions)
        head = head | {"project": project, "mix": alignment.mix_logits(head["mix"].shape[0])}
        adapters = {}
        for name, params in trainable["adapters"].items():
            kernel = jax.jit(alignment.linear_map)(table, directions, frozen[name]["embed"], self._pieces(name))
            skip = jnp.zeros_like(params["skip"]["kernel"]).at[: kernel.shape[0]].set(kernel)
            quiet = jax.tree.map(jnp.zeros_like, params["down"])
            adapters[name] = params | {"skip": {"kernel": skip}, "down": quiet, "gain": sizes[name].reshape(())}
        return {"encoder": encoder_params | {"head": head}, "adapters": adapters}

    def _pieces(self, name: str) -> jax.Array:
        """Returns i32 [v n]: a reader's ids of each of the encoder's token strings, -1 beyond their end."""
        assert self.body_location is not None  # validation allows the aligned start for a pretrained body only
        own, reader = load_tokenizer(self.body_location), self.tokenizers[name]
        count = self.abstract().trainable["encoder"]["body"]["embed"].shape[0]
        texts = [own.decode([index]) if index < own.vocab else "" for index in range(count)]
        pieces = np.full((count, PIECES), -1, np.int32)
        for row, ids in zip(pieces, reader.encode_batch(texts), strict=True):
            row[: len(ids)] = ids[:PIECES]
        return jnp.asarray(pieces)

    def load_frozen(self) -> Tree:
        """Streams the readers' weights into their shards."""
        placed = self.shardings().frozen
        return {
            name: weights.load(at, dtype=DTYPES[self.cfg.llms[name].weights], shardings=placed[name])
            for name, at in self.locations.items()
        }

    @functools.cached_property
    def layout(self) -> batches.Layout:
        """Returns what decides the ids of an example."""
        cfg = self.cfg
        return batches.Layout(
            prompt=cfg.prompt,
            readers={name: batches.Reader(self.tokenizers[name], llm.template) for name, llm in cfg.llms.items()},
            source=load_tokenizer(self.body_location) if self.body_location else ByteTokenizer(),
            window=cfg.encoder.window,
            slots=cfg.encoder.slots,
            data=cfg.data,
        )

    def data(self, split: examples.Split, *, rows: Sequence[str] = ()) -> batches.Encoded:
        """Returns the tokenised examples of "train" or "validation"; the KL's teacher needs the text row."""
        if self.cfg.loss.kl:
            rows = (*rows, "text")
        found = examples.load(self.cfg.data, split, seed=self.cfg.seed)
        return batches.encode(found, layout=self.layout, rows=rows)

    def loss(self, trainable: Tree, frozen: Tree, batch: Tree, rng: jax.Array) -> LossTerms:
        """One fused pass per reader: cross-entropy over all answer tokens and EOS, and the KL where it is asked.

        The objective is the mean over answer tokens of all readers together.
        """
        del rng  # nothing here is random
        latents = self.wire.encode(trainable, batch["source"])
        total, weight, terms = jnp.zeros(()), jnp.zeros(()), {}
        for name in self.wire.readers:
            fields, params = batch["readers"][name], frozen[name]
            targets, counted = fields["targets"], fields["weights"]
            prompt = wire.wire_prompt(params, fields, self.wire.prefix(trainable, name, latents))
            student = self.wire.answer_logits(params, name, prompt, fields["answer_inputs"])
            ce = terms[f"nll/{name}"] = losses.nll(student, targets, counted)
            terms[f"accuracy/{name}"] = losses.hits(student, targets, counted)
            total, weight = total + self.cfg.loss.ce * ce[0], weight + ce[1]
            if self.cfg.loss.kl:
                text = wire.text_prompt(params, fields["text"])
                teacher = jax.lax.stop_gradient(self.wire.answer_logits(params, name, text, fields["answer_inputs"]))
                kl = losses.kl(teacher, student, counted, temperature=self.cfg.loss.temperature)
                terms[f"kl/{name}"] = kl
                total = total + self.cfg.loss.kl * kl[0]
        return LossTerms(total, weight, terms)

    def identity(self) -> dict[str, str]:
        """Returns the fingerprints of the frozen readers and of the encoder's origin."""
        spec = self.cfg.encoder
        origin = weights.fingerprint(self.body_location) if self.body_location else "from scratch"
        shape = f"{spec.kind} {spec.pooling} {spec.slots}x{spec.width} layers {spec.layers}"
        readers = {f"llms/{name}": weights.fingerprint(at) for name, at in self.locations.items()}
        return {"encoder": f"{shape}, {origin}"} | readers

    @functools.cached_property
    def encode(self):
        """Returns jitted (trainable, source) -> latents."""
        return jax.jit(self.wire.encode)

    @functools.cached_property
    def prompt_from_latents(self):
        """Returns jitted (trainable, reader's parameters, fields, latents, name) -> Prompt."""

        def build(trainable: Tree, params: Tree, fields: Mapping, latents: jax.Array, name: str) -> wire.Prompt:
            return wire.wire_prompt(params, fields, self.wire.prefix(trainable, name, latents))

        return jax.jit(build, static_argnames="name")

    @functools.cached_property
    def prompt_from_text(self):
        """Returns jitted (reader's parameters, {"ids", "mask"}) -> Prompt."""
        return jax.jit(wire.text_prompt)

    @functools.cached_property
    def score(self):
        """Returns jitted (reader's parameters, Prompt, fields, name) -> per-example nll, hits, first, tokens [b]."""

        def measure(params: Tree, prompt: wire.Prompt, fields: Mapping, name: str) -> dict[str, jax.Array]:
            logits = self.wire.answer_logits(params, name, prompt, fields["answer_inputs"])
            targets, counted = fields["targets"], fields["weights"]
            right = (jnp.argmax(logits, axis=2).astype(targets.dtype) == targets).astype(jnp.float32)
            return {
                "nll": jnp.sum(losses.token_nll(logits, targets) * counted, axis=1),
                "hits": jnp.sum(right * counted, axis=1),
                "first": right[:, 0],
                "tokens": jnp.sum(counted, axis=1),
            }

        return jax.jit(measure, static_argnames="name")

    @functools.cached_property
    def generate(self):
        """Returns jitted (reader's parameters, Prompt, name, max_new_tokens) -> ids [b n], -1 after the stop."""

        def run(params: Tree, prompt: wire.Prompt, name: str, max_new_tokens: int) -> jax.Array:
            return self.wire.generate(params, name, prompt, max_new_tokens=max_new_tokens)

        return jax.jit(run, static_argnames=("name", "max_new_tokens"))


def _wire(
    cfg: Config, mesh: Mesh, *, locations: Mapping[str, Path], tokenizers: Mapping[str, Tokenizer], body: Path | None
) -> wire.Wire:
    rows = NamedSharding(mesh, P("data"))
    mode = decoder.Mode(remat=cfg.compute.remat, constrain=lambda x: jax.lax.with_sharding_constraint(x, rows))
    spec = wire.EncoderSpec(
        kind=cfg.encoder.kind,
        slots=cfg.encoder.slots,
        width=cfg.encoder.width,
        pooling=cfg.encoder.pooling,
        layers=cfg.encoder.layers,
        body=_body(weights.describe(body), cfg.encoder.layers) if body else None,
        dtype=DTYPES[cfg.compute.dtype],
    )
    readers = {
        name: wire.Reader(
            weights.describe(at), cfg.adapter.hidden, cfg.adapter.calibration, tuple(tokenizers[name].stops)
        )
        for name, at in locations.items()
    }
    return wire.Wire(spec, readers, mode)


def _body(config: DecoderConfig, layers: int) -> DecoderConfig:
    """The encoder's body: the first `layers` of a pretrained decoder (0: all), never its head."""
    if layers > config.layers:
        raise UserError(
            f"config.encoder.layers={layers} but the body has {config.layers} layers; choose 0 (all) or fewer"
        )
    return dataclasses.replace(config, layers=layers or config.layers, tied=True)
