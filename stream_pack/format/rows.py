"""Columns read row by row, as Python's integers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["rows"]

STEP = 1 << 12
"""Rows that are objects at a time: an int takes 32 bytes, four times as much as its entry in a column."""


def rows(*columns: NDArray[np.integer]) -> Iterator[tuple[Any, ...]]:
    """The rows of columns of one length, an int for each column.  Memory: that of a few thousand rows."""
    for begin in range(0, len(columns[0]), STEP):
        yield from zip(*(column[begin : begin + STEP].tolist() for column in columns))
