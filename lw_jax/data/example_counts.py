"""Counts of used, dropped and cut examples of a data set, by reason."""

import collections
from collections.abc import Mapping, Sequence

from lw_jax.core.errors import UserError

REASONS = {
    "question": "dropped: the question with the text after it is longer than data.question_tokens",
    "answer": "dropped: the answer with its EOS is longer than data.answer_tokens",
    "nothing": "dropped: the answer has no token",
    "outlier": "dropped: among the longest 1 %; all passages are padded to the longest one used",
    "boundary": "dropped: the end of the prompt (prompt.anchor) and the answer are not split where they are joined",
    "prompt": "dropped: the prompt leaves no room for its context in data.context_tokens",
    "context": "dropped: the context is longer than encoder.window or data.context_tokens",
    "source_cut": "sources cut at encoder.window",
    "text_cut": "text prompts cut at data.context_tokens, their questions kept",
}


class DropCounts:
    """Dropped and cut examples; the first reason to drop one counts, from any reader."""

    def __init__(self, ids: Sequence[str], reasons: Mapping[str, str] = REASONS, what: str = "examples") -> None:
        self.ids, self.reasons, self.what = ids, reasons, what
        self.dropped: dict[int, tuple[str, str]] = {}  # position -> (reason, detail)
        self.overlong: dict[int, str] = {}
        self.cut: dict[str, set[int]] = collections.defaultdict(set)  # reason -> positions

    def drop(self, index: int, reason: str, detail: str) -> None:
        self.dropped.setdefault(index, (reason, f"{self.ids[index]!r}: {detail}"))

    def refuse(self, index: int, detail: str) -> None:
        """Records that an example is beyond a limit; `apply_policy` decides what follows."""
        self.overlong.setdefault(index, f"{self.ids[index]!r}: {detail}")

    def settled(self, index: int) -> bool:
        return index in self.dropped or index in self.overlong

    def apply_policy(self, policy: str) -> list[int]:
        """Returns the usable positions; raises UserError under "refuse" with an overlong one and with none left."""
        overlong = {i: detail for i, detail in self.overlong.items() if i not in self.dropped}
        if overlong and policy == "refuse":
            raise UserError(
                f"example {overlong[min(overlong)]}; {len(overlong)} of {len(self.ids)} examples have a context "
                'beyond the limit: raise it, or set config.data.overlong to "drop" or "cut"'
            )
        self.dropped |= {i: ("context", detail) for i, detail in overlong.items()}
        keep = [i for i in range(len(self.ids)) if i not in self.dropped]
        if not keep:
            first, counts = dict(reversed(self.dropped.values())), self.counts()
            causes = "; ".join(f"{counts[name]} {self.reasons[name]}, as {detail}" for name, detail in first.items())
            raise UserError(f"none of {len(self.ids)} {self.what} can be used: {causes or 'the list is empty'}")
        return keep

    def counts(self) -> dict[str, int]:
        """Returns the numbers of given, kept, dropped and cut examples, by reason."""
        counts = dict.fromkeys(("given", "kept", *self.reasons), 0)
        for reason, _ in self.dropped.values():
            counts[reason] += 1
        counts |= {name: len(positions - self.dropped.keys()) for name, positions in self.cut.items()}
        return counts | {"given": len(self.ids), "kept": len(self.ids) - len(self.dropped)}


def describe(counts: Mapping[str, int], what: str, reasons: Mapping[str, str] = REASONS) -> list[str]:
    """Returns lines for people: how many are used, and how many were dropped or cut for which reason."""
    kept, given = counts["kept"], counts["given"]
    used = f"{kept:,}{f' of {given:,}' if given > kept else ''} {what}"
    return [used, *(f"  {counts[reason]:,} {meaning}" for reason, meaning in reasons.items() if counts[reason])]
