"""What opening proves about a file before anything of it is used: :mod:`stream_pack.format.proof`, fed from a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stream_pack.errors import StateError, StreamPackError
from stream_pack.format.head import Head
from stream_pack.format.header import Header
from stream_pack.format.proof import END_NBYTES, START_NBYTES, prove_head, prove_header, prove_reach
from stream_pack.reader.mapping import FileRange, map_shared

__all__ = ["naming", "read_footer", "read_head", "read_header"]


def read_header(file: FileRange) -> Header:
    """The header at the range's first byte.

    Raises: as :func:`stream_pack.format.proof.prove_header`.
    """
    return prove_header(file.read(0, START_NBYTES))


def read_head(file: FileRange) -> Head:
    """Everything before the region, validated; the index's columns are views of a map of their own.

    Raises: NotAPackError, RawPayloadError, NewerVersionError, TruncatedError, ChecksumError, FormatError.
    """
    header = read_header(file)
    prove_reach(header, file.available)
    data = memoryview(map_shared(file, header.region_file_offset))
    return prove_head(data, header, end=lambda: file.read(file.available - END_NBYTES, END_NBYTES))


def read_footer(file: FileRange, head: Head) -> bytes:
    """All bytes after the block checksums; a copy."""
    begin = head.footer_file_offset
    return file.read(begin, head.pack_nbytes - begin)


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
