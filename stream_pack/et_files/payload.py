"""What a payload, or a data file, is: where its constants lie, and what it says of those that lie elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from stream_pack.et_files.constants import Constants, Fault
from stream_pack.format.ragged import row_lengths

__all__ = ["NOTHING", "Keyed", "Payload", "ReadFile", "by_row", "inside", "of_all", "twice"]

_T = TypeVar("_T")


class ReadFile(Protocol):
    """The bytes of a file, at random or, of a pipe, only forward."""

    @property
    def nbytes(self) -> int | None:
        """The file's length; of a pipe nobody knows it."""

    def read(self, begin: int, nbytes: int) -> memoryview:
        """Bytes ``[begin, begin + nbytes)``.  Raises: an error of this package when they are not there."""

    def keep(self, begin: int, end: int) -> None:
        """Say that these bytes are constants: a pipe must not pass over them."""


@dataclass(frozen=True, slots=True)
class Keyed:
    """What a payload says of a constant that lies elsewhere, under a key."""

    dtype: int
    shape: tuple[int, ...]
    notes: Mapping[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """One payload, or data file.

    ``kind``: ``"mps"``, ``"xnnpack"``, ``"ptd"``; ``"pack"`` for one that is a pack, which knows its tensors itself;
    ``"other"`` for what another backend made.  ``backend`` and ``users`` are of the program around it: the backend's
    id, and the delegates that receive it.

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


NOTHING = Constants(
    names=(),
    dtypes=np.empty(0, np.int16),
    dims=np.empty(0, np.int64),
    dims_ends=np.empty(0, np.int64),
    file_offsets=np.empty(0, np.int64),
    nbytes=np.empty(0, np.int64),
)


def by_row(constants: Constants, by_name: Mapping[str, _T]) -> dict[int, _T]:
    """What belongs to constants of these names, by their rows."""
    if not by_name:
        return {}
    return {row: by_name[name] for row, name in enumerate(constants.names) if name in by_name}


def inside(
    payload: Payload,
    names: list[str],
    *,
    dtypes: NDArray[np.int16],
    dims: NDArray[np.int64],
    dims_ends: NDArray[np.int64],
    offsets: NDArray[np.uint64],
    nbytes: NDArray[np.uint64],
) -> tuple[Constants, list[Fault]]:
    """The constants that lie inside the payload's region, and a fault for each that does not."""
    room = np.uint64(payload.region_nbytes)
    held = (offsets <= room) & (nbytes <= room - np.minimum(offsets, room))
    faults = []
    for row in np.flatnonzero(~held).tolist():
        text = (
            f"constant {names[row]!r} has {nbytes[row]} bytes from byte {offsets[row]} on, outside the "
            f"{room} bytes of constants"
        )
        faults.append(of_all(payload, "range", text, (names[row],)))
    ranks = row_lengths(dims_ends)
    constants = Constants(
        names=names if held.all() else [n for n, kept in zip(names, held.tolist()) if kept],
        dtypes=dtypes[held],
        dims=dims[np.repeat(held, ranks)],
        dims_ends=np.cumsum(ranks[held]),
        file_offsets=payload.region_file_offset + offsets[held].astype(np.int64),
        nbytes=nbytes[held].astype(np.int64),
    )
    return constants, faults


def of_all(payload: Payload, part: str, text: str, names: tuple[str, ...] = ()) -> Fault:
    """A fatal fault that cannot be told a place."""
    begin, end = payload.file_offset, payload.file_offset + payload.nbytes
    return Fault(part, text, begin, end, names, fatal=True)


def twice(payload: Payload, names: list[str]) -> list[Fault]:
    """A fault for each name that comes more than once."""
    again = [name for name, count in Counter(names).items() if count > 1]
    begin, end = payload.file_offset, payload.region_file_offset
    return [
        Fault("names", f"named data {name!r} is named twice", begin, end, (name,), fatal=True)
        for name in again
    ]
