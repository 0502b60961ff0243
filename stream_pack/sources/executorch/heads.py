"""How the heads of a file that ExecuTorch wrote are read: in place, or from a pipe as they come by."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

from stream_pack.errors import FormatError
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.pipeline.chunks import Chunk, Zeros

__all__ = ["HeadsInFile", "HeadsInPipe", "OutOfOrder"]

STEP_NBYTES = 1 << 20
"""What a pipe is read in: a length that a file claims is not allocated at once."""
_WHAT = "what the file announces"


class OutOfOrder(Exception):
    """A pipe would have to pass over constants to reach what describes others.  Never leaves this package."""


class HeadsInFile:
    """A regular file as :class:`stream_pack.et_files.payload.ReadFile`.  Copies: none.

    Lifetime: views keep the mapping by themselves.
    """

    def __init__(self, stream: ByteStream) -> None:
        assert stream.regular_file is not None and stream.file_nbytes is not None
        fd, base = stream.regular_file
        self.nbytes: int | None = stream.file_nbytes
        delta = base % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(fd, delta + stream.file_nbytes, access=mmap.ACCESS_READ, offset=base - delta)
        self._memory = memoryview(mapped)[delta:]

    def read(self, begin: int, nbytes: int) -> memoryview:
        """Bytes ``[begin, begin + nbytes)``, in place."""
        return self._memory[begin : begin + nbytes]

    def keep(self, begin: int, end: int) -> None:
        """Nothing is lost here."""


class HeadsInPipe:
    """A pipe as :class:`stream_pack.et_files.payload.ReadFile`.

    Heads stay in memory, because constants may be in them.  Raises (:meth:`read`): OutOfOrder;
    TruncatedSourceError.
    """

    def __init__(self, stream: ByteStream) -> None:
        self.nbytes: int | None = None
        self.stream = stream
        self.heads: list[tuple[int, memoryview]] = []
        self._kept_from: int | None = None

    def read(self, begin: int, nbytes: int) -> memoryview:
        """Bytes ``[begin, begin + nbytes)``, none of which may have been passed over."""
        position = self.stream.position
        if begin >= position:
            if self._kept_from is not None and self._kept_from < begin:
                raise OutOfOrder
            self.stream.skip(begin - position, what=_WHAT)
            self.heads.append((begin, self._fetch(nbytes)))
            return self.heads[-1][1]
        first, head = self.heads[-1]
        if begin < first:
            raise FormatError(f"parts of the file overlap at byte {begin}")
        missing = begin + nbytes - position
        if missing > 0:
            head = memoryview(b"".join((head, self._fetch(missing))))
            self.heads[-1] = first, head
        return head[begin - first : begin - first + nbytes]

    def keep(self, begin: int, end: int) -> None:
        """Remember that bytes are constants.  Raises: FormatError when they have gone by."""
        position = self.stream.position
        if begin < min(end, position) and not self._held(begin, min(end, position)):
            raise FormatError(f"constants (bytes {begin} to {end}) precede what describes them")
        begin = max(begin, position)
        if begin < end:
            self._kept_from = begin if self._kept_from is None else min(self._kept_from, begin)

    def _held(self, begin: int, end: int) -> bool:
        return any(first <= begin and end <= first + len(head) for first, head in self.heads)

    def whole(self) -> Iterator[Chunk]:
        """All of the file; what was passed over is zeros.  Nothing may be read here afterwards."""
        position = 0
        for begin, head in self.heads:
            yield Zeros(begin - position)
            yield head
            position = begin + len(head)
        yield Zeros(self.stream.position - position)
        yield from iter(self.stream.read_some, b"")

    def _fetch(self, nbytes: int) -> memoryview:
        chunks = self.stream.chunks(nbytes, chunk_nbytes=STEP_NBYTES, what=_WHAT)
        return memoryview(b"".join(chunks))
