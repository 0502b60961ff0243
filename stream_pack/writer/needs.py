"""What streaming a source takes: memory, and temporary space for what comes before its turn."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from stream_pack.errors import LimitError
from stream_pack.pipeline.arrival import waiting_nbytes
from stream_pack.pipeline.budget import Budget, budget
from stream_pack.pipeline.memory import anonymous_nbytes
from stream_pack.pipeline.source import Requests, Source
from stream_pack.pipeline.spool import MEMORY_NBYTES

__all__ = ["Means", "Needs", "needs_of"]


@dataclass(frozen=True, slots=True)
class Means:
    """The most that is wanted of chunks, in bytes, and of threads; ``max_memory`` bytes, if given, may not allow it."""

    chunk_nbytes: int
    jobs: int
    max_memory: int | None


@dataclass(frozen=True, slots=True)
class Needs:
    """``spool_nbytes``: temporary disk space; ``waiting_nbytes``: what may wait in memory instead.  Units: bytes."""

    budget: Budget
    spool_nbytes: int
    waiting_nbytes: int


def needs_of(source: Source, requests: Requests, means: Means, *, tensors: int, blocks: int, in_order: bool) -> Needs:
    """What streaming ``requests`` takes, for a target that holds ``tensors`` and has ``blocks`` checksums.

    ``in_order``: the target is a stream.  Call it when the head of the target is in memory: what the process has now
    counts.

    Raises: LimitError naming the least memory that is needed.
    """
    # Under a limit the chunks depend on what this very process holds, so nothing is made of their length.
    unit = means.chunk_nbytes if means.max_memory is None else 1
    spool_nbytes = _spool_nbytes(source, requests, chunk_nbytes=unit, in_order=in_order)

    def with_waiting(nbytes: int) -> Budget:
        return budget(
            max_memory=means.max_memory,
            chunk_nbytes=means.chunk_nbytes,
            jobs=means.jobs,
            tensors=tensors,
            blocks=blocks,
            source_nbytes=source.traits.held_nbytes + nbytes,
            held_nbytes=anonymous_nbytes(),
        )

    if spool_nbytes <= MEMORY_NBYTES:
        if means.max_memory is None:
            # Also for what comes out of order against the plan.
            return Needs(with_waiting(spool_nbytes), 0, MEMORY_NBYTES)
        with suppress(LimitError):
            return Needs(with_waiting(spool_nbytes), 0, spool_nbytes)
    return Needs(with_waiting(0), spool_nbytes, 0)


def _spool_nbytes(source: Source, requests: Requests, *, chunk_nbytes: int, in_order: bool) -> int:
    """Temporary space that the conversion takes at its peak, in bytes.

    ``in_order``: bytes that come before their turn have to wait.  ``chunk_nbytes``: as for
    :meth:`stream_pack.pipeline.source.Source.demand`.  This is never too little, and 0 only where nothing waits,
    unless a pipe brings the first of its storages in the order that is expected, and a later one not.
    """
    demand = source.demand(requests, in_order=in_order, chunk_nbytes=chunk_nbytes)
    if demand.arrival is None:
        return demand.spool_nbytes
    return demand.spool_nbytes + waiting_nbytes(demand.arrival, requests.nbytes)
