"""A pack as a source, from a file or a pipe: repacked, filtered or cast without ever being mapped.

A file is read where buffers are wanted, each block checked against the table at its end, and once however many
tensors lie in it.  A pipe is read through: its table comes last, so the checksums of all blocks (8 bytes each) wait
for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import (
    ChecksumError,
    FormatError,
    RawPayloadError,
    TrailingBytesError,
    TruncatedError,
    TruncatedSourceError,
    UnsupportedTensorError,
)
from stream_pack.format.catalog import Catalog
from stream_pack.format.checksum import BlockHasher
from stream_pack.format.dtypes import BY_NAME
from stream_pack.format.head import Head, check_region, decode, root_checksum
from stream_pack.format.header import MAX_HEADER_NBYTES, Header
from stream_pack.format.index import NO_BUFFER, PACK_NOTE, Index
from stream_pack.format.records import Footer, Locator
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.pipeline.scatter import Scatter
from stream_pack.pipeline.source import Piece, Requests, Source, StreamOptions
from stream_pack.sources.pack.block_runs import block_runs

__all__ = ["PackSource"]

STEP_NBYTES = 1 << 20
"""What the head, the padding and the tail are read in: a length that a pack claims is not allocated at once."""


class PackSource(Source):
    """The tensors of a pack, in its order, with its metadata and notes; a storage is one of its buffers.

    ``within``: the pack stands inside another file, a regular one, whose bytes may follow.

    Lifetime: owns ``stream``, which stands at the pack's first byte.
    Raises: FormatError and its kinds, ChecksumError (of the head), UnsupportedTensorError for a dtype that only a later
    version knows; of a pipe's length and its blocks, only :meth:`stream` can tell.  RawPayloadError leaves ``stream``
    at the first byte.
    """

    def __init__(self, stream: ByteStream, *, within: bool = False) -> None:
        self._stream = stream
        self._head = _read_head(stream)
        if stream.file_nbytes is not None:
            room = stream.file_nbytes
            expected = self._head.pack_nbytes
            _check_length(min(room, expected) if within else room, expected)
        self._catalog = _catalog(self._head.index)
        self._verification = "nothing was read"

    @property
    def catalog(self) -> Catalog:
        return self._catalog

    @property
    def kind(self) -> str:
        return "pack"

    @property
    def chooses_order(self) -> bool:
        return self._stream.regular_file is not None

    @property
    def held_nbytes(self) -> int:
        # Read in pieces, joined, and of each block whether it was proved (file) or what it has (pipe).
        return 3 * self._head.index.checksums_nbytes

    @property
    def verification(self) -> str:
        return self._verification

    def stream(self, requests: Requests, options: StreamOptions) -> Iterator[Piece]:
        if self._stream.regular_file is None:
            yield from self._read_through(requests, options.chunk_nbytes)
            self._verification = "all checksums of the source were verified"
        else:
            yield from self._read_wanted(requests, options)
            self._verification = "the source's checksums of all that was taken were verified"

    def close(self) -> None:
        self._stream.close()

    def _read_wanted(self, requests: Requests, options: StreamOptions) -> Iterator[Piece]:
        self._stream.seek(self._head.checksums_file_offset)
        checksums = self._read_tail()
        proved = np.zeros(len(checksums), bool)
        runs = block_runs(requests, self._head.index, together=not options.in_order)
        scatter = Scatter(
            Requests(runs.of, requests.starts - runs.begins[runs.of], requests.nbytes)
        )
        rows = zip(runs.buffers.tolist(), runs.begins.tolist(), runs.ends.tolist(), strict=True)
        for run, (buffer, begin, end) in enumerate(rows):
            for chunk in self._proved(
                buffer, begin, end, checksums, proved, chunk_nbytes=options.chunk_nbytes
            ):
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
        """Bytes ``[begin, end)`` of the buffer.  Blocks not yet ``proved`` are read whole and then are."""
        index = self._head.index
        block_nbytes = index.block_nbytes
        buffer_nbytes = int(index.buffer_nbytes[buffer])
        base = index.first_block(buffer)
        first, last = begin // block_nbytes, (end - 1) // block_nbytes
        # A proved block at either edge is read where it is wanted only; all between is read whole in any case.
        low = first + bool(proved[base + first])
        high = last if proved[base + last] else last + 1
        position = begin if low > first else first * block_nbytes
        stop = end if high == last else min((last + 1) * block_nbytes, buffer_nbytes)
        hash_begin, hash_end = low * block_nbytes, min(high * block_nbytes, buffer_nbytes)
        self._stream.seek(
            self._head.region_file_offset + int(index.buffer_offsets[buffer]) + position
        )
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
            _check_length(None, self._head.pack_nbytes)
        self._check(checksums, 0, computed)

    def _chunks(self, nbytes: int, chunk_nbytes: int) -> Iterator[memoryview]:
        try:
            yield from self._stream.chunks(nbytes, chunk_nbytes=chunk_nbytes, what="the pack")
        except TruncatedSourceError as error:
            raise _truncated(error.position, self._head.pack_nbytes) from None

    def _skip_padding(self, nbytes: int) -> None:
        for chunk in self._chunks(nbytes, STEP_NBYTES):
            if np.frombuffer(chunk, np.uint8).any():
                raise FormatError(
                    f"the padding before byte {self._stream.position} of the pack is not zero; it is damaged"
                )

    def _read_tail(self) -> NDArray[np.uint64]:
        """The block checksums, proved by the footer behind them."""
        head = self._head
        table = b"".join(self._chunks(head.index.checksums_nbytes, STEP_NBYTES))
        tail_nbytes = head.pack_nbytes - head.footer_file_offset
        tail = b"".join(self._chunks(tail_nbytes, STEP_NBYTES))
        footer, footer_nbytes = Footer.decode(tail)
        if footer_nbytes != tail_nbytes:
            raise FormatError(
                f"the footer has {footer_nbytes} bytes where the head leaves {tail_nbytes} for it; the pack is damaged"
            )
        actual = root_checksum(head.checksum, (table,), tail)
        if actual != footer.checksum:
            raise ChecksumError(
                f"the pack's checksums (bytes {head.checksums_file_offset} to {head.pack_nbytes}) are damaged, or "
                f"belong to another head: their checksum is {actual:016x}, the footer says {footer.checksum:016x}",
                part="checksums",
                expected=footer.checksum,
                actual=actual,
                file_begin=head.checksums_file_offset,
                file_end=head.pack_nbytes,
            )
        return np.frombuffer(table, "<u8")

    def _check(
        self, checksums: NDArray[np.uint64], block: int, computed: list[int] | array[int]
    ) -> int:
        """Compare the blocks from number ``block`` of the pack on; returns the number of the next one."""
        end = block + len(computed)
        different = np.flatnonzero(checksums[block:end] != np.array(computed, np.uint64))
        if len(different):
            first = int(different[0])
            raise _block_error(
                self._head, block + first, int(checksums[block + first]), computed[first]
            )
        return end


def _read_head(stream: ByteStream) -> Head:
    header = Header.decode(stream.peek(MAX_HEADER_NBYTES))
    check_region(header)
    try:
        data = b"".join(
            stream.chunks(header.region_file_offset, chunk_nbytes=STEP_NBYTES, what="the head")
        )
    except TruncatedSourceError as error:
        # The locator, which knows the pack's length, is missing; so much is certain.
        raise _truncated(error.position, header.region_file_offset + header.region_nbytes) from None
    if not Locator.stands_before(data) and _is_raw_payload(stream):
        stream.unread(data) if stream.file_nbytes is None else stream.seek(0)
        raise RawPayloadError(
            f"ExecuTorch's own ({header.kind.value}), not a pack: it has neither index nor checksums; give the "
            "checkpoint it was made from"
        )
    return decode(memoryview(data))


def _is_raw_payload(stream: ByteStream) -> bool:
    """Whether a file without a locator has no footer either (of a pipe, whoever reads it looks in time)."""
    nbytes = stream.file_nbytes
    if nbytes is None:
        return True
    stream.seek(max(0, nbytes - len(Footer.MAGIC)))
    return not Footer.stands_before(stream.peek(len(Footer.MAGIC)))


def _check_length(nbytes: int | None, expected: int) -> None:
    """``nbytes``: of the whole source; None: more than there may be."""
    if nbytes is not None and nbytes < expected:
        raise _truncated(nbytes, expected)
    if nbytes is None or nbytes > expected:
        actual = expected + 1 if nbytes is None else nbytes
        raise TrailingBytesError(
            f"the pack ends at byte {expected}, but more follows: trailing bytes, or two packs joined",
            expected_nbytes=expected,
            actual_nbytes=actual,
        )


def _truncated(nbytes: int, expected: int) -> TruncatedError:
    return TruncatedError(
        f"the pack ends at byte {nbytes} of {expected}: {expected - nbytes} bytes are missing; its writer or its "
        "transfer was interrupted",
        expected_nbytes=expected,
        actual_nbytes=nbytes,
    )


def _block_error(head: Head, block: int, expected: int, actual: int) -> ChecksumError:
    index = head.index
    buffer, number, begin, end = index.block_range(block)
    users = np.flatnonzero(
        (index.tensor_buffers == buffer)
        & (index.tensor_starts < end)
        & (index.tensor_starts + index.tensor_nbytes > begin)
    )
    names = tuple(index.name(int(tensor)) for tensor in users)
    file_offset = head.region_file_offset + int(index.buffer_offsets[buffer])
    return ChecksumError(
        f"block {number} of tensor {names[0] if names else '(none)'!r} (bytes {file_offset + begin} to "
        f"{file_offset + end} of the pack) is damaged: its checksum is {actual:016x}, expected {expected:016x}",
        part="block",
        expected=expected,
        actual=actual,
        file_begin=file_offset + begin,
        file_end=file_offset + end,
        tensors=names,
        tensor_count=len(names),
        buffer=buffer,
        block=number,
    )


def _catalog(index: Index) -> Catalog:
    names = tuple(index.name(tensor) for tensor in range(len(index)))
    if len(set(names)) < len(names):
        raise FormatError("two tensors of the pack have the same name; it is damaged")
    numbers = np.array(
        [_dtype_number(index, number) for number in range(len(index.dtype_names))], np.uint8
    )
    held = index.tensor_buffers != NO_BUFFER
    noted = sorted(set(index.note_tensors.tolist()) - {PACK_NOTE})
    return Catalog(
        names=names,
        dtypes=numbers[index.tensor_dtypes],
        dims=index.dims,
        dims_ends=index.dims_ends,
        nbytes=index.tensor_nbytes,
        storages=np.where(held, index.tensor_buffers, 0).astype(np.int64),
        starts=index.tensor_starts,
        storages_nbytes=int(index.buffer_nbytes.sum()),
        metadata=index.notes(PACK_NOTE),
        notes=tuple(
            (tensor, key, value) for tensor in noted for key, value in index.notes(tensor).items()
        ),
    )


def _dtype_number(index: Index, entry: int) -> int:
    """The number of a dtype that the pack's own table names."""
    name, bits = index.dtype_names[entry], int(index.dtype_bits[entry])
    number = BY_NAME.get(name)
    if number is not None:
        return number
    users = np.flatnonzero(index.tensor_dtypes == entry)
    tensor = index.name(int(users[0])) if len(users) else ""
    raise UnsupportedTensorError(
        f"tensor {tensor!r} has the dtype {name!r} of {bits} bits, which this version does not know; a newer one may",
        tensor=tensor,
    )
