"""ExecuTorch programs (.pte): the flatbuffer at the beginning, which describes the segments that follow.

Bytes in, positions out; :mod:`stream_pack.et_files.survey` compares these with the length of the file.
Source: ExecuTorch 1.4.1, schema/program.fbs, schema/extended_header.cpp.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import FormatError
from stream_pack.format.flatbuf import Tables, root_table
from stream_pack.format.limits import MAX_RANK, MAX_TENSORS
from stream_pack.format.ragged import Ragged

__all__ = [
    "MAX_HEADER_NBYTES",
    "Delegate",
    "Offsets",
    "Program",
    "ProgramHeader",
    "TensorData",
    "decode",
    "decode_header",
]

IDENTIFIER = b"ET12"
EXTENDED_MAGIC = b"eh00"
# After the flatbuffer's identifier: 8 4s magic   12 u32 nbytes of this header   16 u64 program nbytes
#   24 u64 segments' file offset   32 u64 segments' nbytes, only if the header has 32 bytes or more
_EXTENDED = struct.Struct("<4sIQQ")
_SEGMENTS_NBYTES = struct.Struct("<Q")
MAX_HEADER_NBYTES = 8 + _EXTENDED.size + _SEGMENTS_NBYTES.size

_WHAT = "the program"
_U1, _I1 = np.dtype(np.uint8), np.dtype(np.int8)
_U4, _I4 = np.dtype("<u4"), np.dtype("<i4")
_U8 = np.dtype("<u8")
_MAX_IDENTIFIER_NBYTES = 1024
"""Of a method's name, or a backend's: each of their payloads and constants repeats it."""
_MAX_MUTABLE_SEGMENTS = 1024
"""ExecuTorch writes one."""
_TENSOR = 5
"""In the union KernelTypes."""
_SEGMENT, _EXTERNAL = 1, 1
"""In DataLocation, and in TensorDataLocation."""


@dataclass(frozen=True, slots=True)
class ProgramHeader:
    """Where the parts of a .pte are.

    ``program_nbytes`` is None for a program without an extended header, which is the whole file and has no segments.
    ``segments_nbytes`` is None where the header does not have it.

    Units: bytes; file offsets count from the program's first byte.
    """

    program_nbytes: int | None
    segments_file_offset: int
    segments_nbytes: int | None


@dataclass(frozen=True, slots=True)
class Delegate:
    """A delegate of a method.  ``index``: the number of its payload, among the inline ones or the segments."""

    method: str
    number: int
    backend: str
    in_segment: bool
    index: int

    def __str__(self) -> str:
        return f"{self.method}/{self.number}"


@dataclass(frozen=True, slots=True, eq=False)
class Offsets:
    """Where each of several buffers begins in a segment.  Units: bytes from the segment's first one."""

    segment: int
    offsets: NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class TensorData:
    """The tensors of all methods that have data before the program runs, as columns.

    ``buffers``: the number of the data, among the constants or, where ``mutable``, among those of ``mutable_segments``.
    ``names``: None for most; for ``external`` tensors, whose data is in another file, the key.  ``dim_orders`` has rows
    as long as those of ``sizes``, or the tensor is invalid.
    """

    buffers: NDArray[np.uint32]
    mutable: NDArray[np.bool_]
    mutable_segments: NDArray[np.uint64]
    external: NDArray[np.bool_]
    scalar_types: NDArray[np.int8]
    sizes: Ragged[np.int32]
    dim_orders: Ragged[np.uint8]
    names: list[str | None]

    def __len__(self) -> int:
        return len(self.buffers)


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """What a program's flatbuffer says of its data.

    ``inline`` and ``buffers`` are (file offsets, nbytes) of payloads and constants inside the flatbuffer.
    ``segments`` are (offsets, nbytes), ``named`` (keys, numbers of segments).

    Units: bytes; segment offsets count from the header's ``segments_file_offset``.
    """

    delegates: list[Delegate]
    inline: tuple[NDArray[np.int64], NDArray[np.int64]]
    buffers: tuple[NDArray[np.int64], NDArray[np.int64]]
    segments: tuple[NDArray[np.uint64], NDArray[np.uint64]]
    constants: Offsets | None
    mutable: list[Offsets]
    named: tuple[list[str], NDArray[np.uint32]]
    tensors: TensorData


def decode_header(start: bytes) -> ProgramHeader:
    """Read the first bytes of a .pte (40 are enough).  No bound is checked.

    Raises: FormatError when it is not a program.
    """
    if start[4:8] != IDENTIFIER:
        raise FormatError(
            f"not an ExecuTorch program: bytes 4 to 8 are {start[4:8].hex(' ')}, expected {IDENTIFIER.decode()}"
        )
    if len(start) < 8 + _EXTENDED.size or start[8:12] != EXTENDED_MAGIC:
        return ProgramHeader(None, 0, None)
    _, nbytes, program_nbytes, segments = _EXTENDED.unpack_from(start, 8)
    if nbytes < _EXTENDED.size:
        raise FormatError(f"the program's extended header has {nbytes} bytes: expected at least {_EXTENDED.size}")
    segments_nbytes = None
    if nbytes >= _EXTENDED.size + _SEGMENTS_NBYTES.size and len(start) >= MAX_HEADER_NBYTES:
        (segments_nbytes,) = _SEGMENTS_NBYTES.unpack_from(start, 8 + _EXTENDED.size)
    return ProgramHeader(program_nbytes, segments, segments_nbytes)


def decode(data: memoryview) -> Program:
    """Read the flatbuffer of a program: the file's bytes up to the header's ``program_nbytes``.

    Takes about a microsecond a value, and memory in proportion to ``data``, whatever it holds.
    Raises: FormatError when an offset leads outside.
    """
    root = Tables(data, np.array([root_table(data, IDENTIFIER, _WHAT).position]), _WHAT)
    plans, segments, named = (root.children(slot)[1] for slot in (1, 4, 7))
    constants = _offsets(root.tables(5, _present(root, 5)))
    mutable = root.children(6)[1]
    if len(mutable) > _MAX_MUTABLE_SEGMENTS:
        raise FormatError(
            f"{_WHAT} is broken: {len(mutable)} segments of mutable data, the limit is {_MAX_MUTABLE_SEGMENTS}"
        )
    return Program(
        delegates=_delegates(plans),
        inline=root.children(3)[1].spans(0, 1),
        buffers=root.children(2)[1].spans(0, 1),
        segments=(segments.scalars(0, _U8), segments.scalars(1, _U8)),
        constants=constants[0] if constants else None,
        mutable=_offsets(mutable),
        named=([key or "" for key in named.texts(0)], named.scalars(1, _U4)),
        tensors=_tensors(plans),
    )


def _delegates(plans: Tables) -> list[Delegate]:
    methods = _identifiers(plans)
    rows, delegates = plans.children(7)
    backends = _identifiers(delegates)
    held = _present(delegates, 1)
    processed = delegates.tables(1, held)
    in_segment = processed.scalars(0, _I1) == _SEGMENT
    indices = processed.scalars(1, _U4).tolist()
    firsts = np.searchsorted(rows, rows)  # the first of the same method: rows ascend
    return [
        Delegate(methods[int(rows[row])], row - int(firsts[row]), backends[row], inside, index)
        for row, inside, index in zip(held.tolist(), in_segment.tolist(), indices, strict=True)
    ]


def _identifiers(tables: Tables) -> list[str]:
    longest = int(tables.spans(0, 1)[1].max(initial=0))
    if longest > _MAX_IDENTIFIER_NBYTES:
        raise FormatError(
            f"{_WHAT} is broken: a method or backend has a name of {longest} bytes, the limit is "
            f"{_MAX_IDENTIFIER_NBYTES}"
        )
    return [name or "" for name in tables.texts(0)]


def _offsets(tables: Tables) -> list[Offsets]:
    segments = tables.scalars(0, _U4).tolist()
    offsets = tables.vectors(1, _U8, longest=MAX_TENSORS)
    return [Offsets(segment, offsets.row(row)) for row, segment in enumerate(segments)]


def _tensors(plans: Tables) -> TensorData:
    _, values = plans.children(2)
    values = values.where((values.scalars(0, _U1) == _TENSOR) & (values.targets(1) > 0))
    tensors = values.tables(1, np.arange(len(values)))
    informed, info = _info(tensors)
    external = np.zeros(len(tensors), bool)
    external[informed] = info.scalars(2, _I1) == _EXTERNAL
    wanted = external | (tensors.scalars(5, _U4) > 0)
    tensors = tensors.where(wanted)
    informed, info = _info(tensors)
    names: list[str | None] = [None] * len(tensors)
    for row, name in zip(informed.tolist(), info.texts(1), strict=True):
        names[row] = name
    mutable_segments = np.zeros(len(tensors), np.uint64)
    mutable_segments[informed] = info.scalars(0, _U8)
    return TensorData(
        buffers=tensors.scalars(5, _U4),
        mutable=tensors.targets(6) > 0,
        mutable_segments=mutable_segments,
        external=external[wanted],
        scalar_types=tensors.scalars(0, _I1),
        sizes=tensors.vectors(2, _I4, longest=MAX_RANK),
        dim_orders=tensors.vectors(3, _U1, longest=MAX_RANK),
        names=names,
    )


def _info(tensors: Tables) -> tuple[NDArray[np.int64], Tables]:
    """The rows that have extra information, and the tables of it."""
    rows = _present(tensors, 9)
    return rows, tensors.tables(9, rows)


def _present(tables: Tables, slot: int) -> NDArray[np.int64]:
    """The rows that refer to something in ``slot``."""
    return np.flatnonzero(tables.targets(slot) > 0)
