"""Rows of an evaluation, in one table: what a reader has in the place of the context.

A new row is an entry here, and where its parts are new, the code that makes them: token fields in
`data.prompt_tokens`, latents in `evals.message_latents`, the prompt in `evals.control_rows.WireSession.prompt`.
"""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class EvalRow:
    """What the prompt of one row is made of, beside the question."""

    meaning: str  # for a page: the reader's input beside the question
    latents: str = ""  # of a message: "own", "other" (of another text), "zero" or "random"; empty: no message
    fields: tuple[str, ...] = ()  # of a batch, with token ids, which the prompt is made of or (the first) is
    swapped: bool = False  # the text has another answer in the place of its own
    taught: bool = False  # one learned vector stands between the two fields
    compacted: bool = False  # the first field's keys and values are reduced to a message's positions
    ratio: int = 0  # of kind cache: positions of the text for one of the message; 0: the wire's own


ROWS = {
    "text": EvalRow("the text itself", fields=("text",)),
    "text_taught": EvalRow(
        "the text, the form of the answer taught by one learned vector", fields=("context", "asked"), taught=True
    ),
    "latents": EvalRow("the text's latents", latents="own"),
    "shuffled": EvalRow("another text's latents", latents="other"),
    "random": EvalRow("random latents with the moments of real ones", latents="random"),
    "zero": EvalRow("zero latents", latents="zero"),
    "none": EvalRow("nothing", fields=("none",)),
    "truncated": EvalRow("the text's first tokens, as many as the message has slots", fields=("truncated",)),
    "selected_taught": EvalRow(
        "the text's least predictable words in as many positions as the message takes, and the learned vector",
        fields=("selected_context", "asked"),
        taught=True,
    ),
    "ceiling": EvalRow(
        "its own keys and values of the text, reduced to the message's positions by attention matching",
        fields=("context", "asked"),
        compacted=True,
    ),
    "ceiling_taught": EvalRow(
        "the same and the learned vector, one position more",
        fields=("context", "asked"),
        taught=True,
        compacted=True,
    ),
    "swapped": EvalRow("the message of the text with another answer in it", latents="own", swapped=True),
    "swapped_text": EvalRow("the text with another answer in it", fields=("text",), swapped=True),
    "swapped_taught": EvalRow(
        "the text with another answer in it, and the learned vector",
        fields=("context", "asked"),
        swapped=True,
        taught=True,
    ),
}
ROWS |= {
    name: EvalRow(f"the text's message with {share} of the positions (encoder.kind cache)", latents="own", ratio=ratio)
    for name, share, ratio in (
        ("all", "all", 1),
        ("half", "half", 2),
        ("quarter", "a quarter", 4),
        ("eighth", "an eighth", 8),
    )
}
RATIOS = 16  # largest encoder.ratio of kind cache
OF_CACHE = tuple(name for name, row in ROWS.items() if row.ratio)
_TEXTS = ("text", "text_taught", "swapped_text", "swapped_taught")
KNOWN_TO_CACHE = (*_TEXTS, "none", "latents", "shuffled", "swapped", *OF_CACHE)
DEFAULT = ("text", "latents", "shuffled", "zero", "none", "truncated")
PROMPT_FIELDS = tuple(dict.fromkeys(field for row in ROWS.values() for field in row.fields))


def fields_of(rows: Iterable[str]) -> tuple[str, ...]:
    """Returns the fields that rows read, of one with an exchanged answer those of all such.

    Which answers can be exchanged follows from the fields: it is the same whichever of these rows are measured.
    """
    rows = list(rows)
    if any(ROWS[row].swapped for row in rows):
        rows += [name for name, row in ROWS.items() if row.swapped]
    return tuple(dict.fromkeys(field for row in rows for field in ROWS[row].fields))
