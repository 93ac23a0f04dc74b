"""What recipes of wires share: the frozen readers, the data of their stages, and the loss of a reader's answers."""

import dataclasses
import functools
import operator
from collections.abc import Mapping
from pathlib import Path

import jax

from lw_jax.core.types import SHARED, Example, LossTerms, Tree
from lw_jax.data import examples, prompt_tokens, question_cards, tokens
from lw_jax.data.batches import Encoded, one_context
from lw_jax.data.data_schedule import DataSchedule
from lw_jax.data.tokens import Tokenizer, load_tokenizer
from lw_jax.hub import weights
from lw_jax.losses import chunked, objectives
from lw_jax.models import decoder
from lw_jax.models.wire import Reader, Wire
from lw_jax.recipes import frozen_models
from lw_jax.recipes.curriculum import Curriculum
from lw_jax.training import preflight
from lw_jax.training.recipe import Finding, Recipe
from sharding import shards


class WireReaders(Recipe):
    """What recipes of wires have in common: the readers of a configuration on a placement."""

    has_branches = True
    wire: Wire
    layout: prompt_tokens.Layout
    curriculum: Curriculum
    reader_bytes = staticmethod(frozen_models.reader_bytes)

    @functools.cached_property
    def locations(self) -> dict[str, Path]:
        return {name: frozen_models.locate(self.cfg, llm.source, llm.sha256) for name, llm in self.cfg.llms.items()}

    @functools.cached_property
    def tokenizers(self) -> dict[str, Tokenizer]:
        return {name: load_tokenizer(location) for name, location in self.locations.items()}

    def _abstract_readers(self) -> Tree:
        return {
            name: frozen_models.describe(reader.config, self.cfg, self.cfg.llms[name], self.placement.platform)
            for name, reader in self.wire.readers.items()
        }

    def _reader_shardings(self) -> Tree:
        shapes = self.abstract.frozen
        return {
            name: frozen_models.shardings(shapes[name], self.cfg.llms[name], component, name)
            for name, component in self.placement.readers.items()
        }

    def _load_readers(self, shardings: Tree) -> Tree:
        return {
            name: frozen_models.load(location, self.cfg, self.cfg.llms[name], shardings[name], self.placement.platform)
            for name, location in self.locations.items()
        }

    def _make_readers(self, *, kind: str) -> dict[str, Reader]:
        cfg, readers = self.cfg, {}
        for name, component in self.placement.readers.items():
            llm, stops = cfg.llms[name], ()
            if self.outline:
                shapes = frozen_models.outline(cfg, llm.source, parts=component.parts)
            else:
                shapes, stops = weights.describe(self.locations[name]), tuple(self.tokenizers[name].stops)
            readers[name] = Reader(
                shapes,
                cfg.adapter.hidden,
                stops,
                frozen_models.mode(cfg, component.mesh, frozen_models.precision_of(cfg, llm, self.placement.platform)),
                unstacked=cfg.eval.layers == "unstacked",
                kind=kind,
                constrain=shards.keep_heads(component.mesh, heads=shapes.kv_heads, split=component.table == "tensor"),
            )
        return readers

    # --- data

    def _make_layout(self, *, source: prompt_tokens.AnyTokenizer, **sizes: int) -> prompt_tokens.Layout:
        """Returns the settings that determine an example's token ids; `prompt_tokens.Layout` has their meanings."""
        cfg = self.cfg
        return prompt_tokens.Layout(
            prompt=cfg.prompt,
            readers={name: prompt_tokens.Reader(self.tokenizers[name], llm.template) for name, llm in cfg.llms.items()},
            source=source,
            data=cfg.data,
            ratio=cfg.encoder.ratio,
            **sizes,
        )

    def identity(self) -> dict[str, str]:
        tokenizers = {
            f"tokenizers/llms/{name}": tokens.identify(tokenizer, template=self.cfg.llms[name].template)
            for name, tokenizer in self.tokenizers.items()
        }
        return {f"llms/{name}": weights.fingerprint(location) for name, location in self.locations.items()} | tokenizers

    def questions(self, split: examples.Split, *, least: int = 0) -> list[Example]:
        """Returns the questions of "train" or "validation"; of a limited or made validation at least so many."""
        data = self.cfg.data
        made = data.validation in question_cards.STYLES
        if least > (data.validation_limit or (examples.VALIDATION_CARDS if made else least)):
            data = dataclasses.replace(data, validation_limit=least)
        return examples.load(data, split, seed=self.cfg.seed)

    def data_schedule(self) -> DataSchedule:
        return self.curriculum.data_schedule()

    def validation(self) -> list[tuple[str, Encoded]]:
        return self.curriculum.validation()

    def collapse(self, step: int, values: Mapping[str, float]) -> str:
        return self.curriculum.collapse(step, values)

    def longest_prompts(self) -> dict[str, int]:
        """Returns the most positions that a reader has in training, by the keys that limit them."""
        raise NotImplementedError

    def findings(self) -> list[Finding]:
        """Returns findings on the held-out texts and on prompts beyond a reader's trained positions."""
        limits = {name: reader.config.max_positions for name, reader in self.wire.readers.items()}
        beyond = [
            Finding(
                "warning", f"reader {name!r}: {keys} allow {needed:,} positions, it was trained on {most:,}; lower them"
            )
            for name, most in limits.items()
            for keys, needed in self.longest_prompts().items()
            if needed > most
        ]
        # An outline reads no data.
        return beyond if self.outline else self._shared_texts() + self._missed_collapse() + beyond

    def _shared_texts(self) -> list[Finding]:
        """Returns a warning where held-out texts are among those of training."""
        named, least = self.curriculum.examples("validation"), self.cfg.eval.examples
        if 0 < self.cfg.data.validation_limit < least:  # `eval` measures others
            named = [*named, *self.questions("validation", least=least)]
        held_out = {example.context for example in named}
        trained = {
            "train": {example.context for example in self.curriculum.examples("train")},
            "passages": set(self.curriculum.passages),
        }
        shared = {key: len(texts & held_out) for key, texts in trained.items()}
        if not any(shared.values()):
            return []
        where = " and ".join(f"{count:,} in config.data.{key}" for key, count in shared.items() if count)
        what = f"of {len(held_out):,} texts of config.data.validation are also {where}"
        remedy = "scores of them measure memory; divide the data by text, not by question"
        return [Finding("warning", f"{what}: {remedy}")]  # a copy is how one tries whether a wire can overfit

    def _missed_collapse(self) -> list[Finding]:
        """Returns a warning where there is no other text from whose message held-out questions could be answered."""
        held_out = self.curriculum.examples("validation")
        if not held_out or not one_context(held_out) or not preflight.alarm_step(self.cfg.train):
            return []
        lost = f"it cannot fire in answers, as all {len(held_out):,} held-out questions are about one text"
        setting = f"train.alarm_step={self.cfg.train.alarm_step}"
        return [Finding("warning", f"{setting}: {lost}; a collapsed run is not stopped")]

    # --- loss

    def loss(self, trainable: Tree, frozen: Tree, batch: Tree, rng: jax.Array) -> LossTerms:
        """Returns the terms of one pass per reader; the objective is the mean over all readers' answer tokens."""
        shared = self.share(trainable, batch["source"], rng, frozen.get(SHARED))
        branches = (
            self.branch(name, self.part(name, trainable), frozen[name], batch["readers"][name], shared, rng)
            for name in self.wire.readers
        )
        return functools.reduce(operator.add, branches)

    def measure(
        self, frozen: Tree, name: str, states: jax.Array, fields: Tree, teacher_states: jax.Array | None = None
    ) -> LossTerms:
        """Returns a reader's loss terms from the hidden states [b t d] of its answers, and those of its teacher."""

        def piece(head: Tree, states: jax.Array, constants: Tree) -> LossTerms:
            fields, teacher_states = constants
            teacher = None if teacher_states is None else decoder.logits(head, teacher_states)
            return objectives.total(self.cfg.loss, name, decoder.logits(head, states), fields, teacher)

        rows, length, _ = states.shape
        data = shards.row_devices(self.placement.readers[name].mesh)
        pieces = chunked.pieces(self.cfg.compute.logits_chunk, rows=rows, length=length, data=data)
        head, constants = {"head": decoder.head(frozen)}, (fields, teacher_states)
        return chunked.sum_of_pieces(piece, head, states, constants, pieces=pieces)
