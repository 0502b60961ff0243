"""Header kind ``mps``: the header of an MPS payload, and ExecuTorch's MPSGraph with one value a tensor and no weights.

:func:`encode` writes the graph of a plain pack; :func:`decode` reads the constants of any MPSGraph, also one that
ExecuTorch wrote.
Source: ``schema/graph.fbs``; the FlatBuffers internals document for the binary layout.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import FormatError, LimitError
from stream_pack.format.dtypes import DTYPES
from stream_pack.format.flatbuf import Tables, root_table
from stream_pack.format.flatbuf_write import ColumnWriter
from stream_pack.format.graph_mps_nodes import check_ids
from stream_pack.format.header import Header, HeadKind, types_and_dims
from stream_pack.format.index import Index
from stream_pack.format.limits import MAX_RANK, MAX_TENSORS
from stream_pack.format.ragged import Ragged

__all__ = [
    "KIND",
    "GraphValues",
    "check_nodes",
    "constant_ids",
    "decode",
    "disagreements",
    "encode",
    "expected_values",
]

IDENTIFIER = b"MP00"
INVALID = 0


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
    """What the graph before ``index`` must say about its tensors (ids: their own numbers)."""
    numbers = {dtype.name: dtype.mps for dtype in DTYPES}
    datatypes, dims = types_and_dims(index, numbers, none=INVALID)
    return GraphValues(
        ids=np.arange(len(index), dtype=np.int32),
        datatypes=datatypes,
        num_dims=dims.lengths.astype(np.int32),
        dims=dims,
        nbytes=index.tensor_nbytes.astype(np.uint64),
        offsets=index.offsets.astype(np.uint64),
    )


def encode(index: Index) -> bytes:
    """The flatbuffer ``MP00`` of a plain pack: every tensor a value and a constant, no nodes.

    About 58 bytes a tensor.  Raises: LimitError when it would reach 2 GiB, or above 2**31-1 tensors.
    """
    tensors = len(index)
    if tensors > MAX_TENSORS:
        raise LimitError(f"{tensors} tensors: the graph numbers them with 31 bits", value=tensors, limit=MAX_TENSORS)
    values = expected_values(index)

    writer = ColumnWriter(IDENTIFIER)
    # Slots of schema/graph.fbs: version, mps_nodes, mps_values, input_ids, output_ids, constant_ids, (graph_type:
    # default), constant_segment.
    root_vtable = writer.vtable(32, 4, 8, 12, 16, 20, 24, 0, 28)
    # datatype, num_dims, dims, constant_buffer_size, constant_buffer, segment_offset; in the table by width, so that
    # none needs padding.
    value_vtable = writer.vtable(36, 32, 4, 24, 8, 28, 16)
    segment_vtable, buffer_vtable = writer.vtable(4), writer.vtable(8, 4)
    root, version = writer.reserve(8), writer.reserve(2)
    nodes, input_ids, output_ids, segment = (writer.reserve(1) for _ in range(4))
    value_references, constant_ids = writer.reserve(1 + tensors), writer.reserve(1 + tensors)
    writer.align(2)  # for the u64 fields
    words = 10 + values.dims.lengths  # 9 of the table; dims, which follow it
    places = writer.reserve_each(words + words % 2)
    buffer = writer.reserve(2)
    writer.align(4, after=1)  # storage is force_align 16: its (absent) first element
    storage = writer.reserve(1)
    writer.allocate(f"a graph for {tensors} tensors")

    table = writer.root(root_vtable, root)
    vectors = (version, nodes, value_references, input_ids, output_ids, constant_ids)
    for slot, target in enumerate(vectors):
        table.refer(slot, target)
    table.refer(7, segment)
    writer.text(version, b"0")
    writer.tables(segment_vtable, segment)
    writer.references(value_references, places)
    writer.numbers(constant_ids, values.ids)
    table = writer.tables(value_vtable, places)
    table.u32(0, values.datatypes)
    table.u32(1, values.num_dims)
    table.refer(2, places + 9)
    table.u64(3, values.nbytes)
    table.refer(4, buffer)
    table.u64(5, values.offsets)
    writer.vectors(places + 9, values.dims)
    writer.tables(buffer_vtable, buffer).refer(0, storage)
    return writer.finish()


_MPS_VALUES, _CONSTANT_IDS = 2, 5
_WHAT = "the graph"


def constant_ids(data: memoryview) -> NDArray[np.int32]:
    """The numbers that an MPSGraph gives its constants among its values, in place.

    Raises: as :func:`decode`.
    """
    return _ids_and_values(data)[0]


def _ids_and_values(data: memoryview) -> tuple[NDArray[np.int32], int]:
    """The constant ids, and where the offsets of the values are."""
    root = root_table(data, IDENTIFIER, _WHAT)
    ids = root.vector(_CONSTANT_IDS, np.int32)
    first, count = root.vector_position(_MPS_VALUES, 4) or (0, 0)
    if len(ids) > count or (len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= count)):
        raise FormatError(
            f"{_WHAT} is broken: {len(ids)} constant ids from {int(ids.min())} to {int(ids.max())} for {count} values"
        )
    return ids, first


def decode(data: memoryview, *, most: int | None = None) -> GraphValues:
    """The constants of the MPSGraph in ``data``, written by any tool; no region bound is checked.

    ``most``: how many of them to decode, from the first on; by default all.  A graph may list far more than its reader
    wants, and 20 times its bytes are needed to decode them.

    Vectorised: about a second a million values.
    Raises: FormatError when an offset points outside ``data``, or an id outside the values.
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


def check_nodes(data: memoryview) -> None:
    """Prove that the nodes of an MPSGraph, its inputs and its outputs name values that it has.

    Raises: FormatError.
    """
    check_ids(root_table(data, IDENTIFIER, _WHAT))


def disagreements(data: memoryview, index: Index) -> NDArray[np.bool_]:
    """Which tensors of ``index`` the graph describes otherwise.

    Raises: FormatError when it is not an MPSGraph, has fewer constants than there are tensors, or names a value that
    it does not have.
    """
    check_nodes(data)
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
