"""Constants of ExecuTorch's files as columns, whatever kind of file has them, and what is wrong with them.

ExecuTorch checks none of this, and its exporters get some of it wrong: a view that stores its whole storage, float64
labelled float32, scalars that misalign all that follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import LimitError, SourceError
from stream_pack.format.catalog import tensor_nbytes
from stream_pack.format.dtypes import BITS, BY_NAME, DTYPES
from stream_pack.format.limits import MAX_NBYTES
from stream_pack.format.ragged import Ragged
from stream_pack.text import quoted

__all__ = [
    "BYTES",
    "UNKNOWN",
    "Constants",
    "Fault",
    "byte_strings",
    "constant_fault",
    "duplicate_name",
    "expected_nbytes",
    "find_faults",
    "fits",
    "join",
    "lookup",
]

UNKNOWN = -1
"""The dtype of a constant that is not in :data:`stream_pack.format.dtypes.DTYPES`."""
BYTES = BY_NAME["uint8"]
_N = TypeVar("_N", bound=np.generic)
_BITS = np.array([*BITS, 8])  # the last one is that of UNKNOWN


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is wrong with a file.

    ``part``: ``"constant"`` for a single constant; ``"range"``, ``"segment"``, ``"graph"``, ``"names"`` or ``"length"``
    for anything larger.  ``names``: the constants affected.  ``fatal``: bytes are missing, or would be misread.

    Units: bytes; the half-open range ``[file_begin, file_end)``.
    """

    part: str
    text: str
    file_begin: int
    file_end: int
    names: tuple[str, ...] = ()
    fatal: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Constants:
    """Columns, one entry a constant.

    ``dtypes`` are numbers in :data:`stream_pack.format.dtypes.DTYPES`, or :data:`UNKNOWN`.  By number of
    constant: ``invalid``, why its bytes are not the tensor that dtype and dims describe; ``notes``, text that belongs
    to it; ``orders``, where its bytes are not row-major, its dims as they follow in memory, outermost first.

    Units: bytes; every range is inside the file.
    """

    names: Sequence[str]
    dtypes: NDArray[np.int16]
    dims: Ragged[np.int64]
    file_offsets: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    invalid: Mapping[int, str] = field(default_factory=dict)
    notes: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    orders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.names)

    def shape(self, row: int) -> tuple[int, ...]:
        """The dims of one constant."""
        return tuple(self.dims.row(row).tolist())

    def dtype_name(self, row: int) -> str:
        """The name of its dtype; ``"invalid"`` for an unknown one."""
        number = int(self.dtypes[row])
        return "invalid" if number == UNKNOWN else DTYPES[number].name


def byte_strings(names: Sequence[str], file_offsets: NDArray[np.int64], nbytes: NDArray[np.int64]) -> Constants:
    """Constants of which only the bytes are known: uint8 of one dim."""
    return Constants(
        names=names,
        dtypes=np.full(len(names), BYTES, np.int16),
        dims=Ragged(nbytes, np.arange(1, len(names) + 1)),
        file_offsets=file_offsets,
        nbytes=nbytes,
    )


def join(parts: Sequence[Constants]) -> Constants:
    """All constants of ``parts``, in order, with unique names: one that an earlier one has gets ``#2``, ``#3``, ..."""
    names: list[str] = []
    taken: dict[str, int] = {}
    invalid: dict[int, str] = {}
    notes: dict[int, Mapping[str, str]] = {}
    orders: dict[int, tuple[int, ...]] = {}
    for part in parts:
        base = len(names)
        invalid.update((base + row, text) for row, text in part.invalid.items())
        notes.update((base + row, text) for row, text in part.notes.items())
        orders.update((base + row, order) for row, order in part.orders.items())
        for name in part.names:
            unique = name
            while unique in taken:
                taken[name] += 1
                unique = f"{name}#{taken[name]}"
            taken[unique] = 1
            names.append(unique)
    dims = [part.dims.values for part in parts]
    ranks = [part.dims.lengths for part in parts]
    return Constants(
        names=names,
        dtypes=_joined([part.dtypes for part in parts], np.int16),
        dims=Ragged.of(_joined(dims, np.int64), _joined(ranks, np.int64)),
        file_offsets=_joined([part.file_offsets for part in parts], np.int64),
        nbytes=_joined([part.nbytes for part in parts], np.int64),
        invalid=invalid,
        notes=notes,
        orders=orders,
    )


def _joined(columns: Sequence[NDArray[_N]], dtype: type[_N]) -> NDArray[_N]:
    return np.concatenate([np.empty(0, dtype), *columns])


def find_faults(constants: Constants, faults: list[Fault], *, origin: int) -> Constants:
    """The constants with the invalid ones marked; what is wrong with them is appended to ``faults``.

    ``origin``: the file offset that alignment counts from, which a runtime maps at a page.
    Vectorised; names of dtypes and shapes are only looked up for what is wrong.
    """
    begins, nbytes = constants.file_offsets, constants.nbytes
    known = constants.dtypes != UNKNOWN
    invalid = dict(constants.invalid)
    for row in np.flatnonzero(known & (expected_nbytes(constants) != nbytes)).tolist():
        invalid.setdefault(row, _contradiction(constants, row))
    faults += [constant_fault(constants, row, text, fatal=True) for row, text in invalid.items()]
    itemsizes = np.maximum(_BITS[constants.dtypes] // 8, 1)
    misaligned = (nbytes > 0) & ((begins - origin) % itemsizes != 0)
    for row in np.flatnonzero(misaligned).tolist():
        text = (
            f"begins at byte {int(begins[row]) - origin}, which is not a multiple of {itemsizes[row]}, the length of "
            f"one {constants.dtype_name(row)}"
        )
        faults.append(constant_fault(constants, row, text))
    faults += _overlaps(constants)
    return replace(constants, invalid=invalid)


def constant_fault(constants: Constants, row: int, text: str, *, fatal: bool = False) -> Fault:
    """A fault of one constant; ``text`` follows its name."""
    name, begin = constants.names[row], int(constants.file_offsets[row])
    end = begin + int(constants.nbytes[row])
    return Fault("constant", f"constant {quoted(name)} {text}", begin, end, (name,), fatal)


def duplicate_name(name: str, file_begin: int, file_end: int) -> Fault:
    """The fault of named data whose name is not its own."""
    text = f"several named data are called {quoted(name)}"
    return Fault("names", text, file_begin, file_end, (name,), fatal=True)


def fits(offsets: NDArray[np.uint64], nbytes: NDArray[np.uint64], room: np.uint64) -> NDArray[np.bool_]:
    """Which ranges are inside the first ``room`` bytes.  No sum of them wraps."""
    return (offsets <= room) & (nbytes <= room - np.minimum(offsets, room))


def lookup(numbers: NDArray[np.integer], table: Mapping[int, int]) -> NDArray[np.int16]:
    """The dtype of each number; ``table`` has those of the numbers that are known."""
    distinct, places = np.unique(numbers, return_inverse=True)
    found = [table.get(number, UNKNOWN) for number in distinct.tolist()]
    return np.array(found, np.int16)[places]


def expected_nbytes(constants: Constants) -> NDArray[np.int64]:
    """The length in bytes that dtype and dims give; -1 where no tensor can have them."""
    ranks, begins = constants.dims.lengths, constants.dims.begins
    bits = _BITS[constants.dtypes]
    expected = np.full(len(constants), -1, np.int64)
    for rank in np.unique(ranks).tolist():
        rows = np.flatnonzero(ranks == rank)
        shapes = constants.dims.values[begins[rows, None] + np.arange(rank)]
        filled = np.where(shapes == 0, 1, shapes)
        # float64 proves that the exact product fits; 2**60 elements of 16 bytes are beyond any file.
        product = filled.astype(np.float64).prod(axis=1)
        possible = (shapes >= 0).all(axis=1) & (product < MAX_NBYTES / 4)
        elements = np.where(possible[:, None], filled, 1).prod(axis=1)
        last = shapes[:, -1] if rank else np.ones(len(rows), np.int64)
        possible &= last % 8 * bits[rows] % 8 == 0
        length = elements // 8 * bits[rows] + elements % 8 * bits[rows] // 8
        length[(shapes == 0).any(axis=1)] = 0
        expected[rows] = np.where(possible, length, -1)
    return expected


def _contradiction(constants: Constants, row: int) -> str:
    shape, nbytes = constants.shape(row), int(constants.nbytes[row])
    try:
        expected = tensor_nbytes(constants.names[row], int(constants.dtypes[row]), shape)
    except (SourceError, LimitError) as error:
        return f"is not possible: {error}"
    return f"has {nbytes} bytes; {constants.dtype_name(row)} of shape {list(shape)} has {expected}"


def _overlaps(constants: Constants) -> list[Fault]:
    """A fault for each two constants that share bytes, unless one is inside the other."""
    held = np.flatnonzero(constants.nbytes > 0)
    begins = constants.file_offsets[held]
    ends = begins + constants.nbytes[held]
    order = np.lexsort((-ends, begins))
    held, begins, ends = held[order], begins[order], ends[order]
    reach = np.maximum.accumulate(ends)
    before = np.concatenate((reach[:1], reach[:-1]))
    faults = []
    for place in np.flatnonzero((begins < before) & (ends > before)).tolist():
        other = int(np.searchsorted(reach, before[place]))  # the first that ends there
        names = (constants.names[int(held[other])], constants.names[int(held[place])])
        begin, end = int(begins[place]), int(before[place])
        text = f"constants {quoted(names[0])} and {quoted(names[1])} overlap in {end - begin} bytes"
        faults.append(Fault("constant", text, begin, end, names))
    return faults
