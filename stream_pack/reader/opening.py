"""What opening proves about a file before anything of it is used: :mod:`stream_pack.format.proof`, fed from a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from stream_pack.errors import NotAPackError, StateError, StreamPackError
from stream_pack.format.checksum import xxh3
from stream_pack.format.head import Head, assemble_head, checksum_place, index_place
from stream_pack.format.header import Header
from stream_pack.format.limits import MAX_RECORD_NBYTES
from stream_pack.format.proof import (
    END_NBYTES,
    START_NBYTES,
    prove_checksums,
    prove_header,
    prove_locator,
    prove_reach,
)  # fmt: skip
from stream_pack.format.records import Footer
from stream_pack.reader.file_range import FileRange, Window

__all__ = ["naming", "prove_tail", "read_footer", "read_head", "read_header"]


def read_header(file: FileRange) -> Header:
    """The header at the range's first byte.

    Raises: as :func:`stream_pack.format.proof.prove_header`.
    """
    start = file.read(0, START_NBYTES)
    if not start and file.offset:
        nbytes = file.identity[2]
        raise NotAPackError(f"nothing is there: the file has only {nbytes} bytes")
    return prove_header(start)


def read_head(file: FileRange) -> Head:
    """Everything before the region, validated.

    Copies: the index, whose columns are views of the copy; nothing else of the head stays in memory.
    Raises: NotAPackError, RawPayloadError, NewerVersionError, TruncatedError, ChecksumError, FormatError; ReadError.
    """
    header = read_header(file)
    prove_reach(header, file.available)
    region = header.region_file_offset
    tail_nbytes = min(region, MAX_RECORD_NBYTES)
    tail = file.array(region - tail_nbytes, tail_nbytes).data
    prove_locator(tail, header, end=lambda: file.read(file.available - END_NBYTES, END_NBYTES))
    index_begin, index_nbytes = index_place(tail, region)
    index = np.empty(index_nbytes, np.uint8).data
    window = Window(file)

    def covered() -> Iterator[memoryview]:
        yield from window.parts(0, index_begin)
        file.fill(index_begin, index)
        yield index
        begin, end = checksum_place(region)
        yield from window.parts(index_begin + index_nbytes, begin)
        yield from window.parts(end, region)

    return assemble_head(header, tail, checksum=xxh3(covered()), read_index=lambda begin, nbytes: index)


def read_footer(file: FileRange, head: Head) -> bytes:
    """All bytes after the block checksums; a copy."""
    begin = head.footer_file_offset
    return file.array(begin, head.pack_nbytes - begin).tobytes()


def prove_tail(file: FileRange, head: Head) -> Footer:
    """The block checksums, read in steps, and the footer.

    Raises: as :func:`stream_pack.format.proof.prove_checksums`; ReadError.
    """
    checksums = Window(file).parts(head.checksums_file_offset, head.footer_file_offset)
    return prove_checksums(head, checksums, read_footer(file, head))


@contextmanager
def naming(file: FileRange) -> Iterator[None]:
    """Prefix the message of an error of this package with the file's name."""
    try:
        yield
    except StateError:  # has the name already
        raise
    except StreamPackError as error:
        where = f"{file.name} at byte {file.offset}" if file.offset else file.name
        error.args = (f"{where}: {error}", *error.args[1:])
        raise
