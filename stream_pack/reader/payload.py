"""Raw MP00 payloads, as ExecuTorch's MPS delegate receives them: constants that are known by number.

They carry no checksum and no names, and stock ExecuTorch writes some whose bytes are not what their dtype and dims
promise (a view that stores its whole storage, float64 labelled float32).  So every position is bounded, and every
constant that contradicts itself is marked.  Source: ExecuTorch 1.4.1, backends/apple/mps/serialization/schema.fbs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stream_pack import graph
from stream_pack.align import Alignment
from stream_pack.catalog import tensor_nbytes
from stream_pack.checksum import BLOCK_NBYTES
from stream_pack.dtypes import DTYPES
from stream_pack.errors import FormatError, LimitError, SourceError, TruncatedError
from stream_pack.graph import GraphValues
from stream_pack.header import HEADER_NBYTES
from stream_pack.index import NO_BUFFER, Index, name_columns
from stream_pack.limits import MAX_NBYTES
from stream_pack.reader.lending import Contents
from stream_pack.reader.mapping import FileRange, map_shared
from stream_pack.reader.opening import read_header

__all__ = ["read_payload"]

_BY_MPS = {dtype.mps: number for number, dtype in enumerate(DTYPES) if dtype.mps}


def read_payload(file: FileRange) -> Contents:
    """The constants of a raw payload, named by the decimal numbers that the graph gives them.

    Raises: NotAPackError, TruncatedError, FormatError.
    """
    header = read_header(file)
    region, nbytes = header.region_file_offset, header.region_nbytes
    if region <= HEADER_NBYTES or region > MAX_NBYTES or nbytes > MAX_NBYTES:
        raise FormatError(
            f"the header places the constants at byte {region} with {nbytes} bytes, which no payload has"
        )
    if region + nbytes > file.available:
        raise TruncatedError(
            f"the payload ends too early: expected {region + nbytes} bytes, found {file.available}",
            expected_nbytes=region + nbytes,
            actual_nbytes=file.available,
        )
    head = map_shared(file, region)
    flatbuffer = memoryview(head)[HEADER_NBYTES:]
    # Before they are decoded, which takes many times their memory.
    ids = graph.constant_ids(flatbuffer)
    if len(np.unique(ids)) != len(ids):
        raise FormatError("the graph names a constant twice")
    values = graph.decode(flatbuffer)
    room = np.uint64(nbytes)
    inside = (values.offsets <= room) & (values.nbytes <= room - np.minimum(values.offsets, room))
    if not inside.all():
        row = int(np.flatnonzero(~inside)[0])
        raise FormatError(
            f"constant {values.ids[row]} has {values.nbytes[row]} bytes from byte {values.offsets[row]} on, "
            f"outside the {nbytes} bytes of constants"
        )
    return Contents(None, _index(values), region, nbytes, region + nbytes, _faults(values))


def _index(values: GraphValues) -> Index:
    """The columns of an index, here without promise of alignment, or of lengths that fit dtype and dims."""
    offsets, nbytes = values.offsets.astype(np.int64), values.nbytes.astype(np.int64)
    buffer_offsets, buffer_nbytes, buffers = _merge(offsets, nbytes)
    held = buffers != NO_BUFFER
    starts = np.zeros(len(offsets), np.int64)
    starts[held] = offsets[held] - buffer_offsets[buffers[held]]
    datatypes, tensor_dtypes = np.unique(values.datatypes, return_inverse=True)
    dtypes = [
        DTYPES[_BY_MPS[number]] if number in _BY_MPS else None for number in datatypes.tolist()
    ]
    name_ends, names, name_order = name_columns([str(number) for number in values.ids.tolist()])
    return Index(
        block_nbytes=BLOCK_NBYTES,
        alignment=Alignment(),
        dtype_names=tuple(dtype.name if dtype else "invalid" for dtype in dtypes),
        dtype_bits=np.array([dtype.bits if dtype else 8 for dtype in dtypes], np.uint16),
        buffer_offsets=buffer_offsets,
        buffer_nbytes=buffer_nbytes,
        tensor_buffers=buffers,
        tensor_starts=starts,
        tensor_dtypes=tensor_dtypes.astype(np.uint8),
        tensor_nbytes=nbytes,
        dims_ends=values.dims_ends,
        dims=values.dims.astype(np.int64),
        name_ends=name_ends,
        names=names,
        name_order=name_order,
        note_tensors=np.empty(0, np.uint32),
        note_ends=np.empty(0, np.int64),
        note_text=np.empty(0, np.uint8),
    )


def _merge(
    offsets: NDArray[np.int64], nbytes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32]]:
    """Buffers that do not overlap, whatever the constants do: offsets, lengths, and the buffer of each constant."""
    buffers = np.full(len(offsets), NO_BUFFER, np.uint32)
    held = np.flatnonzero(nbytes > 0)
    order = held[np.argsort(offsets[held], kind="stable")]
    begins, ends = offsets[order], offsets[order] + nbytes[order]
    reach = np.maximum.accumulate(ends)
    apart = np.ones(len(order), bool)
    apart[1:] = begins[1:] >= reach[:-1]
    buffers[order] = (np.cumsum(apart) - 1).astype(np.uint32)
    first = np.flatnonzero(apart)
    merged_ends = reach[np.append(first[1:], len(order)) - 1] if len(order) else reach
    return begins[first], merged_ends - begins[first], buffers


def _faults(values: GraphValues) -> dict[int, str]:
    """What is wrong with each constant that contradicts itself."""
    faults = {}
    begin = 0
    columns = (values.datatypes, values.num_dims, values.dims_ends, values.nbytes)
    for row, (datatype, rank, end, nbytes) in enumerate(
        zip(*(column.tolist() for column in columns))
    ):
        shape = values.dims[begin:end].tolist()
        begin = end
        if datatype not in _BY_MPS:
            continue
        if rank != len(shape):
            faults[row] = f"claims {rank} dims and has {len(shape)}"
            continue
        try:
            expected = tensor_nbytes(str(values.ids[row]), _BY_MPS[datatype], shape)
        except (SourceError, LimitError) as error:
            faults[row] = f"is impossible: {error}"
            continue
        if expected != nbytes:
            dtype = DTYPES[_BY_MPS[datatype]].name
            faults[row] = f"has {nbytes} bytes; {dtype} of shape {shape} has {expected}"
    return faults
