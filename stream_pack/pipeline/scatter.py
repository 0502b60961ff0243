"""Which buffers want which bytes of a storage that is streamed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stream_pack.errors import TruncatedSourceError
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.pipeline.chunks import Chunk, Piece, Zeros
from stream_pack.pipeline.source import Requests

__all__ = ["Scatter", "SingleBuffer", "read_ranges"]


def read_ranges(stream: ByteStream, requests: Requests, *, begin: int, chunk_nbytes: int, what: str) -> Iterator[Piece]:
    """Every buffer in turn, from a regular file that is one storage, which starts at byte ``begin`` of ``stream``.

    Raises: TruncatedSourceError, which says ``what`` was read.
    """
    for buffer, (_, start, nbytes) in enumerate(requests.rows()):
        stream.seek(begin + start)
        for chunk in stream.chunks(nbytes, chunk_nbytes=chunk_nbytes, what=what):
            yield buffer, chunk


class Scatter:
    """Cuts the chunks of storages into the pieces that were requested.

    Storages may pass in any order and alternate; the bytes of each come once, from its first to its last.
    """

    def __init__(self, requests: Requests) -> None:
        order = np.lexsort((requests.starts, requests.storages))
        storages = requests.storages[order]
        firsts = np.flatnonzero(np.diff(storages, prepend=np.int64(-1)))
        bounds = np.append(firsts, len(order)).tolist()
        self._requests = requests
        self._order = order
        self._ranges = {int(storage): (bounds[k], bounds[k + 1]) for k, storage in enumerate(storages[firsts])}
        self._passing: dict[int, _Passing] = {}
        self._unserved = len(requests)

    def wants(self, storage: int) -> bool:
        """Whether any buffer in ``storage`` lacks bytes."""
        return storage in self._ranges

    def pieces(self, storage: int, chunk: Chunk) -> Iterator[Piece]:
        """The next bytes of ``storage``, as (buffer, its part of ``chunk``).  Copies: none."""
        passing = self._passing.get(storage)
        if passing is None:
            if storage not in self._ranges:
                return
            passing = self._passing[storage] = self._start(storage)
        for buffer, begin, end, last in passing.advance(len(chunk)):
            self._unserved -= last
            yield buffer, _cut(chunk, begin, end)
        if passing.complete:  # a checkpoint may have a million storages: what is served is let go
            del self._passing[storage], self._ranges[storage]

    def finish(self) -> None:
        """Raises: TruncatedSourceError when a buffer has not got all its bytes."""
        if self._unserved:
            raise TruncatedSourceError(
                f"the source ended, but {self._unserved} of {len(self._requests)} buffers are incomplete"
            )

    def _start(self, storage: int) -> _Passing:
        first, last = self._ranges[storage]
        buffers = self._order[first:last]
        starts = self._requests.starts[buffers]
        ends = starts + self._requests.nbytes[buffers]
        return _Passing(buffers.tolist(), starts.tolist(), ends.tolist())


class SingleBuffer:
    """What :class:`Scatter` does, for one buffer: bytes ``[begin, end)`` of the one storage that passes."""

    def __init__(self, buffer: int, begin: int, end: int) -> None:
        self._passing = _Passing([buffer], [begin], [end])

    def pieces(self, storage: int, chunk: Chunk) -> Iterator[Piece]:
        """The next bytes of the storage, as (buffer, its part of ``chunk``).  Copies: none."""
        for buffer, begin, end, _ in self._passing.advance(len(chunk)):
            yield buffer, _cut(chunk, begin, end)


class _Passing:
    """One storage being streamed: its buffers by rising start, and those that the current byte is in."""

    def __init__(self, buffers: list[int], starts: list[int], ends: list[int]) -> None:
        self._buffers, self._starts, self._ends = buffers, starts, ends
        self._position = 0
        self._next = 0
        self._open: list[int] = []

    @property
    def complete(self) -> bool:
        """Whether every buffer has all its bytes."""
        return self._next == len(self._starts) and not self._open

    def advance(self, nbytes: int) -> Iterator[tuple[int, int, int, bool]]:
        """(buffer, begin and end within the next ``nbytes`` bytes, whether the buffer is complete then)."""
        position = self._position
        end = self._position = position + nbytes
        while self._next < len(self._starts) and self._starts[self._next] < end:
            self._open.append(self._next)
            self._next += 1
        for k in self._open:
            begin = max(self._starts[k], position)
            stop = min(self._ends[k], end)
            yield self._buffers[k], begin - position, stop - position, self._ends[k] <= end
        self._open = [k for k in self._open if self._ends[k] > end]


def _cut(chunk: Chunk, begin: int, end: int) -> Chunk:
    if begin == 0 and end == len(chunk):
        return chunk
    if isinstance(chunk, Zeros):
        return Zeros(end - begin)
    return memoryview(chunk)[begin:end]
