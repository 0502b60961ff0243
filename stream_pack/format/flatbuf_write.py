"""Writing flatbuffers by columns: one field of many tables at a time.

A flatbuffer builder takes 40 times as long, and as much memory.  The caller first reserves a place for everything, so
that each reference leads forward, then fills in the columns.  Places are in words of 4 bytes from the flatbuffer's
first byte.  :class:`stream_pack.format.flatbuf.Tables` reads the same way.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import LimitError
from stream_pack.format.limits import MAX_FLATBUFFER_NBYTES
from stream_pack.format.ragged import Ragged

__all__ = ["ColumnWriter", "TableColumns", "VTable", "check_flatbuffer_nbytes", "text_words"]

Places: TypeAlias = "int | NDArray[np.int64]"
Column: TypeAlias = "int | NDArray[np.integer]"


class VTable(NamedTuple):
    """A vtable at ``place``: ``slots`` are the positions of fields in a table, in bytes, 0 for one that is absent."""

    place: int
    table_nbytes: int
    slots: tuple[int, ...]


class ColumnWriter:
    """A flatbuffer: reserve everything, :meth:`allocate`, fill in, :meth:`finish`.  What is not filled in is zero."""

    def __init__(self, identifier: bytes) -> None:
        self._identifier = identifier
        self._vtables: list[VTable] = []
        self._words = 2  # position of the root table, identifier
        self._out = np.empty(0, "<u4")

    def vtable(self, table_nbytes: int, *slots: int) -> VTable:
        """Reserve a vtable, which tables of one kind share."""
        place = self.reserve((4 + 2 * len(slots) + 3) // 4)
        self._vtables.append(VTable(place, table_nbytes, slots))
        return self._vtables[-1]

    def reserve(self, words: int) -> int:
        """The place of the next ``words``."""
        self._words += words
        return self._words - words

    def reserve_each(self, words: NDArray[np.int64]) -> NDArray[np.int64]:
        """The places of things of these lengths, one after the other."""
        ends = self._words + np.cumsum(words)
        if len(ends):
            self._words = int(ends[-1])
        return ends - words

    def align(self, words: int, *, after: int = 0) -> None:
        """Leave room, so that ``after`` words from the next place on is a multiple of ``words``."""
        self._words += -(self._words + after) % words

    def allocate(self, what: str) -> None:
        """Everything is reserved.  Raises: LimitError, naming ``what``, when it would reach 2 GiB."""
        check_flatbuffer_nbytes(4 * self._words, what)
        self._out = np.zeros(self._words, "<u4")
        self._out[1] = int.from_bytes(self._identifier, "little")
        for vtable in self._vtables:
            fields = (4 + 2 * len(vtable.slots), vtable.table_nbytes, *vtable.slots)
            self._out[vtable.place :].view("<u2")[: len(fields)] = fields

    def root(self, vtable: VTable, place: int) -> TableColumns:
        """The root table."""
        self._out[0] = 4 * place
        return self.tables(vtable, place)

    def tables(self, vtable: VTable, places: Places) -> TableColumns:
        """A table at each place."""
        return TableColumns(self._out, vtable, places)

    def references(self, place: int, targets: NDArray[np.int64]) -> None:
        """A vector of tables, vectors or texts."""
        self._out[place] = len(targets)
        _refer(self._out, place + 1 + np.arange(len(targets)), targets)

    def numbers(self, place: int, values: NDArray[np.integer]) -> None:
        """A vector of 32-bit numbers."""
        self._out[place] = len(values)
        self._out[place + 1 : place + 1 + len(values)] = values

    def vectors(self, places: NDArray[np.int64], rows: Ragged[np.int32]) -> None:
        """A vector of 32-bit numbers at each place."""
        self._out[places] = rows.lengths
        self._out[np.repeat(places + 1, rows.lengths) + rows.places] = rows.values

    def text(self, place: int, data: bytes) -> None:
        """A text, or a vector of bytes."""
        self._out[place] = len(data)
        self._out[place + 1 :].view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)

    def texts(self, places: NDArray[np.int64], rows: Ragged[np.uint8]) -> None:
        """A text of :func:`text_words` at each place, without gaps."""
        if not len(places):
            return
        nbytes = rows.lengths
        self._out[places] = nbytes
        # Count, text, then terminator and padding, of every text.
        rest = 4 * text_words(nbytes) - 4 - nbytes
        lengths = np.stack((np.full(len(nbytes), 4), nbytes, rest), axis=1).ravel()
        is_text = np.repeat(np.tile((False, True, False), len(nbytes)), lengths)
        begin = 4 * int(places[0])
        self._out.view(np.uint8)[begin : begin + len(is_text)][is_text] = rows.values

    def finish(self) -> bytes:
        """The flatbuffer; a copy."""
        return self._out.tobytes()


class TableColumns:
    """Tables of one kind, to be filled in: each value is one for all of them, or a column."""

    def __init__(self, out: NDArray[np.uint32], vtable: VTable, places: Places) -> None:
        self._out = out
        self._slots = vtable.slots
        self._places = places
        out[places] = 4 * (places - vtable.place)

    def _fields(self, slot: int) -> Places:
        return self._places + self._slots[slot] // 4

    def refer(self, slot: int, targets: Places) -> None:
        """Where the vector, text or table of the field is."""
        _refer(self._out, self._fields(slot), targets)

    def u32(self, slot: int, values: Column) -> None:
        """A number of 32 bits, or of fewer with nothing beside it in the same word."""
        self._out[self._fields(slot)] = values

    def u64(self, slot: int, values: NDArray[np.integer]) -> None:
        """A number of 64 bits."""
        halves = values.astype("<u8", copy=False).view("<u4").reshape(-1, 2)
        fields = self._fields(slot)
        self._out[fields] = halves[:, 0]
        self._out[fields + 1] = halves[:, 1]


def text_words(nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many words texts of these lengths take: the count, the text, its terminator."""
    return 2 + nbytes // 4


def check_flatbuffer_nbytes(nbytes: int, what: str) -> None:
    """Raises: LimitError for ``what`` of ``nbytes`` bytes, when a flatbuffer cannot be that long."""
    if nbytes > MAX_FLATBUFFER_NBYTES:
        raise LimitError(
            f"{what} of {nbytes} bytes: a flatbuffer must stay below 2 GiB; pack fewer tensors, or give them shorter "
            "names",
            value=nbytes,
            limit=MAX_FLATBUFFER_NBYTES,
        )


def _refer(out: NDArray[np.uint32], fields: Places, targets: Places) -> None:
    out[fields] = 4 * (targets - fields)
