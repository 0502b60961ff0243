"""Where bytes may start: the alignment rule, in pure arithmetic.

A tensor starts at a multiple of :attr:`Alignment.small`; a tensor of at least
:attr:`Alignment.large_nbytes` starts at a multiple of :attr:`Alignment.large`, so that it can be an
``MTLBuffer`` of its own.  The region starts and ends at a multiple of :data:`PAGE_NBYTES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import LimitError, OptionError

__all__ = ["DEFAULT_ALIGNMENT", "PAGE_NBYTES", "Alignment", "align_up"]

PAGE_NBYTES = 16384
"""The page of Apple silicon; a multiple of every smaller page in use (4,096 on Intel and most of ARM)."""

MIN_ALIGNMENT = 16
MAX_ALIGNMENT = 2**30


@overload
def align_up(value: int, alignment: int) -> int: ...
@overload
def align_up(value: NDArray[np.int64], alignment: NDArray[np.int64] | int) -> NDArray[np.int64]: ...
def align_up(value: int | NDArray[np.int64], alignment: int | NDArray[np.int64]) -> int | NDArray[np.int64]:
    """The smallest multiple of ``alignment`` (a power of two) that is not below ``value``."""
    return (value + alignment - 1) & -alignment


@dataclass(frozen=True, slots=True)
class Alignment:
    """The alignment rule of one pack.

    Units: bytes.  ``small`` and ``large`` are powers of two from 16 to 2**30, ``small <= large``.

    256 is what cuBLAS wants and more than any Metal binding needs; 16,384 is the page that an ``MTLBuffer`` without a
    copy must start at.  1 MiB keeps the page's cost below 1.6 % of the tensor that pays it.

    Raises: LimitError for a value outside these bounds; OptionError.
    """

    small: int = 256
    large: int = PAGE_NBYTES
    large_nbytes: int = 1 << 20

    def __post_init__(self) -> None:
        for value in (self.small, self.large, self.large_nbytes):
            if not isinstance(value, int):
                raise OptionError(f"an alignment of {value!r}: expected a whole number of bytes")
        for value in (self.small, self.large):
            if not MIN_ALIGNMENT <= value <= MAX_ALIGNMENT or value & (value - 1):
                raise LimitError(
                    f"an alignment of {value} bytes: expected a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}",
                    value=value,
                    limit=MAX_ALIGNMENT,
                )
        if self.small > self.large:
            raise LimitError(
                f"small tensors aligned to {self.small} bytes, large ones to {self.large}: "
                "the large alignment must not be the smaller one",
                value=self.small,
                limit=self.large,
            )
        if not 1 <= self.large_nbytes < 2**63:
            raise LimitError(
                f"tensors are large from {self.large_nbytes} bytes on: expected 1 to 2**63-1",
                value=self.large_nbytes,
                limit=2**63 - 1,
            )

    @property
    def region(self) -> int:
        """The alignment of the region's first byte: whatever is aligned in it, is aligned in the file."""
        return max(PAGE_NBYTES, self.large)

    def of(self, nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
        """The alignment that a tensor of each length gets by itself."""
        return np.where(nbytes >= self.large_nbytes, np.int64(self.large), np.int64(self.small))


DEFAULT_ALIGNMENT = Alignment()
