"""The constants of an MP00 payload, of an XH00 payload, and of a .ptd, each from its own flatbuffer.

Source: ExecuTorch 1.4.1, backends/apple/mps/serialization/schema.fbs, backends/xnnpack/serialization/schema.fbs,
extension/flat_tensor/serialize/flat_tensor.fbs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from stream_pack.et_files.constants import BYTES, Fault, find_faults, lookup
from stream_pack.et_files.layouts import BY_SCALAR_TYPE, row_major
from stream_pack.et_files.mps_types import DTYPE_OF, MPS_TYPES, Runtime
from stream_pack.et_files.payload import Keyed, Payload, by_row, inside, of_all, twice
from stream_pack.format import graph_mps, graph_ptd, graph_xnnpack
from stream_pack.format.dtypes import BY_NAME
from stream_pack.format.ragged import row_lengths

__all__ = ["DECODERS"]

_MPS_TAKES = [mps.dtype for mps in MPS_TYPES.values() if mps.runtime is not Runtime.ABORTS]
"""float64 is among them, because the runtime loads such a constant: as float32."""


def mps(payload: Payload, flatbuffer: memoryview, prefix: str) -> Payload:
    ids = graph_mps.constant_ids(flatbuffer)
    # First, because a graph that says one thing very often would take many times its bytes to decode.
    if len(np.unique(ids)) < len(ids):
        fault = of_all(payload, "names", "the graph names a constant twice")
        return replace(payload, faults=(fault,))
    values = graph_mps.decode(flatbuffer)
    names = [prefix + str(number) for number in values.ids.tolist()]
    constants, faults = inside(
        payload,
        names,
        dtypes=lookup(values.datatypes, DTYPE_OF),
        dims=values.dims.astype(np.int64),
        dims_ends=values.dims_ends,
        offsets=values.offsets,
        nbytes=values.nbytes,
    )
    ranks = row_lengths(values.dims_ends)
    miscounted = {
        names[row]: f"claims {values.num_dims[row]} dims and has {ranks[row]}"
        for row in np.flatnonzero(values.num_dims != ranks).tolist()
    }
    if miscounted:
        unsound = {
            row: miscounted[name] for row, name in enumerate(constants.names) if name in miscounted
        }
        constants = replace(constants, unsound=unsound)
    constants, found = find_faults(constants, origin=payload.file_offset)
    faults += found
    aborts = ~np.isin(constants.dtypes, _MPS_TAKES)
    for row in np.flatnonzero(aborts | (constants.nbytes == 0)).tolist():
        what = f"is {constants.dtype_name(row)}" if aborts[row] else "has no bytes"
        name, begin = constants.names[row], int(constants.file_offsets[row])
        text = f"constant {name!r} {what}: the MPS delegate aborts on it"
        faults.append(Fault("constant", text, begin, begin + int(constants.nbytes[row]), (name,)))
    return replace(payload, constants=constants, faults=tuple(faults))


def xnnpack(payload: Payload, flatbuffer: memoryview, prefix: str) -> Payload:
    found = graph_xnnpack.decode(flatbuffer)
    values = found.values
    count = len(found.offsets)
    # The first value that refers to a constant says what it is; one that nobody describes is bytes.
    numbers, firsts = np.unique(values.constants, return_index=True)
    ranks = np.ones(count, np.int64)
    ranks[numbers] = row_lengths(values.dims_ends)[firsts]
    ends = np.cumsum(ranks)
    dims = np.repeat(found.nbytes.astype(np.int64), ranks)
    dtypes = np.full(count, BYTES, np.int16)
    dtypes[numbers] = lookup(values.datatypes[firsts], _BY_XNN)
    notes = {}
    value_ranks = row_lengths(values.dims_ends)
    for number, first in zip(numbers.tolist(), firsts.tolist()):
        begin = int(values.dims_ends[first] - value_ranks[first])
        end = int(ends[number])
        dims[end - int(ranks[number]) : end] = values.dims[begin : int(values.dims_ends[first])]
        quantized = _QUANTIZED.get(int(values.datatypes[first]))
        if quantized is not None:
            notes[number] = {"xnnpack.datatype": quantized}
    faults = []
    keyed = {}
    inline = np.ones(count, bool)
    inline[:1] = False  # entry 0 is reserved
    for number in np.flatnonzero(found.offsets == np.uint64(graph_xnnpack.BY_KEY)).tolist():
        inline[number] = False
        key = found.key(number)
        if key is None:
            text = f"constant {number} lies elsewhere, and has no key that would say where"
            faults.append(of_all(payload, "graph", text))
        else:
            shape = dims[int(ends[number] - ranks[number]) : int(ends[number])]
            keyed[key] = Keyed(int(dtypes[number]), tuple(shape.tolist()), notes.get(number, {}))
    rows = np.flatnonzero(inline)
    constants, outside = inside(
        payload,
        [prefix + str(number) for number in rows.tolist()],
        dtypes=dtypes[rows],
        dims=dims[np.repeat(inline, ranks)],
        dims_ends=np.cumsum(ranks[rows]),
        offsets=found.offsets[rows],
        nbytes=found.nbytes[rows],
    )
    by_name = {prefix + str(number): text for number, text in notes.items()}
    constants = replace(constants, notes=by_row(constants, by_name))
    constants, wrong = find_faults(constants, origin=payload.file_offset)
    return replace(payload, constants=constants, faults=(*faults, *outside, *wrong), keyed=keyed)


_BY_XNN = {number: BY_NAME[name] for number, name in graph_xnnpack.DTYPE_NAMES.items()}
_QUANTIZED = {
    3: "qint8",
    4: "quint8",
    5: "qint32",
    6: "qcint8",
    7: "qcint32",
    8: "qcint4",
    10: "qbint4",
}
"""XNNDatatypes whose numbers mean nothing without the scales that stand beside them."""


def ptd(payload: Payload, flatbuffer: memoryview, prefix: str) -> Payload:
    found = graph_ptd.decode(flatbuffer)
    names = [found.key(entry) for entry in range(len(found))]
    layouts = row_major(found.dims, found.dims_ends, found.dim_order, found.dims_ends)
    nbytes = found.segment_nbytes[found.segments]
    # A name without a layout is bytes.
    ranks = np.where(found.has_layout, row_lengths(found.dims_ends), 1)
    dims = np.repeat(nbytes.astype(np.int64), ranks)
    dims[np.repeat(found.has_layout, ranks)] = layouts.dims
    constants, faults = inside(
        payload,
        names,
        dtypes=np.where(found.has_layout, lookup(found.scalar_types, BY_SCALAR_TYPE), BYTES),
        dims=dims,
        dims_ends=np.cumsum(ranks),
        offsets=found.segment_offsets[found.segments],
        nbytes=nbytes,
    )
    constants = replace(
        constants,
        notes=by_row(constants, {names[row]: text for row, text in layouts.notes.items()}),
        unsound=by_row(constants, {names[row]: text for row, text in layouts.unsound.items()}),
    )
    constants, wrong = find_faults(constants, origin=payload.file_offset)
    faults += wrong
    if len(set(names)) < len(names):
        faults += twice(payload, names)
    return replace(payload, constants=constants, faults=tuple(faults))


DECODERS: dict[str, Callable[[Payload, memoryview, str], Payload]] = {
    "mps": mps,
    "xnnpack": xnnpack,
    "ptd": ptd,
}
"""What adds its constants to a payload, by the kind of its header; takes the flatbuffer and a prefix for names."""
