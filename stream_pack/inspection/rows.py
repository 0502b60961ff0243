"""A row for each tensor, with the tensors that share its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from stream_pack.format.align import PAGE_NBYTES
from stream_pack.format.dtypes import GGUF_TYPE_NOTE
from stream_pack.format.index import NO_BUFFER, Index
from stream_pack.inspection.inspection import InspectedTensor

__all__ = ["quantization_of", "rows_of", "sharing"]

_TYPE_NOTES = (GGUF_TYPE_NOTE, "xnnpack.datatype")


def rows_of(
    index: Index, region_file_offset: int, faults: Mapping[int, str], dim_orders: Mapping[int, tuple[int, ...]]
) -> Iterator[InspectedTensor]:
    """A row for each tensor of an index."""
    buffers = np.where(index.tensor_buffers == NO_BUFFER, -1, index.tensor_buffers.astype(np.int64))
    inside, same = sharing(buffers, index.tensor_starts, index.tensor_nbytes)
    noted = set(index.note_tensors.tolist())
    rows = zip(index.offsets.tolist(), index.tensor_nbytes.tolist(), buffers.tolist())
    for tensor, (offset, nbytes, buffer) in enumerate(rows):
        notes = index.notes(tensor) if tensor in noted else {}
        yield InspectedTensor(
            number=tensor,
            name=index.name(tensor),
            dtype=index.dtype_name(tensor),
            shape=index.shape(tensor),
            nbytes=nbytes,
            file=None,
            file_offset=region_file_offset + offset,
            buffer=None if buffer < 0 else buffer,
            shared_with=same.get(tensor),
            inside=inside.get(tensor),
            page_aligned=nbytes > 0 and (region_file_offset + offset) % PAGE_NBYTES == 0,
            fault=faults.get(tensor),
            dim_order=dim_orders.get(tensor),
            quantization=quantization_of(notes),
            notes=notes,
        )


def quantization_of(notes: Mapping[str, str]) -> str | None:
    """The type that the notes of a tensor say its bytes are of."""
    return next((notes[key] for key in _TYPE_NOTES if key in notes), None)


def sharing(
    buffers: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[dict[int, int], dict[int, int]]:
    """For tensors that share bytes: the larger one that each is inside, and another one with the same bytes.

    ``buffers``: what the bytes are in, -1 for a tensor without any; ``starts``: where in it.
    """
    inside: dict[int, int] = {}
    same: dict[int, int] = {}
    held = np.flatnonzero(buffers >= 0)
    order = held[np.argsort(buffers[held], kind="stable")]
    grouped = buffers[order]
    for group in np.split(order, np.flatnonzero(grouped[1:] != grouped[:-1]) + 1):
        if len(group) < 2:
            continue
        longest = int(group[np.argmax(lengths[group])])
        begin = int(starts[longest])
        end = begin + int(lengths[longest])
        first: dict[tuple[int, int], int] = {}
        for tensor in group.tolist():
            extent = (int(starts[tensor]), int(lengths[tensor]))
            if extent in first:
                same[tensor] = first[extent]
                same.setdefault(first[extent], tensor)
            else:
                first[extent] = tensor
            # Overlapping constants of a raw payload need not contain each other.
            if begin <= extent[0] and extent[0] + extent[1] <= end and extent[1] < end - begin:
                inside[tensor] = longest
    return inside, same
