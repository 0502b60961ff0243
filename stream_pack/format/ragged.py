"""Rows of different lengths in one flat column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["Ragged"]

_N = TypeVar("_N", bound=np.generic)
_M = TypeVar("_M", bound=np.generic)


@dataclass(frozen=True, slots=True, eq=False)
class Ragged(Generic[_N]):
    """Row ``k`` is ``values[begins[k]:ends[k]]``, and begins where row ``k - 1`` ends, the first one at 0."""

    values: NDArray[_N]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, values: NDArray[_N], lengths: NDArray[np.int64] | Sequence[int]) -> Ragged[_N]:
        """Rows of these lengths."""
        return cls(values, np.cumsum(lengths, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """How many values each row has."""
        # Not np.diff: with its prepend it takes most of a tenth of the time that opening a small pack takes.
        lengths = self.ends.astype(np.int64)
        lengths[1:] -= self.ends[:-1]
        return lengths

    @property
    def begins(self) -> NDArray[np.int64]:
        """Where each row begins."""
        return self.ends - self.lengths

    @property
    def rows(self) -> NDArray[np.int64]:
        """The row of each value."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @property
    def places(self) -> NDArray[np.int64]:
        """The place of each value in its row."""
        return np.arange(len(self.values)) - np.repeat(self.begins, self.lengths)

    def row(self, row: int) -> NDArray[_N]:
        """The values of a row, in place."""
        return self.values[self.ends.item(row - 1) if row else 0 : self.ends.item(row)]

    def take(self, rows: NDArray[np.integer] | NDArray[np.bool_]) -> Ragged[_N]:
        """These rows, by number or by mask."""
        lengths = self.lengths[rows]
        ends = np.cumsum(lengths)
        places = np.arange(int(lengths.sum())) + np.repeat(self.ends[rows] - ends, lengths)
        return Ragged(self.values[places], ends)

    def astype(self, dtype: type[_M]) -> Ragged[_M]:
        """The same rows of another type."""
        return Ragged(self.values.astype(dtype), self.ends)

    def differs(self, other: Ragged[_M]) -> NDArray[np.bool_]:
        """Which rows are not equal to those of ``other``, which has as many."""
        differ: NDArray[np.bool_] = self.lengths != other.lengths
        same = np.flatnonzero(~differ)
        left, right = self.take(same), other.take(same)
        differ[same[left.rows[left.values != right.values]]] = True
        return differ
