"""The head: header, graph, index and locator together, everything in front of the region.

:func:`encode` makes it from a layout before the first data byte is known; :func:`decode` reads and
proves it, from the same bytes a file or a pipe delivers.  Source: docs/FORMAT.md, "The file".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from stream_pack import graph, index
from stream_pack.align import PAGE_NBYTES, align_up
from stream_pack.checksum import xxh3, zeros
from stream_pack.errors import ChecksumError, FormatError
from stream_pack.header import HEADER_NBYTES, Header
from stream_pack.index import Index
from stream_pack.layout import Layout
from stream_pack.limits import MAX_HEAD_NBYTES, MAX_NBYTES, MAX_RECORD_NBYTES
from stream_pack.records import FOOTER_NBYTES, LOCATOR_NBYTES, Footer, Locator, uncover

__all__ = [
    "EncodedHead",
    "Head",
    "check_region",
    "decode",
    "encode",
    "encode_footer",
    "root_checksum",
]

INDEX_ALIGNMENT = 64
"""A cache line: columns that NumPy reads in place are aligned whatever the graph's length."""


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """What stands in front of a region, validated.

    Units: bytes; file offsets count from the pack's first byte.
    """

    region_file_offset: int
    region_nbytes: int
    pack_nbytes: int
    index_file_offset: int
    index_nbytes: int
    locator_nbytes: int
    checksum: int
    index: Index

    @property
    def checksums_file_offset(self) -> int:
        """Where the block checksums begin: at the region's end."""
        return self.region_file_offset + self.region_nbytes

    @property
    def footer_file_offset(self) -> int:
        """Where the footer begins: at the checksums' end."""
        return self.checksums_file_offset + self.index.checksums_nbytes


@dataclass(frozen=True, slots=True, eq=False)
class EncodedHead:
    """A head ready to be written: ``front``, then ``padding_nbytes`` zeros, then ``locator``."""

    front: bytes
    padding_nbytes: int
    locator: bytes
    head: Head


def encode(layout: Layout) -> EncodedHead:
    """The head of the pack that ``layout`` describes.

    Raises: LimitError when a flatbuffer would reach 2 GiB.
    """
    the_index = layout.index
    graph_bytes = graph.encode(the_index)
    index_bytes = index.encode(the_index)
    index_file_offset = align_up(HEADER_NBYTES + len(graph_bytes), INDEX_ALIGNMENT)
    used = index_file_offset + len(index_bytes) + LOCATOR_NBYTES
    region_file_offset = align_up(used, the_index.alignment.region)
    header = Header(region_file_offset, layout.region_nbytes)
    front = b"".join(
        (
            header.encode(),
            graph_bytes,
            bytes(index_file_offset - HEADER_NBYTES - len(graph_bytes)),
            index_bytes,
        )
    )
    pack_nbytes = (
        region_file_offset + layout.region_nbytes + the_index.checksums_nbytes + FOOTER_NBYTES
    )
    locator = Locator(index_file_offset, len(index_bytes), pack_nbytes, checksum=0)
    padding_nbytes = region_file_offset - used
    checksum = xxh3((front, *zeros(padding_nbytes), locator.covered()))
    return EncodedHead(
        front=front,
        padding_nbytes=padding_nbytes,
        locator=replace(locator, checksum=checksum).encode(),
        head=Head(
            region_file_offset=region_file_offset,
            region_nbytes=layout.region_nbytes,
            pack_nbytes=pack_nbytes,
            index_file_offset=index_file_offset,
            index_nbytes=len(index_bytes),
            locator_nbytes=LOCATOR_NBYTES,
            checksum=checksum,
            index=the_index,
        ),
    )


def check_region(header: Header) -> None:
    """Prove that the header's positions are possible at all, before anything is read or mapped for
    them.

    Raises: FormatError.
    """
    offset, nbytes = header.region_file_offset, header.region_nbytes
    smallest = HEADER_NBYTES + LOCATOR_NBYTES
    if not smallest <= offset <= MAX_HEAD_NBYTES or nbytes > MAX_NBYTES:
        raise FormatError(
            f"the header places the region at byte {offset} with {nbytes} bytes, which no pack has; "
            "the file is damaged or not a pack"
        )


def decode(data: memoryview) -> Head:
    """Read and validate a head; ``data`` is exactly the bytes in front of the region.

    Copies: none; the index's columns are views of ``data``.
    Raises: FormatError, NewerVersionError, ChecksumError.
    """
    header = Header.decode(bytes(data[:HEADER_NBYTES]))
    check_region(header)
    if header.region_file_offset != len(data):
        raise FormatError(
            f"the header places the region at byte {header.region_file_offset}, the head has {len(data)} bytes"
        )
    locator, locator_nbytes = Locator.decode(data)
    front = len(data) - locator_nbytes
    actual = xxh3((data[:front], uncover(data[front:])))
    if actual != locator.checksum:
        raise ChecksumError(
            f"the head (bytes 0 to {len(data)}) is damaged: its checksum is {actual:016x}, "
            f"the locator says {locator.checksum:016x}",
            part="head",
            expected=locator.checksum,
            actual=actual,
            file_begin=0,
            file_end=len(data),
        )
    begin, nbytes = locator.index_file_offset, locator.index_nbytes
    if begin % INDEX_ALIGNMENT or begin < HEADER_NBYTES or begin > front or nbytes > front - begin:
        raise FormatError(
            f"the locator places the index at byte {begin} with {nbytes} bytes, outside the head's "
            f"{HEADER_NBYTES} to {front}, or not at a multiple of {INDEX_ALIGNMENT}"
        )
    the_index = index.decode(data[begin : begin + nbytes], region_nbytes=header.region_nbytes)
    region_end = header.region_file_offset + header.region_nbytes
    footer_nbytes = locator.pack_nbytes - region_end - the_index.checksums_nbytes
    unit = the_index.alignment.region
    if header.region_file_offset % unit or header.region_nbytes % PAGE_NBYTES:
        raise FormatError(
            f"the header places the region at byte {header.region_file_offset} with "
            f"{header.region_nbytes} bytes: expected multiples of {unit} and {PAGE_NBYTES}"
        )
    if not FOOTER_NBYTES <= footer_nbytes <= MAX_RECORD_NBYTES:
        raise FormatError(
            f"the locator gives the pack {locator.pack_nbytes} bytes; header ({header.region_file_offset} + "
            f"{header.region_nbytes} bytes) and index ({the_index.checksums_nbytes} bytes of checksums) leave "
            f"{footer_nbytes} for a footer of {FOOTER_NBYTES} to {MAX_RECORD_NBYTES}; the file is damaged"
        )
    return Head(
        region_file_offset=header.region_file_offset,
        region_nbytes=header.region_nbytes,
        pack_nbytes=locator.pack_nbytes,
        index_file_offset=begin,
        index_nbytes=nbytes,
        locator_nbytes=locator_nbytes,
        checksum=locator.checksum,
        index=the_index,
    )


def root_checksum(
    head_checksum: int,
    checksums: Iterator[bytes | memoryview] | tuple[bytes | memoryview, ...],
    footer: bytes,
) -> int:
    """The pack's root value: over the head's checksum, the block checksums and the footer without
    its own."""
    return xxh3((head_checksum.to_bytes(8, "little"), *checksums, uncover(footer)))


def encode_footer(head: Head, checksums: bytes | memoryview) -> bytes:
    """The footer of a pack whose block checksums, little-endian, are ``checksums``."""
    blank = Footer(checksum=0)
    return Footer(checksum=root_checksum(head.checksum, (checksums,), blank.encode())).encode()
