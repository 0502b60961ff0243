"""The header: what stands at a pack's first byte and says where the region is.

There are three, one for each reader in ExecuTorch that a pack can be made for; all else in a pack is the same.
Source: docs/FORMAT.md, "Header".
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stream_pack.errors import FormatError, LimitError, NotAPackError
from stream_pack.format.limits import MAX_XNNPACK_REGION_FILE_OFFSET

__all__ = ["MAX_HEADER_NBYTES", "HeadKind", "Header", "To", "encode", "graph_end"]

To: TypeAlias = Literal["mps", "xnnpack", "ptd"]
"""A :class:`HeadKind`, as callers say it."""

# All little-endian, no padding but what is named.  Source: ExecuTorch 1.4.1,
# backends/apple/mps/runtime/MPSDelegateHeader.cpp,
#   0 4s zero   4 4s magic   8 u64 region file offset   16 u64 region nbytes;   the graph follows
_MPS = struct.Struct("<4s4sQQ")
# backends/xnnpack/runtime/XNNHeader.h,
#   0 4s zero   4 4s magic   8 u16 nbytes of the header   10 u32 graph file offset   14 u32 graph nbytes
#   18 u32 region file offset   22 u64 region nbytes   30 2s zero;   the graph follows
_XNNPACK = struct.Struct("<4s4sHIIIQ2s")
_XNNPACK_NBYTES = 30
# extension/flat_tensor/serialize/serialize.py: this header is put into the flatbuffer, behind its identifier.
#   0 u32 root table   4 4s identifier   8 4s magic   12 u32 nbytes of the header   16 u64 where the flatbuffer goes on
#   24 u64 graph nbytes   32 u64 region file offset   40 u64 region nbytes   48 8s zero;   the rest of the graph follows
_PTD = struct.Struct("<I4s4sIQQQQ8s")
_PTD_NBYTES = 40
_PTD_ADDED = 48
"""Bytes put into the flatbuffer: the header, and zeros that keep the alignment of what follows."""


class HeadKind(enum.Enum):
    """Whose header a pack begins with."""

    MPS = "mps"
    """A payload of ExecuTorch's MPS delegate: the default."""
    XNNPACK = "xnnpack"
    """A payload of ExecuTorch's XNNPACK delegate, its constants in line."""
    PTD = "ptd"
    """ExecuTorch's data file: what a program whose tensors are external is loaded with."""

    @classmethod
    def of(cls, start: bytes) -> HeadKind | None:
        """The kind that these first bytes claim; 12 of them decide."""
        return next((kind for kind in cls if start.startswith(*_CLAIMS[kind])), None)

    @property
    def header_nbytes(self) -> int:
        """Bytes from the pack's first one on that say where the region is."""
        return _RECORDS[self].size

    @property
    def graph_file_offset(self) -> int:
        """Where the flatbuffer stands.  That of a .ptd begins with the file; the header stands inside it."""
        return 0 if self is HeadKind.PTD else self.header_nbytes

    @property
    def zeros(self) -> tuple[int, int]:
        """The half-open range of file offsets that holds the header's padding."""
        return _ZEROS[self]


_Claim: TypeAlias = "tuple[bytes, int]"
_RECORDS = {HeadKind.MPS: _MPS, HeadKind.XNNPACK: _XNNPACK, HeadKind.PTD: _PTD}
_CLAIMS: dict[HeadKind, _Claim] = {
    # what bytes, where
    HeadKind.MPS: (b"\0\0\0\0MP00", 0),
    HeadKind.XNNPACK: (b"\0\0\0\0XH00", 0),
    HeadKind.PTD: (b"FT01FH01", 4),
}
_ZEROS = {HeadKind.MPS: (24, 24), HeadKind.XNNPACK: (30, 32), HeadKind.PTD: (48, 56)}

MAX_HEADER_NBYTES = _PTD.size
"""First bytes of a file that are enough to decode any header."""


@dataclass(frozen=True, slots=True)
class Header:
    """Where graph and region are.

    ``graph_nbytes`` is None where the header does not say it (mps).  That of a .ptd counts from the file's first byte,
    so that bytes ``[0, graph_nbytes)`` of the file are a flatbuffer that has the header as a gap.

    Units: bytes; file offsets count from the pack's first byte.
    """

    kind: HeadKind
    region_file_offset: int
    region_nbytes: int
    graph_file_offset: int
    graph_nbytes: int | None

    @classmethod
    def decode(cls, data: bytes) -> Header:
        """Read the header of a pack or raw payload from its first bytes (56 are enough).  No bound is checked here.

        Raises: NotAPackError when there are too few, or they carry none of the three magics.
        """
        kind = HeadKind.of(data)
        least = (kind or HeadKind.MPS).header_nbytes
        if len(data) < least:
            raise NotAPackError(
                f"{len(data)} bytes are too few for a pack, whose header alone has {least}"
            )
        if kind is None:
            raise NotAPackError(
                f"not a pack: the first 8 bytes are {data[:8].hex(' ')}, expected 00 00 00 00 and 4d 50 30 30 or "
                "58 48 30 30, or FT01 and FH01 from byte 4 on"
            )
        if kind is HeadKind.MPS:
            *_, region, region_nbytes = _MPS.unpack_from(data)
            return cls(kind, region, region_nbytes, _MPS.size, None)
        if kind is HeadKind.XNNPACK:
            _, _, _, graph, graph_nbytes, region, region_nbytes, _ = _XNNPACK.unpack_from(data)
            return cls(kind, region, region_nbytes, graph, graph_nbytes)
        _, _, _, nbytes, more, graph_nbytes, region, region_nbytes, _ = _PTD.unpack_from(data)
        if nbytes < _PTD_NBYTES or more < nbytes:
            raise FormatError(
                f"the header claims {nbytes} bytes, and that its flatbuffer goes on {more} bytes later: expected at "
                f"least {_PTD_NBYTES}, and no less than that"
            )
        return cls(kind, region, region_nbytes, 0, more + graph_nbytes)


def graph_end(kind: HeadKind, graph: bytes) -> int:
    """The file offset at which the flatbuffer ``graph`` will end."""
    return (_PTD_ADDED if kind is HeadKind.PTD else kind.header_nbytes) + len(graph)


def encode(
    kind: HeadKind, graph: bytes, *, region_file_offset: int, region_nbytes: int
) -> tuple[bytes | memoryview, ...]:
    """Header and graph as they stand in the file, in pieces; ``graph`` is a flatbuffer by itself.

    Copies: none of the graph.
    Raises: LimitError for an XNNPACK payload whose region begins at 4 GiB or later.
    """
    if kind is HeadKind.MPS:
        return _MPS.pack(bytes(4), b"MP00", region_file_offset, region_nbytes), graph
    if kind is HeadKind.XNNPACK:
        if region_file_offset > MAX_XNNPACK_REGION_FILE_OFFSET:
            raise LimitError(
                f"graph and index take {region_file_offset} bytes in front of the tensors: the header of an XNNPACK "
                f"payload has 32 bits for that, at most {MAX_XNNPACK_REGION_FILE_OFFSET}; fewer tensors, shorter "
                "metadata, a smaller alignment, or another kind of head",
                value=region_file_offset,
                limit=MAX_XNNPACK_REGION_FILE_OFFSET,
            )
        header = _XNNPACK.pack(
            bytes(4),
            b"XH00",
            _XNNPACK_NBYTES,
            _XNNPACK.size,
            len(graph),
            region_file_offset,
            region_nbytes,
            bytes(2),
        )
        return header, graph
    root = int.from_bytes(graph[:4], "little") + _PTD_ADDED
    header = _PTD.pack(
        root,
        graph[4:8],
        b"FH01",
        _PTD_NBYTES,
        _PTD_ADDED,
        len(graph),
        region_file_offset,
        region_nbytes,
        bytes(8),
    )
    return header, memoryview(graph)[8:]
