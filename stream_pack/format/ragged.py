"""Rows of different lengths in one flat column: row ``k`` is ``values[ends[k-1]:ends[k]]``, ``ends[-1]`` being 0."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["row_lengths", "rows_differ"]


def row_lengths(ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many values each row has."""
    return np.diff(ends, prepend=0)


def rows_differ(
    left: NDArray[np.integer],
    left_ends: NDArray[np.int64],
    right: NDArray[np.integer],
    right_ends: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Which rows are not equal in two columns of as many rows."""
    left_lengths, lengths = row_lengths(left_ends), row_lengths(right_ends)
    differ: NDArray[np.bool_] = left_lengths != lengths
    same = np.flatnonzero(~differ)
    lengths = lengths[same]
    # Values of the rows that are equally long, side by side.
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    from_left = left[np.repeat(left_ends[same] - lengths, lengths) + within]
    from_right = right[np.repeat(right_ends[same] - lengths, lengths) + within]
    differ[np.repeat(same, lengths)[from_left != from_right]] = True
    return differ
