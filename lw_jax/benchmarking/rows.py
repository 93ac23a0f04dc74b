"""Rows of a benchmark, measured or predicted, and their table."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from lw_jax.benchmarking.timing import Ceilings, Spread
from lw_jax.planning import plan_tables, workload
from lw_jax.recipes.latentwire import LatentWire


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
    why_not: str = ""  # what stood in the way


def encode_row(recipe: LatentWire, ceilings: Ceilings, median: float, **fields: Any) -> Row:
    """Returns the row of writing a batch of texts that fill the encoder's window; `median` is in seconds."""
    spec = recipe.cfg.encoder
    batch, tokens = workload.texts(recipe)["ids"].shape
    work = workload.encode_flops(recipe)
    return Row(
        "encode",
        f"{spec.kind} encoder",
        f"{batch} texts of {tokens} tokens -> {spec.slots} x {spec.width}",
        samples_per_second=batch / median,
        tokens_per_second=batch * tokens / median,
        flops=work,
        of_matmul=work / (median * ceilings.matmul * recipe.placement.data),
        **fields,
    )


def prefill_rows(name: str, prompts: dict[str, workload.PromptShapes], fields: dict[str, dict[str, Any]]) -> list[Row]:
    rows, seconds = [], []
    for kind, prompt in prompts.items():
        computed = prompt.embeddings.shape[1]
        what = f"1 {kind} in a prompt of {prompt.positions} positions, {computed} of them computed"
        row = Row("prefill", name, what, **fields[kind])
        rows.append(row)
        seconds.append(row.seconds.median if row.seconds else row.predicted_seconds)
    ratio = seconds[0] / seconds[1]
    return [rows[0], dataclasses.replace(rows[1], what=f"{rows[1].what}; the text takes {ratio:.2f} x as long")]


def answer_row(recipe: LatentWire, name: str, ceilings: Ceilings, medians: tuple[float, float], **fields: Any) -> Row:
    """Returns the row of a reader's answers; `medians` are the seconds of answers of all tokens and of one token."""
    prompts, params = workload.prompts(recipe, name), workload.reader(recipe, name)
    tokens, model = recipe.cfg.eval.max_new_tokens, recipe.wire.readers[name].config
    whole, short = medians
    token = (whole - short) / (tokens - 1) if tokens > 1 and whole > short else None  # else noise alone
    need = workload.token_bytes(params, model, prompts, tokens)
    alone = recipe.placement.readers[name].mesh.size == 1
    batch, length = len(prompts.mask), prompts.positions
    return Row(
        "answer",
        name,
        f"{batch} prompts of {length} positions, {tokens} tokens each"
        + ("" if token is None else f"; a token of all {token * 1e3:.1f} ms"),
        samples_per_second=batch / whole,
        tokens_per_second=batch * tokens / whole,
        bytes=need,
        of_bandwidth=need / token / ceilings.bandwidth if alone and token else None,
        **fields,
    )


def table(device: str, ceilings: Ceilings, rows: Sequence[Row]) -> str:
    absent = any(row.predicted_seconds is not None for row in rows)
    limits = f"{ceilings.matmul / 1e12:.2f} TFLOP/s, {ceilings.bandwidth / 1e9:.1f} GB/s"
    lines = [
        f"{device}; {'peaks of the data sheet' if absent else 'measured ceilings'} in {ceilings.dtype}: {limits}",
        "",
    ]
    head = ("part", "of", "seconds", "least..most", "samples/s", "tokens/s", "of ceiling", "memory GB", "")
    lines += plan_tables.align([head, *map(_cells, rows)])
    for row in rows:
        if row.compile_seconds is not None and row.cached_seconds is not None:
            figures = f"{row.compile_seconds:.1f} s with an empty cache, {row.cached_seconds:.1f} s with a filled one"
            lines.append(f"{row.part}, traced and compiled: {figures}")
        if row.compiled_flops is not None and row.compiled_bytes:
            work = f"{row.compiled_flops / 1e12:,.1f} TFLOP of products"
            figures = f"{work}, {row.compiled_bytes / 1e9:,.1f} GB read and written"
            lines.append(f"{row.part} of {row.subject}, its program on a device: {figures}")
        if row.padding is not None:
            lines.append(f"{row.part}, positions that hold no token: {row.padding:.1%}")
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

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
        number(row.samples_per_second, ",.1f"),
        number(row.tokens_per_second, ",.0f"),
        share,
        peak,
        row.what,
    )
