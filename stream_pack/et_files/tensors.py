"""The constants that an ExecuTorch program holds itself: those that no delegate took, and mutable ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stream_pack.et_files.constants import UNKNOWN, Constants, Fault, byte_strings, expected_nbytes, join, lookup
from stream_pack.et_files.layouts import BY_SCALAR_TYPE, find_orders
from stream_pack.et_files.program import Offsets, Program

__all__ = ["Segments", "program_constants"]

Segments = tuple[NDArray[np.int64], NDArray[np.int64]]
"""File offsets and lengths; -1 and 0 for a segment that is not in the file."""


@dataclass(frozen=True, slots=True, eq=False)
class _Slots:
    """Places that tensors refer to by number.

    ``room``: bytes up to the next one, padding included.  ``tensors``: which tensors refer to these places.
    """

    prefix: str
    tensors: NDArray[np.bool_]
    file_offsets: NDArray[np.int64]
    room: NDArray[np.int64]


def program_constants(program: Program, segments: Segments, faults: list[Fault]) -> Constants:
    """The program's own constants, as the first tensor that refers to each describes it.

    What is out of range is appended to ``faults``.
    """
    slots = _slots(program, segments, faults)
    return join([part for place in slots for part in _described(program, place, faults)])


def _slots(program: Program, segments: Segments, faults: list[Fault]) -> Iterator[_Slots]:
    tensors = program.tensors
    held = ~tensors.external & (tensors.buffers > 0)
    if len(program.buffers[0]):
        begins, lengths = program.buffers
        yield _Slots("constant/", held & ~tensors.mutable, begins, lengths)
    elif program.constants is not None:
        yield _in_segment("constant/", held & ~tensors.mutable, program.constants, segments, faults)
    for number, offsets in enumerate(program.mutable):
        mutable = held & tensors.mutable & (tensors.mutable_segments == number)
        yield _in_segment(f"mutable/{number}/", mutable, offsets, segments, faults)


def _in_segment(
    prefix: str, tensors: NDArray[np.bool_], found: Offsets, segments: Segments, faults: list[Fault]
) -> _Slots:
    begins, lengths = segments
    if found.segment >= len(begins):
        text = f"{prefix[:-1]}: its data is in segment {found.segment}, and there are {len(begins)}"
        faults.append(Fault("segment", text, 0, 0, fatal=True))
        nothing = np.zeros(0, np.int64)
        return _Slots(prefix, np.zeros_like(tensors), nothing, nothing)
    begin, nbytes = int(begins[found.segment]), int(lengths[found.segment])
    inside = found.offsets <= np.uint64(nbytes)
    for number in np.flatnonzero(~inside).tolist():
        text = f"{prefix}{number} begins at byte {found.offsets[number]} of a segment of {nbytes} bytes"
        end = max(begin, 0) + nbytes
        faults.append(Fault("range", text, max(begin, 0), end, (f"{prefix}{number}",), fatal=True))
    offsets = np.where(inside, found.offsets, np.uint64(nbytes)).astype(np.int64)
    # Each ends at the next higher offset, or at the segment's end.
    bounds = np.unique(np.append(offsets, nbytes))
    following = bounds[np.minimum(np.searchsorted(bounds, offsets, side="right"), len(bounds) - 1)]
    return _Slots(prefix, tensors, max(begin, 0) + offsets, following - offsets)


def _described(program: Program, slots: _Slots, faults: list[Fault]) -> Iterator[Constants]:
    tensors = program.tensors
    rows = np.flatnonzero(slots.tensors)
    numbers = tensors.buffers[rows].astype(np.int64)
    missing = numbers >= len(slots.room)
    for number in np.unique(numbers[missing]).tolist():
        name = f"{slots.prefix}{number}"
        text = f"a tensor has the data {name}, and there is data for {len(slots.room)}"
        faults.append(Fault("range", text, 0, 0, (name,), fatal=True))
    numbers, firsts = np.unique(numbers[~missing], return_index=True)
    rows = rows[~missing][firsts]
    sizes = tensors.sizes.take(rows)
    orders, invalid = find_orders(sizes, tensors.dim_orders.take(rows))
    room = slots.room[numbers]
    places = zip(rows.tolist(), numbers.tolist())
    described = Constants(
        names=[tensors.names[row] or f"{slots.prefix}{number}" for row, number in places],
        dtypes=lookup(tensors.scalar_types[rows], BY_SCALAR_TYPE),
        dims=sizes.astype(np.int64),
        file_offsets=slots.file_offsets[numbers],
        nbytes=room,
        invalid=invalid,
        orders=orders,
    )
    expected = expected_nbytes(described)
    fits = (expected >= 0) & (expected <= room) & (described.dtypes != UNKNOWN)
    yield replace(described, nbytes=np.where(fits, expected, room))
    others = np.setdiff1d(np.flatnonzero(slots.room > 0), numbers)
    others = others[others > 0]  # number 0 stands for no data
    names = [f"{slots.prefix}{number}" for number in others.tolist()]
    yield byte_strings(names, slots.file_offsets[others], slots.room[others])
