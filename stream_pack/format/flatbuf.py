"""Reading flatbuffers that may have been forged.

The flatbuffers package trusts every offset.  Here each one is checked before it is followed,
vectors come back as NumPy arrays in place, and nothing recurses.  :class:`Table` reads one table,
:class:`Tables` many of a kind, a field of all of them as one array.  Source: the FlatBuffers internals
document (root, soffset to the vtable, uoffsets forward from the field that holds them).
"""

from __future__ import annotations

import struct
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import FormatError
from stream_pack.format.ragged import Ragged

__all__ = ["Table", "Tables", "decode_text", "gather", "root_table"]

_N = TypeVar("_N", bound=np.generic)
_I = TypeVar("_I", bound=np.integer)
_U4 = np.dtype("<u4")


class Table:
    """A table at ``position`` of ``data``.

    ``what`` names it in errors.  Lifetime: arrays that come from it are views of ``data``.
    Raises (every method): FormatError when an offset points outside ``data``.
    """

    def __init__(self, data: memoryview, position: int, what: str) -> None:
        self.data = data
        self.position = position
        self.what = what
        vtable = position - self._read("<i", position)
        vtable_nbytes = self._read("<H", vtable)
        self._table_nbytes = self._read("<H", vtable + 2)
        is_whole = 4 <= self._table_nbytes <= len(data) - position
        if vtable_nbytes < 4 or vtable_nbytes % 2 or not is_whole:
            raise self._broken(vtable)
        slots = range(vtable + 4, vtable + vtable_nbytes, 2)
        self._slots = [self._read("<H", slot) for slot in slots]

    def _broken(self, position: int) -> FormatError:
        return FormatError(
            f"{self.what} is broken: what starts at byte {position} does not fit into its flatbuffer of "
            f"{len(self.data)} bytes"
        )

    def _read(self, format: str, position: int) -> int:
        nbytes = struct.calcsize(format)
        if position < 0 or position + nbytes > len(self.data):
            raise self._broken(position)
        value: int = struct.unpack_from(format, self.data, position)[0]
        return value

    def _field(self, slot: int, nbytes: int) -> int | None:
        offset = self._slots[slot] if slot < len(self._slots) else 0
        if offset == 0:
            return None
        if offset + nbytes > self._table_nbytes:
            raise self._broken(self.position + offset)
        return self.position + offset

    def scalar(self, slot: int, format: str, default: int = 0) -> int:
        """The integer in ``slot``; ``format`` is a struct code such as ``"<Q"``."""
        position = self._field(slot, struct.calcsize(format))
        return default if position is None else self._read(format, position)

    def _follow(self, slot: int) -> int | None:
        position = self._field(slot, 4)
        return None if position is None else position + self._read("<I", position)

    def vector_position(self, slot: int, itemsize: int) -> tuple[int, int] | None:
        """Where the first element of a vector is, and how many there are; None when the field is absent."""
        position = self._follow(slot)
        if position is None:
            return None
        count = self._read("<I", position)
        if position + 4 + count * itemsize > len(self.data):
            raise self._broken(position)
        return position + 4, count

    def vector(self, slot: int, dtype: type[_N]) -> NDArray[_N]:
        """The scalars of the vector in ``slot``, in place; absent counts as empty."""
        little = np.dtype(dtype).newbyteorder("<")
        first, count = self.vector_position(slot, little.itemsize) or (0, 0)
        return np.frombuffer(self.data[first:], little, count=count)

    def tables(self, slot: int, *, most: int | None = None) -> Tables:
        """The tables of the vector in ``slot``, the first ``most`` of them; absent counts as empty."""
        first, count = self.vector_position(slot, 4) or (0, 0)
        if most is not None:
            count = min(count, most)
        return Tables.referred(self.data, first + 4 * np.arange(count), self.what)

    def string(self, slot: int) -> str | None:
        """The text in ``slot``."""
        where = self.vector_position(slot, 1)
        return None if where is None else self._text(*where)

    def strings(self, slot: int, *, limit: int) -> list[str]:
        """The texts of a vector of at most ``limit`` strings; absent counts as empty."""
        first, count = self.vector_position(slot, 4) or (0, 0)
        if count > limit:
            raise FormatError(f"{self.what} is broken: {count} strings, the limit is {limit}")
        texts = []
        total = 0
        for position in range(first, first + 4 * count, 4):
            position += self._read("<I", position)
            nbytes = self._read("<I", position)
            total += nbytes
            # Texts may share their bytes, but not so that together they exceed the file.
            if position + 4 + nbytes > len(self.data) or total > len(self.data):
                raise self._broken(position)
            texts.append(self._text(position + 4, nbytes))
        return texts

    def _text(self, position: int, nbytes: int) -> str:
        return decode_text(self.data, position, nbytes, f"{self.what}: a string at byte {position}")


class Tables:
    """Tables of one kind, one at each of ``positions``.

    Every method gives one entry a table.  Memory: about 20 bytes a table, and 100 while a field is read.
    Raises (every method): FormatError when an offset points outside ``data``.
    """

    def __init__(self, data: memoryview, positions: NDArray[np.int64], what: str) -> None:
        self.what = what
        self._raw = np.frombuffer(data, np.uint8)
        self._positions = positions
        vtables = positions - self._gather(positions, np.dtype("<i4"))
        # Few distinct ones, whatever the number of tables.
        self._vtables, self._vtable_of = np.unique(vtables, return_inverse=True)
        self._vtable_nbytes = self._gather(self._vtables, np.dtype("<u2"))
        self._table_nbytes = self._gather(self._vtables + 2, np.dtype("<u2"))

    @classmethod
    def referred(cls, data: memoryview, fields: NDArray[np.int64], what: str) -> Tables:
        """The tables that the references at ``fields`` lead to."""
        raw = np.frombuffer(data, np.uint8)
        return cls(data, fields + gather(raw, fields, _U4, what), what)

    def __len__(self) -> int:
        return len(self._positions)

    def _gather(self, positions: NDArray[np.int64], dtype: np.dtype[_I]) -> NDArray[_I]:
        return gather(self._raw, positions, dtype, self.what)

    def _fields(self, slot: int, nbytes: int) -> NDArray[np.int64]:
        """Where each table has the field; 0 where it is absent."""
        entry = 4 + 2 * slot
        offsets = np.zeros(len(self._vtables), np.int64)
        has = self._vtable_nbytes >= entry + 2
        offsets[has] = self._gather(self._vtables[has] + entry, np.dtype("<u2"))
        if ((offsets > 0) & (offsets + nbytes > self._table_nbytes)).any():
            raise FormatError(f"{self.what} is broken: a field is outside its table")
        offsets = offsets[self._vtable_of]
        return np.where(offsets > 0, self._positions + offsets, 0)

    def scalars(self, slot: int, dtype: np.dtype[_I]) -> NDArray[_I]:
        """The integers in ``slot``; absent ones are 0."""
        fields = self._fields(slot, dtype.itemsize)
        values = np.zeros(len(self), dtype)
        present = fields > 0
        values[present] = self._gather(fields[present], dtype)
        return values

    def targets(self, slot: int) -> NDArray[np.int64]:
        """The positions of the vectors, texts or tables that ``slot`` refers to; 0 for absent ones."""
        fields = self._fields(slot, 4)
        present = fields > 0
        fields[present] += self._gather(fields[present], _U4)
        return fields

    def tables(self, slot: int, rows: NDArray[np.int64]) -> Tables:
        """The tables that ``slot`` of the tables ``rows`` refers to.  Raises: FormatError also when one is absent."""
        targets = self.targets(slot)[rows]
        if not targets.all():
            raise FormatError(f"{self.what} is broken: a table is missing")
        return Tables(self._raw.data, targets, self.what)

    def where(self, rows: NDArray[np.bool_]) -> Tables:
        """The tables of ``rows`` alone."""
        return Tables(self._raw.data, self._positions[rows], self.what)

    def children(self, slot: int) -> tuple[NDArray[np.int64], Tables]:
        """The tables in the vectors of ``slot``, one after the other: the row that refers to each, and the tables."""
        fields = _elements(*self.spans(slot, 4), 4)
        return fields.rows, Tables.referred(self._raw.data, fields.values, self.what)

    def texts(self, slot: int) -> list[str | None]:
        """The texts in ``slot``."""
        firsts, counts = self.spans(slot, 1)
        present = self.targets(slot) > 0
        rows = zip(present.tolist(), firsts.tolist(), counts.tolist())
        return [self._text(first, nbytes) if held else None for held, first, nbytes in rows]

    def _text(self, first: int, nbytes: int) -> str:
        return decode_text(self._raw.data, first, nbytes, f"{self.what}: a string at byte {first}")

    def spans(self, slot: int, itemsize: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the first elements of vectors are, and how many there are; absent counts as empty.

        Raises: FormatError also when vectors share bytes so that together they exceed ``data``, which would make a
        small file take large memory.
        """
        targets = self.targets(slot)
        counts = np.zeros(len(self), np.int64)
        present = targets > 0
        counts[present] = self._gather(targets[present], _U4)
        firsts = targets + 4
        if (firsts + counts * itemsize)[present].max(initial=0) > len(self._raw):
            raise FormatError(f"{self.what} is broken: a vector ends after its {len(self._raw)} bytes")
        if int(counts.sum()) * itemsize > len(self._raw):
            raise FormatError(f"{self.what} is broken: {int(counts.sum())} elements in {len(self._raw)} bytes")
        return firsts, counts

    def vectors(self, slot: int, dtype: np.dtype[_I], *, longest: int) -> Ragged[_I]:
        """The elements of the vectors in ``slot``.

        Raises: FormatError also when one has more than ``longest`` elements.
        """
        firsts, counts = self.spans(slot, dtype.itemsize)
        if int(counts.max(initial=0)) > longest:
            raise FormatError(f"{self.what} is broken: a vector of {int(counts.max())}, the limit is {longest}")
        elements = _elements(firsts, counts, dtype.itemsize)
        return Ragged(self._gather(elements.values, dtype), elements.ends)


def decode_text(data: memoryview, begin: int, nbytes: int, what: str) -> str:
    """The text of a string.  Raises: FormatError when ``what`` is not UTF-8."""
    try:
        return str(data[begin : begin + nbytes], "utf-8")
    except UnicodeDecodeError:
        raise FormatError(f"{what} is not UTF-8") from None


def _elements(firsts: NDArray[np.int64], counts: NDArray[np.int64], itemsize: int) -> Ragged[np.int64]:
    """The position of each element of vectors."""
    elements = Ragged.of(np.repeat(firsts, counts), counts)
    elements.values[:] += itemsize * elements.places
    return elements


def gather(raw: NDArray[np.uint8], positions: NDArray[np.int64], dtype: np.dtype[_I], what: str) -> NDArray[_I]:
    """One scalar at each position, aligned or not.

    Raises: FormatError naming ``what``.
    """
    if len(positions) == 0:
        return np.empty(0, dtype)
    if int(positions.min()) < 0 or int(positions.max()) > len(raw) - dtype.itemsize:
        raise FormatError(f"{what} is broken: an offset points outside its {len(raw)} bytes")
    scalars: NDArray[_I] = raw[positions[:, None] + np.arange(dtype.itemsize)].view(dtype)
    return scalars.reshape(-1)


def root_table(data: memoryview, identifiers: bytes | tuple[bytes, ...], what: str) -> Table:
    """The root table of a flatbuffer that carries the identifier, or one of them.

    Raises: FormatError.
    """
    known = (identifiers,) if isinstance(identifiers, bytes) else identifiers
    if len(data) < 8 or bytes(data[4:8]) not in known:
        raise FormatError(
            f"{what} is broken: its flatbuffer begins with {bytes(data[:8]).hex(' ')}, "
            f"expected the identifier {' or '.join(name.decode() for name in known)} at byte 4"
        )
    return Table(data, struct.unpack_from("<I", data)[0], what)
