"""The region: chunks are placed in the file, and every block is hashed on the way."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import numpy as np
import xxhash
from numpy.typing import NDArray

from stream_pack.errors import SourceError, TruncatedSourceError
from stream_pack.format.checksum import BlockHasher
from stream_pack.format.head import Head
from stream_pack.pipeline.chunks import Chunk, Piece, Zeros
from stream_pack.pipeline.spool import Spool, SpoolFile
from stream_pack.text import quoted

__all__ = ["RegionHasher", "in_turn", "weight"]

MAX_PADDING_CHUNK = 4096
_PADDING = bytes(MAX_PADDING_CHUNK)


class _ChecksumTable:
    """Checksums by block number, in pages that are made when their first one comes.

    A source may announce far more bytes than it will ever deliver; only what it delivers takes memory here.
    """

    PAGE = 1 << 13

    def __init__(self) -> None:
        self._pages: dict[int, NDArray[np.uint64]] = {}

    def store(self, block: int, checksums: list[int]) -> None:
        for number, checksum in enumerate(checksums, block):
            page, slot = divmod(number, self.PAGE)
            if page not in self._pages:
                self._pages[page] = np.zeros(self.PAGE, "<u8")
            self._pages[page][slot] = checksum

    def column(self, blocks: int) -> NDArray[np.uint64]:
        pages = [self._pages[page] for page in range(-(-blocks // self.PAGE))]
        return np.concatenate([*pages, np.empty(0, "<u8")])[:blocks]


class RegionHasher:
    """Knows how far each buffer is and hashes what comes for it."""

    def __init__(self, head: Head) -> None:
        index = head.index
        self._head = head
        self._block_nbytes = index.block_nbytes
        self._nbytes = index.buffer_nbytes
        self._file_offsets = index.buffer_offsets + head.region_file_offset
        self._padding = np.diff(index.buffer_offsets, append=head.region_nbytes) - self._nbytes
        self._open: dict[int, tuple[BlockHasher, int, int]] = {}
        self._missing = len(index.buffer_nbytes)
        self._done = np.zeros(self._missing, bool)
        self._checksums = _ChecksumTable()

    def place(self, buffer: int, chunk: Chunk) -> Iterator[tuple[int, Chunk]]:
        """Hash the next bytes of ``buffer`` and say where in the file they go.

        After a buffer's last bytes come the zeros up to the next buffer, if they are few: they join two small writes to
        one.  A wider gap is left to the sink.
        Raises: SourceError when the buffer gets more bytes than it has.
        """
        yield self._add(buffer, chunk), chunk
        padding = int(self._padding[buffer])
        if self._done[buffer] and 0 < padding <= MAX_PADDING_CHUNK:
            end = int(self._file_offsets[buffer] + self._nbytes[buffer])
            yield end, _PADDING[:padding]

    def _add(self, buffer: int, chunk: Chunk) -> int:
        nbytes = int(self._nbytes[buffer])
        file_offset = int(self._file_offsets[buffer])
        begun = self._open.pop(buffer, None)
        filled = begun[1] if begun else 0
        end = filled + len(chunk)
        if end > nbytes or self._done[buffer]:
            raise SourceError(
                f"the source delivered more than the {nbytes} bytes that it announced for tensor {self._name(buffer)}"
            )
        if begun is None:
            block = self._head.index.first_block(buffer)
            if end == nbytes <= self._block_nbytes and not isinstance(chunk, Zeros):
                # One short buffer in one chunk: most tensors of a model with many.
                self._checksums.store(block, [xxhash.xxh3_64_intdigest(chunk)])
                self._finish(buffer)
                return file_offset
            begun = (BlockHasher(self._block_nbytes), 0, block)
        hasher, _, block = begun
        if isinstance(chunk, Zeros):
            checksums = hasher.update_zeros(chunk.nbytes)
        else:
            checksums = hasher.update(chunk)
        if end == nbytes:
            checksums += hasher.finish()
            self._finish(buffer)
        self._checksums.store(block, checksums)
        if end < nbytes:
            self._open[buffer] = (hasher, end, block + len(checksums))
        return file_offset + filled

    def _finish(self, buffer: int) -> None:
        self._done[buffer] = True
        self._missing -= 1

    def finish(self) -> NDArray[np.uint64]:
        """The checksums of all blocks, in file order.

        Raises: TruncatedSourceError when a buffer is not complete.
        """
        if self._missing:
            buffer = int(np.flatnonzero(~self._done)[0])
            filled = self._open[buffer][1] if buffer in self._open else 0
            raise TruncatedSourceError(
                f"the source ended after {filled} of {int(self._nbytes[buffer])} bytes of tensor {self._name(buffer)}"
            )
        return self._checksums.column(self._head.index.checksums_nbytes // 8)

    def _name(self, buffer: int) -> str:
        index = self._head.index
        return quoted(index.name(index.first_tensor(buffer)))


def weight(piece: Piece) -> int:
    """The memory that a piece holds, for :func:`stream_pack.pipeline.overlap.overlap`."""
    return 0 if isinstance(piece[1], Zeros) else len(piece[1])


def in_turn(pieces: Iterator[Piece], nbytes: NDArray[np.int64], spool: Spool, *, chunk_nbytes: int) -> Iterator[Piece]:
    """The pieces in the order of the buffers; what comes before its turn waits in the spool.

    Raises: LimitError when something has to wait and there is no place for the spool.
    """
    early: dict[int, SpoolFile] = {}
    turn = delivered = 0
    try:
        for buffer, chunk in pieces:
            if buffer != turn:
                if buffer not in early:
                    early[buffer] = spool.open(
                        why="the source's bytes come in another order than the pack's",
                        nbytes=int(nbytes[buffer]),
                        of_nbytes=int(nbytes[turn:].sum()),
                    )
                early[buffer].append(chunk)
                continue
            yield buffer, chunk
            delivered += len(chunk)
            while turn < len(nbytes) and delivered >= nbytes[turn]:
                turn, delivered = turn + 1, 0
                if turn in early:
                    delivered = yield from _released(early.pop(turn), turn, chunk_nbytes)
    finally:
        for held in early.values():
            held.close()


def _released(held: SpoolFile, buffer: int, chunk_nbytes: int) -> Generator[Piece, None, int]:
    """What of ``buffer`` has waited, as pieces; returns how many bytes that was."""
    with held:
        for part in held.read(0, held.nbytes, chunk_nbytes=chunk_nbytes):
            yield buffer, part
        return held.nbytes
