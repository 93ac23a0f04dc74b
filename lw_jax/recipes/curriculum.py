"""Batches of the wire's stages: tasks, passage lengths, message shapes; and the held-out sets."""

import functools
import itertools
from collections.abc import Callable, Mapping

import numpy as np

from lw_jax.core import config
from lw_jax.core.config import Config
from lw_jax.core.types import Example
from lw_jax.data import batches, examples, passages
from lw_jax.data.batches import Encoded, one_context
from lw_jax.data.data_schedule import DataSchedule, Phase, Stream
from lw_jax.data.packing import Packed
from lw_jax.data.prompt_tokens import Layout
from lw_jax.losses import objectives

GAP = 0.05  # nats an answer token: a smaller NLL gap of another text's latents is a collapse


def longest_passage(cfg: Config) -> int:
    """Returns the longest passage of any stage in tokens; 0 without passages."""
    return max((length for _, stage, _ in config.stages(cfg) for length in stage.lengths), default=0)


def encoder_rates(cfg: Config) -> dict[str, tuple[float, ...]]:
    """Returns each encoder part's learning rate multiple in each stage; 0 where it is frozen."""
    stages = [0.0 if cfg.encoder.run else stage.encoder for _, stage, _ in config.stages(cfg)]
    body = cfg.encoder.rate if cfg.encoder.kind != "bytes" else 1.0
    learned = "lora" if cfg.encoder.rank else "body"
    return {learned: tuple(body * rate for rate in stages), "head": tuple(stages)}


class Curriculum:
    """Data sets of a run's stages, each tokenised once."""

    def __init__(self, cfg: Config, layout: Layout, complete: Callable[[Encoded], Encoded], rows: tuple[str, ...] = ()):
        """Prepares the stages; `complete` takes each data set, that of questions with the prompts that `rows` names."""
        self.cfg, self.layout, self.stages = cfg, layout, config.stages(cfg)
        self._complete, self._rows = complete, rows
        self.stream = functools.cache(self._stream)
        self._trained = functools.cache(self._group)
        self.examples = functools.cache(self._examples)
        self._starts = functools.cache(self._read_starts)

    def data_schedule(self) -> DataSchedule:
        """Returns the batches of all stages in order; a stage's passage lengths get equal parts of it."""
        phases, rates = [], {part: each for part, each in encoder_rates(self.cfg).items() if any(each)}
        for number, (_, stage, steps) in enumerate(self.stages):
            frozen = tuple(part for part, each in rates.items() if not each[number])
            lengths = stage.lengths or (0,)
            ends = [round(steps * part / len(lengths)) for part in range(len(lengths) + 1)]
            for length, (begin, end) in zip(lengths, itertools.pairwise(ends), strict=True):
                if end == begin:
                    continue
                streams = tuple((self._trained(task, length), weight) for task, weight in stage.tasks.items())
                sizes = (stage.slots, stage.ratios, stage.widths, stage.bits)
                phases.append(Phase(end - begin, streams, *sizes, frozen))
        return DataSchedule(tuple(phases))

    def validation(self) -> list[tuple[str, Encoded]]:
        """Returns (metric prefix, examples): each task's held-out ones, then the same with other examples' sources.

        The first is the heaviest task of the last stage. Where all are about one text there is no other source.
        """
        length = longest_passage(self.cfg)
        held_out = [self.stream("validation", task, length) for task in config.tasks(self.cfg)]
        several = [encoded for encoded in held_out if not one_context(encoded.examples)]
        return [("", encoded) for encoded in held_out] + [("shuffled/", encoded.shuffled()) for encoded in several]

    def collapse(self, step: int, values: Mapping[str, float]) -> str:
        """Returns a message where another text's latents serve every reader as well; else an empty string.

        `values` are a validation's; only the tasks of the step's stage count.
        """
        ends = list(itertools.accumulate(steps for _, _, steps in self.stages))
        stage = next(stage for (_, stage, _), end in zip(self.stages, ends, strict=True) if step <= end)
        labels = ["" if task == "answer" else f"{task}/" for task in stage.tasks]
        names = [f"{label}nll/{name}" for label in labels for name in self.cfg.llms]
        gaps = {name: values[f"shuffled/{name}"] - values[name] for name in names if f"shuffled/{name}" in values}
        if not gaps or not all(gap < GAP for gap in gaps.values()):  # NaN is a divergence, no collapse
            return ""
        readers = ", ".join(f"{name} {values[name]:.3f} (another text's: {gap:+.3f})" for name, gap in gaps.items())
        why = "shuffled latents score as well as the right ones: the latents are ignored"
        return f"collapse at step {step}: {why}: {readers}"

    def _group(self, task: str, length: int) -> Stream:
        """Returns what is trained on: the questions of one text packed where the configuration says so."""
        encoded, tokens = self.stream("train", task, length), self.cfg.data.packed_tokens
        return Packed(encoded, tokens) if task == "answer" and tokens else encoded

    def _stream(self, split: examples.Split, task: str, length: int) -> Encoded:
        if task != "answer":
            return self._complete(passages.encode(self._passages(split, task, length), layout=self.layout, task=task))
        rows, loss = self._rows, self.cfg.loss
        if objectives.needs_teacher(loss, task):
            # one pass reads the context and all packed questions behind it
            packed = split == "train" and self.cfg.data.packed_tokens and not loss.teacher_k
            rows = ("context",) if packed else ("text",)
        return self._complete(batches.encode(self.examples(split), layout=self.layout, rows=rows))

    def _passages(self, split: examples.Split, task: str, length: int) -> list[Example]:
        named = self.passages if split == "train" else []
        documents = named or [example.context for example in self.examples(split)]
        make = passages.reconstructions if task == "reconstruct" else passages.continuations
        return make(documents, length, self._starts)

    def _read_starts(self, document: str) -> np.ndarray:
        """Returns i32[t], where the tokens of the first reader begin, in which passages of all lengths are counted."""
        return np.array(next(iter(self.layout.readers.values())).tokenizer.starts(document), np.int32)

    @functools.cached_property
    def passages(self) -> list[str]:
        """Returns the texts of data.passages where a stage has passages; else none."""
        data = self.cfg.data
        return passages.read(data.passages, data.columns) if data.passages and longest_passage(self.cfg) else []

    def _examples(self, split: examples.Split) -> list[Example]:
        return examples.load(self.cfg.data, split, seed=self.cfg.seed)
