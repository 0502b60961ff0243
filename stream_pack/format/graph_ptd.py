"""Header kind ``ptd``: the header of a .ptd, and ExecuTorch's FlatTensor: names, layouts, segments of bytes.

:func:`encode` writes that of a plain pack; :func:`decode` reads any.
Source: ``schema/flat_tensor.fbs``; ExecuTorch 1.5.1, extension/flat_tensor/serialize/flat_tensor.fbs.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import FormatError, UnsupportedTensorError
from stream_pack.format.dtypes import DTYPES
from stream_pack.format.flatbuf import decode_text, root_table
from stream_pack.format.flatbuf_write import ColumnWriter, text_words
from stream_pack.format.header import Header, HeadKind, types_and_dims
from stream_pack.format.index import Index
from stream_pack.format.limits import MAX_RANK
from stream_pack.format.ragged import Ragged
from stream_pack.text import quoted

__all__ = ["KIND", "FlatTensor", "decode", "disagreements", "encode"]

IDENTIFIER = b"FT01"
_WHAT = "the flatbuffer of the .ptd"
_NO_TYPE = -1
_SCALAR_TYPES = {d.name: d.executorch for d in DTYPES if d.executorch is not None}


@dataclass(frozen=True, slots=True, eq=False)
class FlatTensor:
    """Segments and named data, as columns.

    Segment ``s`` has ``segment_nbytes[s]`` bytes from ``segment_offsets[s]`` on.  Entry ``k`` of the named data is in
    the segment ``segments[k]``, and is called :meth:`key`.  Where ``has_layout``, it is a tensor: of the ScalarType
    ``scalar_types[k]``, with row ``k`` of ``dims`` and of ``dim_order``, which are equally long.

    Units: bytes; offsets count from the region's first byte.
    Lifetime: keeps the flatbuffer, from which keys are read when asked for.
    """

    segment_offsets: NDArray[np.uint64]
    segment_nbytes: NDArray[np.uint64]
    segments: NDArray[np.uint32]
    key_begins: NDArray[np.int64]
    key_nbytes: NDArray[np.int64]
    has_layout: NDArray[np.bool_]
    scalar_types: NDArray[np.int8]
    dims: Ragged[np.int32]
    dim_order: Ragged[np.uint8]
    data: memoryview

    def __len__(self) -> int:
        """How many named data there are."""
        return len(self.segments)

    def key_bytes(self, entry: int) -> bytes:
        """The key of an entry, UTF-8 in a valid file."""
        begin = int(self.key_begins[entry])
        return bytes(self.data[begin : begin + int(self.key_nbytes[entry])])

    def key(self, entry: int) -> str:
        """The key of an entry.  Raises: FormatError when it is not UTF-8."""
        begin, nbytes = self.key_begins.item(entry), self.key_nbytes.item(entry)
        return decode_text(self.data, begin, nbytes, f"{_WHAT}: the key of entry {entry}")


def _types_and_dims(index: Index) -> tuple[NDArray[np.int16], Ragged[np.int32]]:
    return types_and_dims(index, _SCALAR_TYPES, none=_NO_TYPE)


def _segments(index: Index) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Offsets and lengths of segments: each range that a tensor has, once; and the segment of each tensor."""
    order = np.lexsort((index.tensor_nbytes, index.offsets))
    offsets, nbytes = index.offsets[order], index.tensor_nbytes[order]
    first = np.ones(len(order), bool)
    first[1:] = (np.diff(offsets) != 0) | (np.diff(nbytes) != 0)
    segments = np.empty(len(order), np.int64)
    segments[order] = np.cumsum(first) - 1
    return offsets[first], nbytes[first], segments


def encode(index: Index) -> bytes:
    """The flatbuffer ``FT01`` of a pack: a segment for each range of bytes, a name for each tensor.

    About 100 bytes a tensor, and its name.
    Raises: LimitError when it would reach 2 GiB; UnsupportedTensorError for a name with a NUL, at which the runtime
    would end it.
    """
    _refuse_nul(index)
    types, all_dims = _types_and_dims(index)
    segment_offsets, segment_nbytes, segment_of = _segments(index)
    tensors, segments = len(index), len(segment_offsets)
    named = np.flatnonzero(types != _NO_TYPE)
    dims = all_dims.take(named)
    ranks = np.unique(dims.lengths)

    writer = ColumnWriter(IDENTIFIER)
    root_vtable = writer.vtable(12, 0, 4, 8)  # (version: 0), segments, named_data
    segment_vtable = writer.vtable(24, 8, 16)  # offset, size
    named_vtable = writer.vtable(16, 4, 8, 12)  # key, segment_index, tensor_layout
    blob_vtable = writer.vtable(12, 4, 8)  # key, segment_index
    layout_vtable = writer.vtable(16, 12, 4, 8)  # scalar_type, sizes, dim_order
    root = writer.reserve(3)
    segment_references, named_references = writer.reserve(1 + segments), writer.reserve(1 + tensors)
    writer.align(2)  # for the u64 fields
    segment_places = writer.reserve_each(np.full(segments, 6))
    entry_words = np.full(tensors, 3)
    entry_words[named] = 4
    entries = writer.reserve_each(entry_words)
    layouts = writer.reserve_each(np.full(len(named), 4))
    sizes = writer.reserve_each(1 + dims.lengths)
    names = writer.reserve_each(text_words(index.ragged_names.lengths))
    orders = writer.reserve_each(1 + (ranks + 3) // 4)
    writer.allocate(f"a flatbuffer for {tensors} tensors")

    table = writer.root(root_vtable, root)
    table.refer(1, segment_references)
    table.refer(2, named_references)
    writer.references(segment_references, segment_places)
    table = writer.tables(segment_vtable, segment_places)
    table.u64(0, segment_offsets)
    table.u64(1, segment_nbytes)
    writer.references(named_references, entries)
    table = writer.tables(blob_vtable, entries)
    table.refer(0, names)
    table.u32(1, segment_of)
    writer.tables(named_vtable, entries[named]).refer(2, layouts)
    table = writer.tables(layout_vtable, layouts)
    table.u32(0, types[named])
    table.refer(1, sizes)
    table.refer(2, orders[np.searchsorted(ranks, dims.lengths)])
    writer.vectors(sizes, dims)
    writer.texts(names, index.ragged_names)
    for rank, order in zip(ranks.tolist(), orders.tolist()):
        writer.text(order, bytes(range(rank)))
    return writer.finish()


def _refuse_nul(index: Index) -> None:
    nul = np.flatnonzero(index.names == 0)
    if len(nul):
        name = index.name(int(np.searchsorted(index.name_ends, nul[0], side="right")))
        raise UnsupportedTensorError(
            f"tensor {quoted(name)}: its name has a NUL, at which ExecuTorch ends names in a .ptd, so that it would be "
            "mistaken for another tensor; rename it",
            tensor=name,
        )


_I1, _I4, _U1, _U4, _U8 = map(np.dtype, ("i1", "<i4", "u1", "<u4", "<u8"))


def decode(data: memoryview, *, most: int | None = None) -> FlatTensor:
    """The FlatTensor in ``data``, written by any tool; no region bound is checked.

    ``data`` is the file from its first byte to the flatbuffer's end (``Header.graph_nbytes`` bytes), or a flatbuffer
    without a header.  ``most``: how many named data to decode, from the first on; by default all.

    Vectorised.  Raises: FormatError when an offset points outside ``data``, named data to a segment that is not there,
    or a layout has not as many places in its dim order as it has sizes.
    """
    root = root_table(data, IDENTIFIER, _WHAT)
    segments = root.tables(1)
    named = root.tables(2, most=most)
    numbers = named.scalars(1, _U4)
    if len(numbers) and int(numbers.max()) >= len(segments):
        raise FormatError(f"{_WHAT} is broken: named data are in segment {int(numbers.max())} of {len(segments)}")
    key_begins, key_nbytes = named.spans(0, 1)
    has_layout = named.targets(2) > 0
    rows = np.flatnonzero(has_layout)
    layouts = named.tables(2, rows)
    dims = layouts.vectors(1, _I4, longest=MAX_RANK)
    dim_order = layouts.vectors(2, _U1, longest=MAX_RANK)
    if not np.array_equal(dims.ends, dim_order.ends):
        raise FormatError(f"{_WHAT} is broken: a layout's sizes and dim order differ in length")
    scalar_types = np.zeros(len(named), np.int8)
    scalar_types[rows] = layouts.scalars(0, _I1)
    ranks = np.zeros(len(named), np.int64)
    ranks[rows] = dims.lengths
    return FlatTensor(
        segment_offsets=segments.scalars(0, _U8),
        segment_nbytes=segments.scalars(1, _U8),
        segments=numbers,
        key_begins=key_begins,
        key_nbytes=key_nbytes,
        has_layout=has_layout,
        scalar_types=scalar_types,
        dims=Ragged.of(dims.values, ranks),
        dim_order=Ragged.of(dim_order.values, ranks),
        data=data,
    )


def disagreements(data: memoryview, index: Index) -> NDArray[np.bool_]:
    """Which tensors of ``index`` the flatbuffer describes otherwise.

    Raises: FormatError when it is not a FlatTensor, or has another number of names than there are tensors.
    """
    found = decode(data, most=len(index) + 1)
    if len(found) != len(index):
        more = "at least " if len(found) > len(index) else ""
        raise FormatError(f"the flatbuffer has {more}{len(found)} named data for {len(index)} tensors")
    types, dims = _types_and_dims(index)
    wrong: NDArray[np.bool_] = np.where(found.has_layout, found.scalar_types, _NO_TYPE) != types
    wrong |= found.dims.differs(dims)
    wrong[found.dims.rows[found.dim_order.values != found.dims.places]] = True
    wrong |= found.segment_offsets[found.segments] != index.offsets.astype(np.uint64)
    wrong |= found.segment_nbytes[found.segments] != index.tensor_nbytes.astype(np.uint64)
    equal = (found.key_bytes(k) == index.name_bytes(k) for k in range(len(index)))
    wrong |= ~np.fromiter(equal, bool, len(index))
    return wrong


# Source: ExecuTorch 1.4.1, extension/flat_tensor/serialize/serialize.py, which puts this header into the flatbuffer,
# after its identifier.  Little-endian:
#   0 u32 root table   4 4s identifier   8 4s magic   12 u32 nbytes of the header   16 u64 bytes inserted
#   24 u64 graph nbytes   32 u64 region file offset   40 u64 region nbytes   48 8s zero;   the rest of the graph follows
_HEADER = struct.Struct("<I8sIQQQQ8s")
_HEADER_NBYTES = 40
_ADDED_NBYTES = 48
"""Bytes put into the flatbuffer: the header, and zeros that keep the alignment of what follows."""
_MAGIC = IDENTIFIER + b"FH01"


def _unpack(data: bytes) -> Header:
    _, _, nbytes, more, graph_nbytes, region, region_nbytes, _ = _HEADER.unpack_from(data)
    if nbytes < _HEADER_NBYTES or more < nbytes:
        raise FormatError(
            f"the header claims {nbytes} bytes, and {more} bytes inserted into its flatbuffer: expected at least "
            f"{_HEADER_NBYTES}, and at least as many inserted"
        )
    return Header(KIND, region, region_nbytes, 0, more + graph_nbytes)


def _pack(graph: bytes, region_file_offset: int, region_nbytes: int) -> tuple[bytes, memoryview]:
    root = int.from_bytes(graph[:4], "little") + _ADDED_NBYTES
    region = region_file_offset, region_nbytes, bytes(8)
    header = _HEADER.pack(root, _MAGIC, _HEADER_NBYTES, _ADDED_NBYTES, len(graph), *region)
    return header, memoryview(graph)[8:]


KIND = HeadKind(
    name="ptd",
    raw="ExecuTorch data file",
    pack_as="a .ptd",
    magic=_MAGIC,
    magic_at=4,
    header_nbytes=_HEADER.size,
    zeros=(8 + _HEADER_NBYTES, _HEADER.size),
    graph_file_offset=0,
    before_graph_nbytes=_ADDED_NBYTES,
    tables=(3, 1),  # name, layout and segment; root
    says_dim_order=True,
    unpack=_unpack,
    pack=_pack,
    encode=encode,
    disagreements=disagreements,
)
"""ExecuTorch's data file, which is loaded beside a program whose tensors are external."""
