"""A reader of packs, written from docs/FORMAT.md alone, with nothing but the standard library.

It shows that the text suffices, and stays a foreign opinion in tests: it must never import stream_pack.  It trusts
the file (section 10 is what a real reader adds).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    file_offset: int
    data: bytes


@dataclass(frozen=True)
class Pack:
    kind: str
    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    nbytes: int
    head_checksum: int
    covered_head: bytes
    blocks: list[bytes]
    block_checksums: list[int]
    root_checksum: int
    covered_by_root: bytes


def integers(data: bytes, code: str, begin: int, count: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{count}{code}", data, begin)


def integer(data: bytes, code: str, begin: int) -> int:
    return integers(data, code, begin, 1)[0]


def field(buffer: bytes, slot: int) -> int | None:
    """Section 13: where a field of the root table stands."""
    table = integer(buffer, "I", 0)
    vtable = table - integer(buffer, "i", table)
    if 4 + 2 * slot >= integer(buffer, "H", vtable):
        return None
    relative = integer(buffer, "H", vtable + 4 + 2 * slot)
    return table + relative if relative else None


def scalar(buffer: bytes, slot: int) -> int:
    position = field(buffer, slot)
    return 0 if position is None else integer(buffer, "Q", position)


def vector_at(buffer: bytes, position: int, code: str) -> tuple[int, ...]:
    position += integer(buffer, "I", position)
    return integers(buffer, code, position + 4, integer(buffer, "I", position))


def vector(buffer: bytes, slot: int, code: str) -> tuple[int, ...]:
    position = field(buffer, slot)
    return () if position is None else vector_at(buffer, position, code)


def strings(buffer: bytes, slot: int) -> list[str]:
    position = field(buffer, slot)
    if position is None:
        return []
    position += integer(buffer, "I", position)
    entries = range(position + 4, position + 4 + 4 * integer(buffer, "I", position), 4)
    return [bytes(vector_at(buffer, entry, "B")).decode() for entry in entries]


def split(values: bytes | tuple[int, ...], ends: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The slices that a column of prefix sums cuts."""
    return [tuple(values[begin:end]) for begin, end in zip((0, *ends), ends, strict=False)]


def header(data: bytes) -> tuple[str, int, int]:
    """Section 2: kind, R and region nbytes."""
    if data[4:12] == b"FT01FH01":
        return "ptd", integer(data, "Q", 32), integer(data, "Q", 40)
    if data[:8] == b"\0\0\0\0XH00":
        return "xnnpack", integer(data, "I", 18), integer(data, "Q", 22)
    assert data[:8] == b"\0\0\0\0MP00"
    return "mps", integer(data, "Q", 8), integer(data, "Q", 16)


def read(data: bytes) -> Pack:
    kind, region, region_nbytes = header(data)
    # Section 3, locator.
    assert data[region - 8 : region] == b"\x89SPL\r\n\x1a\n"
    assert integer(data, "I", region - 12) == 1
    index_begin, index_nbytes, nbytes, head_checksum = integers(data, "Q", region - 48, 4)
    # Section 5, index.
    index = data[index_begin : index_begin + index_nbytes]
    assert index[4:8] == b"SPI1"
    block_nbytes = scalar(index, 0)
    dtype_names, dtype_bits = strings(index, 4), vector(index, 5, "H")
    buffer_offsets, buffer_nbytes = vector(index, 6, "Q"), vector(index, 7, "Q")
    tensor_buffers, tensor_starts = vector(index, 8, "I"), vector(index, 9, "Q")
    shapes = split(vector(index, 12, "Q"), vector(index, 11, "Q"))
    names = split(vector(index, 14, "B"), vector(index, 13, "Q"))
    tensors = {}
    for number, dtype in enumerate(vector(index, 10, "B")):
        bits = dtype_bits[dtype]
        for dim in shapes[number]:
            bits *= dim
        begin = region
        if bits:
            begin += buffer_offsets[tensor_buffers[number]] + tensor_starts[number]
        contents = data[begin : begin + bits // 8]
        name = bytes(names[number]).decode()
        tensors[name] = Tensor(dtype_names[dtype], shapes[number], begin, contents)
    texts = [bytes(text).decode() for text in split(vector(index, 18, "B"), vector(index, 17, "Q"))]
    notes = zip(vector(index, 16, "I"), texts[::2], texts[1::2], strict=True)
    # Section 7, checksums, and section 3, footer.
    blocks = []
    for offset, length in zip(buffer_offsets, buffer_nbytes, strict=True):
        for begin in range(offset, offset + length, block_nbytes):
            end = min(begin + block_nbytes, offset + length)
            blocks.append(data[region + begin : region + end])
    checksums = region + region_nbytes
    footer = checksums + 8 * len(blocks)
    assert data[nbytes - 8 : nbytes] == b"\x89SPF\r\n\x1a\n"
    assert footer + integer(data, "I", nbytes - 16) == nbytes
    return Pack(
        kind=kind,
        tensors=tensors,
        metadata={key: value for tensor, key, value in notes if tensor == 0xFFFFFFFF},
        nbytes=nbytes,
        head_checksum=head_checksum,
        covered_head=data[: region - 24] + data[region - 16 : region],
        blocks=blocks,
        block_checksums=list(integers(data, "Q", checksums, len(blocks))),
        root_checksum=integer(data, "Q", nbytes - 24),
        covered_by_root=data[region - 24 : region - 16] + data[checksums : nbytes - 24] + data[nbytes - 16 : nbytes],
    )
