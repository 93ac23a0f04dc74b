"""Every kind of input that the campaign mutates."""

from tests.chaos import kinds_run, kinds_text, kinds_wire
from tests.chaos.cases import Kind


def every() -> list[Kind]:
    return [*kinds_text.KINDS, *kinds_run.KINDS, *kinds_wire.KINDS]
