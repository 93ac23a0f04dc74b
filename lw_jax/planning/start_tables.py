"""What a report says of a plan without steps."""

from lw_jax.core.progress import duration
from lw_jax.planning.start_plan import TEXT, ReaderPlan, StartCandidate, StartPlan, Work
from lw_jax.training.memory import bytes_of

LEGEND = (
    "bytes of one device; peak: weights of all readers and one batch of texts read or written; est.: arithmetic "
    "estimate and its distance from the compiled figure; times by arithmetic"
)


def describe(plan: StartPlan) -> str:
    return f"no step, a start from {plan.texts} texts of at most {plan.tokens} tokens, {plan.rows} at once"


def choice(plan: StartPlan, best: StartCandidate) -> list[str]:
    seconds = f", {duration(plan.hours * 3600)} for the start without compiling" if plan.hours is not None else ""
    return [f"chosen: {best.name}{seconds}", *(_text(name, one, plan.ratio) for name, one in best.readers.items())]


def _text(name: str, one: ReaderPlan, ratio: int) -> str:
    memory = (
        f"{bytes_of(one.text_bytes)} of keys and values, {bytes_of(one.message_bytes)} of its message at "
        f"encoder.ratio={ratio} while it answers"
    )
    times = ""
    if one.read_seconds is not None and one.write_seconds is not None:
        times = f"read in {one.read_seconds:.3g} s, written in {one.write_seconds:.3g} s, "
    return f"{name}: a text of {TEXT:,} tokens: {times}{memory}"


def rows(candidates: tuple[StartCandidate, ...]) -> list[tuple[str, ...]]:
    head = ("strategy", "mesh", "reader", "weights", "code", "basis", "reading", "est.", "writing", "est.")
    table: list[tuple[str, ...]] = [(*head, "TFLOP", "s/start", "")]
    for one in candidates:
        for name, reader in one.readers.items():
            table.append(
                (
                    one.strategy,
                    one.mesh,
                    name,
                    *map(bytes_of, (reader.weights_bytes, reader.code_bytes, reader.basis_bytes)),
                    *_both(reader.reading),
                    *_both(reader.writing),
                    f"{reader.flops / 1e12:.3g}",
                    "-" if reader.seconds is None else f"{reader.seconds:.1f}",
                    "",
                )
            )
        peak = f"peak {bytes_of(one.peak_bytes)}"
        table[-1] = (*table[-1][:-1], peak if one.fits else f"{peak}, no: {one.obstacle}")
    return table


def _both(work: Work) -> tuple[str, str]:
    guess = bytes_of(work.estimate_bytes)
    if work.peak_bytes == work.estimate_bytes:
        return guess, guess
    return bytes_of(work.peak_bytes), f"{guess} ({work.estimate_bytes / max(work.peak_bytes, 1) - 1:+.0%})"
