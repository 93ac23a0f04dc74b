"""Latents that an evaluation gives to readers: of each text once, and those of its controls."""

from collections.abc import Callable, Sequence

import numpy as np

from lw_jax.core import processes
from lw_jax.data.batches import Batch, Encoded, other_examples


def make(
    encode: Callable[[Batch], np.ndarray],
    encoded: Encoded,
    indices: Sequence[int],
    *,
    kinds: set[str],
    batch: int,
    seed: int,
) -> dict[str, np.ndarray]:
    """Returns {kind: f32[n m z]} of the examples at `indices`; "own" is always there.

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
    found = {kind: latents[[at[index] for index in each]] for kind, each in wanted.items()}
    if "zero" in kinds:
        found["zero"] = np.zeros_like(found["own"])
    if "random" in kinds:
        found["random"] = draw(found["own"], seed=seed)
    return found


def draw(latents: np.ndarray, *, seed: int) -> np.ndarray:
    """Returns normal random latents [n m z] with the mean and deviation of each slot's values over the examples.

    Each random latent is then scaled to the size (RMS) of the real one in its place.
    """
    mean, deviation = latents.mean(axis=0), latents.std(axis=0)
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
