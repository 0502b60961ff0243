"""The constants of an MP00 payload, of an XH00 payload, and of a .ptd, each from its own flatbuffer.

Source: ExecuTorch 1.4.1, backends/apple/mps/serialization/schema.fbs, backends/xnnpack/serialization/schema.fbs,
extension/flat_tensor/serialize/flat_tensor.fbs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from stream_pack.errors import FormatError
from stream_pack.et_files.constants import BYTES, Fault, constant_fault, duplicate_name, lookup
from stream_pack.et_files.layouts import BY_SCALAR_TYPE, find_orders
from stream_pack.et_files.mps_types import DTYPE_OF, MPS_TYPES, Runtime
from stream_pack.et_files.payload import Keyed, Payload, constants_inside, kept_rows, payload_fault
from stream_pack.format import graph_mps, graph_ptd, graph_xnnpack
from stream_pack.format.dtypes import BY_NAME
from stream_pack.format.ragged import Ragged
from stream_pack.text import quoted

__all__ = ["DECODERS"]

_MPS_TAKES = [mps.dtype for mps in MPS_TYPES.values() if mps.runtime is not Runtime.ABORTS]
"""float64 is among them, because the runtime loads such a constant: as float32."""


def mps(payload: Payload, flatbuffer: memoryview, prefix: str) -> Payload:
    ids = graph_mps.constant_ids(flatbuffer)
    # First, because a graph that names one value very often would take many times its bytes to decode.
    if len(np.unique(ids)) < len(ids):
        fault = payload_fault(payload, "names", "the graph names a constant twice")
        return replace(payload, faults=(fault,))
    values = graph_mps.decode(flatbuffer)
    ranks = values.dims.lengths
    faults: list[Fault] = []
    try:
        graph_mps.check_nodes(flatbuffer)
    except FormatError as error:
        # The constants can be had all the same.
        faults.append(replace(payload_fault(payload, "graph", f"{_place(prefix)}{error}"), fatal=False))
    constants = constants_inside(
        payload,
        faults,
        names=[prefix + str(number) for number in values.ids.tolist()],
        dtypes=lookup(values.datatypes, DTYPE_OF),
        dims=values.dims.astype(np.int64),
        offsets=values.offsets,
        nbytes=values.nbytes,
        invalid={
            row: f"has num_dims {values.num_dims[row]}, but {ranks[row]} dims"
            for row in np.flatnonzero(values.num_dims != ranks).tolist()
        },
    )
    aborts = ~np.isin(constants.dtypes, _MPS_TAKES)
    for row in np.flatnonzero(aborts | (constants.nbytes == 0)).tolist():
        what = f"is {constants.dtype_name(row)}" if aborts[row] else "has no bytes"
        faults.append(constant_fault(constants, row, f"{what}: the MPS delegate aborts on it"))
    return replace(payload, constants=constants, faults=tuple(faults))


def _place(prefix: str) -> str:
    return f"the payload of {quoted(prefix[:-1])}: " if prefix else ""


def xnnpack(payload: Payload, flatbuffer: memoryview, prefix: str) -> Payload:
    found = graph_xnnpack.decode(flatbuffer)
    values = found.values
    count = len(found.offsets)
    # The first value that refers to a constant describes it; one without any is bytes.
    described, firsts = np.unique(values.constants, return_index=True)
    dims_of = values.dims.take(firsts)
    ranks = np.ones(count, np.int64)
    ranks[described] = dims_of.lengths
    dims = Ragged.of(np.repeat(found.nbytes.astype(np.int64), ranks), ranks)
    is_described = np.zeros(count, bool)
    is_described[described] = True
    dims.values[is_described[dims.rows]] = dims_of.values
    dtypes = np.full(count, BYTES, np.int16)
    dtypes[described] = lookup(values.datatypes[firsts], _BY_XNN)
    notes = {
        number: {"xnnpack.datatype": _QUANTIZED[datatype]}
        for number, datatype in zip(described.tolist(), values.datatypes[firsts].tolist())
        if datatype in _QUANTIZED
    }
    faults: list[Fault] = []
    keyed = {}
    inline = found.offsets != np.uint64(graph_xnnpack.BY_KEY)
    for number in np.flatnonzero(~inline).tolist():
        key = found.key(number)
        if key is None:
            text = f"constant {number} is outside the payload, and has no key to find it by"
            faults.append(payload_fault(payload, "graph", text))
        else:
            shape = tuple(dims.row(number).tolist())
            keyed[key] = Keyed(int(dtypes[number]), shape, notes.get(number, {}))
    inline[:1] = False  # entry 0 is reserved
    constants = constants_inside(
        payload,
        faults,
        names=[prefix + str(number) for number in np.flatnonzero(inline).tolist()],
        dtypes=dtypes[inline],
        dims=dims.take(inline),
        offsets=found.offsets[inline],
        nbytes=found.nbytes[inline],
        notes=kept_rows(notes, inline),
    )
    return replace(payload, constants=constants, faults=tuple(faults), keyed=keyed)


_BY_XNN = {number: BY_NAME[name] for number, name in graph_xnnpack.DTYPE_NAMES.items()}
_QUANTIZED = {3: "qint8", 4: "quint8", 5: "qint32", 6: "qcint8", 7: "qcint32", 8: "qcint4", 10: "qbint4"}
"""XNNDatatypes whose elements mean nothing without the scales, which are other constants."""


def ptd(payload: Payload, flatbuffer: memoryview, prefix: str) -> Payload:
    found = graph_ptd.decode(flatbuffer)
    names = [found.key(entry) for entry in range(len(found))]
    orders, invalid = find_orders(found.dims, found.dim_order)
    nbytes = found.segment_nbytes[found.segments]
    # An entry without a layout is bytes.
    ranks = np.where(found.has_layout, found.dims.lengths, 1)
    dims = np.repeat(nbytes.astype(np.int64), ranks)
    dims[np.repeat(found.has_layout, ranks)] = found.dims.values
    faults: list[Fault] = []
    constants = constants_inside(
        payload,
        faults,
        names=names,
        dtypes=np.where(found.has_layout, lookup(found.scalar_types, BY_SCALAR_TYPE), BYTES),
        dims=Ragged.of(dims, ranks),
        offsets=found.segment_offsets[found.segments],
        nbytes=nbytes,
        invalid=invalid,
        orders=orders,
    )
    begin, end = payload.file_offset, payload.region_file_offset
    repeated = [name for name, uses in Counter(names).items() if uses > 1]
    faults += [duplicate_name(name, begin, end) for name in repeated]
    return replace(payload, constants=constants, faults=tuple(faults))


DECODERS: dict[str, Callable[[Payload, memoryview, str], Payload]] = {"mps": mps, "xnnpack": xnnpack, "ptd": ptd}
"""What adds its constants to a payload, by the kind of its header; takes the flatbuffer and a prefix for names."""
