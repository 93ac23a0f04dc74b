"""Sequence packing: the questions of one text, with their answers, one behind the other in a row of each reader.

The text is encoded once for them, and no position is spent on padding every question to the longest.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from lw_jax.data.batches import MULTIPLE, Batch, Encoded

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
        """Returns the readers' task."""
        return self.encoded.task

    @property
    def slots(self) -> int:
        """Returns the slots of a message."""
        return self.encoded.slots

    @property
    def width(self) -> int:
        """Returns the width of a latent."""
        return self.encoded.width

    def count_slots(self, indices: Sequence[int], ratio: int | np.ndarray | None = None) -> np.ndarray:
        """Returns i32[b]: the slots of each text's message, as `Encoded.count_slots`."""
        return self.encoded.count_slots([self.groups[i][0] for i in indices], ratio)

    @functools.cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Returns each example's positions in `encoded`; texts in the order of their first questions."""
        asked: dict[str, list[int]] = {}
        for position, example in enumerate(self.encoded.examples):
            asked.setdefault(example.context, []).append(position)
        return tuple(group for positions in asked.values() for group in self._fill_rows(positions))

    def _fill_rows(self, positions: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yields a text's questions in rows, a new one where the next question fits in no more."""
        row: list[int] = []
        used = np.zeros((len(self.encoded.readers), 2), np.int64)
        for position in positions:
            needed = np.array([self._lengths(name, position) for name in self.encoded.readers])
            if row and ((used + needed) > [self.tokens, self.tokens // 2]).any():
                yield tuple(row)
                row, used = [], np.zeros_like(used)
            row.append(position)
            used = used + needed
        yield tuple(row)

    def _lengths(self, name: str, position: int) -> tuple[int, int]:
        """Returns the positions of a question with its answer, whose end token is no input, and its targets."""
        fields = self.encoded.readers[name]
        answer = len(fields["answer"].ids[position])
        return len(fields["after"].ids[position]) + answer - 1, answer

    @functools.cached_property
    def _widths(self) -> dict[str, tuple[int, int]]:
        """Returns each reader's width of a row and of its targets: the longest, rounded up within the limits."""
        longest = {
            name: np.max([np.sum([self._lengths(name, one) for one in group], axis=0) for group in self.groups], axis=0)
            for name in self.encoded.readers
        }
        return {
            name: (_round_up(width, self.tokens), _round_up(targets, self.tokens // 2))
            for name, (width, targets) in longest.items()
        }

    def __len__(self) -> int:
        """Returns the number of examples."""
        return len(self.groups)

    def collate(self, indices: Sequence[int], *, channel: np.ndarray | None = None) -> Batch:
        """Returns a batch [b ...]; each reader's questions are packed in "packed", "places" and the targets.

        "packed" has ids i32[b p] and segments i32[b p], the number of the question from 1, 0 at filling; "places"
        i32[b t] the positions in it that predict the targets. `channel` i32[b 3] is that of a text's message.
        """
        groups = [self.groups[i] for i in indices]
        firsts = [group[0] for group in groups]
        batch = self.encoded.collate(firsts, channel=channel)
        each = self.encoded.collate([position for group in groups for position in group], rows=())
        readers = {}
        for name, fields in batch["readers"].items():
            packed = pack(each["readers"][name], [len(group) for group in groups], *self._widths[name])
            readers[name] = {key: leaf for key, leaf in fields.items() if key not in _QUESTION_FIELDS} | packed
        return {"source": batch["source"], "readers": readers, "index": np.array(indices, np.int32)}

    def digest(self) -> str:
        """Identifies the tokens of every example and which questions it has."""
        said = hashlib.blake2b(self.encoded.digest().encode(), digest_size=16)
        said.update(repr((self.tokens, self.groups)).encode())
        return said.hexdigest()

    def probe(self) -> Batch:
        """Returns a batch of one example for its shapes and types."""
        if not self.encoded.teachers:
            return self.collate([0])
        bare = dataclasses.replace(self, encoded=dataclasses.replace(self.encoded, teachers={})).collate([0])
        for name, teacher in self.encoded.teachers.items():
            _, targets = self._widths[name]
            bare["readers"][name]["teacher"] = {
                key: np.zeros((1, targets, *leaf.shape[2:]), leaf.dtype) for key, leaf in teacher.empty(1).items()
            }
        return bare

    def describe(self) -> list[str]:
        """Returns report lines."""
        texts = len({example.context for example in self.encoded.examples})
        lines = [*self.encoded.describe(), f"{texts} texts: {len(self)} examples with all of their questions"]
        for name, (width, _) in self._widths.items():
            used = sum(self._lengths(name, position)[0] for group in self.groups for position in group)
            filling = 1 - used / (len(self) * width)
            lines.append(f"{name}: questions and answers packed in rows of {width}, {filling:.1%} of them filling")
        return lines


def pack(fields: Batch, counts: Sequence[int], width: int, targets: int) -> Batch:
    """Returns a reader's questions [n ...] in rows of so many each: "packed", "places" and the targets' fields."""
    asked, answered = fields["after"], fields["weights"] > 0
    real = np.concatenate([asked["mask"], answered[:, 1:]], axis=1)  # an input is real where it is a target too
    ids = np.concatenate([asked["ids"], fields["answer_inputs"]], axis=1)
    numbers = np.concatenate([np.arange(1, count + 1, dtype=np.int32) for count in counts])
    predicts = real.copy()
    predicts[:, : asked["mask"].shape[1] - 1] = False  # of the question the last token alone
    at = (np.cumsum(real.ravel()) - 1).reshape(real.shape)
    ends = np.cumsum(counts)
    rows = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    starts = np.repeat([at[row][real[row]][0] for row in rows], counts)

    def join(values: np.ndarray, mask: np.ndarray, length: int) -> np.ndarray:
        """Returns the values [n t ...] under a mask, those of a row side by side, zeros behind them."""
        found = np.zeros((len(rows), length, *values.shape[2:]), values.dtype)
        for number, row in enumerate(rows):
            own = values[row][mask[row]]
            found[number, : len(own)] = own
        return found

    segments = np.broadcast_to(numbers[:, None], real.shape)
    packed = {"ids": join(ids, real, width), "segments": join(segments, real, width)}
    places = join((at - starts[:, None]).astype(np.int32), predicts, targets)
    found: Batch = {key: join(fields[key], answered, targets) for key in ("targets", "weights")}
    if "teacher" in fields:
        found["teacher"] = {key: join(leaf, answered, targets) for key, leaf in fields["teacher"].items()}
    return found | {"packed": packed, "places": places}


def _round_up(longest: int, limit: int) -> int:
    return min(-(-int(longest) // MULTIPLE) * MULTIPLE, limit)
