"""The head: header, graph, index and locator together, everything before the region.

:func:`encode_head` makes it from a layout before the first data byte is known; :func:`decode_head` reads and
proves it, from the same bytes a file or a pipe delivers.  Source: docs/FORMAT.md, "The file".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from stream_pack.errors import ChecksumError, FormatError
from stream_pack.format.align import PAGE_NBYTES, align_up
from stream_pack.format.checksum import xxh3, zeros
from stream_pack.format.flatbuf_write import check_flatbuffer_nbytes
from stream_pack.format.header import Header, HeadKind
from stream_pack.format.header_kinds import MAX_HEADER_NBYTES, Front, decode_header
from stream_pack.format.index import Index, decode_index, encode_index
from stream_pack.format.layout import Layout
from stream_pack.format.limits import MAX_HEAD_NBYTES, MAX_NBYTES, MAX_RECORD_NBYTES
from stream_pack.format.records import (
    CHECKSUM_NBYTES,
    FOOTER_NBYTES,
    LOCATOR_NBYTES,
    RECORD_TAIL_NBYTES,
    Footer,
    Locator,
    uncover,
)  # fmt: skip

__all__ = [
    "EncodedHead", "Head", "assemble_head", "check_region", "checksum_place", "decode_head", "encode_footer",
    "encode_head", "index_place", "root_checksum",
]  # fmt: skip

INDEX_ALIGNMENT = 64
"""A cache line: columns that NumPy reads in place are aligned whatever the graph's length."""


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """What is before a region, validated.

    ``graph_end`` is where the graph ends at the latest: exactly there, but for ``mps``, whose header does not say it.

    Units: bytes; file offsets count from the pack's first byte.
    """

    kind: HeadKind
    graph_end: int
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
    """A head ready to be written: ``parts``, then ``padding_nbytes`` zeros, then ``locator``."""

    parts: tuple[bytes | memoryview, ...]
    padding_nbytes: int
    locator: bytes
    head: Head

    @property
    def front(self) -> bytes:
        """``parts`` as one: a copy."""
        return b"".join(self.parts)


def encode_head(layout: Layout, front: Front) -> EncodedHead:
    """The head of the pack that ``layout`` describes, beginning with ``front``.

    Raises: LimitError when a flatbuffer would reach 2 GiB, or a header cannot say where the region is; what the front
    raises.
    """
    index = layout.index
    graph_bytes = front.encode(index)
    check_flatbuffer_nbytes(len(graph_bytes), "a graph")
    index_bytes = encode_index(index)
    graph_end = front.kind.before_graph_nbytes + len(graph_bytes)
    index_file_offset = align_up(graph_end, INDEX_ALIGNMENT)
    used = index_file_offset + len(index_bytes) + LOCATOR_NBYTES
    region_file_offset = align_up(used, index.alignment.region)
    header_and_graph = front.kind.pack(graph_bytes, region_file_offset, layout.region_nbytes)
    parts = (*header_and_graph, bytes(index_file_offset - graph_end), index_bytes)
    pack_nbytes = region_file_offset + layout.region_nbytes + index.checksums_nbytes + FOOTER_NBYTES
    locator = Locator(index_file_offset, len(index_bytes), pack_nbytes, checksum=0)
    padding_nbytes = region_file_offset - used
    checksum = xxh3((*parts, *zeros(padding_nbytes), locator.covered()))
    return EncodedHead(
        parts=parts,
        padding_nbytes=padding_nbytes,
        locator=replace(locator, checksum=checksum).encode(),
        head=Head(
            kind=front.kind,
            graph_end=graph_end,
            region_file_offset=region_file_offset,
            region_nbytes=layout.region_nbytes,
            pack_nbytes=pack_nbytes,
            index_file_offset=index_file_offset,
            index_nbytes=len(index_bytes),
            locator_nbytes=LOCATOR_NBYTES,
            checksum=checksum,
            index=index,
        ),
    )


def check_region(found: Header) -> None:
    """Prove that the header's positions are possible at all, before anything is read or mapped for them.

    Raises: FormatError.
    """
    offset, nbytes = found.region_file_offset, found.region_nbytes
    smallest = found.kind.header_nbytes + LOCATOR_NBYTES
    if not smallest <= offset <= MAX_HEAD_NBYTES or nbytes > MAX_NBYTES:
        raise FormatError(
            f"the header places the region at byte {offset} with {nbytes} bytes, which is impossible in a pack; "
            "the file is damaged or not a pack"
        )


def decode_head(data: memoryview) -> Head:
    """Read and validate a head; ``data`` is exactly the bytes before the region.

    Copies: none; the index's columns are views of ``data``.
    Raises: FormatError, NewerVersionError, ChecksumError.
    """
    found = decode_header(bytes(data[:MAX_HEADER_NBYTES]))
    check_region(found)
    region = found.region_file_offset
    if region != len(data):
        raise FormatError(f"the header places the region at byte {region}, the head has {len(data)} bytes")
    begin, end = checksum_place(region)
    return assemble_head(
        found,
        data[-MAX_RECORD_NBYTES:],
        checksum=xxh3((data[:begin], data[end:])),
        read_index=lambda begin, nbytes: data[begin : begin + nbytes],
    )


def checksum_place(region_file_offset: int) -> tuple[int, int]:
    """Where the head checksum is: the only bytes of a head that it does not cover."""
    end = region_file_offset - RECORD_TAIL_NBYTES
    return end - CHECKSUM_NBYTES, end


def index_place(tail: bytes | memoryview, region_file_offset: int) -> tuple[int, int]:
    """Where a locator that nothing has proved yet places the index; its nbytes are 0 if that is outside the head."""
    try:
        locator, nbytes = Locator.decode(tail)
    except FormatError:
        return 0, 0
    room = region_file_offset - nbytes - locator.index_file_offset
    return (locator.index_file_offset, locator.index_nbytes) if 0 <= locator.index_nbytes <= room else (0, 0)


def assemble_head(
    found: Header,
    tail: memoryview,
    *,
    checksum: int,
    read_index: Callable[[int, int], memoryview],
) -> Head:
    """Validate a head that was read in parts.

    ``tail``: its last bytes, with all of the locator.  ``checksum``: the XXH3 of all of it but :func:`checksum_place`.
    ``read_index(begin, nbytes)`` returns the index; its columns are views of that.

    Raises: FormatError, NewerVersionError, ChecksumError.
    """
    region, region_nbytes = found.region_file_offset, found.region_nbytes
    expected = Locator.stored_checksum(tail)
    if Locator.stands_before(tail) and checksum != expected:
        # Before the version, in which a flipped bit is damage too.
        raise ChecksumError(
            f"the head (bytes 0 to {region}) is damaged: its checksum is {checksum:016x}, "
            f"the locator says {expected:016x}",
            part="head",
            expected=expected,
            actual=checksum,
            file_begin=0,
            file_end=region,
        )
    locator, locator_nbytes = Locator.decode(tail)
    front = region - locator_nbytes
    begin, nbytes = locator.index_file_offset, locator.index_nbytes
    least = found.kind.header_nbytes
    if begin % INDEX_ALIGNMENT or begin < least or begin > front or nbytes > front - begin:
        raise FormatError(
            f"the locator places the index at byte {begin} with {nbytes} bytes, outside the head's "
            f"{least} to {front}, or not at a multiple of {INDEX_ALIGNMENT}"
        )
    graph_end = _graph_end(found, begin)
    index = decode_index(read_index(begin, nbytes), region_nbytes=region_nbytes)
    region_end = region + region_nbytes
    footer_nbytes = locator.pack_nbytes - region_end - index.checksums_nbytes
    unit = index.alignment.region
    if region % unit or region_nbytes % PAGE_NBYTES:
        raise FormatError(
            f"the header places the region at byte {region} with "
            f"{region_nbytes} bytes: expected multiples of {unit} and {PAGE_NBYTES}"
        )
    if not FOOTER_NBYTES <= footer_nbytes <= MAX_RECORD_NBYTES:
        raise FormatError(
            f"the locator gives the pack {locator.pack_nbytes} bytes; header ({region} + "
            f"{region_nbytes} bytes) and index ({index.checksums_nbytes} bytes of checksums) leave "
            f"{footer_nbytes} for a footer of {FOOTER_NBYTES} to {MAX_RECORD_NBYTES}; the file is damaged"
        )
    return Head(
        kind=found.kind,
        graph_end=graph_end,
        region_file_offset=region,
        region_nbytes=region_nbytes,
        pack_nbytes=locator.pack_nbytes,
        index_file_offset=begin,
        index_nbytes=nbytes,
        locator_nbytes=locator_nbytes,
        checksum=locator.checksum,
        index=index,
    )


def _graph_end(found: Header, index_file_offset: int) -> int:
    """Where the graph ends; it is where it must be, and before the index."""
    begin = found.graph_file_offset
    if found.graph_nbytes is None:
        return index_file_offset
    if begin != found.kind.graph_file_offset or begin + found.graph_nbytes > index_file_offset:
        raise FormatError(
            f"the header places the graph at byte {begin} with {found.graph_nbytes} bytes: expected byte "
            f"{found.kind.graph_file_offset}, and an end before the index at byte {index_file_offset}"
        )
    return begin + found.graph_nbytes


def root_checksum(head_checksum: int, checksums: Iterable[bytes | memoryview], footer: bytes) -> int:
    """The pack's root value: over the head's checksum, the block checksums and the footer without its own."""
    return xxh3((head_checksum.to_bytes(8, "little"), *checksums, uncover(footer)))


def encode_footer(head: Head, checksums: bytes | memoryview) -> bytes:
    """The footer of a pack whose block checksums, little-endian, are ``checksums``."""
    blank = Footer(checksum=0)
    return Footer(checksum=root_checksum(head.checksum, (checksums,), blank.encode())).encode()
