"""Proof that bytes are a pack: header, head, length, checksums and blocks, from any source.

No I/O: a caller reads one part after the other and passes it to :func:`prove_header`, :func:`prove_reach`,
:func:`prove_head`, :func:`prove_length` and :func:`prove_checksums`.  The head is proved before the length, because a
length from a damaged head means nothing.  Source: docs/FORMAT.md, "What a reader must do".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import TypeAlias

import numpy as np
import xxhash

from stream_pack.errors import (
    ChecksumError,
    FormatError,
    NewerVersionError,
    NotAPackError,
    RawPayloadError,
    ReadError,
    TrailingBytesError,
    TruncatedError,
)
from stream_pack.format.checksum import xxh3
from stream_pack.format.file_kinds import CHECKPOINTS, SNIFF_NBYTES, describe_start, sniff
from stream_pack.format.head import Head, check_region, decode_head, root_checksum
from stream_pack.format.header import Header
from stream_pack.format.header_kinds import decode_header, kind_of
from stream_pack.format.index import NO_BUFFER, Index
from stream_pack.format.records import Footer, Locator
from stream_pack.text import counted, listed

__all__ = [
    "END_NBYTES",
    "START_NBYTES",
    "Users",
    "Wrong",
    "block_error",
    "prove_checksums",
    "prove_footer",
    "prove_head",
    "prove_header",
    "prove_length",
    "prove_locator",
    "prove_reach",
    "truncated",
    "truncated_head",
    "unreadable_block",
    "wrong_blocks",
]

START_NBYTES = SNIFF_NBYTES
"""First bytes that decode any header, and say what a file is that has none."""
END_NBYTES = len(Footer.MAGIC)
"""Last bytes that tell whether there is a footer."""

MAX_NAMED = 100
"""Names that an error about a block lists: all of a tied tensor's would make a report grow with names times blocks."""

_STRIDE = 1024
"""Tensors searched in one step: few compared with a pack's million, many compared with one."""


def prove_header(start: bytes) -> Header:
    """The header in ``start``, the first START_NBYTES of a file, or all of one that has fewer.

    Raises: NotAPackError, which says what the file is instead; TruncatedError when it ends inside the header;
    FormatError.
    """
    kind = kind_of(start)
    if kind is not None and len(start) < kind.header_nbytes:
        raise truncated(len(start), kind.header_nbytes, at_least=True)
    try:
        return decode_header(start)
    except NotAPackError as error:
        advice = ": make a pack of it with `stream-pack convert`" if sniff(start) in CHECKPOINTS else ""
        detail = str(error).removeprefix("not a pack: ")
        raise NotAPackError(f"not a pack: {describe_start(start)}{advice} ({detail})") from None


def prove_reach(header: Header, available: int | None) -> None:
    """The head is of a possible length, and all there; ``available``: bytes of the file, None where it is a pipe.

    Raises: FormatError, TruncatedError.
    """
    check_region(header)
    if available is not None and available < header.region_file_offset:
        raise truncated_head(header, available)


def prove_head(data: memoryview, header: Header, *, end: Callable[[], bytes | None]) -> Head:
    """The head in ``data``, all bytes before the region.

    ``end`` is called when there is no locator, and returns the file's last END_NBYTES, or None if they cannot be read
    yet.

    Copies: none; the index's columns are views of ``data``.
    Raises: RawPayloadError, NewerVersionError, FormatError, ChecksumError.
    """
    prove_locator(data, header, end=end)
    return decode_head(data)


def prove_locator(tail: bytes | memoryview, header: Header, *, end: Callable[[], bytes | None]) -> None:
    """A locator is at the end of ``tail``, which is where the head ends; ``end`` as for :func:`prove_head`.

    Raises: RawPayloadError, FormatError.
    """
    if Locator.stands_before(tail):
        return
    if Footer.stands_before(end() or b""):
        raise FormatError(
            f"no locator at the expected position before byte {header.region_file_offset}, but a footer at the end; "
            "the file is damaged"
        )
    raise RawPayloadError(
        f"neither locator nor footer: a raw {header.kind.raw}, in which nothing can be verified, or a pack damaged in "
        f"both places; make a pack of it with `stream-pack convert`, or pass kind={header.kind.name!r} in Python to "
        "open it as it is"
    )


def prove_length(head: Head, available: int | None, *, contained: bool) -> None:
    """The pack is whole.

    ``available``: bytes from the pack's first one to the end of the file, None for more than the pack has, however
    many.  ``contained``: the pack is inside another file, whose bytes may follow.

    Raises: TruncatedError, TrailingBytesError.
    """
    expected = head.pack_nbytes
    actual = expected + 1 if available is None else available
    if actual < expected:
        raise truncated(actual, expected)
    if actual > expected and not contained:
        extra, found = ("more bytes", "more") if available is None else (counted(actual - expected, "byte"), actual)
        follow = "follows" if actual - expected == 1 and available is not None else "follow"
        raise TrailingBytesError(
            f"{extra} {follow} the pack: expected {expected} bytes, found {found}; something was appended, or a "
            "shorter pack was written over a longer file",
            expected_nbytes=expected,
            actual_nbytes=actual,
        )


def prove_footer(head: Head, footer: bytes) -> Footer:
    """The record in ``footer``, all bytes after the block checksums; its own checksum is not looked at.

    Raises: FormatError, NewerVersionError.
    """
    record, nbytes = Footer.decode(footer)
    if nbytes != len(footer):
        raise FormatError(f"the footer claims {nbytes} bytes, expected {len(footer)}; the file is damaged")
    return record


def prove_checksums(head: Head, checksums: Iterable[bytes | memoryview], footer: bytes) -> Footer:
    """The block checksums are those that were written with this head: the root checksum in the footer covers both.

    ``checksums``: their bytes, in parts.

    Raises: FormatError; ChecksumError; NewerVersionError only where the root checksum is right.
    """
    record: Footer | NewerVersionError
    try:
        record = prove_footer(head, footer)
    except NewerVersionError as error:
        record = error
    expected = Footer.stored_checksum(footer)
    actual = root_checksum(head.checksum, checksums, footer)
    if actual != expected:
        begin, end = head.checksums_file_offset, head.pack_nbytes
        raise ChecksumError(
            f"the checksums (bytes {begin} to {end}) are damaged, or belong to another pack's head: the root checksum "
            f"is {actual:016x}, the footer says {expected:016x}",
            part="checksums",
            expected=expected,
            actual=actual,
            file_begin=begin,
            file_end=end,
        )
    if isinstance(record, NewerVersionError):
        raise record
    return record


def truncated_head(header: Header, available: int) -> TruncatedError:
    """The error for a file that ends before its region.

    The locator, which says how long the pack is, is missing; the header says at least where the region ends.
    """
    return truncated(available, header.region_file_offset + header.region_nbytes, at_least=True)


def truncated(
    available: int, expected: int, *, at_least: bool = False, what: str = "the pack", again: str = "convert"
) -> TruncatedError:
    """The error for a pack, or ``what``, that ends after ``available`` of ``expected`` bytes."""
    missing = expected - available
    lacking = "1 byte is" if missing == 1 else f"{missing} bytes are"
    return TruncatedError(
        f"{what} is truncated: expected {'at least ' * at_least}{expected} bytes, found {available}, {lacking} "
        f"missing; the copy or the writer was interrupted: copy or {again} again",
        expected_nbytes=expected,
        actual_nbytes=available,
    )


Wrong: TypeAlias = "int | ReadError"
"""What is wrong with a block: the checksum that it has, or why it cannot be read."""


def wrong_blocks(
    read: Callable[[int, int, int], Iterable[memoryview]],
    head: Head,
    expected: Iterable[int],
    first: int,
    end: int,
) -> list[tuple[int, Wrong]]:
    """Number and actual checksum of the blocks among ``[first, end)`` that have not the ``expected`` one.

    ``read(file_begin, file_end, ahead)`` returns bytes of the pack, in parts; what will be asked for ends at ``ahead``.

    Raises: what ``read`` raises, but ReadError.
    """
    wrong: list[tuple[int, Wrong]] = []
    extents = _extents(head, first, end)
    ahead = extents[-1][1] if extents else 0
    for block, (begin, stop), value in zip(range(first, end), extents, expected):
        try:
            parts = iter(read(begin, stop, ahead))
            part = next(parts)
            # At once where it is whole.
            whole = len(part) == stop - begin
            actual = xxhash.xxh3_64_intdigest(part) if whole else xxh3(chain((part,), parts))
        except ReadError as error:
            wrong.append((block, error))
            continue
        if actual != value:
            wrong.append((block, actual))
    return wrong


def _extents(head: Head, first: int, end: int) -> list[tuple[int, int]]:
    """Begin and end (file offsets) of each of the blocks ``[first, end)``, numbered through all buffers."""
    index = head.index
    blocks = np.arange(first, end)
    buffers = np.searchsorted(index.block_ends, blocks, side="right")
    offsets, nbytes = index.buffer_offsets[buffers] + head.region_file_offset, index.buffer_nbytes[buffers]
    begins = (blocks - index.first_blocks[buffers]) * index.block_nbytes
    ends = np.minimum(begins + index.block_nbytes, nbytes)
    return list(zip((offsets + begins).tolist(), (offsets + ends).tolist()))


class Users:
    """Which tensors own which bytes: sorted once, for any number of damaged blocks."""

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
        # A tensor that ends before the range also begins before its end.
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


def block_error(head: Head, users: Users, block: int, *, expected: int, actual: int) -> ChecksumError:
    """The error that says which bytes of the pack differ, and which tensors own them."""
    text, attributes = _block_place(head, users, block)
    return ChecksumError(
        f"{text} is damaged: its checksum is {actual:016x}, expected {expected:016x}",
        expected=expected,
        actual=actual,
        **attributes,
    )


def unreadable_block(head: Head, users: Users, block: int, error: ReadError) -> ReadError:
    """``error``, with the block in which it happened, and the tensors that own it."""
    text, attributes = _block_place(head, users, block)
    of_system = {"errno": error.errno, "strerror": error.strerror, "filename": error.filename}
    return ReadError(f"{text} cannot be read: {error.strerror}", **of_system, **attributes)


def _block_place(head: Head, users: Users, block: int) -> tuple[str, dict[str, object]]:
    """Where a block is, in words and as attributes of an error."""
    index = head.index
    buffer, number, begin, end = index.block_range(block)
    offset = int(index.buffer_offsets[buffer])
    tensors, count = users.of(offset + begin, offset + end)
    file_offset = head.region_file_offset + offset
    file_begin, file_end = file_offset + begin, file_offset + end
    text = (
        f"tensor {listed(tensors, most=3, total=count)}: block {number} of buffer {buffer} (bytes {file_begin} to "
        f"{file_end} of the pack)"
    )
    return text, {
        "part": "block",
        "file_begin": file_begin,
        "file_end": file_end,
        "tensors": tensors,
        "tensor_count": count,
        "buffer": buffer,
        "block": number,
    }
