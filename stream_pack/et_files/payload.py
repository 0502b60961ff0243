"""One payload, or data file: where its constants are, and what it says of those that are elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from stream_pack.et_files.constants import Constants, Fault, find_faults, fits, join
from stream_pack.format.ragged import Ragged
from stream_pack.text import quoted

__all__ = ["NOTHING", "Keyed", "Payload", "ReadFile", "constants_inside", "kept_rows", "payload_fault"]

_T = TypeVar("_T")


class ReadFile(Protocol):
    """The bytes of a file: of a regular one at random, of a pipe only forward."""

    @property
    def nbytes(self) -> int | None:
        """The file's length; None for a pipe."""

    def read(self, begin: int, nbytes: int) -> memoryview:
        """Bytes ``[begin, begin + nbytes)``.  Raises: an error of this package when they are not there."""

    def keep(self, begin: int, end: int) -> None:
        """Mark these bytes as constants, which a pipe must not skip."""


@dataclass(frozen=True, slots=True)
class Keyed:
    """What a payload says of a constant that is elsewhere, under a key."""

    dtype: int
    shape: tuple[int, ...]
    notes: Mapping[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """One payload, or data file.

    ``kind``: ``"mps"``, ``"xnnpack"``, ``"ptd"``; ``"pack"`` for one that is a pack, which knows its tensors itself;
    ``"other"`` for another backend's.  ``backend`` and ``users`` are from the program around it: the backend's id, and
    the delegates that receive it.

    Units: bytes; file offsets count from the first byte of the file around it.
    """

    kind: str
    file_offset: int
    nbytes: int
    region_file_offset: int
    region_nbytes: int
    constants: Constants
    faults: tuple[Fault, ...] = ()
    keyed: Mapping[str, Keyed] = field(default_factory=dict)
    backend: str = ""
    users: tuple[str, ...] = ()


NOTHING = join([])


def constants_inside(
    payload: Payload,
    faults: list[Fault],
    *,
    names: list[str],
    dtypes: NDArray[np.int16],
    dims: Ragged[np.int64],
    offsets: NDArray[np.uint64],
    nbytes: NDArray[np.uint64],
    invalid: Mapping[int, str] | None = None,
    notes: Mapping[int, Mapping[str, str]] | None = None,
    orders: Mapping[int, tuple[int, ...]] | None = None,
) -> Constants:
    """The constants that are inside the payload's region, the invalid ones marked.

    What is wrong with them, and each that is outside, is appended to ``faults``.  ``offsets`` count from the region's
    first byte.
    """
    room = np.uint64(payload.region_nbytes)
    inside = fits(offsets, nbytes, room)
    for row in np.flatnonzero(~inside).tolist():
        text = (
            f"constant {quoted(names[row])} has {nbytes[row]} bytes from byte {offsets[row]} on, outside the {room} "
            "bytes of constants"
        )
        faults.append(payload_fault(payload, "range", text, (names[row],)))
    constants = Constants(
        names=names if inside.all() else [names[row] for row in np.flatnonzero(inside).tolist()],
        dtypes=dtypes[inside],
        dims=dims.take(inside),
        file_offsets=payload.region_file_offset + offsets[inside].astype(np.int64),
        nbytes=nbytes[inside].astype(np.int64),
        invalid=kept_rows(invalid or {}, inside),
        notes=kept_rows(notes or {}, inside),
        orders=kept_rows(orders or {}, inside),
    )
    return find_faults(constants, faults, origin=payload.file_offset)


def kept_rows(by_row: Mapping[int, _T], kept: NDArray[np.bool_]) -> dict[int, _T]:
    """The entries of the rows that are kept, by their new numbers."""
    if not by_row:
        return {}
    numbers = np.cumsum(kept) - 1
    return {int(numbers[row]): value for row, value in by_row.items() if kept[row]}


def payload_fault(payload: Payload, part: str, text: str, names: tuple[str, ...] = ()) -> Fault:
    """A fatal fault whose place in the payload is not known."""
    begin, end = payload.file_offset, payload.file_offset + payload.nbytes
    return Fault(part, text, begin, end, names, fatal=True)
