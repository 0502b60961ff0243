"""Reading flatbuffers that somebody else may have forged.

The flatbuffers package trusts every offset.  Here each one is checked before it is followed,
vectors come back as NumPy arrays in place, and nothing recurses.  Source: the FlatBuffers internals
document (root, soffset to the vtable, uoffsets forward from the field that holds them).
"""

from __future__ import annotations

import struct
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import FormatError

__all__ = ["Table", "root_table"]

_N = TypeVar("_N", bound=np.generic)


class Table:
    """A table at ``position`` of ``data``.

    ``what`` names it in errors.  Lifetime: arrays that come from it are views of ``data``.
    Raises (every method): FormatError when an offset leads out of ``data``.
    """

    def __init__(self, data: memoryview, position: int, what: str) -> None:
        self.data = data
        self.position = position
        self.what = what
        vtable = position - self._read("<i", position)
        vtable_nbytes = self._read("<H", vtable)
        self._table_nbytes = self._read("<H", vtable + 2)
        if (
            vtable_nbytes < 4
            or vtable_nbytes % 2
            or self._table_nbytes < 4
            or position + self._table_nbytes > len(data)
        ):
            raise self._broken(vtable)
        self._slots = [
            self._read("<H", vtable + 4 + 2 * slot) for slot in range((vtable_nbytes - 4) // 2)
        ]

    def _broken(self, position: int) -> FormatError:
        return FormatError(
            f"{self.what} is broken: byte {position} of its flatbuffer of {len(self.data)} bytes leads outside"
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
        """Where the first element of a vector stands, and how many there are; None when the field
        is absent."""
        position = self._follow(slot)
        if position is None:
            return None
        count = self._read("<I", position)
        if position + 4 + count * itemsize > len(self.data):
            raise self._broken(position)
        return position + 4, count

    def vector(self, slot: int, dtype: type[_N]) -> NDArray[_N]:
        """The scalars of the vector in ``slot``, in place; absent counts as empty."""
        where = self.vector_position(slot, np.dtype(dtype).itemsize)
        if where is None or where[1] == 0:
            return np.empty(0, dtype)
        little = np.dtype(dtype).newbyteorder("<")
        return np.frombuffer(self.data, little, offset=where[0], count=where[1])

    def string(self, slot: int) -> str | None:
        """The text in ``slot``."""
        where = self.vector_position(slot, 1)
        return None if where is None else self._text(*where)

    def strings(self, slot: int, *, limit: int) -> list[str]:
        """The texts of a vector of at most ``limit`` strings; absent counts as empty."""
        where = self.vector_position(slot, 4)
        if where is not None and where[1] > limit:
            raise FormatError(
                f"{self.what} is broken: {where[1]} texts where at most {limit} may stand"
            )
        texts = []
        total = 0
        for number in range(where[1] if where else 0):
            assert where is not None
            position = where[0] + 4 * number
            position += self._read("<I", position)
            nbytes = self._read("<I", position)
            total += nbytes
            # Texts may share their bytes, but not so that together they exceed the file.
            if position + 4 + nbytes > len(self.data) or total > len(self.data):
                raise self._broken(position)
            texts.append(self._text(position + 4, nbytes))
        return texts

    def _text(self, position: int, nbytes: int) -> str:
        try:
            return str(self.data[position : position + nbytes], "utf-8")
        except UnicodeDecodeError:
            raise FormatError(f"{self.what}: a text at byte {position} is not UTF-8") from None


def root_table(data: memoryview, identifier: bytes, what: str) -> Table:
    """The root table of a flatbuffer that carries ``identifier``.

    Raises: FormatError.
    """
    if len(data) < 8 or bytes(data[4:8]) != identifier:
        raise FormatError(
            f"{what} is broken: its flatbuffer begins with {bytes(data[:8]).hex(' ')}, "
            f"expected the identifier {identifier.decode()} at byte 4"
        )
    return Table(data, struct.unpack_from("<I", data)[0], what)
