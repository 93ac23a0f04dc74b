"""Where the original 8-GPU report contradicts itself: its own figures, and what follows from them by arithmetic."""

import dataclasses
import math
import statistics

# As the report states them (128 tokens, TTT-Linear 125M, 8 x H100).
RATES = (1987, 1999, 1984, 1968, 1959, 1909, 1893, 1871)  # tokens/s of each card
LOSSES = (0.5486, 0.5491, 0.5498, 0.5494, 0.5484, 0.5481, 0.5485, 0.5491)  # of each card at step 0
LENGTH, BATCH, CARDS = 128, 16, 8
TOTAL, OF_TWO = 15570, 4300  # tokens/s of eight cards, and of two
SECONDS = 7.5  # "per step"
EFFECTIVE, VARIANCE, EFFICIENCY = 2048, 6, 90  # tokens a step, %, %
LONGEST, OF_LONGEST = 1024, 4000  # tokens, and the tokens/s stated for them
PARAMETERS, VOCABULARY = 124_298_064, 50_257
# What the report does not say.
LOGGING = 20  # steps that its script divides a loss by; inferred, as is the sum of losses it was meant for
BF16 = 989.5e12  # FLOP/s of one H100, dense, by its data sheet


@dataclasses.dataclass(frozen=True)
class Note:
    """A statement of the report, and what its own figures say."""

    stated: str
    right: str


def notes() -> list[Note]:
    """Returns what the report got wrong, each computed from its own figures."""
    tokens, mean = LENGTH * BATCH * CARDS, statistics.mean(RATES)
    loss, uniform = statistics.mean(LOSSES) * LOGGING, math.log(VOCABULARY)
    apart = (max(RATES) - min(RATES)) / 2 / mean
    gain, more = TOTAL / OF_TWO, CARDS // 2
    times = LONGEST // LENGTH
    used = 6 * PARAMETERS * mean / BF16
    return [
        Note(
            f"initial loss {statistics.mean(LOSSES):.3f}",
            f"{loss:.2f}: the script divides one step's loss by its logging interval ({LOGGING}, inferred). A model "
            f"that knows nothing has ln {VOCABULARY:,} = {uniform:.2f}.",
        ),
        Note(
            f"effective batch of {EFFECTIVE:,} tokens",
            f"{LENGTH} x {BATCH} x {CARDS} = {tokens:,} tokens; {LENGTH * BATCH:,} are one card's.",
        ),
        Note(
            f"{SECONDS} seconds a step",
            f"{tokens:,} tokens at {TOTAL:,} tokens/s take {tokens / TOTAL:.2f} s; {SECONDS} s would be "
            f"{tokens / SECONDS:,.0f} tokens/s, or {SECONDS * TOTAL / tokens:.1f} accumulated micro-steps.",
        ),
        Note(
            "memory falls quadratically with shorter text",
            f"It is linear: the state of a TTT layer has one size at every length, and activations grow with the "
            f"tokens ({LONGEST:,} tokens take {times} times those of {LENGTH}, not {times**2}).",
        ),
        Note(
            f"load varies by ±{VARIANCE} %",
            f"{min(RATES):,} .. {max(RATES):,} tokens/s is ±{apart:.1%} about {mean:,.0f}.".replace("%", " %"),
        ),
        Note(
            f"{EFFICIENCY} % scaling efficiency",
            f"{TOTAL:,} / {OF_TWO:,} = {gain:.2f} of {more} times: {100 * gain / more:.1f} %, from two cards to eight. "
            "One card alone was never measured, so that what two lose against one is not in it.",
        ),
        Note(
            "512 and 1,024 tokens, and 12,000+ tokens/s at 350M",
            f"Guesses, no run stands behind them. {OF_LONGEST:,} tokens/s at {LONGEST:,} would mean that a token costs "
            f"{TOTAL / OF_LONGEST:.1f} times as much there, against the linear cost that the same report names.",
        ),
        Note(
            "throughput A+",
            f"{mean:,.0f} tokens/s a card x 6 x {PARAMETERS:,} = {6 * PARAMETERS * mean / 1e12:.2f} TFLOP/s, "
            f"{100 * used:.3f} % of the {BF16 / 1e12:,.1f} that an H100 has in bf16.",
        ),
    ]
