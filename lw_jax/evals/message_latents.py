"""Latents that an evaluation gives to readers: of each text once, and those of its controls."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from lw_jax.core import processes
from lw_jax.core.progress import phase
from lw_jax.data.batches import Batch, Encoded
from lw_jax.data.loader import batches_of


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

    Another text's have the slots of their own message; random ones and zeros those of the example's. `encode` returns
    latents f32[b m z] of this process's rows of a batch's source, a `batch` being what all processes encode at once;
    `kinds` are of `core.eval_rows.EvalRow.latents`.
    """
    sources = {"own": encoded} | ({"other": encoded.shuffled()} if "other" in kinds else {})
    ids = [data_set.source.ids[index] for data_set in sources.values() for index in indices]
    latents, positions = _encode_once(encode, encoded, ids, batch=batch)
    rows = dict(zip(sources, np.split(positions, len(sources)), strict=True))
    messages = {kind: Sent(latents[rows[kind]], data_set.count_slots(indices)) for kind, data_set in sources.items()}
    values, slots = messages["own"]
    if "zero" in kinds:
        messages["zero"] = Sent(np.zeros_like(values), slots)
    if "random" in kinds:
        messages["random"] = Sent(draw(values, slots, seed=seed), slots)
    return messages


def draw(latents: np.ndarray, slots: np.ndarray, *, seed: int) -> np.ndarray:
    """Returns normal random latents [n m z] with the mean and deviation of each slot's values over the examples.

    Only messages that have the slot count. Each random latent is then scaled to the size (RMS) of the real one in its
    place, so that it is zero beyond a message's `slots` i32[n].
    """
    used = (np.arange(latents.shape[1]) < slots[:, None])[:, :, None]
    count = np.maximum(used.sum(axis=0), 1)
    mean = latents.sum(axis=0, where=used) / count
    deviation = np.sqrt(np.sum((latents - mean) ** 2, axis=0, where=used) / count)
    drawn = np.random.default_rng(seed).standard_normal(latents.shape, np.float32) * deviation + mean
    sizes = [np.sqrt(np.mean(values.astype(np.float64) ** 2, axis=2, keepdims=True)) for values in (latents, drawn)]
    return (drawn * (sizes[0] / np.maximum(sizes[1], np.finfo(np.float32).tiny))).astype(np.float32)


def _encode_once(
    encode: Callable[[Batch], np.ndarray], encoded: Encoded, ids: Sequence[np.ndarray], *, batch: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the latents of the different ones of these sources, and each source's position among them, i32[n]."""
    chosen: dict[bytes, np.ndarray] = {}
    for tokens in ids:
        chosen.setdefault(tokens.tobytes(), tokens)
    position = {key: number for number, key in enumerate(chosen)}
    positions = np.array([position[tokens.tobytes()] for tokens in ids], np.int32)
    sources = dataclasses.replace(
        encoded, source=dataclasses.replace(encoded.source, ids=[*chosen.values()]), readers={}
    )
    hosts = batches_of(sources, range(len(chosen)), batch, share=processes.share())
    with phase("encoding the texts", -(-len(chosen) // batch), "batches") as done:
        parts = [encode(host["source"]) for host in done.track(hosts)]
    gathered = np.stack(processes.gather_rows(np.concatenate(parts)))  # [processes, batches x rows, m, z]
    shape = gathered.shape[2:]
    by_batch = gathered.reshape(len(gathered), len(parts), -1, *shape).swapaxes(0, 1)
    return by_batch.reshape(-1, *shape)[: len(chosen)], positions
