"""A row for each tensor of an index, with the tensors that share its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from stream_pack.format.align import PAGE_NBYTES
from stream_pack.format.index import NO_BUFFER, Index
from stream_pack.inspection.inspection import InspectedTensor

__all__ = ["rows_of"]


def rows_of(
    index: Index, region_file_offset: int, faults: Mapping[int, str], dim_orders: Mapping[int, tuple[int, ...]]
) -> Iterator[InspectedTensor]:
    """A row for each tensor of an index."""
    inside, same = _sharing(index)
    noted = set(index.note_tensors.tolist())
    columns = (index.offsets, index.tensor_nbytes, index.tensor_buffers)
    rows = zip(*(column.tolist() for column in columns))
    for tensor, (offset, nbytes, buffer) in enumerate(rows):
        yield InspectedTensor(
            name=index.name(tensor),
            dtype=index.dtype_name(tensor),
            shape=index.shape(tensor),
            nbytes=nbytes,
            file_offset=region_file_offset + offset,
            buffer=None if buffer == NO_BUFFER else buffer,
            shared_with=same.get(tensor),
            inside=inside.get(tensor),
            page_aligned=nbytes > 0 and (region_file_offset + offset) % PAGE_NBYTES == 0,
            fault=faults.get(tensor),
            dim_order=dim_orders.get(tensor),
            notes=index.notes(tensor) if tensor in noted else {},
        )


def _sharing(index: Index) -> tuple[dict[int, int], dict[int, int]]:
    """For tensors that share bytes: the larger one that each is inside, and another one with the same bytes."""
    inside: dict[int, int] = {}
    same: dict[int, int] = {}
    held = np.flatnonzero(index.tensor_buffers != NO_BUFFER)
    order = held[np.argsort(index.tensor_buffers[held], kind="stable")]
    buffers = index.tensor_buffers[order]
    for group in np.split(order, np.flatnonzero(buffers[1:] != buffers[:-1]) + 1):
        if len(group) < 2:
            continue
        longest = int(group[np.argmax(index.tensor_nbytes[group])])
        begin = int(index.tensor_starts[longest])
        end = begin + int(index.tensor_nbytes[longest])
        first: dict[tuple[int, int], int] = {}
        for tensor in group.tolist():
            extent = (int(index.tensor_starts[tensor]), int(index.tensor_nbytes[tensor]))
            if extent in first:
                same[tensor] = first[extent]
                same.setdefault(first[extent], tensor)
            else:
                first[extent] = tensor
            # Overlapping constants of a raw payload need not contain each other.
            if begin <= extent[0] and extent[0] + extent[1] <= end and extent[1] < end - begin:
                inside[tensor] = longest
    return inside, same
