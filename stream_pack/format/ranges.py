"""Half-open ranges of bytes that may overlap, sorted by their begin."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["fresh_nbytes", "starts_apart"]


def fresh_nbytes(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many bytes of each range no range before it has: their sum is the length of the union.

    No range begins below 0.
    """
    reach = np.maximum.accumulate(np.concatenate((np.zeros(1, np.int64), ends)))[:-1]
    fresh: NDArray[np.int64] = np.maximum(ends - np.maximum(begins, reach), 0)
    return fresh


def starts_apart(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which ranges share no byte with any before them: each begins another group of ranges that overlap."""
    apart = np.ones(len(begins), bool)
    apart[1:] = begins[1:] >= np.maximum.accumulate(ends)[:-1]
    return apart
