"""What opening proves about a file before anything of it is used.

Source: docs/FORMAT.md, "What a reader must do".  The head is proved before the file's length is compared with what the
head says of it, because a length from a damaged head means nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stream_pack.errors import (
    FormatError,
    NotAPackError,
    RawPayloadError,
    StateError,
    StreamPackError,
    TrailingBytesError,
    TruncatedError,
)
from stream_pack.format import head
from stream_pack.format.head import Head, check_region
from stream_pack.format.header import Header, HeadKind
from stream_pack.format.records import Footer, Locator
from stream_pack.format.sniff import CHECKPOINTS, SNIFF_NBYTES, describe_start, sniff
from stream_pack.reader.mapping import FileRange, map_shared

__all__ = ["check_footer", "check_length", "naming", "read_head", "read_header"]

_RAW = {
    HeadKind.MPS: "a raw MP00 payload",
    HeadKind.XNNPACK: "a raw XH00 payload",
    HeadKind.PTD: "a .ptd that ExecuTorch wrote",
}


def read_header(file: FileRange) -> Header:
    """The header at the range's first byte.

    Raises: NotAPackError, which says what stands there instead; TruncatedError when the file ends inside the header.
    """
    start = file.read(0, SNIFF_NBYTES)
    kind = HeadKind.of(start)
    if kind is not None and len(start) < kind.header_nbytes:
        raise _truncated(file, kind.header_nbytes, "at least ")
    try:
        return Header.decode(start)
    except NotAPackError as error:
        advice = (
            ": make a pack of it with `stream_pack convert`" if sniff(start) in CHECKPOINTS else ""
        )
        raise NotAPackError(f"{error}; found {describe_start(start)}{advice}") from None


def read_head(file: FileRange) -> Head:
    """Everything in front of the region, validated; the index's columns are views of a map of their own.

    Raises: NotAPackError, RawPayloadError, NewerVersionError, TruncatedError, ChecksumError, FormatError.
    """
    header = read_header(file)
    check_region(header)
    region = header.region_file_offset
    if region > file.available:
        raise _truncated(file, region, "at least ")
    if not Locator.stands_before(file.read(region - len(Locator.MAGIC), len(Locator.MAGIC))):
        if Footer.stands_before(file.read(file.available - len(Footer.MAGIC), len(Footer.MAGIC))):
            raise FormatError(
                f"no locator before byte {region}, where one must end, but a footer at the end; "
                "the file is damaged"
            )
        raise RawPayloadError(
            f"neither locator nor footer: {_RAW[header.kind]}, in which nothing can be verified, or a pack damaged in "
            "both places; make a pack of it with `stream_pack convert`, or pass "
            f"kind={header.kind.value!r} in Python to open it as it is"
        )
    return head.decode(memoryview(map_shared(file, region)))


def check_length(file: FileRange, head: Head, *, contained: bool) -> None:
    """The pack is whole.  ``contained``: it stands inside another file, whose bytes may follow.

    Raises: TruncatedError, TrailingBytesError.
    """
    if file.available < head.pack_nbytes:
        raise _truncated(file, head.pack_nbytes, "")
    if file.available > head.pack_nbytes and not contained:
        raise TrailingBytesError(
            f"{file.available - head.pack_nbytes} bytes follow the pack: expected {head.pack_nbytes} "
            f"bytes, found {file.available}; something was appended, or a shorter pack written over a longer file",
            expected_nbytes=head.pack_nbytes,
            actual_nbytes=file.available,
        )


def check_footer(file: FileRange, head: Head) -> None:
    """The footer stands where header, index and locator place it; its checksum is not looked at.

    Raises: FormatError, NewerVersionError.
    """
    nbytes = head.pack_nbytes - head.footer_file_offset
    _, found = Footer.decode(file.read(head.footer_file_offset, nbytes))
    if found != nbytes:
        raise FormatError(
            f"the footer claims {found} bytes, expected {nbytes}; the file is damaged"
        )


@contextmanager
def naming(file: FileRange) -> Iterator[None]:
    """Put the file's name in front of what an error of this package says."""
    try:
        yield
    except StateError:  # names it itself
        raise
    except StreamPackError as error:
        where = f"{file.name} at byte {file.offset}" if file.offset else file.name
        error.args = (f"{where}: {error}", *error.args[1:])
        raise


def _truncated(file: FileRange, expected: int, at_least: str) -> TruncatedError:
    return TruncatedError(
        f"the file ends too early: expected {at_least}{expected} bytes, found {file.available}, "
        f"{expected - file.available} are missing; the copy or the writer was interrupted: copy or convert again",
        expected_nbytes=expected,
        actual_nbytes=file.available,
    )
