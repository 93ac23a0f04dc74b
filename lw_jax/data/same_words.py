"""The same words in two tokenizers: which of a reader's tokens stand in each of the encoder's windows."""

from collections.abc import Sequence

import numpy as np


def window_starts(starts: Sequence[int], windows: int) -> np.ndarray:
    """Returns the characters [windows 2] between which each window of a text's tokens stands, the last one open.

    `starts` are the places of its tokens; the windows are those of `models.encoder.window_weights`.
    """
    length, slot = len(starts), np.arange(windows)
    first = slot * length // windows
    last = np.maximum((slot + 1) * length // windows, first + 1)
    places = np.append(np.asarray(starts, np.int64), np.iinfo(np.int64).max)
    return np.stack([places[first], places[last]], axis=1)


def window_weights(starts: Sequence[int], windows: np.ndarray) -> np.ndarray:
    """Returns rows f32 [windows t] of ones at the tokens that begin in each window, or at the one that reaches into it.

    `starts` are the places of a reader's tokens in the same text, `windows` as `window_starts` gives them.
    """
    places = np.asarray(starts, np.int64)[None, :]
    inside = (places >= windows[:, :1]) & (places < windows[:, 1:])
    reaching = np.maximum(np.searchsorted(places[0], windows[:, 0], side="right") - 1, 0)
    none = ~inside.any(axis=1)
    inside[none, reaching[none]] = True
    return inside.astype(np.float32)
