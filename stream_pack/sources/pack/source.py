"""A pack as a source, from a file or a pipe: repacked, filtered or cast without ever being mapped.

Of a file only the requested blocks are read, each once, and checked against the checksums at the file's end.  A pipe
is read through: its checksums are last, so those computed of all blocks (8 bytes each) are kept until then.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import FormatError, RawPayloadError, TruncatedSourceError, UnsupportedTensorError
from stream_pack.format.catalog import Catalog
from stream_pack.format.checksum import BlockHasher
from stream_pack.format.dtypes import BY_NAME
from stream_pack.format.head import Head
from stream_pack.format.index import NO_BUFFER, PACK_NOTE, Index
from stream_pack.format.names import Names
from stream_pack.format.proof import (
    END_NBYTES,
    START_NBYTES,
    Users,
    block_error,
    prove_checksums,
    prove_head,
    prove_header,
    prove_length,
    prove_reach,
    truncated,
    truncated_head,
)
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.pipeline.chunks import Piece
from stream_pack.pipeline.places import Places
from stream_pack.pipeline.scatter import Scatter
from stream_pack.pipeline.source import Requests, Source, StreamOptions, Traits
from stream_pack.sources.pack.block_runs import block_runs
from stream_pack.text import quoted

__all__ = ["PackSource"]

BYTES = BY_NAME["uint8"]

STEP_NBYTES = 1 << 20
"""Step in which head, padding and tail are read: a claimed length is not allocated before its bytes exist."""


class PackSource(Source):
    """The tensors of a pack, in its order, with its metadata and notes; a storage is one of its buffers.

    ``within``: the pack is inside another regular file, whose bytes may follow.

    Lifetime: owns ``stream``, which is at the pack's first byte.
    Raises: FormatError and its subclasses, ChecksumError (of the head), UnsupportedTensorError for a dtype of a later
    version; for the length and the blocks of a pipe, only :meth:`stream` raises.  RawPayloadError leaves ``stream`` at
    the first byte.
    """

    def __init__(self, stream: ByteStream, *, within: bool = False) -> None:
        self._stream = stream
        self._head = _read_head(stream)
        if stream.file_nbytes is not None:
            prove_length(self._head, stream.file_nbytes, contained=within)
        traits = Traits(
            "pack",
            chooses_order=stream.regular_file is not None,
            # The checksums in pieces and joined; for each block, whether it is proved (file) or its checksum (pipe).
            held_nbytes=3 * self._head.index.checksums_nbytes,
        )
        super().__init__(_catalog(self._head.index), traits)
        self._verification = "nothing was read"

    @property
    def verification(self) -> str:
        return self._verification

    def stream(self, requests: Requests, options: StreamOptions) -> Iterator[Piece]:
        if self._stream.regular_file is None:
            yield from self._read_through(requests, options.chunk_nbytes)
            self._verification = "all checksums of the source were verified"
        else:
            yield from self._read_wanted(requests, options)
            self._verification = "checksums of all source data read were verified"

    @property
    def checksums(self) -> str:
        return "XXH3-64 of each block"

    @property
    def head(self) -> Head:
        """All that precedes the tensors, proved."""
        return self._head

    def places(self, requests: Requests) -> Places:
        begin = self._stream.file_offset(self._head.region_file_offset)
        offsets = begin + self._head.index.buffer_offsets[requests.storages] + requests.starts
        return Places.within(self._stream.source_file, offsets.astype(np.int64))

    def block_checksums(self) -> NDArray[np.uint64]:
        """The checksums of all blocks, as a regular file has them at its end, proved by its footer.

        Raises: ChecksumError, FormatError; TruncatedSourceError; OSError.
        """
        self._stream.seek(self._head.checksums_file_offset)
        return self._read_tail()

    def check_unchanged(self) -> None:
        self._stream.check_unchanged()

    def close(self) -> None:
        self._stream.close()

    def _read_wanted(self, requests: Requests, options: StreamOptions) -> Iterator[Piece]:
        checksums = self.block_checksums()
        proved = np.zeros(len(checksums), bool)
        runs = block_runs(requests, self._head.index, together=not options.in_order)
        scatter = Scatter(Requests(runs.of, requests.starts - runs.begins[runs.of], requests.nbytes))
        rows = zip(runs.buffers.tolist(), runs.begins.tolist(), runs.ends.tolist(), strict=True)
        for run, (buffer, begin, end) in enumerate(rows):
            for chunk in self._proved(buffer, begin, end, checksums, proved, chunk_nbytes=options.chunk_nbytes):
                yield from scatter.pieces(run, chunk)
        scatter.finish()

    def _proved(
        self,
        buffer: int,
        begin: int,
        end: int,
        checksums: NDArray[np.uint64],
        proved: NDArray[np.bool_],
        *,
        chunk_nbytes: int,
    ) -> Iterator[memoryview]:
        """Bytes ``[begin, end)`` of the buffer.  Blocks not yet ``proved`` are read whole and proved."""
        index = self._head.index
        block_nbytes = index.block_nbytes
        buffer_nbytes = int(index.buffer_nbytes[buffer])
        base = index.first_block(buffer)
        first, last = begin // block_nbytes, (end - 1) // block_nbytes
        # A proved block at either edge is read only where requested; all between is read whole anyway.
        low = first + bool(proved[base + first])
        high = last if proved[base + last] else last + 1
        position = begin if low > first else first * block_nbytes
        stop = end if high == last else min((last + 1) * block_nbytes, buffer_nbytes)
        hash_begin, hash_end = low * block_nbytes, min(high * block_nbytes, buffer_nbytes)
        self._stream.seek(self._head.region_file_offset + int(index.buffer_offsets[buffer]) + position)
        hasher = BlockHasher(block_nbytes)
        block = base + low
        for chunk in self._chunks(stop - position, chunk_nbytes):
            fresh = chunk[max(hash_begin - position, 0) : max(hash_end - position, 0)]
            block = self._check(checksums, block, hasher.update(fresh))
            part = chunk[max(begin - position, 0) : max(end - position, 0)]
            if part:
                yield part
            position += len(chunk)
        block = self._check(checksums, block, hasher.finish())
        proved[base + low : block] = True

    def _read_through(self, requests: Requests, chunk_nbytes: int) -> Iterator[Piece]:
        index = self._head.index
        scatter = Scatter(requests)
        hasher = BlockHasher(index.block_nbytes)
        computed = array("Q")
        position = 0
        places = zip(index.buffer_offsets.tolist(), index.buffer_nbytes.tolist(), strict=True)
        for buffer, (offset, nbytes) in enumerate(places):
            self._skip_padding(offset - position)
            for chunk in self._chunks(nbytes, chunk_nbytes):
                computed.extend(hasher.update(chunk))
                yield from scatter.pieces(buffer, chunk)
            computed.extend(hasher.finish())
            position = offset + nbytes
        self._skip_padding(self._head.region_nbytes - position)
        checksums = self._read_tail()
        scatter.finish()
        if not self._stream.at_end():
            prove_length(self._head, None, contained=False)
        self._check(checksums, 0, computed)

    def _chunks(self, nbytes: int, chunk_nbytes: int) -> Iterator[memoryview]:
        try:
            yield from self._stream.chunks(nbytes, chunk_nbytes=chunk_nbytes, what="the pack")
        except TruncatedSourceError as error:
            raise truncated(error.position, self._head.pack_nbytes) from None

    def _skip_padding(self, nbytes: int) -> None:
        for chunk in self._chunks(nbytes, STEP_NBYTES):
            if np.frombuffer(chunk, np.uint8).any():
                raise FormatError(
                    f"the padding before byte {self._stream.position} of the pack is not zero; the pack is damaged"
                )

    def _read_tail(self) -> NDArray[np.uint64]:
        """The block checksums, proved by the footer that follows them."""
        head = self._head
        table = b"".join(self._chunks(head.index.checksums_nbytes, STEP_NBYTES))
        footer = b"".join(self._chunks(head.pack_nbytes - head.footer_file_offset, STEP_NBYTES))
        prove_checksums(head, (table,), footer)
        return np.frombuffer(table, "<u8")

    def _check(self, checksums: NDArray[np.uint64], block: int, computed: list[int] | array[int]) -> int:
        """Compare the blocks from number ``block`` on; returns the number of the next one."""
        end = block + len(computed)
        different = np.flatnonzero(checksums[block:end] != np.array(computed, np.uint64))
        if len(different):
            first = int(different[0])
            actual, expected = computed[first], int(checksums[block + first])
            users = Users(self._head.index)
            raise block_error(self._head, users, block + first, expected=expected, actual=actual)
        return end


def _read_head(stream: ByteStream) -> Head:
    header = prove_header(stream.peek(START_NBYTES))
    prove_reach(header, stream.file_nbytes)
    try:
        nbytes = header.region_file_offset
        data = b"".join(stream.chunks(nbytes, chunk_nbytes=STEP_NBYTES, what="the head"))
    except TruncatedSourceError as error:
        raise truncated_head(header, error.position) from None
    try:
        return prove_head(memoryview(data), header, end=lambda: _end(stream))
    except RawPayloadError:
        stream.unread(data) if stream.file_nbytes is None else stream.seek(0)
        raise


def _end(stream: ByteStream) -> bytes | None:
    """The last bytes of a file; of a pipe, the caller that reads a raw payload looks at them in time."""
    if stream.file_nbytes is None:
        return None
    stream.seek(max(0, stream.file_nbytes - END_NBYTES))
    return bytes(stream.peek(END_NBYTES))


def _catalog(index: Index) -> Catalog:
    names = Names(index.ragged_names)
    if len(set(names)) < len(names):
        raise FormatError("two tensors of the pack have the same name; the pack is damaged")
    known = np.array([name in BY_NAME for name in index.dtype_names], bool)
    numbers = np.array([BY_NAME.get(name, BYTES) for name in index.dtype_names], np.uint8)
    refused = {}
    for row in np.flatnonzero(~known[index.tensor_dtypes]).tolist():
        entry = int(index.tensor_dtypes[row])
        refused[row] = UnsupportedTensorError(
            f"tensor {quoted(names[row])} has the dtype {quoted(index.dtype_names[entry])} of "
            f"{int(index.dtype_bits[entry])} bits, which this version does not know; update stream_pack",
            tensor=names[row],
        )
    held = index.tensor_buffers != NO_BUFFER
    noted = sorted(set(index.note_tensors.tolist()) - {PACK_NOTE})
    return Catalog(
        names=names,
        dtypes=numbers[index.tensor_dtypes],
        dims=index.ragged_dims,
        nbytes=index.tensor_nbytes,
        storages=np.where(held, index.tensor_buffers, 0).astype(np.int64),
        starts=index.tensor_starts,
        storages_nbytes=int(index.buffer_nbytes.sum()),
        metadata=index.notes(PACK_NOTE),
        notes=tuple((tensor, key, value) for tensor in noted for key, value in index.notes(tensor).items()),
        refused=refused,
    )
