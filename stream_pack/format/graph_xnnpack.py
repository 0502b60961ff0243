"""Header kind ``xnnpack``: the header of an XNNPACK payload, and ExecuTorch's XNNGraph.

:func:`encode` writes the graph of a plain pack; :func:`decode` reads where the constants of any XNNGraph are, and what.
Source: ``schema/xnn_graph.fbs``; ExecuTorch 1.5.1, backends/xnnpack/serialization/schema.fbs and runtime_schema.fbs.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import FormatError, LimitError
from stream_pack.format.flatbuf import Table, Tables, decode_text, root_table
from stream_pack.format.flatbuf_write import ColumnWriter
from stream_pack.format.header import Header, HeadKind
from stream_pack.format.index import Index
from stream_pack.format.limits import MAX_RANK, MAX_XNNPACK_REGION_FILE_OFFSET
from stream_pack.format.ragged import Ragged

__all__ = ["BY_KEY", "DTYPE_NAMES", "KIND", "XnnGraph", "XnnValues", "decode", "disagreements", "encode"]

IDENTIFIERS = (b"XN01", b"XN00")
"""The one written by ExecuTorch for delegates, and that of the same tables in its runtime's schema."""

BY_KEY = 2**64 - 1
"""The offset of a constant that is not in the payload, but in the program's named data, under its key."""

DTYPE_NAMES: dict[int, str] = {
    # XNNDatatype: the dtype of the elements in the payload; quantized ones as the integers they are
    1: "float32",
    2: "float16",
    3: "int8",  # qint8
    4: "uint8",  # quint8
    5: "int32",  # qint32
    6: "int8",  # qcint8
    7: "int32",  # qcint32
    8: "uint4",  # qcint4: stored with 8 added
    10: "uint4",  # qbint4: stored with 8 added
    12: "int32",
    14: "bfloat16",
}

_FLOAT32, _BFLOAT16 = 1, 14
_WHAT = "the XNNPACK graph"


@dataclass(frozen=True, slots=True, eq=False)
class XnnValues:
    """What a graph says of its constants: one row for each value, or table of quantization scales, that has one.

    ``constants`` are numbers in constant_data, from 1 on; more than one row may have the same.  ``datatypes`` are
    XNNDatatype numbers; ``num_dims`` is the field of that name, which a valid graph has equal to the number of dims.
    """

    constants: NDArray[np.uint32]
    datatypes: NDArray[np.int16]
    num_dims: NDArray[np.uint32]
    dims: Ragged[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class XnnGraph:
    """The constants of a graph, as columns.  Entry 0 is reserved, and refers to nothing.

    An offset of :data:`BY_KEY` marks a constant that has a key instead.

    Units: bytes; ``offsets`` count from the region's first byte.
    Lifetime: keeps the flatbuffer, from which keys are read when asked for.
    """

    offsets: NDArray[np.uint64]
    nbytes: NDArray[np.uint64]
    key_begins: NDArray[np.int64]
    key_nbytes: NDArray[np.int64]
    values: XnnValues
    data: memoryview

    def key(self, constant: int) -> str | None:
        """The key of a constant in the program's named data; None if it has none.

        Raises: FormatError when it is not UTF-8.
        """
        begin, nbytes = int(self.key_begins[constant]), int(self.key_nbytes[constant])
        if nbytes == 0:
            return None
        return decode_text(self.data, begin, nbytes, f"{_WHAT}: the key of constant {constant}")


def encode(index: Index) -> bytes:
    """The flatbuffer ``XN01`` of a plain pack: every tensor a constant, no nodes and no values.

    28 bytes a tensor.  Raises: LimitError when it would reach 2 GiB.
    """
    constants = 1 + len(index)
    writer = ColumnWriter(IDENTIFIERS[0])
    # Slots: version, xnodes, xvalues, (num_externs: 0), input_ids, output_ids, (two deprecated ones), constant_data.
    root_vtable = writer.vtable(28, 4, 8, 12, 0, 16, 20, 0, 0, 24)
    # offset, size, (named_key: absent; ExecuTorch's runtime looks for any that is there, an empty one too).
    constant_vtable = writer.vtable(24, 8, 16)
    root, version = writer.reserve(7), writer.reserve(2)
    nodes, values, inputs, outputs = (writer.reserve(1) for _ in range(4))
    constant_data = writer.reserve(1 + constants)
    writer.align(2)  # for the u64 fields
    first = writer.reserve(6 * constants)
    writer.allocate(f"a graph for {len(index)} tensors")
    places = first + 6 * np.arange(constants)

    table = writer.root(root_vtable, root)
    targets = (version, nodes, values, inputs, outputs, constant_data)
    for slot, target in zip((0, 1, 2, 4, 5, 8), targets, strict=True):
        table.refer(slot, target)
    writer.text(version, b"0")
    writer.references(constant_data, places)
    writer.tables(constant_vtable, places[:1])  # the reserved one
    table = writer.tables(constant_vtable, places[1:])
    table.u64(0, index.offsets)
    table.u64(1, index.tensor_nbytes)
    return writer.finish()


_I2, _U4, _U8 = np.dtype("<i2"), np.dtype("<u4"), np.dtype("<u8")
_UNION = np.dtype("u1")


def decode(data: memoryview, *, most: int | None = None) -> XnnGraph:
    """The constants of the XNNGraph in ``data``, written by any tool; no region bound is checked.

    ``most``: how many constants to decode, the reserved one included, and no values then; by default all.

    Vectorised.  Raises: FormatError when an offset points outside ``data``, or a value refers to a missing constant.
    """
    root = root_table(data, IDENTIFIERS, _WHAT)
    constants = root.tables(8, most=most)
    key_begins, key_nbytes = constants.spans(2, 1)
    values = _values(root if most is None else None, len(constants))
    return XnnGraph(
        offsets=constants.scalars(0, _U8),
        nbytes=constants.scalars(1, _U8),
        key_begins=key_begins,
        key_nbytes=key_nbytes,
        values=values,
        data=data,
    )


def _values(root: Table | None, constants: int) -> XnnValues:
    if root is None:
        empty = np.empty(0, _U4)
        return XnnValues(empty, empty.astype(_I2), empty, Ragged.of(empty, []))
    values = root.tables(2)
    union = values.scalars(0, _UNION)
    quantized = values.tables(1, np.flatnonzero(union == 2))
    parts = [
        _tensors(values.tables(1, np.flatnonzero(union == 1))),
        _tensors(quantized.tables(0, np.arange(len(quantized)))),
    ]
    parameters = quantized.scalars(1, _UNION)
    for kind, slot, datatype in ((1, 2, _FLOAT32), (4, 4, _BFLOAT16)):
        # PerChannelQuant and PerChannelGroupQuant keep their scales among the constants.
        scaled = quantized.tables(2, np.flatnonzero(parameters == kind))
        parts.append(_scales(scaled, slot, datatype))
    numbers, datatypes, num_dims, ranks, dims = map(np.concatenate, zip(*parts, strict=True))
    if int(numbers.max(initial=0)) >= max(constants, 1):
        raise FormatError(f"{_WHAT} is broken: a value has constant {int(numbers.max())} of {constants}")
    held = numbers > 0
    return XnnValues(
        constants=numbers[held].astype(_U4),
        datatypes=datatypes[held].astype(_I2),
        num_dims=num_dims[held].astype(_U4),
        dims=Ragged.of(dims, ranks).take(held).astype(np.uint32),
    )


def _tensors(tensors: Tables) -> tuple[NDArray[np.integer], ...]:
    """Constant, datatype, num_dims, rank, dims of XNNTensorValues."""
    dims = tensors.vectors(2, _U4, longest=MAX_RANK)
    numbers, datatypes = tensors.scalars(3, _U4), tensors.scalars(0, _I2)
    return numbers, datatypes, tensors.scalars(1, _U4), dims.lengths, dims.values


def _scales(tables: Tables, slot: int, datatype: int) -> tuple[NDArray[np.integer], ...]:
    """Constant, datatype, num_dims, rank, dims of the scales that quantization parameters refer to from ``slot`` on."""
    one = np.ones(len(tables), np.int64)
    numbers, dims = tables.scalars(slot, _U4), tables.scalars(slot + 1, _U4)
    return numbers, np.full(len(tables), datatype, _I2), one, one, dims


def disagreements(data: memoryview, index: Index) -> NDArray[np.bool_]:
    """Which tensors of ``index`` the graph describes otherwise.

    Raises: FormatError when it is not an XNNGraph, or has fewer constants than there are tensors.
    """
    found = decode(data, most=1 + len(index))
    if len(found.offsets) < 1 + len(index):
        raise FormatError(
            f"the graph has {len(found.offsets)} constants, the reserved one included, for {len(index)} tensors"
        )
    wrong: NDArray[np.bool_] = found.offsets[1:] != index.offsets.astype(np.uint64)
    wrong |= found.nbytes[1:] != index.tensor_nbytes.astype(np.uint64)
    wrong |= found.key_nbytes[1:] > 0
    return wrong


# Source: ExecuTorch 1.4.1, backends/xnnpack/runtime/XNNHeader.h.  Little-endian:
#   0 4s zero   4 4s magic   8 u16 nbytes of the header   10 u32 graph file offset   14 u32 graph nbytes
#   18 u32 region file offset   22 u64 region nbytes   30 2s zero;   the graph follows
_HEADER = struct.Struct("<8sHIIIQ2s")
_HEADER_NBYTES = 30
_MAGIC = b"\0\0\0\0XH00"


def _unpack(data: bytes) -> Header:
    _, _, graph, graph_nbytes, region, region_nbytes, _ = _HEADER.unpack_from(data)
    return Header(KIND, region, region_nbytes, graph, graph_nbytes)


def _pack(graph: bytes, region_file_offset: int, region_nbytes: int) -> tuple[bytes, bytes]:
    if region_file_offset > MAX_XNNPACK_REGION_FILE_OFFSET:
        raise LimitError(
            f"graph and index take {region_file_offset} bytes before the tensors: the header of an XNNPACK payload "
            f"has 32 bits for that, at most {MAX_XNNPACK_REGION_FILE_OFFSET}; pack fewer tensors, shorter metadata, a "
            "smaller alignment, or for another delegate (to=)",
            value=region_file_offset,
            limit=MAX_XNNPACK_REGION_FILE_OFFSET,
        )
    region = region_file_offset, region_nbytes, bytes(2)
    return _HEADER.pack(_MAGIC, _HEADER_NBYTES, _HEADER.size, len(graph), *region), graph


KIND = HeadKind(
    name="xnnpack",
    raw="XH00 payload",
    pack_as="a payload of its XNNPACK delegate",
    magic=_MAGIC,
    magic_at=0,
    header_nbytes=_HEADER.size,
    zeros=(_HEADER_NBYTES, _HEADER.size),
    graph_file_offset=_HEADER.size,
    before_graph_nbytes=_HEADER.size,
    tables=(1, 2),  # constant; root and the reserved constant
    says_dim_order=False,
    unpack=_unpack,
    pack=_pack,
    encode=encode,
    disagreements=disagreements,
)
"""A payload of ExecuTorch's XNNPACK delegate, its constants in line."""
