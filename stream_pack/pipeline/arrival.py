"""When a source that comes in its own order brings each buffer, and how much has to wait for its turn meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Arrival", "in_any_order", "one_after_another", "one_pass", "waiting_nbytes"]

Arrival: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]
"""When each buffer begins to come, and when it is complete, on one clock; its ticks have an order, and no length."""

_DIRECT = -1


def one_pass(
    storages: NDArray[np.int64],
    starts: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    derived: Mapping[int, tuple[int, int, int]],
    *,
    chunk_nbytes: int,
) -> Arrival:
    """Of buffers that are bytes ``[start, start + nbytes)`` of storages which pass one after the other.

    A storage passes in chunks of ``chunk_nbytes``, or a multiple of that; each chunk is given to the buffers in it one
    after the other, by their starts.  ``derived`` storages, as of a catalog, come when the one that they are made from
    has passed whole, by their numbers, in pieces of any length.
    """
    passes = storages.copy()
    made = np.full(len(storages), _DIRECT, np.int64)
    for buffer in np.flatnonzero(np.isin(storages, _numbers(derived))).tolist():
        made[buffer] = storages[buffer]
        passes[buffer], _, _ = derived[int(storages[buffer])]
    count = len(storages)
    unit = np.where(made == _DIRECT, chunk_nbytes, 1)
    rank = np.empty(count, np.int64)
    rank[np.lexsort((starts,))] = np.arange(count)
    keys = (
        np.repeat([0, 1], count),  # what begins in its chunk may end there
        np.tile(rank, 2),
        np.concatenate([starts // unit, (starts + nbytes - 1) // unit]),
        np.tile(made, 2),
        np.tile(passes, 2),
    )
    ticks = np.empty(2 * count, np.int64)
    ticks[np.lexsort(keys)] = np.arange(2 * count)
    return ticks[:count], ticks[count:]


def in_any_order(buffers: int) -> Arrival:
    """Of buffers that may come at any time: the worst case, in which all wait for the first."""
    return np.zeros(buffers, np.int64), np.arange(1, buffers + 1, dtype=np.int64)


def one_after_another(buffers: int) -> Arrival:
    """Of buffers that come in turn, each complete before the next begins."""
    ticks = np.arange(buffers, dtype=np.int64)
    return ticks, ticks + 1


def waiting_nbytes(arrival: Arrival, nbytes: NDArray[np.int64]) -> int:
    """How many bytes wait at most when buffers leave by their number, whatever the chunks that they come in.

    A buffer that begins before all those with lower numbers are complete waits until they are.  It is counted whole
    from its beginning on: how much of it has come by then depends on the chunks.
    """
    begins, ends = arrival
    turns = np.maximum.accumulate(np.concatenate([[np.int64(0)], ends]))[:-1]
    early = np.flatnonzero(begins < turns)
    if not len(early):
        return 0
    clock = np.concatenate([begins[early], turns[early]])
    change = np.concatenate([nbytes[early], -nbytes[early]])
    # What leaves at a tick makes room for what begins at it: a buffer is complete before those after it begin.
    order = np.lexsort((change, clock))
    return int(np.cumsum(change[order]).max())


def _numbers(derived: Collection[int]) -> NDArray[np.int64]:
    return np.fromiter(derived, np.int64, len(derived))
