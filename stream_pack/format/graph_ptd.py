"""Header kind ``ptd``: the header of a .ptd, and ExecuTorch's FlatTensor: names, layouts, segments of bytes.

:func:`encode` writes it with NumPy; :func:`decode` reads any.
Source: ``schema/flat_tensor.fbs``; ExecuTorch 1.5.1, extension/flat_tensor/serialize/flat_tensor.fbs.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import FormatError, LimitError, UnsupportedTensorError
from stream_pack.format.dtypes import BY_NAME, DTYPES
from stream_pack.format.flatbuf import root_table
from stream_pack.format.header import Header, HeadKind
from stream_pack.format.index import Index
from stream_pack.format.limits import MAX_FLATBUFFER_NBYTES, MAX_RANK
from stream_pack.format.ragged import Ragged

__all__ = ["KIND", "FlatTensor", "decode", "disagreements", "encode"]

IDENTIFIER = b"FT01"
MAX_DIM = 2**31 - 1
_WHAT = "the flatbuffer of the .ptd"
_NO_TYPE = -1


@dataclass(frozen=True, slots=True, eq=False)
class FlatTensor:
    """Segments and named data, as columns.

    Segment ``s`` has ``segment_nbytes[s]`` bytes from ``segment_offsets[s]`` on.  Entry ``k`` of the named data lies in
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
        """The key of an entry, UTF-8 if it is sound."""
        begin = int(self.key_begins[entry])
        return bytes(self.data[begin : begin + int(self.key_nbytes[entry])])

    def key(self, entry: int) -> str:
        """The key of an entry.  Raises: FormatError when it is not UTF-8."""
        try:
            return self.key_bytes(entry).decode()
        except UnicodeDecodeError:
            raise FormatError(f"{_WHAT}: the key of entry {entry} is not UTF-8") from None


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """What must be said of the tensors of an index."""

    scalar_types: NDArray[np.int64]  # _NO_TYPE: no layout
    dims: Ragged[np.int32]
    segment_offsets: NDArray[np.int64]
    segment_nbytes: NDArray[np.int64]
    segments: NDArray[np.int64]


def _wanted(index: Index) -> _Wanted:
    table = [
        DTYPES[BY_NAME[name]].executorch if name in BY_NAME else None for name in index.dtype_names
    ]
    numbers = np.array([_NO_TYPE if number is None else number for number in table], np.int64)
    types = numbers[index.tensor_dtypes]
    dims = index.ragged_dims
    types[dims.rows[dims.values > MAX_DIM]] = _NO_TYPE
    named = types != _NO_TYPE
    # Segments: each range that a tensor has, once.
    order = np.lexsort((index.tensor_nbytes, index.offsets))
    offsets, nbytes = index.offsets[order], index.tensor_nbytes[order]
    first = np.ones(len(order), bool)
    first[1:] = (np.diff(offsets) != 0) | (np.diff(nbytes) != 0)
    segments = np.empty(len(order), np.int64)
    segments[order] = np.cumsum(first) - 1
    return _Wanted(
        scalar_types=types,
        dims=Ragged.of(dims.take(named).values.astype(np.int32), np.where(named, dims.lengths, 0)),
        segment_offsets=offsets[first],
        segment_nbytes=nbytes[first],
        segments=segments,
    )


# In words of 4 bytes.  Each vtable: its nbytes, the table's, then where each slot is.
_ROOT_VTABLE_AT, _SEGMENT_VTABLE_AT, _NAMED_VTABLE_AT, _BLOB_VTABLE_AT, _LAYOUT_VTABLE_AT = (
    2,
    5,
    7,
    10,
    12,
)
_ROOT_AT = 15
_VTABLES = (
    (_ROOT_VTABLE_AT, (10, 12, 0, 4, 8)),  # (version: 0), segments, named_data
    (_SEGMENT_VTABLE_AT, (8, 24, 8, 16)),  # offset, size
    (_NAMED_VTABLE_AT, (10, 16, 4, 8, 12)),  # key, segment_index, tensor_layout
    (_BLOB_VTABLE_AT, (8, 12, 4, 8)),  # key, segment_index
    (_LAYOUT_VTABLE_AT, (10, 16, 12, 4, 8)),  # scalar_type, sizes, dim_order
)
_SEGMENT_WORDS, _NAMED_WORDS, _BLOB_WORDS, _LAYOUT_WORDS = 6, 4, 3, 4


def encode(index: Index) -> bytes:
    """The flatbuffer ``FT01`` of a pack: a segment for each range of bytes, a name for each tensor.

    About 100 bytes a tensor, and its name.
    Raises: LimitError when it would reach 2 GiB; UnsupportedTensorError for a name with a NUL, at which the runtime
    would end it.
    """
    _refuse_nul(index)
    return _words(index).tobytes()


def _words(index: Index) -> NDArray[np.uint32]:
    """The flatbuffer, in words of 4 bytes."""
    wanted = _wanted(index)
    tensors, segments = len(index), len(wanted.segment_offsets)
    named = np.flatnonzero(wanted.scalar_types != _NO_TYPE)
    dims = wanted.dims.take(named)
    ranks = dims.lengths
    name_nbytes = index.ragged_names.lengths

    # One area for each kind of thing, so that every reference leads forward.
    segment_fields = _ROOT_AT + 4
    named_fields = segment_fields + segments + 1
    first_segment = named_fields + tensors
    first_segment += first_segment % 2  # u64 fields stand at multiples of 8
    first_named = first_segment + _SEGMENT_WORDS * segments
    named_words = np.full(tensors, _BLOB_WORDS)
    named_words[named] = _NAMED_WORDS
    entries, first_layout = _places(first_named, named_words)
    layouts = first_layout + _LAYOUT_WORDS * np.arange(len(named))
    sizes, first_name = _places(first_layout + _LAYOUT_WORDS * len(named), 1 + ranks)
    name_words = 1 + name_nbytes // 4 + 1  # count; text and terminator
    names, first_order = _places(first_name, name_words)
    distinct_ranks = np.unique(ranks)
    orders, total = _places(first_order, 1 + (distinct_ranks + 3) // 4)
    if 4 * total > MAX_FLATBUFFER_NBYTES:
        raise LimitError(
            f"a flatbuffer of {4 * total} bytes for {tensors} tensors: it must stay below 2 GiB",
            value=4 * total,
            limit=MAX_FLATBUFFER_NBYTES,
        )

    out = np.zeros(total, "<u4")
    out[0] = 4 * _ROOT_AT
    out[1] = int.from_bytes(IDENTIFIER, "little")
    for at, vtable in _VTABLES:
        out[at:].view("<u2")[: len(vtable)] = vtable

    def refer(fields: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        out[fields] = 4 * (targets - fields)

    out[_ROOT_AT] = 4 * (_ROOT_AT - _ROOT_VTABLE_AT)
    vectors = np.array([segment_fields - 1, named_fields - 1])
    refer(np.array([_ROOT_AT + 1, _ROOT_AT + 2]), vectors)
    out[vectors] = segments, tensors
    tables = first_segment + _SEGMENT_WORDS * np.arange(segments)
    refer(segment_fields + np.arange(segments), tables)
    out[tables] = 4 * (tables - _SEGMENT_VTABLE_AT)
    for word, column in ((2, wanted.segment_offsets), (4, wanted.segment_nbytes)):
        out[tables + word] = column & 0xFFFFFFFF
        out[tables + word + 1] = column >> 32
    refer(named_fields + np.arange(tensors), entries)
    out[entries] = 4 * (entries - _BLOB_VTABLE_AT)
    out[entries[named]] = 4 * (entries[named] - _NAMED_VTABLE_AT)
    refer(entries + 1, names)
    out[entries + 2] = wanted.segments
    refer(entries[named] + 3, layouts)
    out[layouts] = 4 * (layouts - _LAYOUT_VTABLE_AT)
    refer(layouts + 1, sizes)
    refer(layouts + 2, orders[np.searchsorted(distinct_ranks, ranks)])
    out[layouts + 3] = wanted.scalar_types[named]
    out[sizes] = ranks
    out[np.repeat(sizes + 1, ranks) + dims.places] = dims.values
    out[names] = name_nbytes
    # Count, text, then terminator and padding, of every name.
    lengths = np.stack((np.full(tensors, 4), name_nbytes, 4 * name_words - 4 - name_nbytes), axis=1)
    is_text = np.repeat(np.tile((False, True, False), tensors), lengths.ravel())
    out.view(np.uint8)[4 * first_name : 4 * first_order][is_text] = index.names
    for rank, order in zip(distinct_ranks.tolist(), orders.tolist()):
        out[order] = rank
        out[order + 1 :].view(np.uint8)[:rank] = np.arange(rank)
    return out


def _places(first: int, words: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Where things of these lengths stand one after the other, and where the last one ends."""
    ends = first + np.cumsum(words)
    return ends - words, int(ends[-1]) if len(ends) else first


def _refuse_nul(index: Index) -> None:
    nul = np.flatnonzero(index.names == 0)
    if len(nul):
        name = index.name(int(np.searchsorted(index.name_ends, nul[0], side="right")))
        raise UnsupportedTensorError(
            f"tensor {name!r}: its name has a NUL, where ExecuTorch ends the names of a .ptd, so that it would be "
            "taken for another tensor; rename it",
            tensor=name,
        )


_I1, _I4, _U1, _U4, _U8 = map(np.dtype, ("i1", "<i4", "u1", "<u4", "<u8"))


def decode(data: memoryview, *, most: int | None = None) -> FlatTensor:
    """The FlatTensor in ``data``, whoever wrote it; no region bound is checked.

    ``data`` is what stands in the file from its first byte to the flatbuffer's end (``Header.graph_nbytes`` bytes), or
    a flatbuffer without a header.
    ``most``: how many named data to decode, from the first on; by default all.

    Vectorised.  Raises: FormatError when an offset leads out of ``data``, named data to a segment that is not there, or
    a layout has not as many places in its dim order as it has sizes.
    """
    root = root_table(data, IDENTIFIER, _WHAT)
    segments = root.tables(1)
    named = root.tables(2, most=most)
    numbers = named.scalars(1, _U4)
    if len(numbers) and int(numbers.max()) >= len(segments):
        raise FormatError(
            f"{_WHAT} is broken: named data lie in segment {int(numbers.max())} of {len(segments)}"
        )
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
    """Of which tensors of ``index`` the flatbuffer says something else.

    Raises: FormatError when it is no FlatTensor, or has another number of names than there are tensors.
    """
    found, wanted = decode(data, most=len(index) + 1), _wanted(index)
    if len(found) != len(index):
        more = "at least " if len(found) > len(index) else ""
        raise FormatError(
            f"the flatbuffer has {more}{len(found)} named data for {len(index)} tensors"
        )
    types = np.where(found.has_layout, found.scalar_types, _NO_TYPE)
    wrong: NDArray[np.bool_] = types != wanted.scalar_types
    wrong |= found.dims.differs(wanted.dims)
    wrong[found.dims.rows[found.dim_order.values != found.dims.places]] = True
    wrong |= found.segment_offsets[found.segments] != index.offsets.astype(np.uint64)
    wrong |= found.segment_nbytes[found.segments] != index.tensor_nbytes.astype(np.uint64)
    equal = (found.key_bytes(k) == index.name_bytes(k) for k in range(len(index)))
    wrong |= ~np.fromiter(equal, bool, len(index))
    return wrong


# Source: ExecuTorch 1.4.1, extension/flat_tensor/serialize/serialize.py, which puts this header into the flatbuffer,
# after its identifier.  Little-endian:
#   0 u32 root table   4 4s identifier   8 4s magic   12 u32 nbytes of the header   16 u64 where the flatbuffer goes on
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
            f"the header claims {nbytes} bytes, and that its flatbuffer goes on {more} bytes later: expected at "
            f"least {_HEADER_NBYTES}, and no less than that"
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
