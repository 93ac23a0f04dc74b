"""Tiny readers that the project trains itself on question cards, then freezes: real reading without a download.

Two families with vocabularies of their own, saved as ordinary model folders, so that everything after them runs the
code that runs for Llama and Qwen.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from lw_jax.core import config, precision
from lw_jax.core import rng as rngs
from lw_jax.core.config import Config
from lw_jax.core.errors import UserError
from lw_jax.core.files import content_hash, locked
from lw_jax.core.progress import phase
from lw_jax.core.types import Example, LossTerms, Tree
from lw_jax.data import batches, examples, prompt_tokens, question_cards
from lw_jax.data.data_schedule import DataSchedule
from lw_jax.data.tokens import load_tokenizer, marked
from lw_jax.hub import sources, weights
from lw_jax.losses import token_losses
from lw_jax.models import decoder, wire
from lw_jax.training.recipe import Recipe, Weights
from lw_jax.training.trainer import Run
from sharding import mesh as meshes
from sharding import placement, rules, tables

FORMAT = 4  # raised when what is trained changes, so that old folders are not taken up
CARDS = 16384
LAYERS, WIDTH, HEADS, KV_HEADS = 2, 128, 4, 2  # of a reader
POSITIONS = 1024  # that a reader learns; longer cards are left out
TEXT_WEIGHT = 0.2  # of a token that is not the answer's, in the loss
# Muon learns to look a value up in a third of Adam's steps; rate and warm-up are the configuration's.
OPTIM = config.Optim(
    kind="muon",
    learning_rate=0.0,
    warmup_steps=0,
    end_fraction=0.1,
    weight_decay=0.01,
    clip_norm=1.0,
    b2=0.99,
)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Size and special tokens of a tokenizer that is trained here."""

    vocab: int  # of its byte-level BPE
    begin: str  # BOS text; empty: none
    end: str
    pad: str


@dataclasses.dataclass(frozen=True)
class Family(Vocabulary):
    """Tokenizer and model family of one self-made reader."""

    qkv_bias: bool
    rope_theta: float


FAMILIES = {
    "llama": Family(1024, "<s>", "</s>", "<pad>", False, 10000.0),
    "qwen2": Family(640, "", "<|im_end|>", "<|endoftext|>", True, 1e6),
}


def family(source: str) -> str:
    """Returns "llama" or "qwen2" for "selfmade:llama" or "selfmade:qwen"."""
    name = {"llama": "llama", "qwen": "qwen2"}.get(source.removeprefix(sources.SELFMADE))
    if name is None:
        raise UserError(f"source {source!r}: self-made readers are {sources.SELFMADE}llama and {sources.SELFMADE}qwen")
    return name


def style(cfg: Config) -> str:
    """Returns which kind of cards these readers learn to read: the run's own, where it has any."""
    return cfg.data.train if cfg.data.train in question_cards.STYLES else question_cards.STYLES[0]


def folder(cfg: Config, source: str) -> Path:
    """Returns where this reader's folder belongs: one per training, prompt and cards."""
    training, prompt = dataclasses.asdict(cfg.selfmade), dataclasses.asdict(cfg.prompt)
    name = content_hash([FORMAT, family(source), training, prompt, cfg.data.facts, style(cfg)], size=8)
    return sources.cache_root() / "selfmade" / f"{family(source)}-{name}"


def finished_folder(cfg: Config, source: str) -> Path:
    path = folder(cfg, source)
    if not _is_made(path):
        raise UserError(f"source {source!r}: no finished reader in {path}; `python run.py` with this config makes it")
    return path


def decoder_config(cfg: Config, source: str) -> decoder.DecoderConfig:
    kind = FAMILIES[family(source)]
    return decoder.DecoderConfig(
        vocab=kind.vocab,
        width=WIDTH,
        layers=LAYERS,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=WIDTH // HEADS,
        ffn=2 * WIDTH,
        rope_theta=kind.rope_theta,
        norm_eps=1e-6,
        max_positions=POSITIONS,
        tied=False,
        qkv_bias=kind.qkv_bias,
    )


def make_readers(cfg: Config) -> None:
    """Trains and saves the self-made readers that the configuration names and the cache lacks; of two jobs one does.

    Raises UserError where several processes would have to.
    """
    named = {llm.source for llm in cfg.llms.values()} | {cfg.encoder.source}
    readers = (source for source in named if source.startswith(sources.SELFMADE))
    missing = sorted(source for source in readers if not _is_made(folder(cfg, source)))
    if missing and jax.process_count() > 1:
        where = f"source {missing[0]!r}: no finished reader in {folder(cfg, missing[0])}"
        raise UserError(
            f"{where}, and {jax.process_count()} processes cannot make one together; run the command once in one "
            "process, which makes the readers before it trains, with LW_JAX_CACHE naming a folder that all of them see"
        )
    if missing:
        for split in ("train", "validation"):  # a broken row is reported now, not after minutes of making readers
            examples.load(cfg.data, split, seed=cfg.seed)
    for source in missing:
        _make(_training_config(cfg), source)


def _make(cfg: Config, source: str) -> None:
    path = folder(cfg, source)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f"{path.name}.lock")
    with locked(lock, waiting=lambda: print(f"reader {source}: waiting for another job that trains it", flush=True)):
        if _is_made(path):
            return
        print(f"reader {source}: trained here once ({cfg.train.steps:,} steps), then frozen", flush=True)
        with phase(f"making cards and a tokenizer for reader {source}"):
            recipe = SelfmadeReader(cfg, source=source)
        run = Run(cfg, recipe, None, None, quiet=True)
        with phase(f"training reader {source}", cfg.train.steps, "steps") as done:
            run.train(lambda step: bool(done.advance()))
        recipe.save(run.state["trainable"])
        right = run.reporter.last["accuracy/answer"]
        print(f"reader {source}: made; in its last steps it had {right:.1%} of the answers' tokens right", flush=True)


def _is_made(path: Path) -> bool:
    return (path / "config.json").exists()  # written last


def _training_config(cfg: Config) -> Config:
    """Returns the configuration of the readers' own training: one stage, seed 0, the steps of `cfg.selfmade`."""
    spec = cfg.selfmade
    return dataclasses.replace(
        cfg,
        seed=0,
        stages=config.Stages(),
        train=dataclasses.replace(
            cfg.train, steps=spec.steps, global_batch=spec.batch, micro_batch=0, log_every=10, eval_every=0
        ),
        optim=dataclasses.replace(OPTIM, learning_rate=spec.learning_rate, warmup_steps=spec.steps // 10),
    )


class SelfmadeReader(Recipe):
    """Trains one reader to answer from the text prompt. See `training.recipe.Recipe`; nothing is frozen."""

    def __init__(self, cfg: Config, *, source: str):
        kind = FAMILIES[family(source)]
        self.family = family(source)
        limits = dict.fromkeys(("context_tokens", "question_tokens", "answer_tokens"), POSITIONS)
        data = config.Data(
            train=style(cfg), validation=style(cfg), cards=CARDS, facts=cfg.data.facts, overlong="drop", **limits
        )
        # One reader whatever the run's seed, limits, packing and arithmetic: the folder's name knows nothing of them.
        own = dataclasses.replace(cfg, seed=0, compute=config.Compute(), data=data)
        super().__init__(own, placement.one_mesh(meshes.make(data=1, model=1), ["reader"]))
        self.config = decoder_config(cfg, source)
        self.folder = folder(cfg, source)
        self.examples = examples.load(self.cfg.data, "train", seed=self.cfg.seed)
        write_tokenizer(self.folder, kind, [f"{e.context} {e.question} {e.answers[0]}" for e in self.examples])
        self.tokenizer = load_tokenizer(self.folder)
        dtypes = precision.of(self.cfg.compute.dtype, self.placement.platform)
        self.wire = wire.Wire(
            wire.EncoderSpec(1, 1, "windows", 0, 1, None),
            {"reader": wire.Reader(self.config, 1, tuple(self.tokenizer.stops), decoder.Mode(factors=dtypes.factors))},
        )

    @functools.cached_property
    def abstract(self) -> Weights:
        return Weights(decoder.abstract(self.config, jnp.float32), {})

    @functools.cached_property
    def shardings(self) -> Weights:
        return Weights(
            rules.shardings(tables.TRAINABLE, self.abstract.trainable, self.placement.learner, name="selfmade"), {}
        )

    def build(self, frozen: Tree | None = None) -> Weights:
        init = jax.jit(
            lambda key: decoder.init(key, self.config, jnp.float32, scale=0.05),
            out_shardings=self.shardings.trainable,
        )
        return Weights(init(rngs.stream(self.cfg.seed, f"selfmade/{self.family}")), {})

    def load_frozen(self) -> Tree:
        return {}

    def data_schedule(self) -> DataSchedule:
        return DataSchedule.of(self.encode(self.examples))

    def encode(self, cards: Sequence[Example]) -> batches.Encoded:
        """Returns whole cards as one sequence: its first token is the prompt, all others with the answer the target.

        Predicting the question's words teaches copying from the text, without which the answer is learned late; a card
        that answers several questions is asked all of them, which teaches looking up several times as fast.
        """
        layout = prompt_tokens.Layout(
            prompt=self.cfg.prompt,
            readers={"reader": prompt_tokens.Reader(self.tokenizer, "plain")},
            source=self.tokenizer,
            window=self.cfg.data.context_tokens,
            windows=1,
            slots=1,
            width=1,
            data=self.cfg.data,
        )
        encoded = batches.encode(cards, layout=layout, rows=("text",))
        text, answer = (encoded.readers["reader"][key] for key in ("text", "answer"))
        more = self._ask_all(encoded.examples, layout)
        targets = [np.concatenate([t[1:], a, m]) for t, a, (m, _) in zip(text.ids, answer.ids, more, strict=True)]
        scored = [
            np.concatenate([np.zeros(len(t) - 1, np.int32), np.ones(len(a), np.int32), s])
            for t, a, (_, s) in zip(text.ids, answer.ids, more, strict=True)
        ]
        whole = {
            "before": batches.Field([ids[:1] for ids in text.ids], 1, text.pad, left=True),
            "answer": batches.field(targets, answer.pad, left=False),
            "scored": batches.field(scored, 0, left=False),
        }
        return dataclasses.replace(encoded, readers={"reader": whole})

    def _ask_all(self, cards: Sequence[Example], layout: prompt_tokens.Layout) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns, for each card, the ids of its other questions with answers, and which of them are the answers'."""
        if style(self.cfg) != "pairs":
            return [(np.zeros(0, np.int32), np.zeros(0, np.int32))] * len(cards)
        frame = prompt_tokens.make_frame("reader", layout.readers["reader"], layout.prompt)
        known: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
        for pair in {pair for example in cards for pair in question_cards.questions(example)}:
            question = self.tokenizer.encode(frame.after(pair[0]))
            answer = marked(self.tokenizer.encode(frame.gap + pair[1]), (), (frame.end,)).tolist()
            known[pair] = (question + answer, [0] * len(question) + [1] * len(answer))
        rows = []
        for example in cards:
            others = [known[pair] for pair in question_cards.questions(example) if pair[0] != example.question]
            rows.append(tuple(np.array(sum((entry[i] for entry in others), []), np.int32) for i in range(2)))
        return rows

    def loss(self, trainable: Tree, frozen: Tree, batch: Tree, rng: jax.Array) -> LossTerms:
        """Cross-entropy of every token of the card; the answers' with EOS count fully, the others by TEXT_WEIGHT."""
        del frozen, rng
        fields = batch["readers"]["reader"]
        prompt = wire.text_prompt(trainable, fields["before"])
        logits = self.wire.answer_logits(trainable, "reader", prompt, fields)
        targets, present = fields["targets"], fields["weights"]
        in_answer = fields["scored"]["ids"] == 1
        answers = jnp.where(in_answer, present, 0.0)
        total, weight = token_losses.nll(logits, targets, jnp.where(in_answer, present, TEXT_WEIGHT * present))
        terms = {
            "nll/answer": token_losses.nll(logits, targets, answers),
            "accuracy/answer": token_losses.hits(logits, targets, answers),
        }
        return LossTerms(total, weight, terms)

    def save(self, trainable: Tree) -> None:
        """Writes the trained reader as a model folder; its presence marks the reader as made."""
        weights.save(self.folder, trainable, self.config, model_type=self.family, tokenizer=self.tokenizer.backend)


def write_tokenizer(path: Path, kind: Vocabulary, texts: Sequence[str]) -> None:
    """Trains a byte-level BPE on the texts and writes it as a fast tokenizer."""
    from transformers import PreTrainedTokenizerFast

    specials = [text for text in (kind.pad, kind.begin, kind.end) if text]
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=kind.vocab,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    named = {"pad_token": kind.pad, "eos_token": kind.end}
    if kind.begin:
        begin = (kind.begin, backend.token_to_id(kind.begin))
        backend.post_processor = processors.TemplateProcessing(single=f"{kind.begin} $A", special_tokens=[begin])
        named["bos_token"] = kind.begin
    path.mkdir(parents=True, exist_ok=True)
    PreTrainedTokenizerFast(tokenizer_object=backend, **named).save_pretrained(path)
