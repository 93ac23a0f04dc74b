"""Rank and cosines of latents over inputs and slots; a collapsed encoder writes the same latents for every text."""

from collections.abc import Mapping

import numpy as np


def describe(latents: np.ndarray) -> dict[str, float | None]:
    """Returns effective rank and mean cosines of the latents [n m z] of n different inputs, zeros where one has none.

    "effective_rank" is that of all inputs' latents as rows [n m*z], centred: at most n - 1, and 0 for n equal rows.
    "effective_rank_uncentred" is at least 1, and near 1 for nearly equal rows, which centring alone would magnify.
    In both a slot that an input does not have counts as the mean of those that have it.
    "input_cosine" is the mean over slots and pairs of inputs, "slot_cosine" that over inputs and pairs of slots: None
    where there is no pair.
    """
    count, used = len(latents), np.any(latents, axis=2)
    inputs = used.sum(axis=0)  # that have each slot
    centred, uncentred = _ranks(latents, used, inputs)
    units = _to_units(latents)
    # |sum of units|^2 is the sum of all cosines: without each one's with itself, that over ordered pairs.
    by_slot = np.sum(units.sum(axis=0) ** 2, axis=1) - np.einsum("nmk,nmk->m", units, units)
    pairs = int(np.sum(inputs * (inputs - 1)))
    similarity, messages = _sum_pairs(units), _count_pairs(used)
    others = int(messages.sum() - np.trace(messages))
    return {
        "inputs": count,
        "effective_rank": centred,
        "effective_rank_uncentred": uncentred,
        "input_cosine": float(by_slot.sum() / pairs) if pairs else None,
        "slot_cosine": float((similarity.sum() - np.trace(similarity)) / others) if others else None,
    }


def format_figures(found: Mapping[str, float | None]) -> str:
    shown = {key: "unknown" if value is None else f"{value:.3f}" for key, value in found.items()}
    return (
        f"latents of {found['inputs']} inputs: effective rank {shown['effective_rank']} "
        f"({shown['effective_rank_uncentred']} uncentred), cosine between inputs {shown['input_cosine']}, "
        f"between slots {shown['slot_cosine']}"
    )


def _ranks(latents: np.ndarray, used: np.ndarray, inputs: np.ndarray) -> tuple[float, float]:
    """Returns the effective ranks of `describe`, centred and not."""
    rows = latents.astype(np.float64)
    mean = rows.sum(axis=0) / np.maximum(inputs, 1)[:, None]
    rows = np.where(used[:, :, None], rows, mean).reshape(len(latents), -1)
    uncentred = effective_rank(rows)
    rows -= rows.mean(axis=0)
    return effective_rank(rows), uncentred


def effective_rank(rows: np.ndarray) -> float:
    """Returns exp of the entropy of the singular values' shares [Roy and Vetterli, 2007]; 0 where all of them are 0."""
    # By the products of rows, or of columns where they are fewer: of thousands the rows themselves take an hour.
    squares = np.linalg.eigvalsh(rows @ rows.T if len(rows) < rows.shape[1] else rows.T @ rows)
    values = np.sqrt(np.where(squares > np.finfo(np.float64).eps * max(rows.shape) * squares[-1], squares, 0.0))
    if not values.any():
        return 0.0
    shares = values[values > 0] / values.sum()
    return float(np.exp(-np.sum(shares * np.log(shares))))


def slot_similarity(latents: np.ndarray) -> np.ndarray:
    """Returns the mean cosine between slots i and j of one message, [m m], over those that have both; NaN: none has."""
    messages = _count_pairs(np.any(latents, axis=2))
    return np.where(messages > 0, _sum_pairs(_to_units(latents)) / np.maximum(messages, 1), np.nan)


def _sum_pairs(units: np.ndarray) -> np.ndarray:
    return np.einsum("nik,njk->ij", units, units, optimize=True)


def _count_pairs(used: np.ndarray) -> np.ndarray:
    return used.T.astype(np.int64) @ used.astype(np.int64)


def _to_units(latents: np.ndarray) -> np.ndarray:
    values = latents.astype(np.float64)
    return values / np.maximum(np.linalg.norm(values, axis=2, keepdims=True), np.finfo(np.float64).tiny)
