"""Recipe `ttt`: trains a Test-Time-Training language model on text; nothing is frozen."""

import dataclasses
import functools
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from lw_jax.core import precision
from lw_jax.core import rng as rngs
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.progress import phase
from lw_jax.core.types import LossTerms, Task, Tree
from lw_jax.data import corpus, documents, row_sources
from lw_jax.data.corpus import Span, TextTokenizer, WarmupSchedule, Windows
from lw_jax.data.examples import spread
from lw_jax.data.tokens import ByteTokenizer, Tokenizer, byte_backend, load_tokenizer, wrap
from lw_jax.evals import ngrams
from lw_jax.hub import sources, weights
from lw_jax.losses import chunked
from lw_jax.models import decoder, ttt
from lw_jax.training.recipe import Finding, Recipe, Weights
from sharding import rules, shards, tables
from sharding.placement import Placement

NAME = "lm"  # of the model, among the readers of a placement and of a batch
INNER_START = {"linear": 1.0, "mlp": 0.1}  # of the inner rate at step 0, even to 1 over optim.warmup_steps
BASELINE_TOKENS = 1 << 26  # of the training text, for the n-gram counts
BASELINE_PIECE = 1 << 12  # tokens one behind the other among them
INNER = ("first", "before", "after")  # fast weights for the inner loss of a chunk's last token
UNSTABLE = 1.0  # inner rate from which on an inner MLP diverged; of 0.01, 0.1, 1 and 10 the authors took 0.1
MANY_EPOCHS = 4  # beyond it tokens that are read again teach little (Muennighoff et al. 2023)


class TTT(Recipe):
    """See `training.recipe.Recipe`. Trainable: the tree of `models/ttt.py`; frozen: {"lm": {}}."""

    decays_all = True  # as the authors train

    def __init__(self, cfg: Config, placed: Placement, *, outline: bool = False):
        """Describes the model; an `outline` needs no text and, where ttt.vocab is set, no tokenizer."""
        super().__init__(cfg, placed, outline=outline)
        self.model = _model(cfg, self._vocab())

    @staticmethod
    def reader_bytes(cfg: Config) -> dict[str, int]:
        del cfg
        return {NAME: 0}

    @property
    def unit(self) -> tuple[str, int]:
        return "tokens", self.cfg.ttt.length * self.cfg.ttt.segments

    def _vocab(self) -> int:
        spec = self.cfg.ttt
        if spec.tokenizer == "bytes":
            return ByteTokenizer().vocab
        if spec.vocab and self.outline:
            return spec.vocab
        vocab = self.tokenizer.vocab
        if spec.vocab not in (0, vocab):
            raise UserError(
                f"config.ttt.vocab = {spec.vocab}: the tokenizer {spec.tokenizer} has {vocab} tokens; leave it 0"
            )
        return vocab

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | ByteTokenizer:
        name = self.cfg.ttt.tokenizer
        return (
            ByteTokenizer() if name == "bytes" else load_tokenizer(sources.locate(name, files=sources.TOKENIZER_FILES))
        )

    def reader_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer as a model folder stores it, with the same ids."""
        return wrap(byte_backend()) if isinstance(self.tokenizer, ByteTokenizer) else self.tokenizer

    # --- weights

    @functools.cached_property
    def abstract(self) -> Weights:
        return Weights(ttt.abstract(self.model), {NAME: {}})

    @functools.cached_property
    def shardings(self) -> Weights:
        over = self.placement.readers[NAME].table == "fsdp"
        table = tables.LEARNER_FSDP if over else tables.TRAINABLE
        shapes = self.abstract.trainable
        return Weights(rules.shardings(table, shapes, self.placement.learner, name="ttt"), {NAME: {}})

    def build(self, frozen: Tree | None = None) -> Weights:
        """Initialises the weights, or loads those of ttt.source."""
        del frozen
        shardings, source = self.shardings.trainable, self.cfg.ttt.source
        if not source:
            init = jax.jit(lambda key: ttt.init(key, self.model), out_shardings=shardings)
            return Weights(init(rngs.stream(self.cfg.seed, "ttt")), {NAME: {}})
        location = sources.locate(source)
        stored = weights.describe_ttt(location)
        expected = dataclasses.replace(self.model, rows=0)  # a file has no padding rows
        if stored != expected:
            raise UserError(f"config.ttt.source = {source!r} is {stored}, the configuration describes {expected}")
        theirs = load_tokenizer(location) if (location / "tokenizer.json").is_file() else None
        if theirs and theirs.backend.get_vocab() != self.reader_tokenizer().backend.get_vocab():
            raise UserError(
                f"config.ttt.source = {source!r} was trained with another tokenizer than config.ttt.tokenizer = "
                f"{self.cfg.ttt.tokenizer!r}; name the source's own"
            )
        fill = jax.jit(functools.partial(ttt.fill_tables, self.model), out_shardings=shardings)
        return Weights(fill(weights.load_ttt(location, shardings=shardings)), {NAME: {}})

    def load_frozen(self) -> Tree:
        return {NAME: {}}

    # --- data

    def data_schedule(self) -> WarmupSchedule:
        """Returns the windows of the training text, in another order each epoch."""
        spec = self.cfg.ttt
        train = _refuse_empty(Windows(self._spans[0], self.unit[1], NAME))
        return WarmupSchedule.of(train, warmup=self.cfg.optim.warmup_steps, start=INNER_START[spec.inner])

    def validation(self) -> list[tuple[str, Windows]]:
        """Returns the held-out windows with the unigram and bigram baselines of the training text."""
        train, held_out = self._spans
        # From all over the text, whose parts may differ; every tenth piece is for the bigram's discount, not counted.
        size = min(BASELINE_PIECE, max(2, len(train) // 10))
        starts = [train.start + size * i for i in spread(len(train) // size, BASELINE_TOKENS // size)]
        counted, tune = (
            train.corpus.rows(part, size).ravel()
            for part in ([start for i, start in enumerate(starts) if i % 10], starts[::10])
        )
        with phase("counting pairs of tokens for the bigram baseline"):
            baseline = ngrams.fit(counted, self.model.vocab, tune=tune)
        return [("", _refuse_empty(Windows(held_out, self.unit[1], NAME, extra=baseline.nll, measure=True)))]

    @functools.cached_property
    def _spans(self) -> tuple[Span, Span]:
        data = self.cfg.data
        tokenizer = cast(TextTokenizer, self.tokenizer)  # a cached property is no property to a type checker
        root, columns = sources.cache_root(), data.columns
        if data.validation:
            row_sources.check_apart(data.train, data.validation, beside=documents.PLAIN)
        whole = corpus.pack(data.train, tokenizer, root=root, columns=columns)
        if not data.validation:
            return whole.split(data.held_out, length=self.unit[1])
        held_out = corpus.pack(data.validation, tokenizer, root=root, split="validation", columns=columns)
        return Span(whole, 0, whole.tokens), Span(held_out, 0, held_out.tokens)

    # --- loss

    def loss(self, trainable: Tree, frozen: Tree, batch: Tree, rng: jax.Array) -> LossTerms:
        """Returns the summed next-token cross-entropy over every token of the windows, in nats."""
        del frozen, rng
        fields = batch["readers"][NAME]
        ids, measured = fields["ids"], fields["task"] == Task("measure")
        # The only label shift: a position's logits predict the next token.
        out = self._read(trainable, ids[:, :-1], fields["rate"], measured=measured)
        chunk = chunked.positions(
            self.cfg.compute.logits_chunk, rows=len(ids), data=shards.row_devices(self.placement.learner)
        )
        table = decoder.head(trainable)
        targets = ids[:, 1:]
        counted = jnp.broadcast_to(fields["weights"], targets.shape)
        factors = self._mode(measured).precision.factors
        vocab = self.model.vocab if self.model.rows else 0  # the table's rows beyond it are padding
        total, nll = chunked.summed_nll(out.hidden, table, targets, counted, chunk=chunk, vocab=vocab, factors=factors)
        terms = self._details(out, nll, counted, fields) if measured else {}
        return LossTerms(total, jnp.sum(counted), terms)

    def _read(self, params: Tree, ids: jax.Array, rate: jax.Array, *, measured: bool) -> ttt.Output:
        """Runs the model over a window; fast weights carry over from segment to segment."""
        spec, mode = self.cfg.ttt, self._mode(measured)
        if spec.segments == 1 or measured:  # measured: one text, whose states carry over anyway
            return ttt.forward(params, self.model, ids, rate=rate, mode=mode)
        rows = ids.shape[0]
        pieces = jnp.moveaxis(ids.reshape(rows, spec.segments, spec.length), 1, 0)

        def body(memory: ttt.Memory, piece: jax.Array):
            out = ttt.forward(params, self.model, piece, rate=rate, memory=memory, mode=mode)
            assert out.cache is not None, "a memory was given"
            return jax.lax.stop_gradient(out.cache.memory), out.hidden

        begin = ttt.beginning(params, self.model, rows, mode.precision.values)
        _, hidden = jax.lax.scan(body, begin, pieces)
        return ttt.Output(jnp.moveaxis(hidden, 0, 1).reshape(rows, ids.shape[1], -1), None, None)

    def _details(self, out: ttt.Output, nll: jax.Array, counted: jax.Array, fields: Tree) -> dict:
        """Returns the baselines, the inner losses and the loss by position, each as (sum, weight)."""
        rows, weight = fields["weights"][:, 0], jnp.sum(counted)
        details = {f"nll/{name}": (jnp.sum(fields[name] * rows), weight) for name in ("unigram", "bigram")}
        assert out.losses is not None, "the mode measures them"
        if out.losses.shape[1]:  # a text shorter than a chunk has none
            inner = jnp.mean(out.losses, axis=(0, 1, 3)) * rows[:, None]
            details |= {f"inner/{name}": (jnp.sum(inner[:, i]), jnp.sum(rows)) for i, name in enumerate(INNER)}
        length, first = nll.shape[1], 0
        while first < length:  # positions 1, 2, 3 to 4, 5 to 8, ...
            last = min(max(1, 2 * first), length)
            counts = counted[:, first:last]
            name = f"detail/position/{first + 1}-{last}"
            details[name] = (jnp.sum(nll[:, first:last] * counts), jnp.sum(counts))
            first = last
        return details

    def _mode(self, measured: bool) -> ttt.Mode:
        spec = self.cfg.ttt
        return ttt.Mode(
            precision.of(self.cfg.compute.dtype, self.placement.platform),
            form=spec.form,
            remat=self.cfg.compute.remat,
            constrain=shards.keep_rows(self.placement.learner),
            local=shards.by_rows(self.placement.learner),
            measured=measured,
        )

    # --- identity

    def identity(self) -> dict[str, str]:
        return {"tokenizer": self.tokenizer.fingerprint}

    def content(self) -> dict[str, str]:
        """Returns the names of the packed texts: hashes of their bytes and tokens."""
        train, held_out = self._spans
        return {"train": train.corpus.folder.name, "validation": held_out.corpus.folder.name}

    # --- preflight

    def findings(self) -> list[Finding]:
        """Returns problems of the inner rate and, at a start, which has the text, of its length."""
        findings, spec, train = [], self.cfg.ttt, self.cfg.train
        if spec.inner == "mlp" and spec.inner_rate >= UNSTABLE:
            problem = f"ttt.inner_rate={spec.inner_rate:g} suits ttt.inner=linear"
            findings.append(Finding("warning", f"{problem}: an inner MLP may diverge; the authors take 0.1"))
        if self.outline:
            return findings
        ((windows, _),) = self.data_schedule().phases[0].streams
        epochs = train.steps * train.global_batch / len(windows)
        if epochs > MANY_EPOCHS:
            repeats = f"train.steps={train.steps} reads each of {len(windows):,} windows {epochs:.1f} times"
            findings.append(Finding("warning", f"{repeats}: beyond {MANY_EPOCHS} little is learned; give more text"))
        return findings

    # --- planning

    def batch_widths(self) -> Tree:
        fields = {
            "ids": jax.ShapeDtypeStruct((self.unit[1] + 1,), np.int32),
            "weights": jax.ShapeDtypeStruct((1,), np.float32),
            "rate": jax.ShapeDtypeStruct((), np.float32),
            "task": Task("train"),
        }
        return {"source": {}, "readers": {NAME: fields}, "index": jax.ShapeDtypeStruct((), np.int32)}

    def validation_widths(self) -> Tree:
        """Returns one held-out window as shapes: it is measured beside its baselines."""
        widths, scalar = self.batch_widths(), jax.ShapeDtypeStruct((), np.float32)
        fields = widths["readers"][NAME] | {"task": Task("measure"), "unigram": scalar, "bigram": scalar}
        return widths | {"readers": {NAME: fields}}


def _refuse_empty(windows: Windows) -> Windows:
    if not len(windows):
        raise UserError(
            f"{windows.span.corpus.source}: {len(windows.span)} tokens, fewer than a window of {windows.length} + 1; "
            "give more text, or lower config.ttt.length or ttt.segments"
        )
    return windows


def _model(cfg: Config, vocab: int) -> ttt.TTTConfig:
    spec, mamba = cfg.ttt, cfg.ttt.backbone == "mamba"
    rows = -(-vocab // spec.table_multiple) * spec.table_multiple
    return ttt.TTTConfig(
        vocab=vocab,
        width=spec.width,
        layers=spec.layers,
        heads=spec.heads,
        ffn=spec.ffn,
        inner=spec.inner,
        chunk=spec.chunk,
        base_rate=spec.inner_rate,
        pre_conv=mamba,
        share_qk=mamba,
        gate=mamba,
        rows=rows if rows > vocab else 0,
    )
