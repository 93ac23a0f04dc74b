"""Rows of a benchmark, measured or predicted, and their table."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lw_jax import recipes
from lw_jax.benchmarking.timing import Ceilings, Spread
from lw_jax.core.config import LLM, Config
from lw_jax.core.errors import UserError
from lw_jax.core.types import SHARED, Tree
from lw_jax.evals.wire_functions import WireFunctions
from lw_jax.models.wire import Prompt
from lw_jax.planning import plan_tables, workload
from sharding.placement import Placement

Call = tuple[Callable[[Any, Any], Any], Tree]  # a function of (weights, inputs), and the shapes of its inputs


@dataclasses.dataclass(frozen=True)
class Planned:
    """What a plan for this card says of a step that is measured."""

    bytes: float  # of the fullest device, as compiled
    seconds: float  # with the shares of the data sheet's peaks that every plan assumes
    seconds_at_ceilings: float  # with the ceilings that were measured


@dataclasses.dataclass(frozen=True)
class Row:
    """One thing measured, or predicted; what does not apply is None, and 0 is a figure."""

    part: str
    subject: str  # the recipe, or a reader's name
    what: str  # for people, with every size that decides the time
    seconds: Spread | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    flops: float | None = None  # of all devices, the model's own arithmetic: nothing recomputed
    of_matmul: float | None = None  # share of the ceiling
    bytes: float | None = None  # that must be read at least, on a device
    of_bandwidth: float | None = None
    peak_bytes: float | None = None  # of the fullest device
    peak_from: str = ""  # "device" | "compiled" (the compiler's) | "host": on it, beside the arrays if they lie there
    compile_seconds: float | None = None  # traced, lowered and compiled with an empty cache
    cached_seconds: float | None = None  # the same, the program found on disk
    padding: float | None = None  # share of positions that hold no token
    predicted_seconds: float | None = None  # of a device that is not here; then nothing of the row is measured
    compiled_flops: float | None = None  # of a device, in all products that its program runs
    compiled_bytes: float | None = None  # of a device, read and written by all its kernels
    planned: Planned | None = None  # of a step on a card that plans know
    why_not: str = ""  # what stood in the way


class Benchmark:
    """Parts of a configuration whose rows are made alike, whether their costs are measured or predicted."""

    parts: list[str]  # that the recipe has on these devices: names of methods
    device: str  # the devices in words
    ceilings: Ceilings  # denominators of shares

    def __init__(self, cfg: Config, placement: Placement):
        self.cfg, self.placement = cfg, placement
        self.recipe: Any = recipes.make(cfg, placement, outline=True)

    def measure(self, part: str, *, asked: bool = True) -> list[Row]:
        """Returns a part's rows; unless it was `asked` for, none of its files is fetched.

        Raises UserError for a part that is not among `parts`.
        """
        if part not in self.parts:
            have = f"recipe {self.cfg.recipe!r} has {', '.join(self.parts)} on {self.device}"
            raise UserError(f"--parts {part}: {have}; name some of these.")
        return getattr(self, part)()

    def costs(self, weights: Tree, calls: Sequence[Call]) -> list[dict[str, Any]]:
        """Returns what each call costs, by field of `Row`; all read the same weights, which are shapes."""
        raise NotImplementedError

    def step_row(self, median: float, micro_batch: int, accumulation: int, more: str = "", **figures: Any) -> Row:
        """Returns the row of a training step of `median` seconds; `figures` are other fields of `Row`."""
        batch, work = self.cfg.train.global_batch, workload.step_flops(self.cfg)
        return Row(
            "step",
            self.cfg.recipe,
            f"{batch} samples = {micro_batch} a device x {self.placement.data} x {accumulation} accumulated, "
            f"remat {self.cfg.compute.remat}{more}",
            samples_per_second=batch / median,
            flops=work,
            of_matmul=work / (median * self.ceilings.matmul * self.placement.devices),
            **figures,
        )

    def encode(self) -> list[Row]:
        """Writes a batch of texts that fill the encoder's window."""
        spec, texts = self.cfg.encoder, workload.texts(self.recipe)
        encode, weights = WireFunctions(self.recipe.wire, self.placement).encode, self.recipe.placed()
        both = {"trainable": weights.trainable, "body": weights.frozen.get(SHARED)}
        (costs,) = self.costs(both, [(lambda both, texts: encode(source=texts, **both), texts)])
        (batch, tokens), median, work = texts["ids"].shape, _typical(costs), workload.encode_flops(self.recipe)
        return [
            Row(
                "encode",
                f"{spec.kind} encoder",
                f"{batch} texts of {tokens} tokens -> {spec.slots} x {spec.width}",
                samples_per_second=batch / median,
                tokens_per_second=batch * tokens / median,
                flops=work,
                of_matmul=work / (median * self.ceilings.matmul * self.placement.data),
                **costs,
            )
        ]

    def prefill(self) -> list[Row]:
        """Reads one prompt with each reader, of a text and of a message; the message's adapter is not among it."""
        return [row for name in self.placement.readers for row in self._prefill(name)]

    def _prefill(self, name: str) -> list[Row]:
        rows = self.placement.data  # a question for each part of the axis
        text = workload.text_prompts(self.recipe, name, rows, self.cfg.data.context_tokens)
        message = workload.prompts(self.recipe, name, rows)
        begin = WireFunctions(self.recipe.wire, self.placement).begin

        def read(params: Tree, prompt: Tree) -> Tree:
            return begin(params, Prompt(*prompt), name, 1)

        costs = self.costs(self.recipe.placed().frozen[name], [(read, text), (read, message)])
        slower = f"; the text takes {_typical(costs[0]) / _typical(costs[1]):.2f} x as long"
        return [
            Row("prefill", name, f"1 text in {_describe(text)}", **costs[0]),
            Row("prefill", name, f"1 message in {_describe(message)}{slower}", **costs[1]),
        ]

    def answer(self) -> list[Row]:
        """Generates with each reader; the time of a token is the difference between a long and a short answer."""
        return [self._answer(name) for name in self.placement.readers]

    def _answer(self, name: str) -> Row:
        prompts, params = workload.prompts(self.recipe, name), self.recipe.placed().frozen[name]
        tokens, model = self.cfg.eval.max_new_tokens, self.recipe.wire.readers[name].config
        generate = WireFunctions(self.recipe.wire, self.placement).generate

        def answer(count: int) -> Call:
            return lambda params, prompts: generate(params, Prompt(*prompts), name, count), prompts

        costs, cost_of_one = self.costs(params, [answer(tokens), answer(1)])
        whole, short = _typical(costs), _typical(cost_of_one)
        token = (whole - short) / (tokens - 1) if tokens > 1 and whole > short else None  # else noise alone
        need = workload.token_bytes(params, model, prompts, tokens)
        alone = self.placement.readers[name].mesh.size == 1
        batch, length = len(prompts.mask), prompts.positions
        return Row(
            "answer",
            name,
            f"{batch} prompts of {length} positions, {tokens} tokens each"
            + ("" if token is None else f"; a token of all {token * 1e3:.1f} ms"),
            samples_per_second=batch / whole,
            tokens_per_second=batch * tokens / whole,
            bytes=need,
            of_bandwidth=need / token / self.ceilings.bandwidth if alone and token else None,
            **costs,
        )


def _typical(costs: dict[str, Any]) -> float:
    return costs["seconds"].median if "seconds" in costs else costs["predicted_seconds"]


def _describe(prompt: workload.PromptShapes) -> str:
    return f"a prompt of {prompt.positions} positions, {prompt.embeddings.shape[1]} of them computed"


def table(device: str, ceilings: Ceilings, rows: Sequence[Row], readers: Mapping[str, LLM]) -> str:
    absent = any(row.predicted_seconds is not None for row in rows)
    limits = f"{ceilings.matmul / 1e12:.2f} TFLOP/s, {ceilings.bandwidth / 1e9:.1f} GB/s"
    eight = sorted({reader.weights for reader in readers.values()} & {"w8a8", "fp8"})
    lines = [
        f"{device}; {'peaks of the data sheet' if absent else 'measured ceilings'} in {ceilings.dtype}: {limits}",
        *(f"shares are of it for {kind} too, which multiplies in 8 bits: a card may reach more" for kind in eight),
        "",
    ]
    head = ("part", "of", "seconds", "least..most", "samples/s", "tokens/s", "of ceiling", "memory GB", "")
    lines += plan_tables.align([head, *map(_cells, rows)])
    for row in rows:
        if row.compile_seconds is not None and row.cached_seconds is not None:
            figures = f"{row.compile_seconds:.1f} s with an empty cache, {row.cached_seconds:.1f} s with a filled one"
            lines.append(f"{row.part}, traced and compiled: {figures}")
        if row.planned and row.seconds and row.peak_bytes:
            memory, median = row.peak_bytes / row.planned.bytes - 1, row.seconds.median
            times = {"": row.planned.seconds, " with the measured ceilings": row.planned.seconds_at_ceilings}
            parts = (f"{value:.4f} s{words} ({median / value - 1:+.1%} measured)" for words, value in times.items())
            figures = f"{row.planned.bytes / 1e9:.3f} GB ({memory:+.1%} measured), {', '.join(parts)}"
            lines.append(f"{row.part}, as planned: {figures}")
        if row.compiled_flops is not None and row.compiled_bytes:
            work = f"{row.compiled_flops / 1e12:,.1f} TFLOP of products"
            figures = f"{work}, {row.compiled_bytes / 1e9:,.1f} GB read and written"
            lines.append(f"{row.part} of {row.subject}, its program on a device: {figures}")
        if row.padding is not None:
            lines.append(f"{row.part}, positions that hold no token: {row.padding:.1%}")
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    if row.predicted_seconds is not None:
        seconds, spread = row.predicted_seconds, "predicted"
    elif row.seconds is not None:
        seconds, spread = row.seconds.median, f"{row.seconds.least:.4f}..{row.seconds.most:.4f}"
    else:
        return (row.part, row.subject, "not measured", *"-----", row.why_not)
    shares = {"matmul": row.of_matmul, "memory": row.of_bandwidth}
    share = next((f"{value:.0%} {name}" for name, value in shares.items() if value is not None), "-")
    peak = "-" if row.peak_bytes is None else f"{row.peak_bytes / 1e9:.3f} {row.peak_from}"
    return (
        row.part,
        row.subject,
        f"{seconds:.4f}",
        spread,
        plan_tables.number(row.samples_per_second, ",.1f"),
        plan_tables.number(row.tokens_per_second, ",.0f"),
        share,
        peak,
        row.what,
    )
