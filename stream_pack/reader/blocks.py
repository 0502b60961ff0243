"""Blocks: where they lie, and whether their bytes are as written."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import xxhash
from numpy.typing import NDArray

from stream_pack.errors import ChecksumError
from stream_pack.format.head import Head, root_checksum
from stream_pack.format.index import NO_BUFFER, Index
from stream_pack.format.records import Footer
from stream_pack.reader.mapping import Mapping

__all__ = ["BlockCheck", "Users", "block_checksums", "block_error", "check_root"]

MAX_NAMED = 100
"""Names that an error about a block lists: all of a tied tensor's would make a report grow with names times blocks."""

_STRIDE = 1024
"""Tensors that are looked at in one go: few against a pack's million, and their number against 1."""


def block_checksums(mapping: Mapping, head: Head) -> NDArray[np.uint64]:
    """The checksums section: one entry a block, in place.  Not proved: see :func:`check_root`."""
    nbytes = head.index.checksums_nbytes
    if not nbytes:
        return np.empty(0, np.uint64)
    return mapping.array(head.checksums_file_offset, nbytes).view("<u8")


def check_root(mapping: Mapping, head: Head) -> None:
    """Prove that the checksums are those that were written with this head.

    Raises: ChecksumError.
    """
    begin, end = head.checksums_file_offset, head.pack_nbytes
    record = mapping.array(head.footer_file_offset, end - head.footer_file_offset).tobytes()
    footer, _ = Footer.decode(record)
    actual = root_checksum(
        head.checksum, (memoryview(block_checksums(mapping, head)).cast("B"),), record
    )
    if actual != footer.checksum:
        raise ChecksumError(
            f"the checksums (bytes {begin} to {end}) are damaged, or stand behind another pack's head: the root "
            f"checksum is {actual:016x}, the footer says {footer.checksum:016x}",
            part="checksums",
            expected=footer.checksum,
            actual=actual,
            file_begin=begin,
            file_end=end,
        )


def places(index: Index, first: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Buffer, begin and end (offsets) of each of the blocks ``[first, end)``, numbered through all buffers."""
    blocks = np.arange(first, end)
    buffers = np.searchsorted(index.block_ends, blocks, side="right")
    offsets, nbytes = index.buffer_offsets[buffers], index.buffer_nbytes[buffers]
    begins = (blocks - index.first_blocks[buffers]) * index.block_nbytes
    ends = np.minimum(begins + index.block_nbytes, nbytes)
    return zip(buffers.tolist(), (offsets + begins).tolist(), (offsets + ends).tolist())


def wrong_blocks(
    mapping: Mapping, head: Head, checksums: NDArray[np.uint64], first: int, end: int
) -> list[tuple[int, int]]:
    """Number and actual checksum of those of the blocks ``[first, end)`` that are not as written."""
    wrong = []
    expected = checksums[first:end].tolist()
    for block, (_, begin, stop), value in zip(
        range(first, end), places(head.index, first, end), expected
    ):
        data = mapping.array(head.region_file_offset + begin, stop - begin)
        actual = xxhash.xxh3_64_intdigest(memoryview(data))
        if actual != value:
            wrong.append((block, actual))
    return wrong


class Users:
    """Whose bytes are where: sorted once, for as many questions as there are damaged blocks."""

    def __init__(self, index: Index) -> None:
        self._index = index
        held = np.flatnonzero(index.tensor_buffers != NO_BUFFER)
        self._rows = held[np.argsort(index.offsets[held], kind="stable")]
        self._begins = index.offsets[self._rows]
        self._ends = self._begins + index.tensor_nbytes[self._rows]
        self._sorted_ends = np.sort(self._ends)
        self._named: tuple[list[int], tuple[str, ...]] = ([], ())
        self._last_ends = np.maximum.reduceat(self._ends, np.arange(0, len(self._ends), _STRIDE))

    def of(self, begin: int, end: int) -> tuple[tuple[str, ...], int]:
        """Names of tensors that have bytes within offsets ``[begin, end)``, MAX_NAMED at most, and how many do."""
        stop = int(np.searchsorted(self._begins, end))
        # Whoever ends before the range also begins before its end.
        count = stop - int(np.searchsorted(self._sorted_ends, begin, side="right"))
        found: list[int] = []
        for stride in np.flatnonzero(self._last_ends[: -(-stop // _STRIDE)] > begin).tolist():
            first = stride * _STRIDE
            inside = self._ends[first : min(first + _STRIDE, stop)] > begin
            found += self._rows[first + np.flatnonzero(inside)].tolist()
            if len(found) >= MAX_NAMED:
                break
        rows = sorted(found[:MAX_NAMED])
        if rows != self._named[0]:
            # Blocks of one tensor share the tuple: there may be a million of them.
            self._named = rows, tuple(map(self._index.name, rows))
        return self._named[1], count


def block_error(
    head: Head, users: Users, block: int, *, expected: int, actual: int
) -> ChecksumError:
    """The error that says which bytes differ, and whose they are."""
    index = head.index
    buffer, number, begin, end = index.block_range(block)
    offset = int(index.buffer_offsets[buffer])
    tensors, count = users.of(offset + begin, offset + end)
    file_offset = head.region_file_offset + offset
    file_begin, file_end = file_offset + begin, file_offset + end
    named = ", ".join(map(repr, tensors[:3])) + (f" and {count - 3} more" if count > 3 else "")
    return ChecksumError(
        f"tensor {named}: block {number} of buffer {buffer} (bytes {file_begin} to {file_end} of the pack) is damaged: "
        f"its checksum is {actual:016x}, expected {expected:016x}",
        part="block",
        expected=expected,
        actual=actual,
        file_begin=file_begin,
        file_end=file_end,
        tensors=tensors,
        tensor_count=count,
        buffer=buffer,
        block=number,
    )


class BlockCheck:
    """Checks each block at most once, before the first byte of it is handed out."""

    def __init__(self, mapping: Mapping, head: Head) -> None:
        check_root(mapping, head)
        self._head = head
        # Copied: a live array of the mapping would keep it from being closed.
        self._checksums = block_checksums(mapping, head).copy()
        self._proved = np.zeros(len(self._checksums), bool)
        self._lock = threading.Lock()

    def check(self, mapping: Mapping, buffer: int, begin: int, end: int) -> None:
        """Prove the bytes ``[begin, end)`` of a buffer, ``begin < end``.

        Raises: ChecksumError, again each time it is asked for the damaged block.
        """
        index = self._head.index
        base = index.first_block(buffer)
        first = base + begin // index.block_nbytes
        last = base + (end - 1) // index.block_nbytes
        with self._lock:
            for block in (first + np.flatnonzero(~self._proved[first : last + 1])).tolist():
                for number, actual in wrong_blocks(
                    mapping, self._head, self._checksums, block, block + 1
                ):
                    raise block_error(
                        self._head,
                        Users(index),
                        number,
                        expected=int(self._checksums[number]),
                        actual=actual,
                    )
                self._proved[block] = True
