"""The wire's stages as batches: which tasks, on passages how long, sent in which shapes; and what is held out."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

from lw_jax.core import config
from lw_jax.core.config import Config, Stage
from lw_jax.core.types import TASKS, Example
from lw_jax.data import examples, passages
from lw_jax.data.batches import Encoded, Layout
from lw_jax.data.data_schedule import Course, Stretch
from lw_jax.data.tokens import Tokenizer

GAP = 0.05  # nats an answer token: a smaller NLL gap of another text's latents is a collapse


def weight_of(stage: Stage, task: str) -> float:
    """Returns a task's weight among a stage's batches."""
    return float(getattr(stage, task))


def longest_passage(cfg: Config) -> int:
    """Returns the length of the longest passage that a stage asks for, in tokens; 0 where none does."""
    asked = (stage for _, stage, _ in config.stages(cfg) if stage.reconstruct + stage.continuation)
    return max((length for stage in asked for length in stage.lengths), default=0)


def encoder_rates(cfg: Config) -> dict[str, tuple[float, ...]]:
    """Returns the learning rate's multiple of each part of the encoder in each stage; 0 where it is not trained."""
    stages = [0.0 if cfg.encoder.run else stage.encoder for _, stage, _ in config.stages(cfg)]
    body = cfg.encoder.rate if cfg.encoder.kind != "bytes" else 1.0
    return {"body": tuple(body * rate for rate in stages), "head": tuple(stages)}


class Curriculum:
    """What a run's stages read; every data set is tokenised once."""

    def __init__(
        self,
        cfg: Config,
        layout: Layout,
        tokenizers: Mapping[str, Tokenizer],
        answers: Callable[[Sequence[Example]], Encoded],
    ):
        self.cfg, self.layout, self.stages = cfg, layout, config.stages(cfg)
        self._measure = next(iter(tokenizers.values()))  # in whose tokens a passage's length is counted
        self._encode_answers = answers
        self.stream = functools.cache(self._stream)
        self.examples = functools.cache(self._examples)

    def course(self) -> Course:
        """Returns the batches of all stages in their order; a stage's passages grow in equal parts of it."""
        stretches, rates = [], {part: each for part, each in encoder_rates(self.cfg).items() if any(each)}
        for number, (_, stage, steps) in enumerate(self.stages):
            frozen = tuple(part for part, each in rates.items() if not each[number])
            growing = stage.lengths if stage.reconstruct + stage.continuation else (0,)
            ends = [round(steps * (i + 1) / len(growing)) for i in range(len(growing))]
            for length, begin, end in zip(growing, [0, *ends], ends, strict=False):
                weights = [(task, weight_of(stage, task)) for task in TASKS]
                streams = tuple((self.stream("train", task, length), weight) for task, weight in weights if weight)
                if end > begin:
                    stretches.append(Stretch(end - begin, streams, stage.slots, stage.widths, stage.bits, frozen))
        return Course(tuple(stretches))

    def validation(self) -> list[tuple[str, Encoded]]:
        """Returns (prefix of its metrics, examples): each task's held-out ones, then the same with others' sources.

        The first is the heaviest task of the last stage.
        """
        last = self.stages[-1][1]
        tasks = [task for task in TASKS if any(weight_of(stage, task) for _, stage, _ in self.stages)]
        tasks.sort(key=lambda task: -weight_of(last, task))
        length = longest_passage(self.cfg)
        found = [self.stream("validation", task, length) for task in tasks]
        return [("", encoded) for encoded in found] + [("shuffled/", encoded.shuffled()) for encoded in found]

    def collapse(self, step: int, values: Mapping[str, float]) -> str:
        """Returns what is wrong when no reader has more of its own text's latents than of another's; else nothing.

        `values` are a validation's; only the tasks of the stage that the step belongs to are asked.
        """
        ends = list(itertools.accumulate(steps for _, _, steps in self.stages))
        stage = next(stage for (_, stage, _), end in zip(self.stages, ends, strict=True) if step <= end)
        labels = ["" if task == "answer" else f"{task}/" for task in TASKS if weight_of(stage, task)]
        names = [f"{label}nll/{name}" for label in labels for name in self.cfg.llms]
        gaps = {name: values[f"shuffled/{name}"] - values[name] for name in names}
        if max(gaps.values()) >= GAP:
            return ""
        told = ", ".join(f"{name} {values[name]:.3f} (another text's: {gap:+.3f})" for name, gap in gaps.items())
        return f"collapse at step {step}: another text's latents serve the readers as well: {told}"

    def _stream(self, split: examples.Split, task: str, length: int) -> Encoded:
        if task == "answer":
            return self._encode_answers(self.examples(split))
        named = self.cfg.data.passages if split == "train" else ""
        documents = passages.read(named) if named else [example.context for example in self.examples(split)]
        make = passages.reconstructions if task == "reconstruct" else passages.continuations
        return passages.encode(make(documents, length, self._measure), layout=self.layout, task=task)

    def _examples(self, split: examples.Split) -> list[Example]:
        return examples.load(self.cfg.data, split, seed=self.cfg.seed)
