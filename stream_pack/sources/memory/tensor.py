"""What the live source knows of one tensor in memory, whichever library made it."""

from __future__ import annotations

import abc
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from stream_pack.pipeline.geometry import Recipe

__all__ = ["HOST", "LiveTensor", "byte_span", "cut"]

HOST: Hashable = "host"
"""The address space that CPU tensors and NumPy arrays share."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LiveTensor(abc.ABC):
    """A tensor that the caller holds, and how to get at its bytes.

    ``dtype`` is a number in :data:`stream_pack.format.dtypes.DTYPES`, and ``shape`` counts its elements.
    ``space`` tells memories apart, ``storage`` is the half-open address range of the allocation in it, ``span``
    that of the bytes in it which the tensor is made from.  ``derivation`` is None where these bytes are just what
    a pack holds.  Where they have to be gathered, swapped or resolved first, it says how, its ``start`` being the
    address of the first element: tensors of one space and equal derivation have equal bytes.  For a tensor without
    elements the addresses mean nothing.

    Lifetime: keeps the caller's tensor alive, and so do the chunks that it gives.
    """

    dtype: int
    shape: tuple[int, ...]
    space: Hashable
    storage: tuple[int, int]
    span: tuple[int, int]
    derivation: Recipe | None

    @abc.abstractmethod
    def read(self, begin: int, end: int, *, chunk_nbytes: int) -> Iterator[memoryview]:
        """Bytes ``[begin, end)`` of the tensor as the pack holds them, in chunks of at most ``chunk_nbytes``.

        Copies: none of what is in host memory in the pack's form, else one chunk (one element at least).
        """


def cut(pieces: Iterable[memoryview], begin: int, end: int, *, chunk_nbytes: int) -> Iterator[memoryview]:
    """Bytes ``[begin, end)`` of the concatenated pieces, in chunks of at most ``chunk_nbytes``."""
    position = 0
    for piece in pieces:
        first, last = max(begin - position, 0), min(end - position, len(piece))
        for at in range(first, last, chunk_nbytes):
            yield piece[at : min(at + chunk_nbytes, last)]
        position += len(piece)
        if position >= end:
            return


def byte_span(address: int, shape: Sequence[int], byte_strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """The half-open address range that a strided tensor touches; ``address`` is that of its first element."""
    if 0 in shape:
        return address, address
    begin, last = address, address
    for dim, stride in zip(shape, byte_strides, strict=True):
        if stride < 0:
            begin += (dim - 1) * stride
        else:
            last += (dim - 1) * stride
    return begin, last + itemsize
