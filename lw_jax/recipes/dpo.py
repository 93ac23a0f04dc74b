"""Recipe `dpo`: trains LoRA pairs beside one frozen, possibly quantised model on chosen and rejected answers."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from lw_jax.core import precision
from lw_jax.core import rng as rngs
from lw_jax.core.compiling import jitted
from lw_jax.core.config import Config
from lw_jax.core.types import LossTerms, Tree
from lw_jax.data import pairs, preferences, row_sources
from lw_jax.data.batches import Batch
from lw_jax.data.data_schedule import DataSchedule, Phase, digest_of
from lw_jax.data.frozen_cache import CachedRows, Store, key_of
from lw_jax.data.pairs import Preference
from lw_jax.data.preferences import Pair, Preferences
from lw_jax.data.tokens import Tokenizer, load_tokenizer
from lw_jax.hub import sources, weights
from lw_jax.losses import chunked, preference
from lw_jax.losses.preference import LogProbs
from lw_jax.models import decoder, lora
from lw_jax.models.decoder import DecoderConfig
from lw_jax.recipes import frozen_models
from lw_jax.training.recipe import Finding, Recipe, Weights
from sharding import place, rules, shards, tables
from sharding.placement import Placement

LOWEST_RATE = 5e-6  # below it a learning rate suits full tuning; TRL's documentation names 1e-5 for LoRA
BUCKETS = 4  # data sets of like length, each padded to its own longest
MANY_EPOCHS = 10  # beyond it preference tuning memorises its rows


class DPO(Recipe):
    """See `training.recipe.Recipe`. Trainable: the pairs of `models/lora.py`; frozen: {model's name: decoder}."""

    reader_bytes = staticmethod(frozen_models.reader_bytes)

    def __init__(self, cfg: Config, placed: Placement, *, outline: bool = False):
        super().__init__(cfg, placed, outline=outline)
        ((self.name, self.llm),) = cfg.llms.items()
        spec = cfg.lora
        self.lora = lora.make(rank=spec.rank, dropout=spec.dropout, targets=spec.targets)
        self.model: DecoderConfig = (
            frozen_models.outline(cfg, self.llm.source, parts=placed.readers[self.name].parts)
            if outline
            else weights.describe(self.location)
        )
        arithmetic = frozen_models.precision_of(cfg, self.llm, placed.platform)
        self.mode = frozen_models.mode(cfg, placed.readers[self.name].mesh, arithmetic)

    @functools.cached_property
    def location(self) -> Path:
        return frozen_models.locate(self.cfg, self.llm.source, self.llm.sha256)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.location)

    # --- weights

    @functools.cached_property
    def abstract(self) -> Weights:
        frozen = {self.name: frozen_models.describe(self.model, self.cfg, self.llm, self.placement.platform)}
        return Weights(lora.abstract(self.model, self.lora), frozen)

    @functools.cached_property
    def shardings(self) -> Weights:
        shapes, component = self.abstract, self.placement.readers[self.name]
        frozen = {self.name: frozen_models.shardings(shapes.frozen[self.name], self.llm, component, self.name)}
        trainable = rules.shardings(tables.TRAINABLE, shapes.trainable, self.placement.learner, name="lora")
        return Weights(trainable, frozen)

    def build(self, frozen: Tree | None = None) -> Weights:
        """Initialises the pairs and streams the frozen weights into their shards; prints the modules of each target."""
        for target, names in lora.match(self.cfg.lora.targets).items():
            modules = ", ".join(lora.MODULES[name] for name in names)
            print(f"lora.targets {target!r}: {modules}, in each of {self.model.layers} layers", flush=True)
        init = jax.jit(lambda key: lora.init(key, self.model, self.lora), out_shardings=self.shardings.trainable)
        trainable = init(rngs.stream(self.cfg.seed, "lora"))
        return Weights(trainable, self.load_frozen() if frozen is None else frozen)

    def load_frozen(self) -> Tree:
        """Streams the model's weights into their shards; fills a cached reference."""
        placed = self.shardings.frozen[self.name]
        params = frozen_models.load(self.location, self.cfg, self.llm, placed, self.placement.platform)
        if self._store is not None:
            count = sum(self._fill(self._store, data, params) for data in (*self._train, *self._held_out))
            if count:
                where = self._store.folder
                print(f"reference: {count:,} pairs scored by the frozen model; cached in {where}", flush=True)
        return {self.name: params}

    # --- data

    def data_schedule(self) -> DataSchedule:
        """Returns the training pairs in batches of similar length, each length bucket as often as it has pairs."""
        streams = tuple((data, float(len(data))) for data in self._train)
        # The whole run: shares of an epoch would be rounded to batches, in each epoch alike.
        return DataSchedule((Phase(self.cfg.train.steps, streams),))

    def validation(self) -> list[tuple[str, Preferences]]:
        """Returns the held-out pairs; those of data.held_out share no prompt with training."""
        return [("", data) for data in self._held_out]

    @functools.cached_property
    def _pairs(self) -> tuple[list[Preference], list[Preference]]:
        data = self.cfg.data
        train = pairs.read(data.train, columns=data.columns)
        if data.validation:
            row_sources.check_apart(data.train, data.validation)
            return train, pairs.read(data.validation, split="validation", columns=data.columns)
        return pairs.split(train, self.cfg.data.held_out, self.cfg.seed)

    @functools.cached_property
    def _train(self) -> list[Preferences]:
        return [dataclasses.replace(data, training=True) for data in self._encode(self._pairs[0], BUCKETS)]

    @functools.cached_property
    def _held_out(self) -> list[Preferences]:
        return self._encode(self._pairs[1], 1)

    def _encode(self, rows: Sequence[Preference], buckets: int) -> list[Preferences]:
        whole = preferences.encode(
            rows, tokenizer=self.tokenizer, template=self.llm.template, limits=self.cfg.dpo, name=self.name
        )
        # A bucket must hold a batch.
        parts = preferences.part(whole, max(1, min(buckets, len(whole) // self.cfg.train.global_batch)))
        if self._store is None:
            return parts
        return [
            dataclasses.replace(part, reference=CachedRows(self._store, list(map(_key, part.pairs)))) for part in parts
        ]

    @functools.cached_property
    def _store(self) -> Store | None:
        """Returns the cache of the frozen model's log-probabilities, where dpo.reference has one."""
        if self.cfg.dpo.reference != "cached" or self.outline:
            return None
        identity = {
            "weights": weights.identify(self.location),
            "stored": self.llm.weights,
            "arithmetic": list(precision.of(self.cfg.compute.dtype, self.placement.platform)),
            "tokenizer": self.tokenizer.fingerprint,
        }
        return Store(sources.cache_root() / "reference", identity, rows={"reference": ((2,), np.float32)})

    def _fill(self, store: Store, data: Preferences, params: Tree) -> int:
        """Computes what the cache lacks of these pairs with the frozen model; returns how many."""
        assert data.reference is not None, "of `_encode`"
        pairs, mesh = dataclasses.replace(data, reference=None), self.placement.readers[self.name].mesh

        def read(positions: list[int]) -> Batch:
            fields = pairs.collate(positions)["readers"][self.name]
            return {"reference": jax.device_get(self._reference(params, place.put_eval(fields, mesh)))}

        size = place.round_up(self.cfg.eval.batch, self.placement.data)
        what = "the reference model's log-probabilities"
        return store.fill(data.reference.keys, read, batch=size, what=what)

    # --- loss

    def loss(self, trainable: Tree, frozen: Tree, batch: Tree, rng: jax.Array) -> LossTerms:
        """Returns the summed preference loss of the pairs; metrics by TRL's names."""
        spec, fields, params = self.cfg.dpo, batch["readers"][self.name], frozen[self.name]
        keys = _answer_keys(rng, jnp.asarray(batch["index"])) if self.lora.dropout else None
        policy = lora.attach(params, trainable, self.lora, keys=keys, training=jnp.asarray(fields["training"])[0])
        logps, mean_logits = self._score(policy, params, fields)
        if "reference" in fields:
            reference = fields["reference"]
        else:
            reference = jax.lax.stop_gradient(self._score(params, params, fields)[0])
        tokens = jnp.sum(_scored(fields), axis=2)
        sums = LogProbs(*(logps[:, 0], logps[:, 1], reference[:, 0], reference[:, 1]), *(tokens[:, 0], tokens[:, 1]))
        each = preference.combined(spec.loss, spec.weights, sums, beta=spec.beta, label_smoothing=spec.label_smoothing)
        counted = fields["weights"][:, 0]
        total = jnp.sum(counted)
        terms = {
            name: (jnp.sum(value * counted), total) for name, value in preference.metrics(sums, beta=spec.beta).items()
        }
        for number, name in enumerate(("chosen", "rejected")):
            counts = tokens[:, number] * counted
            terms[f"logits/{name}"] = (jnp.sum(mean_logits[:, number] * counted), jnp.sum(counts))
        return LossTerms(jnp.sum(each * counted), total, terms)

    @jitted()
    def _reference(self, params: Tree, fields: Tree) -> jax.Array:
        """Returns the frozen model's log-probabilities f32[b 2] of the answers."""
        return self._score(params, params, fields)[0]

    def _score(self, policy: Tree, params: Tree, fields: Tree) -> tuple[jax.Array, jax.Array]:
        """Returns each answer's summed log-probability and summed mean logits, both [b 2]."""
        rows, sides, length = fields["ids"].shape
        ids, mask = (fields[key].reshape(rows * sides, length) for key in ("ids", "mask"))
        hidden = decoder.forward(policy, self.model, decoder.embed(params, ids), mask=mask, mode=self.mode).hidden
        chunk = chunked.positions(
            self.cfg.compute.logits_chunk, rows=rows * sides, data=shards.row_devices(self.placement.learner)
        )
        # The only label shift: a position's logits predict the next token.
        logp, mean = chunked.token_logp(hidden[:, :-1], decoder.head(params), ids[:, 1:], chunk=chunk)
        scored = _scored(fields).reshape(rows * sides, length - 1)
        total, mean_logits = (jnp.sum(x * scored, axis=1).reshape(rows, sides) for x in (logp, mean))
        return total, mean_logits

    # --- identity

    def identity(self) -> dict[str, str]:
        return {f"llms/{self.name}": weights.fingerprint(self.location), "tokenizer": self.tokenizer.fingerprint}

    def content(self) -> dict[str, str]:
        return {"train": digest_of(self._train), "validation": digest_of(self._held_out)}

    # --- planning

    def batch_widths(self) -> Tree:
        length = self.cfg.dpo.max_length
        fields = {
            "ids": jax.ShapeDtypeStruct((2, length), jnp.int32),
            "mask": jax.ShapeDtypeStruct((2, length), bool),
            "completion": jax.ShapeDtypeStruct((2, length), bool),
            "weights": jax.ShapeDtypeStruct((1,), jnp.float32),
            "training": jax.ShapeDtypeStruct((), jnp.float32),
        }
        if self.cfg.dpo.reference == "cached":
            fields["reference"] = jax.ShapeDtypeStruct((2,), jnp.float32)
        return {"source": {}, "readers": {self.name: fields}, "index": jax.ShapeDtypeStruct((), jnp.int32)}

    validation_widths = batch_widths

    # --- preflight

    def findings(self) -> list[Finding]:
        """Returns problems of the learning rate and, where rows and tokenizer are on this machine, of the rows."""
        findings, rate = [], self.cfg.optim.learning_rate
        if rate < LOWEST_RATE:
            problem = f"optim.learning_rate={rate:g} suits full tuning: LoRA pairs hardly move"
            findings.append(Finding("warning", f"{problem}; 1e-5 to 5e-5 is usual"))
        spec = self.cfg.dpo
        if spec.max_prompt >= spec.max_length:
            problem = (
                f"dpo.max_prompt={spec.max_prompt} leaves no room for an answer in dpo.max_length={spec.max_length}"
            )
            findings.append(Finding("error", f"{problem}: pairs with a long prompt are all dropped"))
        if spec.max_length > self.model.max_positions:
            trained = f"the model was trained on {self.model.max_positions:,} positions"
            findings.append(Finding("error", f"dpo.max_length={spec.max_length}: {trained}; lower it"))
        if self.outline:
            location = frozen_models.cached(self.cfg, self.llm.source)
            data = [name for name in (self.cfg.data.train, self.cfg.data.validation) if name]
            named = (source for name in data for source in row_sources.split_sources(name))
            if location is None or not all(map(row_sources.is_here, named)):
                missing = f"{' or '.join(data)} or the tokenizer is not on this machine"
                return [*findings, Finding("warning", f"rows not checked: {missing}")]
            self.location = location
        return findings + self._row_findings()

    def _row_findings(self) -> list[Finding]:
        counts, spec = self._train[0].counts, self.cfg.dpo
        total, usable, findings = counts["given"], counts["kept"], []
        lost = counts["prompt"] + counts["max_prompt"] + counts["length"]
        if lost:
            reasons = {
                f"raise dpo.max_length={spec.max_length}": counts["prompt"] + counts["length"],
                f"raise dpo.max_prompt={spec.max_prompt} or set dpo.truncation=keep_end": counts["max_prompt"],
            }
            remedies = ", ".join(f"{remedy} ({count})" for remedy, count in reasons.items() if count)
            dropped = f"{lost} of {total} training pairs are dropped as too long"
            findings.append(Finding("error" if lost > total / 2 else "warning", f"{dropped}: {remedies}"))
        if counts["prompt_cut"]:
            cut = f"{counts['prompt_cut']} of {usable} pairs have a truncated prompt"
            limits = f"dpo.max_prompt={spec.max_prompt}, dpo.max_length={spec.max_length}"
            unseen = "end" if spec.truncation == "keep_start" else "beginning"
            findings.append(Finding("warning", f"{cut} ({limits}): the model does not see its {unseen}"))
        epochs = self.cfg.train.steps * self.cfg.train.global_batch / usable
        if epochs > MANY_EPOCHS:
            repeats = f"train.steps={self.cfg.train.steps} repeats each of {usable} pairs {epochs:.0f} times"
            findings.append(Finding("warning", repeats))
        train, held_out = self._pairs
        prompts = {pairs.prompt_key(pair.prompt) for pair in train}
        shared = sum(pairs.prompt_key(pair.prompt) in prompts for pair in held_out)
        if shared:
            overlap = f"{shared:,} of {len(held_out):,} held-out pairs have a prompt that is also trained on"
            findings.append(Finding("warning", f"{overlap}: their scores measure memory; divide the data by prompt"))
        return findings


def _key(pair: Pair) -> bytes:
    rows = [(len(pair.prompt), np.concatenate([pair.prompt, reply])) for reply in (pair.chosen, pair.rejected)]
    flags = [np.arange(len(ids)) >= start for start, ids in rows]
    return key_of(np.concatenate([ids for _, ids in rows]), np.concatenate(flags))


def _answer_keys(rng: jax.Array, index: jax.Array) -> jax.Array:
    """Returns the keys [2 b] of all answers: functions of the step and the pair, independent of the batch."""
    return jax.vmap(lambda number: jax.random.split(jax.random.fold_in(rng, number), 2))(index).reshape(-1)


def _scored(fields: Tree) -> jax.Array:
    """Returns f32[b 2 t-1]: 1 at positions whose next token belongs to the answer."""
    return (fields["completion"] & fields["mask"])[:, :, 1:].astype(jnp.float32)
