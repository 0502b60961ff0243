"""Files as ExecuTorch would write them, made field by field with the flatbuffers package.

Slots and positions are those of ExecuTorch 1.4.1: backends/apple/mps/serialization/schema.fbs,
backends/xnnpack/serialization/schema.fbs, extension/flat_tensor/serialize/flat_tensor.fbs and schema/program.fbs.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import flatbuffers

__all__ = [
    "Constant",
    "DataTensor",
    "Delegate",
    "Named",
    "Node",
    "data_file",
    "mps_payload",
    "program",
    "ptd",
    "xnnpack_payload",
]

SCALAR_TYPES = {"uint8": 0, "int8": 1, "int16": 2, "int32": 3, "int64": 4, "float16": 5, "float32": 6, "float64": 7}
SCALAR_TYPES |= {"bool": 11, "bfloat16": 15, "uint16": 27}
"""ExecuTorch's ScalarType numbers, by torch's names."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant of a payload.  ``nbytes`` None: what f32 has."""

    dims: Sequence[int]
    offset: int
    nbytes: int | None = None
    datatype: int = 2  # MPSDataType f32; of XNNDatatype, f32 is 1
    num_dims: int | None = None
    key: str = ""

    @property
    def stored_nbytes(self) -> int:
        if self.nbytes is not None:
            return self.nbytes
        nbytes = 4
        for dim in self.dims:
            nbytes *= dim
        return nbytes


def _vector(builder: flatbuffers.Builder, places: Sequence[int]) -> int:
    builder.StartVector(4, len(places), 4)
    for place in reversed(places):
        builder.PrependUOffsetTRelative(place)
    return int(builder.EndVector())


def _numbers(builder: flatbuffers.Builder, values: Sequence[int], code: str) -> int:
    nbytes = struct.calcsize(code)
    builder.StartVector(nbytes, len(values), nbytes)
    prepend = {
        "B": builder.PrependUint8,
        "i": builder.PrependInt32,
        "I": builder.PrependUint32,
        "Q": builder.PrependUint64,
    }[code]
    for value in reversed(values):
        prepend(value)
    return int(builder.EndVector())


def _segment(builder: flatbuffers.Builder, offset: int, nbytes: int) -> int:
    builder.StartObject(2)
    builder.PrependUint64Slot(0, offset, 0)
    builder.PrependUint64Slot(1, nbytes, 0)
    return int(builder.EndObject())


@dataclass(frozen=True, slots=True)
class Node:
    """A node of an MPSGraph: its number in MPSNodeUnion, and the fields of its table that are ids, by slot."""

    kind: int
    ids: Mapping[int, int | Sequence[int]]


def mps_payload(
    constants: Sequence[Constant],
    data: bytes,
    *,
    ids: Sequence[int] | None = None,
    region_nbytes: int | None = None,
    nodes: Sequence[Node] = (),
    inputs: Sequence[int] = (),
    outputs: Sequence[int] = (),
) -> bytes:
    """MP00: ``constants`` are the values 0, 1, ...; ``ids`` are what the graph calls constants, by default all.

    ``region_nbytes``: what the header says, if that is not the length of ``data``.
    """
    builder = flatbuffers.Builder()
    values = []
    for constant in constants:
        dims = _numbers(builder, constant.dims, "i")
        builder.StartObject(6)
        builder.PrependInt16Slot(0, constant.datatype, 0)
        rank = len(constant.dims) if constant.num_dims is None else constant.num_dims
        builder.PrependInt32Slot(1, rank, 0)
        builder.PrependUOffsetTRelativeSlot(2, dims, 0)
        builder.PrependUint64Slot(3, constant.stored_nbytes, 0)
        builder.PrependUint64Slot(5, constant.offset, 0)
        values.append(builder.EndObject())
    values_at = _vector(builder, values)
    ids_at = _numbers(builder, range(len(constants)) if ids is None else ids, "i")
    inputs_at, outputs_at = _numbers(builder, inputs, "i"), _numbers(builder, outputs, "i")
    nodes_at = _vector(builder, [_node(builder, node) for node in nodes])
    builder.StartObject(8)
    builder.PrependUOffsetTRelativeSlot(1, nodes_at, 0)
    builder.PrependUOffsetTRelativeSlot(2, values_at, 0)
    builder.PrependUOffsetTRelativeSlot(3, inputs_at, 0)
    builder.PrependUOffsetTRelativeSlot(4, outputs_at, 0)
    builder.PrependUOffsetTRelativeSlot(5, ids_at, 0)
    builder.Finish(builder.EndObject(), file_identifier=b"MP00")
    graph = bytes(builder.Output())
    region = -(-(24 + len(graph)) // 16) * 16
    length = len(data) if region_nbytes is None else region_nbytes
    head = struct.pack("<4s4sQQ", bytes(4), b"MP00", region, length) + graph
    return head.ljust(region, b"\0") + data


def _node(builder: flatbuffers.Builder, node: Node) -> int:
    vectors = {slot: _numbers(builder, ids, "i") for slot, ids in node.ids.items() if not isinstance(ids, int)}
    builder.StartObject(16)
    for slot, ids in node.ids.items():
        if isinstance(ids, int):
            builder.PrependInt32Slot(slot, ids, 0)
        else:
            builder.PrependUOffsetTRelativeSlot(slot, vectors[slot], 0)
    table = builder.EndObject()
    builder.StartObject(3)
    builder.PrependUint8Slot(0, node.kind, 0)
    builder.PrependUOffsetTRelativeSlot(1, table, 0)
    return int(builder.EndObject())


def xnnpack_payload(constants: Sequence[Constant], data: bytes) -> bytes:
    """XH00: constant_data from entry 1 on, and a value for each; a constant with a key has no bytes here."""
    builder = flatbuffers.Builder()
    empty = builder.CreateString("")
    entries = []
    for offset, nbytes, key in [
        (0, 0, ""),
        *((2**64 - 1 if c.key else c.offset, c.stored_nbytes, c.key) for c in constants),
    ]:
        text = builder.CreateString(key) if key else empty
        builder.StartObject(3)
        builder.PrependUint64Slot(0, offset, 0)
        builder.PrependUint64Slot(1, nbytes, 0)
        builder.PrependUOffsetTRelativeSlot(2, text, 0)
        entries.append(builder.EndObject())
    values = []
    for number, constant in enumerate(constants, start=1):
        dims = _numbers(builder, constant.dims, "I")
        builder.StartObject(8)
        builder.PrependInt16Slot(0, constant.datatype, 0)
        builder.PrependUint32Slot(1, len(constant.dims), 0)
        builder.PrependUOffsetTRelativeSlot(2, dims, 0)
        builder.PrependUint32Slot(3, number, 0)
        tensor = builder.EndObject()
        builder.StartObject(2)
        builder.PrependUint8Slot(0, 1, 0)
        builder.PrependUOffsetTRelativeSlot(1, tensor, 0)
        values.append(builder.EndObject())
    values_at, entries_at = _vector(builder, values), _vector(builder, entries)
    builder.StartObject(9)
    builder.PrependUOffsetTRelativeSlot(2, values_at, 0)
    builder.PrependUOffsetTRelativeSlot(8, entries_at, 0)
    builder.Finish(builder.EndObject(), file_identifier=b"XN01")
    graph = bytes(builder.Output())
    region = -(-(32 + len(graph)) // 16) * 16
    header = struct.pack("<4s4sHIIIQ2s", bytes(4), b"XH00", 30, 32, len(graph), region, len(data), bytes(2))
    return (header + graph).ljust(region, b"\0") + data


@dataclass(frozen=True, slots=True)
class Named:
    """Named data; ``scalar_type`` None: without a layout."""

    key: str
    segment: int
    scalar_type: int | None = None
    sizes: Sequence[int] = ()
    dim_order: Sequence[int] = ()


def ptd(named: Sequence[Named], segments: Sequence[tuple[int, int]], *, region: int, region_nbytes: int) -> bytes:
    """The first ``region`` bytes of a FT01 file."""
    builder = flatbuffers.Builder()
    entries = []
    for data in named:
        key = builder.CreateSharedString(data.key)
        layout = 0
        if data.scalar_type is not None:
            sizes = _numbers(builder, data.sizes, "i")
            order = _numbers(builder, data.dim_order, "B")
            builder.StartObject(3)
            builder.PrependInt8Slot(0, data.scalar_type, 0)
            builder.PrependUOffsetTRelativeSlot(1, sizes, 0)
            builder.PrependUOffsetTRelativeSlot(2, order, 0)
            layout = builder.EndObject()
        builder.StartObject(3)
        builder.PrependUOffsetTRelativeSlot(0, key, 0)
        builder.PrependUint32Slot(1, data.segment, 0)
        if layout:
            builder.PrependUOffsetTRelativeSlot(2, layout, 0)
        entries.append(builder.EndObject())
    named_at = _vector(builder, entries)
    segments_at = _vector(builder, [_segment(builder, *segment) for segment in segments])
    builder.StartObject(3)
    builder.PrependUOffsetTRelativeSlot(1, segments_at, 0)
    builder.PrependUOffsetTRelativeSlot(2, named_at, 0)
    builder.Finish(builder.EndObject(), file_identifier=b"FT01")
    graph = bytes(builder.Output())
    (root,) = struct.unpack_from("<I", graph)
    header = struct.pack("<4sIQQQQ8s", b"FH01", 40, 48, len(graph), region, region_nbytes, bytes(8))
    head = struct.pack("<I4s", root + 48, b"FT01") + header + graph[8:]
    assert len(head) <= region
    return head.ljust(region, b"\0")


@dataclass(frozen=True, slots=True)
class DataTensor:
    """A tensor of a data file; ``data`` is as ``dim_order`` says."""

    key: str
    dtype: str
    sizes: Sequence[int]
    dim_order: Sequence[int]
    data: bytes


def data_file(tensors: Sequence[DataTensor], *, also: Sequence[Named] = (), region: int = 8192) -> bytes:
    """A whole FT01 file: a segment for each tensor, 16-aligned, and names for them; ``also``: more names."""
    segments, region_bytes = [], b""
    for tensor in tensors:
        region_bytes = region_bytes.ljust(-(-len(region_bytes) // 16) * 16, b"\0")
        segments.append((len(region_bytes), len(tensor.data)))
        region_bytes += tensor.data
    named = [
        Named(tensor.key, number, SCALAR_TYPES[tensor.dtype], tensor.sizes, tensor.dim_order)
        for number, tensor in enumerate(tensors)
    ]
    head = ptd([*named, *also], segments, region=region, region_nbytes=len(region_bytes))
    return head + region_bytes


@dataclass(frozen=True, slots=True)
class Delegate:
    """A delegate, whose payload is a segment."""

    segment: int
    backend: str = "MPSBackend"


def program(
    delegates: Sequence[Delegate],
    segments: Sequence[tuple[int, int]],
    *,
    named: Sequence[Named] = (),
    constants: tuple[int, Sequence[int]] | None = None,
    base: int,
    segments_nbytes: int,
    method: str = "forward",
    methods: int = 1,
    mutable: int = 0,
) -> bytes:
    """The first ``base`` bytes of a .pte with a method, listed so many times.

    ``constants``: a segment, and offsets in it.  ``mutable``: how many segments of mutable data it lists, all empty.
    """
    builder = flatbuffers.Builder()
    made = []
    for delegate in delegates:
        backend = builder.CreateSharedString(delegate.backend)
        builder.StartObject(2)
        builder.PrependInt8Slot(0, 1, 0)
        builder.PrependUint32Slot(1, delegate.segment, 0)
        processed = builder.EndObject()
        builder.StartObject(3)
        builder.PrependUOffsetTRelativeSlot(0, backend, 0)
        builder.PrependUOffsetTRelativeSlot(1, processed, 0)
        made.append(builder.EndObject())
    delegates_at = _vector(builder, made)
    method_at = builder.CreateString(method)
    builder.StartObject(9)
    builder.PrependUOffsetTRelativeSlot(0, method_at, 0)
    builder.PrependUOffsetTRelativeSlot(7, delegates_at, 0)
    plans_at = _vector(builder, [builder.EndObject()] * methods)
    entries = []
    for data in named:
        key = builder.CreateString(data.key)
        builder.StartObject(2)
        builder.PrependUOffsetTRelativeSlot(0, key, 0)
        builder.PrependUint32Slot(1, data.segment, 0)
        entries.append(builder.EndObject())
    named_at = _vector(builder, entries)
    segments_at = _vector(builder, [_segment(builder, *segment) for segment in segments])
    constants_at = 0
    if constants is not None:
        offsets = _numbers(builder, constants[1], "Q")
        builder.StartObject(2)
        builder.PrependUint32Slot(0, constants[0], 0)
        builder.PrependUOffsetTRelativeSlot(1, offsets, 0)
        constants_at = builder.EndObject()
    mutable_at = 0
    if mutable:
        builder.StartObject(2)
        mutable_at = _vector(builder, [builder.EndObject()] * mutable)
    builder.StartObject(8)
    builder.PrependUOffsetTRelativeSlot(1, plans_at, 0)
    builder.PrependUOffsetTRelativeSlot(4, segments_at, 0)
    if constants_at:
        builder.PrependUOffsetTRelativeSlot(5, constants_at, 0)
    if mutable_at:
        builder.PrependUOffsetTRelativeSlot(6, mutable_at, 0)
    builder.PrependUOffsetTRelativeSlot(7, named_at, 0)
    builder.Finish(builder.EndObject(), file_identifier=b"ET12")
    flatbuffer = bytes(builder.Output())
    (root,) = struct.unpack_from("<I", flatbuffer)
    header = struct.pack("<4sIQQQ", b"eh00", 32, 32 + len(flatbuffer), base, segments_nbytes)
    head = struct.pack("<I4s", root + 32, b"ET12") + header + flatbuffer[8:]
    assert len(head) <= base
    return head.ljust(base, b"\0")
