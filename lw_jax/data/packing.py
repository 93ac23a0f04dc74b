"""Sequence packing: the questions of one text, with their answers, one behind the other in a row of each reader.

The text is encoded once for them, and no position is spent on padding every question to the longest.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from lw_jax.core.files import content_hash
from lw_jax.data.batches import Batch, Encoded, width_of

_QUESTION_FIELDS = ("after", "answer_inputs", "targets", "weights", "teacher")  # in a batch of one question a row


@dataclasses.dataclass(frozen=True)
class Packed:
    """A tokenised data set whose examples are texts with as many of their questions as `tokens` hold.

    The questions and answers of an example take at most `tokens` positions of each reader, the answers at most half of
    them. A text with more is several examples. `index` in a batch is a position among these examples.
    """

    encoded: Encoded
    tokens: int

    @property
    def task(self) -> str:
        return self.encoded.task

    @functools.cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Returns each example's positions in `encoded`; texts in the order of their first questions."""
        by_text: dict[str, list[int]] = {}
        for position, example in enumerate(self.encoded.examples):
            by_text.setdefault(example.context, []).append(position)
        lengths = np.stack(list(self._lengths.values()))
        return tuple(group for positions in by_text.values() for group in self._fill_rows(positions, lengths))

    def _fill_rows(self, positions: Sequence[int], lengths: np.ndarray) -> Iterator[tuple[int, ...]]:
        """Yields a text's questions in rows, a new one where the next question fits in no more."""
        row: list[int] = []
        used = np.zeros((len(lengths), 2), np.int64)
        for position in positions:
            needed = lengths[:, position]
            if row and ((used + needed) > [self.tokens, self.tokens // 2]).any():
                yield tuple(row)
                row, used = [], np.zeros_like(used)
            row.append(position)
            used = used + needed
        yield tuple(row)

    @functools.cached_property
    def _lengths(self) -> dict[str, np.ndarray]:
        """Returns i64[n 2] a reader: each question's positions with its answer, whose end is no input, and targets."""
        lengths = {}
        for name, fields in self.encoded.readers.items():
            questions, answers = (np.array([len(ids) for ids in fields[key].ids]) for key in ("after", "answer"))
            lengths[name] = np.stack([questions + answers - 1, answers], axis=1)
        return lengths

    @functools.cached_property
    def _widths(self) -> dict[str, tuple[int, int]]:
        """Returns each reader's width of a row and of its targets: the longest, rounded up within the limits."""
        widths = {}
        for name, lengths in self._lengths.items():
            width, targets = np.max([lengths[list(group)].sum(axis=0) for group in self.groups], axis=0).tolist()
            widths[name] = width_of(width, self.tokens), width_of(targets, self.tokens // 2)
        return widths

    def __len__(self) -> int:
        return len(self.groups)

    def collate(self, indices: Sequence[int], *, sizes: np.ndarray | None = None) -> Batch:
        """Returns a batch [b ...]; each reader's questions are packed in "packed", "places" and the targets.

        "packed" has ids i32[b p] and segments i32[b p], the number of the question from 1, 0 at padding; "places"
        i32[b t] the positions in it that predict the targets. `sizes` i32[b 4] are those of a text's message.
        """
        groups = [self.groups[i] for i in indices]
        firsts = [group[0] for group in groups]
        batch = self.encoded.collate(firsts, sizes=sizes)
        each = self.encoded.collate([position for group in groups for position in group], rows=())
        readers = {}
        for name, fields in batch["readers"].items():
            packed = pack(each["readers"][name], [len(group) for group in groups], *self._widths[name])
            readers[name] = {key: leaf for key, leaf in fields.items() if key not in _QUESTION_FIELDS} | packed
        return {"source": batch["source"], "readers": readers, "index": np.array(indices, np.int32)}

    def digest(self) -> str:
        """Identifies the tokens of every example and which questions it has."""
        return content_hash([self.encoded.digest(), self.tokens, self.groups])

    def probe(self) -> Batch:
        return dataclasses.replace(self, encoded=self.encoded.untaught()).collate([0])

    def describe(self) -> list[str]:
        texts = len({example.context for example in self.encoded.examples})
        rows = []
        for name, (width, _) in self._widths.items():
            padding = 1 - self._lengths[name][:, 0].sum() / (len(self) * width)
            rows.append(f"{width} tokens for {name} ({padding:.1%} padding)")
        packed = f"{texts:,} texts, the questions of each packed in rows: {len(self):,} of {', '.join(rows)}"
        return [*self.encoded.describe(), f"  {packed}"]


def pack(fields: Batch, counts: Sequence[int], width: int, targets: int) -> Batch:
    """Returns a reader's questions [n ...] in rows of so many each: "packed", "places" and the targets' fields."""
    question, answered = fields["after"], fields["weights"] > 0
    real = np.concatenate([question["mask"], answered[:, 1:]], axis=1)  # an input is real where it is a target too
    ids = np.concatenate([question["ids"], fields["answer_inputs"]], axis=1)
    numbers = np.concatenate([np.arange(1, count + 1, dtype=np.int32) for count in counts])
    predicts = real.copy()
    predicts[:, : question["mask"].shape[1] - 1] = False  # of the question the last token alone
    offsets = (np.cumsum(real.ravel()) - 1).reshape(real.shape)
    ends = np.cumsum(counts)
    rows = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    starts = np.repeat([offsets[row][real[row]][0] for row in rows], counts)

    def join(values: np.ndarray, mask: np.ndarray, length: int) -> np.ndarray:
        """Returns the values [n t ...] under a mask, those of a row side by side, zeros behind them."""
        joined = np.zeros((len(rows), length, *values.shape[2:]), values.dtype)
        for number, row in enumerate(rows):
            valid = values[row][mask[row]]
            joined[number, : len(valid)] = valid
        return joined

    segments = np.broadcast_to(numbers[:, None], real.shape)
    packed = {"ids": join(ids, real, width), "segments": join(segments, real, width)}
    places = join((offsets - starts[:, None]).astype(np.int32), predicts, targets)
    labels: Batch = {key: join(fields[key], answered, targets) for key in ("targets", "weights")}
    if "teacher" in fields:
        labels["teacher"] = {key: join(leaf, answered, targets) for key, leaf in fields["teacher"].items()}
    return labels | {"packed": packed, "places": places}
