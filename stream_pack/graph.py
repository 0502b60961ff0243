"""The graph in front: ExecuTorch's MPSGraph with one value a tensor and no weight bytes.

:func:`encode` writes it with NumPy, a record a tensor, because a flatbuffer builder takes 40 times
as long and as much memory; :func:`decode` reads the values of any MPSGraph, also one that
ExecuTorch wrote.
Source: ``schema/graph.fbs``; the FlatBuffers internals document for the binary layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from stream_pack.dtypes import BY_NAME, DTYPES
from stream_pack.errors import FormatError, LimitError
from stream_pack.flatbuf import root_table
from stream_pack.index import Index
from stream_pack.limits import MAX_FLATBUFFER_NBYTES, MAX_RANK, MAX_TENSORS

__all__ = ["GraphValues", "constant_ids", "decode", "encode", "expected_values"]

IDENTIFIER = b"MP00"
INVALID = 0
_I = TypeVar("_I", bound=np.integer)
MAX_DIM = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class GraphValues:
    """The constants of a graph, as columns.

    ``datatypes`` are MPSDataType numbers; value ``k`` has ``dims[dims_ends[k-1]:dims_ends[k]]``;
    ``num_dims`` is the field of that name, which a sound graph has equal to the number of dims.
    ``ids`` are their numbers in mps_values.

    Units: bytes; ``offsets`` count from the region's first byte.
    """

    ids: NDArray[np.int32]
    datatypes: NDArray[np.int16]
    num_dims: NDArray[np.int32]
    dims: NDArray[np.int32]
    dims_ends: NDArray[np.int64]
    nbytes: NDArray[np.uint64]
    offsets: NDArray[np.uint64]


def expected_values(index: Index) -> GraphValues:
    """What the graph in front of ``index`` must say of its tensors (ids: their own numbers)."""
    begins = np.concatenate((np.zeros(1, np.int64), index.dims_ends))[:-1]
    ranks = index.dims_ends - begins
    table = [DTYPES[BY_NAME[n]].mps if n in BY_NAME else INVALID for n in index.dtype_names]
    datatypes = np.array(table, np.int16)[index.tensor_dtypes]
    long_dims = np.repeat(np.arange(len(index)), ranks)[index.dims > MAX_DIM]
    datatypes[long_dims] = INVALID
    named = datatypes != INVALID
    dims = index.dims[np.repeat(named, ranks)].astype(np.int32)
    ranks = np.where(named, ranks, 0)
    return GraphValues(
        ids=np.arange(len(index), dtype=np.int32),
        datatypes=datatypes,
        num_dims=ranks.astype(np.int32),
        dims=dims,
        dims_ends=np.cumsum(ranks),
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
    begins = np.concatenate((np.zeros(1, np.int64), values.dims_ends))[:-1]
    ranks = values.dims_ends - begins

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
    out[np.repeat(positions + _DIMS_FIRST - begins, ranks) + np.arange(len(values.dims))] = (
        values.dims
    )

    out[buffer] = 4 * (buffer - buffer_vtable)
    refer(buffer + 1, storage)
    return out.tobytes()


_MPS_VALUES, _CONSTANT_IDS = 2, 5
_NUMPY_FIELDS: dict[int, tuple[str, np.dtype[np.integer]]] = {
    # slot: field, element type
    0: ("datatypes", np.dtype("<i2")),
    1: ("num_dims", np.dtype("<i4")),
    3: ("nbytes", np.dtype("<u8")),
    5: ("offsets", np.dtype("<u8")),
}
_DIMS_SLOT = 2
_KNOWN_SLOTS = 6
_WHAT = "the graph"
MAX_VTABLES = 1024
"""Distinct vtables of values: a writer has one for each choice of fields, and there are six fields."""


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
    what = _WHAT
    ids, first = _ids_and_values(data)
    ids = ids[:most]
    raw = np.frombuffer(data, np.uint8)
    fields = first + 4 * ids.astype(np.int64)
    positions = fields + _gather(raw, fields, np.dtype("<u4"), what)
    columns = {name: np.zeros(len(ids), dtype) for name, dtype in _NUMPY_FIELDS.values()}
    dims_at = np.zeros(len(ids), np.int64)
    vtables = positions - _gather(raw, positions, np.dtype("<i4"), what)
    # Few distinct vtables, whatever the number of values: one step each.
    distinct = np.unique(vtables).tolist()
    if len(distinct) > MAX_VTABLES:
        raise FormatError(
            f"{what} is broken: {len(distinct)} vtables for tables of {_KNOWN_SLOTS} fields"
        )
    for vtable in distinct:
        rows = np.flatnonzero(vtables == vtable)
        vtable_nbytes, table_nbytes = _gather(
            raw, np.array([vtable, vtable + 2]), np.dtype("<u2"), what
        ).tolist()
        slots = _gather(
            raw,
            vtable + 4 + 2 * np.arange(min(max(0, vtable_nbytes - 4) // 2, _KNOWN_SLOTS)),
            np.dtype("<u2"),
            what,
        ).tolist()
        for slot, offset in enumerate(slots):
            itemsize = _NUMPY_FIELDS[slot][1].itemsize if slot in _NUMPY_FIELDS else 4
            if offset and offset + itemsize > table_nbytes:
                raise FormatError(f"{what} is broken: a field leads out of its table")
            if offset and slot in _NUMPY_FIELDS:
                name, dtype = _NUMPY_FIELDS[slot]
                columns[name][rows] = _gather(raw, positions[rows] + offset, dtype, what)
            elif offset and slot == _DIMS_SLOT:
                field = positions[rows] + offset
                dims_at[rows] = field + _gather(raw, field, np.dtype("<u4"), what)
    ranks = np.zeros(len(ids), np.int64)
    present = dims_at > 0
    ranks[present] = _gather(raw, dims_at[present], np.dtype("<u4"), what)
    if len(ranks) and int(ranks.max()) > MAX_RANK:
        raise FormatError(
            f"{what} is broken: a value of {int(ranks.max())} dims, the limit is {MAX_RANK}"
        )
    if 4 * int(ranks.sum()) > len(raw):
        # Values may refer to one vector of dims; so many that together they exceed the file are a bomb.
        raise FormatError(f"{what} is broken: {int(ranks.sum())} dims in {len(raw)} bytes")
    dims_ends = np.cumsum(ranks)
    within = np.arange(int(ranks.sum())) - np.repeat(dims_ends - ranks, ranks)
    dims = _gather(raw, np.repeat(dims_at + 4, ranks) + 4 * within, np.dtype("<i4"), what)
    return GraphValues(
        ids=ids,
        datatypes=columns["datatypes"],
        num_dims=columns["num_dims"],
        dims=dims,
        dims_ends=dims_ends,
        nbytes=columns["nbytes"],
        offsets=columns["offsets"],
    )


def _gather(
    raw: NDArray[np.uint8], positions: NDArray[np.int64], dtype: np.dtype[_I], what: str
) -> NDArray[_I]:
    """One scalar at each position, aligned or not."""
    if len(positions) == 0:
        return np.empty(0, dtype)
    if int(positions.min()) < 0 or int(positions.max()) > len(raw) - dtype.itemsize:
        raise FormatError(f"{what} is broken: an offset leads out of its {len(raw)} bytes")
    scalars: NDArray[_I] = raw[positions[:, None] + np.arange(dtype.itemsize)].view(dtype)
    return scalars.reshape(-1)
