"""When a source that comes in its own order brings each buffer, and how much has to wait for its turn meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Arrival", "one_after_another", "one_pass", "waiting_nbytes"]

Arrival: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]
"""When each buffer begins to come, and when it is complete, on one clock; its ticks have an order, and no length."""

_DIRECT = -1


def one_pass(
    storages: NDArray[np.int64],
    starts: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    derived: Mapping[int, tuple[int, int, int]],
) -> Arrival:
    """Of buffers that are bytes ``[start, start + nbytes)`` of storages which pass one after the other.

    Buffers that overlap come at the same time.  ``derived`` storages, as of a catalog, come when the one that they are
    made from has passed whole, by their numbers.
    """
    passes = storages.copy()
    made = np.full(len(storages), _DIRECT, np.int64)
    for buffer in np.flatnonzero(np.isin(storages, _numbers(derived))).tolist():
        made[buffer] = storages[buffer]
        passes[buffer], _, _ = derived[int(storages[buffer])]
    keys = (np.concatenate([starts, starts + nbytes]), np.tile(made, 2), np.tile(passes, 2))
    order = np.lexsort(keys)
    later = np.zeros(len(order), bool)
    for key in keys:
        later[1:] |= key[order][1:] != key[order][:-1]
    ticks = np.empty(len(order), np.int64)
    ticks[order] = np.cumsum(later)
    return ticks[: len(storages)], ticks[len(storages) :]


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
    # What leaves at a tick makes room for what begins at it: a buffer is complete before those behind it begin.
    order = np.lexsort((change, clock))
    return int(np.cumsum(change[order]).max())


def _numbers(derived: Collection[int]) -> NDArray[np.int64]:
    return np.fromiter(derived, np.int64, len(derived))
