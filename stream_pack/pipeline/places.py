"""Where the bytes that are asked of a source lie, in columns: which file, from which byte on.

What reads files by position needs no stream: it takes these columns and the lengths of the requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["NOWHERE", "Places", "SourceFile"]

NOWHERE = -1
"""The number of no file, and the offset of bytes that are stored in none as they are asked for."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A regular file that a source reads.

    ``path``: as it was opened, None for a descriptor of the caller's.  ``descriptor``: open as long as the source is;
    None for a file that is opened only while it is read, by its path.
    """

    path: str | None
    descriptor: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Of each request, ``files[numbers[k]]`` holds its bytes, from byte ``offsets[k]`` of that file to
    ``offsets[k] + nbytes[k]``, exactly as :meth:`stream_pack.pipeline.source.Source.stream` gives them.

    ``numbers``: NOWHERE for what is in several files, or in none: a pipe, memory.
    ``offsets``: NOWHERE, too, for what is in a file otherwise: compressed, strided, byte-swapped, cast.
    What proves the bytes (a CRC-32 of the record, say) is the source's own business.
    """

    files: tuple[SourceFile, ...]
    numbers: NDArray[np.int64]
    offsets: NDArray[np.int64]

    @classmethod
    def nowhere(cls, requests: int, files: Iterable[SourceFile] = ()) -> Places:
        """No place is known of any of that many requests."""
        return cls(tuple(files), np.full(requests, NOWHERE), np.full(requests, NOWHERE))

    @classmethod
    def within(cls, file: SourceFile | None, offsets: NDArray[np.int64]) -> Places:
        """All in one file, at these offsets; None: in no file."""
        if file is None:
            return cls.nowhere(len(offsets))
        return cls((file,), np.zeros(len(offsets), np.int64), offsets)

    @classmethod
    def joined(cls, requests: int, parts: Sequence[tuple[Sequence[int] | NDArray[np.intp], Places]]) -> Places:
        """Of that many requests, those numbered by the first of each pair are at the places that are the second."""
        files: dict[SourceFile, int] = {}
        made = cls.nowhere(requests)
        for rows, places in parts:
            known = [files.setdefault(file, len(files)) for file in places.files]
            renumbered = np.array([*known, NOWHERE], np.int64)  # NOWHERE is the last
            made.numbers[rows] = renumbered[places.numbers]
            made.offsets[rows] = places.offsets
        return cls(tuple(files), made.numbers, made.offsets)
