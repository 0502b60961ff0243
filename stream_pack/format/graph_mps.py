"""Header kind ``mps``: the header of an MPS payload, and ExecuTorch's MPSGraph with one value a tensor and no weights.

:func:`encode` writes it with NumPy, a record a tensor, because a flatbuffer builder takes 40 times
as long and as much memory; :func:`decode` reads the values of any MPSGraph, also one that
ExecuTorch wrote.
Source: ``schema/graph.fbs``; the FlatBuffers internals document for the binary layout.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import FormatError, LimitError
from stream_pack.format.dtypes import BY_NAME, DTYPES
from stream_pack.format.flatbuf import Tables, root_table
from stream_pack.format.header import Header, HeadKind
from stream_pack.format.index import Index
from stream_pack.format.limits import MAX_FLATBUFFER_NBYTES, MAX_RANK, MAX_TENSORS
from stream_pack.format.ragged import Ragged

__all__ = [
    "KIND",
    "GraphValues",
    "constant_ids",
    "decode",
    "disagreements",
    "encode",
    "expected_values",
]

IDENTIFIER = b"MP00"
INVALID = 0
MAX_DIM = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class GraphValues:
    """The constants of a graph, as columns.

    ``datatypes`` are MPSDataType numbers; ``num_dims`` is the field of that name, which a
    valid graph has equal to the number of dims.  ``ids`` are their numbers in mps_values.

    Units: bytes; ``offsets`` count from the region's first byte.
    """

    ids: NDArray[np.int32]
    datatypes: NDArray[np.int16]
    num_dims: NDArray[np.int32]
    dims: Ragged[np.int32]
    nbytes: NDArray[np.uint64]
    offsets: NDArray[np.uint64]


def expected_values(index: Index) -> GraphValues:
    """What the graph in front of ``index`` must say of its tensors (ids: their own numbers)."""
    dims = index.ragged_dims
    table = [DTYPES[BY_NAME[n]].mps if n in BY_NAME else INVALID for n in index.dtype_names]
    datatypes = np.array(table, np.int16)[index.tensor_dtypes]
    datatypes[dims.rows[dims.values > MAX_DIM]] = INVALID
    named = datatypes != INVALID
    ranks = np.where(named, dims.lengths, 0)
    return GraphValues(
        ids=np.arange(len(index), dtype=np.int32),
        datatypes=datatypes,
        num_dims=ranks.astype(np.int32),
        dims=Ragged.of(dims.take(named).values.astype(np.int32), ranks),
        nbytes=index.tensor_nbytes.astype(np.uint64),
        offsets=index.offsets.astype(np.uint64),
    )


# A value's table, in 4-byte words from its start; fields in order of width, so that none needs
# padding.
_SOFFSET, _NUM_DIMS, _NBYTES, _OFFSET, _DIMS, _BUFFER, _DATATYPE, _DIMS_COUNT, _DIMS_FIRST = (
    0,
    1,
    2,
    4,
    6,
    7,
    8,
    9,
    10,
)
_VALUE_NBYTES = 36
# vtable: its nbytes, the table's, then where each slot of schema/graph.fbs is: datatype, num_dims,
# dims, constant_buffer_size, constant_buffer, segment_offset.
_VALUE_VTABLE = np.array([16, _VALUE_NBYTES, 32, 4, 24, 8, 28, 16], "<u2")
# Root: version, mps_nodes, mps_values, input_ids, output_ids, constant_ids, (graph_type: default),
# constant_segment.
_ROOT_NBYTES = 32
_ROOT_VTABLE = np.array([20, _ROOT_NBYTES, 4, 8, 12, 16, 20, 24, 0, 28], "<u2")
_SEGMENT_VTABLE = np.array([4, 4], "<u2")
_BUFFER_VTABLE = np.array([6, 8, 4], "<u2")


def encode(index: Index) -> bytes:
    """The flatbuffer ``MP00`` of a plain pack: every tensor a value and a constant, no nodes.

    About 58 bytes a tensor.  Raises: LimitError when it would reach 2 GiB, or above 2**31-1
    tensors.
    """
    tensors = len(index)
    if tensors > MAX_TENSORS:
        raise LimitError(
            f"{tensors} tensors: the graph numbers them with 31 bits",
            value=tensors,
            limit=MAX_TENSORS,
        )
    values = expected_values(index)
    ranks = values.dims.lengths

    # In words of 4 bytes.  Head: root offset, identifier; vtables; root table; small vectors.
    root_vtable = 2
    value_vtable = root_vtable + 5
    segment_vtable = value_vtable + 4
    buffer_vtable = segment_vtable + 1
    root = buffer_vtable + 2
    version = root + _ROOT_NBYTES // 4  # count 1, "0", terminator
    nodes = version + 2
    input_ids = nodes + 1
    output_ids = input_ids + 1
    segment = output_ids + 1
    value_offsets = segment + 1
    constant_ids = value_offsets + 1 + tensors
    first_value = constant_ids + 1 + tensors
    # u64 fields stand at multiples of 8.
    first_value += first_value % 2
    words = _DIMS_FIRST + ranks
    words += words % 2
    ends = np.cumsum(words) + first_value
    positions = ends - words
    buffer = int(ends[-1]) if tensors else first_value
    storage = buffer + 2
    # storage is force_align 16: its (absent) first element stands at a multiple of 16.
    storage += -(storage + 1) % 4
    total = storage + 1
    if 4 * total > MAX_FLATBUFFER_NBYTES:
        raise LimitError(
            f"a graph of {4 * total} bytes for {tensors} tensors: a flatbuffer must stay below 2 GiB",
            value=4 * total,
            limit=MAX_FLATBUFFER_NBYTES,
        )

    out = np.zeros(total, "<u4")

    def place(word: int, vtable: NDArray[np.uint16]) -> None:
        out[word:].view("<u2")[: len(vtable)] = vtable

    def refer(field: int, target: int) -> None:
        out[field] = 4 * (target - field)

    out[0] = 4 * root
    out[1] = int.from_bytes(IDENTIFIER, "little")
    place(root_vtable, _ROOT_VTABLE)
    place(value_vtable, _VALUE_VTABLE)
    place(segment_vtable, _SEGMENT_VTABLE)
    place(buffer_vtable, _BUFFER_VTABLE)
    out[root] = 4 * (root - root_vtable)
    vectors = (version, nodes, value_offsets, input_ids, output_ids, constant_ids, segment)
    for field, target in enumerate(vectors, root + 1):
        refer(field, target)
    out[version] = 1
    out[version + 1] = ord("0")
    out[segment] = 4 * (segment - segment_vtable)
    out[value_offsets] = tensors
    fields = value_offsets + 1 + np.arange(tensors)
    out[fields] = 4 * (positions - fields)
    out[constant_ids] = tensors
    out[constant_ids + 1 : constant_ids + 1 + tensors] = values.ids

    out[positions + _SOFFSET] = 4 * (positions - value_vtable)
    out[positions + _NUM_DIMS] = values.num_dims
    out[positions + _DIMS] = 4 * (_DIMS_COUNT - _DIMS)
    out[positions + _BUFFER] = 4 * (buffer - (positions + _BUFFER))
    out[positions + _DATATYPE] = values.datatypes
    out[positions + _DIMS_COUNT] = ranks
    for field, column in ((_NBYTES, values.nbytes), (_OFFSET, values.offsets)):
        out[positions + field] = column & 0xFFFFFFFF
        out[positions + field + 1] = column >> np.uint64(32)
    places = np.repeat(positions + _DIMS_FIRST, ranks) + values.dims.places
    out[places] = values.dims.values

    out[buffer] = 4 * (buffer - buffer_vtable)
    refer(buffer + 1, storage)
    return out.tobytes()


_MPS_VALUES, _CONSTANT_IDS = 2, 5
_WHAT = "the graph"


def constant_ids(data: memoryview) -> NDArray[np.int32]:
    """The numbers that an MPSGraph gives its constants among its values, in place.

    Raises: as :func:`decode`.
    """
    return _ids_and_values(data)[0]


def _ids_and_values(data: memoryview) -> tuple[NDArray[np.int32], int]:
    """The constant ids, and where the offsets of the values stand."""
    root = root_table(data, IDENTIFIER, _WHAT)
    ids = root.vector(_CONSTANT_IDS, np.int32)
    where = root.vector_position(_MPS_VALUES, 4)
    first, count = where if where is not None else (0, 0)
    if len(ids) > count or (len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= count)):
        raise FormatError(
            f"{_WHAT} is broken: {len(ids)} constant ids from {int(ids.min())} to {int(ids.max())} for {count} values"
        )
    return ids, first


def decode(data: memoryview, *, most: int | None = None) -> GraphValues:
    """The constants of the MPSGraph in ``data``, whoever wrote it; no region bound is checked.

    ``most``: how many of them to decode, from the first on; by default all.  A graph may list far more than its reader
    wants, and 20 times its bytes are needed to decode them.

    Vectorised: about a second a million values.
    Raises: FormatError when an offset leads out of ``data``, or an id out of the values.
    """
    ids, first = _ids_and_values(data)
    ids = ids[:most]
    values = Tables.referred(data, first + 4 * ids.astype(np.int64), _WHAT)
    return GraphValues(
        ids=ids,
        datatypes=values.scalars(0, np.dtype("<i2")),
        num_dims=values.scalars(1, np.dtype("<i4")),
        dims=values.vectors(2, np.dtype("<i4"), longest=MAX_RANK),
        nbytes=values.scalars(3, np.dtype("<u8")),
        offsets=values.scalars(5, np.dtype("<u8")),
    )


def disagreements(data: memoryview, index: Index) -> NDArray[np.bool_]:
    """Of which tensors of ``index`` the graph says something else.

    Raises: FormatError when it is no MPSGraph, or has fewer constants than there are tensors.
    """
    found, wanted = decode(data, most=len(index)), expected_values(index)
    if len(found.ids) < len(index):
        raise FormatError(f"the graph has {len(found.ids)} constants for {len(index)} tensors")
    wrong = found.dims.differs(wanted.dims)
    for name in ("datatypes", "num_dims", "nbytes", "offsets"):
        wrong |= getattr(found, name) != getattr(wanted, name)
    return wrong


# Source: ExecuTorch 1.4.1, backends/apple/mps/runtime/MPSDelegateHeader.cpp.  Little-endian:
#   0 4s zero   4 4s magic   8 u64 region file offset   16 u64 region nbytes;   the graph follows
_HEADER = struct.Struct("<8sQQ")
_MAGIC = b"\0\0\0\0MP00"


def _unpack(data: bytes) -> Header:
    _, region, region_nbytes = _HEADER.unpack_from(data)
    return Header(KIND, region, region_nbytes, _HEADER.size, None)


def _pack(graph: bytes, region_file_offset: int, region_nbytes: int) -> tuple[bytes, bytes]:
    return _HEADER.pack(_MAGIC, region_file_offset, region_nbytes), graph


KIND = HeadKind(
    name="mps",
    raw="MP00 payload",
    pack_as="a payload of its MPS delegate",
    magic=_MAGIC,
    magic_at=0,
    header_nbytes=_HEADER.size,
    zeros=(24, 24),
    graph_file_offset=_HEADER.size,
    before_graph_nbytes=_HEADER.size,
    tables=(2, 2),  # the value, and the buffer that all share; root and constant segment
    says_dim_order=False,
    unpack=_unpack,
    pack=_pack,
    encode=encode,
    disagreements=disagreements,
)
"""A payload of ExecuTorch's MPS delegate: the default."""
