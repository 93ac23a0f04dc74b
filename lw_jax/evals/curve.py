"""Quality of answers by message size as plain values; a report reads them without JAX."""

import dataclasses
from typing import Any

REFERENCE_ROWS = ("text", "none")  # control rows that a curve is compared with
MODEL = "language model"  # the coding of a text by a language model's own probabilities, among the texts' bytes
COLUMNS = (
    *("slots", "ratio", "width", "bits", "payload_bytes", "framed_bytes", "reader", "examples", "positions"),
    *("nll", "nll_low", "nll_high", "accuracy", "em", "f1", "f1_low", "f1_high"),
)


@dataclasses.dataclass(frozen=True)
class Curve:
    """Figures by message size and their references, all of the same examples."""

    quality: str  # "nll" | "f1": the configured one
    examples: int
    # COLUMNS by name; em and f1 are absent where nothing was generated, ratio (source tokens a slot) where all messages
    # have as many slots, which are else a mean
    points: list[dict[str, Any]]
    references: dict[str, dict[str, Any]]  # reader -> row of REFERENCE_ROWS -> figures
    text_bytes: dict[str, float]  # coding -> mean bytes of a context
