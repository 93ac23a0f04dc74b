"""Latents that an evaluation gives to readers: of each text once, and those of its controls."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from lw_jax.core import processes
from lw_jax.data.batches import Batch, Encoded, other_examples


class Sent(NamedTuple):
    """Latents of messages, zeros beyond each one's slots."""

    values: np.ndarray  # f32[n m z]
    slots: np.ndarray  # i32[n]


def make(
    encode: Callable[[Batch], np.ndarray],
    encoded: Encoded,
    indices: Sequence[int],
    *,
    kinds: set[str],
    batch: int,
    seed: int,
) -> dict[str, Sent]:
    """Returns {kind: latents} of the examples at `indices`; "own" is always there.

    Another text's have the slots of their own message; random ones and zeros those of the example's.

    Args:
        encode: (this process's rows of a batch's source) -> their latents f32[b m z].
        encoded: the data set.
        indices: its measured examples.
        kinds: of `core.eval_rows.EvalRow.latents`.
        batch: texts encoded at once, by all processes together.
        seed: of the random latents.
    """
    wanted = {"own": list(indices)}
    if "other" in kinds:
        others = other_examples(encoded.examples)
        wanted["other"] = [others[index] for index in indices]
    latents, at = _encode_once(encode, encoded, [i for each in wanted.values() for i in each], batch=batch)
    found = {
        kind: Sent(latents[[at[index] for index in each]], encoded.count_slots(each)) for kind, each in wanted.items()
    }
    values, slots = found["own"]
    if "zero" in kinds:
        found["zero"] = Sent(np.zeros_like(values), slots)
    if "random" in kinds:
        found["random"] = Sent(draw(values, slots, seed=seed), slots)
    return found


def draw(latents: np.ndarray, slots: np.ndarray, *, seed: int) -> np.ndarray:
    """Returns normal random latents [n m z] with the mean and deviation of each slot's values over the examples.

    Only messages that have the slot count. Each random latent is then scaled to the size (RMS) of the real one in its
    place, so that it is zero beyond a message's `slots` i32[n].
    """
    own = (np.arange(latents.shape[1]) < slots[:, None])[:, :, None]
    count = np.maximum(own.sum(axis=0), 1)
    mean = latents.sum(axis=0, where=own) / count
    deviation = np.sqrt(np.sum((latents - mean) ** 2, axis=0, where=own) / count)
    drawn = np.random.default_rng(seed).standard_normal(latents.shape, np.float32) * deviation + mean
    sizes = [np.sqrt(np.mean(one.astype(np.float64) ** 2, axis=2, keepdims=True)) for one in (latents, drawn)]
    return (drawn * (sizes[0] / np.maximum(sizes[1], np.finfo(np.float32).tiny))).astype(np.float32)


def _encode_once(
    encode: Callable[[Batch], np.ndarray], encoded: Encoded, indices: Sequence[int], *, batch: int
) -> tuple[np.ndarray, dict[int, int]]:
    """Returns the latents of the different sources among the examples, and each example's position among them."""
    first: dict[bytes, int] = {}  # of each different source, its position
    at = {index: first.setdefault(encoded.source.ids[index].tobytes(), len(first)) for index in dict.fromkeys(indices)}
    sources: dict[int, int] = {}
    for index, position in at.items():
        sources.setdefault(position, index)
    chosen = list(sources.values())
    number, count = processes.share()
    own = slice(number * batch // count, (number + 1) * batch // count)
    parts = []
    for start in range(0, len(chosen), batch):
        rows = chosen[start : start + batch]
        rows = (rows + rows[-1:] * (batch - len(rows)))[own]
        parts.append(encode(encoded.collate(rows, rows=())["source"]))
    gathered = np.stack(processes.gather_rows(np.concatenate(parts)))  # [processes, batches x rows, m, z]
    shape = gathered.shape[2:]
    by_batch = gathered.reshape(count, len(parts), -1, *shape).swapaxes(0, 1)
    return by_batch.reshape(-1, *shape)[: len(chosen)], at
