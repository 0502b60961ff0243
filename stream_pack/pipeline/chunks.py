"""What moves in one step: the words of every source, stage and sink."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Chunk", "Piece", "Zeros"]


@dataclass(frozen=True, slots=True)
class Zeros:
    """A run of ``nbytes`` zero bytes that take no memory; a file sink leaves a hole for it."""

    nbytes: int

    def __len__(self) -> int:
        return self.nbytes


Chunk: TypeAlias = "memoryview | bytes | Zeros"
"""Bytes moved in one step: a C-contiguous, byte-format memoryview (or bytes), or :class:`Zeros`.

The source never writes to its memory again, so a consumer may keep the chunk as long as needed.
"""

Piece: TypeAlias = tuple[int, Chunk]
"""(buffer number, chunk): the next bytes of that buffer."""
