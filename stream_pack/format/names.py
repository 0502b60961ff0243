"""The names of tensors as one column."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from stream_pack.format.ragged import Ragged

__all__ = ["Names"]


class Names(Sequence[str]):
    """A sequence of texts, each made when it is asked for: a text takes its UTF-8 bytes and 8 more, not 50 to 70.

    Equal to any other sequence of the same texts.  ``column`` has the UTF-8 of each; a lone surrogate, which UTF-8 has
    no place for, is kept as the three bytes that it would take.
    """

    __slots__ = ("column",)

    def __init__(self, column: Ragged[np.uint8]) -> None:
        self.column = column

    @classmethod
    def of(cls, texts: Iterable[str]) -> Names:
        """``texts`` as a column: themselves, if they are one."""
        if isinstance(texts, Names):
            return texts
        encoded = [_encoded(text) for text in texts]
        return cls(Ragged.of(np.frombuffer(b"".join(encoded), np.uint8), list(map(len, encoded))))

    def __len__(self) -> int:
        return len(self.column)

    @overload
    def __getitem__(self, at: int) -> str: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[str]: ...

    def __getitem__(self, at: int | slice) -> str | Sequence[str]:
        if isinstance(at, slice):
            return [self[row] for row in range(*at.indices(len(self)))]
        row = operator.index(at)
        if not -len(self) <= row < len(self):
            raise IndexError(f"name {row} of {len(self)}")
        return _decoded(self.column.row(row % len(self)).data)

    def __iter__(self) -> Iterator[str]:
        text, begin = self.column.values.data, 0
        for end in self.column.ends:
            yield _decoded(text[begin:end])
            begin = end

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def order(self) -> NDArray[np.uint32]:
        """The rows sorted by the bytes of their names, equal ones as they come."""
        text, ends, begins = self.column.values.tobytes(), self.column.ends, self.column.begins

        def name(row: int) -> bytes:
            return text[begins.item(row) : ends.item(row)]

        return np.fromiter(sorted(range(len(self)), key=name), np.uint32, len(self))


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _decoded(data: memoryview) -> str:
    return str(data, "utf-8", "surrogatepass")
