"""Which requests to a pack are read together, so that a block they share is read once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stream_pack.format.index import Index
from stream_pack.format.ranges import starts_apart
from stream_pack.pipeline.source import Requests

__all__ = ["BlockRuns", "block_runs"]


@dataclass(frozen=True, slots=True, eq=False)
class BlockRuns:
    """Ranges that are read one after the other: request ``r`` is in run ``of[r]``; run ``k`` is bytes
    ``[begins[k], ends[k])`` of the pack's buffer ``buffers[k]``, cut to what is requested.
    """

    of: NDArray[np.int64]
    buffers: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]


def block_runs(requests: Requests, index: Index, *, together: bool) -> BlockRuns:
    """The runs of ``requests``, whose storages are the buffers of ``index``.

    ``together``: requests that share a block, directly or through others, are one run, and runs are in file order.
    Otherwise every request is its own run, in the order of the requests.
    """
    ends = requests.starts + requests.nbytes
    if not together or len(requests) == 0:
        return BlockRuns(np.arange(len(requests)), requests.storages, requests.starts, ends)
    order = np.lexsort((requests.starts, requests.storages))
    buffers, starts, ends = requests.storages[order], requests.starts[order], ends[order]
    # Numbered through the whole pack, so that no two buffers share one.
    before = index.first_blocks[buffers]
    first = before + starts // index.block_nbytes
    last = before + (ends - 1) // index.block_nbytes
    leads = starts_apart(first, last + 1)
    heads = np.flatnonzero(leads)
    of = np.empty(len(order), np.int64)
    of[order] = np.cumsum(leads) - 1
    return BlockRuns(of, buffers[heads], starts[heads], np.maximum.reduceat(ends, heads))
