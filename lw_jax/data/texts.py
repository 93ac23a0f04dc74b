"""Training examples of several questions each: all of one text, which is encoded once for them."""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence

import jax
import numpy as np

from lw_jax.data.batches import Batch, Encoded, weigh


@dataclasses.dataclass(frozen=True)
class Texts:
    """A tokenised data set whose examples are texts with up to `questions` of their questions.

    A text with more is several examples of nearly equal size. `index` in a batch is a position among these examples.
    """

    encoded: Encoded
    questions: int

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
        return tuple(
            tuple(int(position) for position in part)
            for positions in asked.values()
            for part in np.array_split(positions, -(-len(positions) // self.questions))
        )

    def __len__(self) -> int:
        """Returns the number of examples."""
        return len(self.groups)

    def collate(self, indices: Sequence[int], *, channel: np.ndarray | None = None) -> Batch:
        """Returns a batch [b ...] whose readers' leaves are [b n ...], n the questions of an example.

        Places without a question repeat the text's last one with weight zero. `channel` i32[b 3] is that of a text's
        message.
        """
        groups, n = [self.groups[i] for i in indices], self.questions
        places = [group[min(place, len(group) - 1)] for group in groups for place in range(n)]
        asked = np.array([place < len(group) for group in groups for place in range(n)])
        each = self.encoded.collate(places, channel=None if channel is None else np.repeat(channel, n, axis=0))
        readers = jax.tree.map(
            lambda leaf: leaf.reshape(len(groups), n, *leaf.shape[1:]), weigh(each, asked)["readers"]
        )
        source = jax.tree.map(lambda leaf: leaf[::n], each["source"])
        return {"source": source, "readers": readers, "index": np.array(indices, np.int32)}

    def digest(self) -> str:
        """Identifies the tokens of every example and which questions it has."""
        said = hashlib.blake2b(self.encoded.digest().encode(), digest_size=16)
        said.update(repr((self.questions, self.groups)).encode())
        return said.hexdigest()

    def probe(self) -> Batch:
        """Returns a batch of one example for its shapes and types."""
        one = self.encoded.probe()
        return one | {"readers": jax.tree.map(lambda leaf: np.stack([leaf] * self.questions, axis=1), one["readers"])}

    def describe(self) -> list[str]:
        """Returns report lines."""
        texts, rows = len({example.context for example in self.encoded.examples}), len(self) * self.questions
        filling = 1 - len(self.encoded) / rows
        line = f"{texts} texts: {len(self)} examples of up to {self.questions} questions, {filling:.1%} of rows filling"
        return [*self.encoded.describe(), line]
