"""The flow of a source's bytes into a sink, in as many threads as the budget allows."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TypeAlias

from stream_pack.arguments.jobs import cores
from stream_pack.errors import StreamPackError
from stream_pack.pipeline.budget import Budget
from stream_pack.pipeline.chunks import Chunk, Piece
from stream_pack.pipeline.overlap import overlap
from stream_pack.pipeline.source import Requests, Source, StreamOptions
from stream_pack.pipeline.spool import Spool
from stream_pack.writer.region import in_turn, weight
from stream_pack.writer.sink import Sink

__all__ = ["CHUNK_NBYTES", "Place", "Progress", "default_jobs", "flow"]

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (bytes of the tensors written, bytes they have); the zeros of wide gaps are never counted as written."""

Place: TypeAlias = Callable[[Iterator[Piece]], Iterator[tuple[int, Chunk]]]
"""A stage that says where in the target each piece belongs, and computes its checksums."""

CHUNK_NBYTES = 1 << 20
"""Bytes moved in one step: they stay in a core's own cache between read, hash and write."""

MAX_JOBS = 4
"""Stages that can overlap: read, check the source, hash, write."""


def default_jobs() -> int:
    """Threads to use by default: one a core, up to the number of stages."""
    return min(MAX_JOBS, cores())


def flow(
    source: Source,
    requests: Requests,
    sink: Sink,
    limits: Budget,
    *,
    place: Place,
    spool: Spool,
    progress: Progress | None,
    total_nbytes: int,
) -> None:
    """Put all of ``requests`` into ``sink``, which has begun, and compare the source's files with what they were.

    ``progress`` is called with what has been put and ``total_nbytes``.
    Raises: SourceError and its kinds; LimitError; OSError.
    """
    try:
        _flow(source, requests, sink, limits, place=place, spool=spool, progress=progress, total_nbytes=total_nbytes)
    except StreamPackError:
        source.check_unchanged()  # a file that was changed meanwhile explains its damage
        raise
    source.check_unchanged()


def _flow(
    source: Source,
    requests: Requests,
    sink: Sink,
    limits: Budget,
    *,
    place: Place,
    spool: Spool,
    progress: Progress | None,
    total_nbytes: int,
) -> None:
    options = StreamOptions(
        chunk_nbytes=limits.chunk_nbytes,
        jobs=limits.jobs,
        in_order=sink.in_order,
        spool=spool,
        window_nbytes=limits.window_nbytes,
    )
    pieces = source.stream(requests, options)
    if sink.in_order:
        pieces = in_turn(pieces, requests.nbytes, spool, chunk_nbytes=limits.chunk_nbytes)
    if limits.jobs > 1:
        pieces = overlap(pieces, weigh=weight)
    placed = place(pieces)
    if limits.jobs > 2:
        placed = overlap(placed, weigh=weight)
    written = 0
    try:
        for file_offset, chunk in placed:
            sink.put(file_offset, chunk)
            written += len(chunk)
            if progress is not None:
                progress(written, total_nbytes)
    finally:
        # From the outermost generator in, so that every thread ends before the source is closed.
        if isinstance(placed, Generator):
            placed.close()
