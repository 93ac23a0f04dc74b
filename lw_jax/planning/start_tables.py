"""Table of a plan of a run without steps, for people."""

from lw_jax.core.progress import duration
from lw_jax.planning.plan_tables import align
from lw_jax.planning.start_plan import TEXT, Candidate, ReaderPlan, StartPlan, Work
from lw_jax.training.memory import bytes_of


def report(found: StartPlan) -> str:
    """Returns a plan as text, in the words and columns of `plan_tables.report`."""
    how = "compiled for the target" if found.compiled else "ARITHMETIC ESTIMATE, nothing was compiled"
    lines = [
        f"target {found.target}: {found.devices} devices of {bytes_of(found.memory_bytes)}, target "
        f"{found.limit_bytes / found.memory_bytes:.0%} = {bytes_of(found.limit_bytes)}; no step, a start from "
        f"{found.texts} texts of at most {found.tokens} tokens, {found.rows} at once; {how} in {found.plan_seconds} s"
    ]
    lines += [f"not compiled: {found.why_not_compiled}"] if found.why_not_compiled else []
    lines += ["", *_table(found.candidates), ""]
    lines.append(
        "bytes of one device; peak: weights of all readers and one batch of texts read or written; est.: arithmetic "
        "estimate and its distance from the compiled figure; times by arithmetic"
    )
    best = found.chosen
    if best is None:
        return "\n".join([*lines, "", f"nothing fits: {found.candidates[-1].obstacle}"])
    told = f", {duration(found.hours * 3600)} for the start without compiling" if found.hours is not None else ""
    flags = " ".join(f"--config.{path}={value}" for path, value in best.overrides().items())
    lines += ["", f"chosen: {best.strategy} {best.mesh}{told}"]
    lines += [_text(name, one, found.ratio) for name, one in best.readers.items()]
    return "\n".join([*lines, f"as flags: {flags}"])


def _text(name: str, one: ReaderPlan, ratio: int) -> str:
    """Returns what a text costs a reader, and what its message saves."""
    memory = (
        f"{bytes_of(one.text_bytes)} of keys and values, {bytes_of(one.message_bytes)} of its message at "
        f"encoder.ratio={ratio} while it answers"
    )
    times = ""
    if one.read_seconds is not None and one.write_seconds is not None:
        times = f"read in {one.read_seconds:.3g} s, written in {one.write_seconds:.3g} s, "
    return f"{name}: a text of {TEXT:,} tokens: {times}{memory}"


def _table(candidates: tuple[Candidate, ...]) -> list[str]:
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
    return align(table)


def _both(work: Work) -> tuple[str, str]:
    guess = bytes_of(work.estimate_bytes)
    if work.peak_bytes == work.estimate_bytes:
        return guess, guess
    return bytes_of(work.peak_bytes), f"{guess} ({work.estimate_bytes / max(work.peak_bytes, 1) - 1:+.0%})"
