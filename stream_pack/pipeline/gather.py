"""Strided arrays in row-major order, a window at a time, so that no whole copy ever exists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

__all__ = ["row_windows", "strided_chunks"]

SLAB = 16
"""Columns that are copied at once: their cache lines stay in the nearest cache until all rows have taken their elements
from them.  Measured on transposed matrices of 1 to 8 bytes an element: 2 to 9 times as fast; 32 is slower where strides
are powers of two, 8 elsewhere."""

MIN_SLAB = 1024
"""Elements of a slab that are worth a call."""


def row_windows(shape: Sequence[int], itemsize: int, window_nbytes: int) -> Iterator[tuple[int | slice, ...]]:
    """Indices that cut an array into windows of at most ``window_nbytes`` (one element at least), in row-major order.

    Concatenating ``array[index].ravel()`` over all indices gives ``array.ravel()``.  An array of rank 0 has the one
    window ``()``; an array of no elements has none.
    """
    if 0 in shape:
        return
    if not shape:
        yield ()
        return
    row_nbytes = prod(shape[1:]) * itemsize
    if row_nbytes <= window_nbytes or len(shape) == 1:
        rows = max(1, window_nbytes // row_nbytes)
        for begin in range(0, shape[0], rows):
            yield (slice(begin, min(begin + rows, shape[0])),)
        return
    for row in range(shape[0]):
        for index in row_windows(shape[1:], itemsize, window_nbytes):
            yield (row, *index)


def strided_chunks(array: NDArray[np.generic], *, chunk_nbytes: int) -> Iterator[memoryview]:
    """The bytes of ``array`` in row-major order.

    Copies: one window of at most ``chunk_nbytes`` at a time (one element at least).
    """
    for index in row_windows(array.shape, array.itemsize, chunk_nbytes):
        # The ellipsis keeps rank 0 an array: NumPy's scalars are in native byte order.
        window = _row_major(array[(*index, ...)])
        yield memoryview(window.reshape(-1).view(np.uint8))


def _row_major(window: NDArray[np.generic]) -> NDArray[np.generic]:
    """``numpy.ascontiguousarray(window)``, several times as fast where neighbours in a row are far apart."""
    steps = range(0, window.shape[-1], SLAB) if window.ndim > 1 else range(0)
    if not steps or window.strides[-1] == window.itemsize or window.size < MIN_SLAB * len(steps):
        return np.ascontiguousarray(window)
    result = np.empty(window.shape, window.dtype)
    for begin in steps:
        result[..., begin : begin + SLAB] = window[..., begin : begin + SLAB]
    return result
