"""Tensors of another dim order, gathered from a pipe: the bytes of each wait on disk until its last one has come by."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from stream_pack.format.ranges import starts_apart
from stream_pack.pipeline.gather import strided_chunks
from stream_pack.pipeline.geometry import Recipe
from stream_pack.pipeline.source import StreamOptions
from stream_pack.pipeline.spool import SpoolFile

__all__ = ["Group", "Waiting", "gathered", "groups_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Derived storages whose bytes in the file overlap, and so wait together.

    Units: bytes; the half-open range ``[begin, end)`` of the file.
    """

    begin: int
    end: int
    storages: tuple[int, ...]


def groups_of(recipes: Mapping[int, Recipe], wanted: Iterable[int]) -> list[Group]:
    """The groups of those storages of ``wanted`` that are derived, in the order of the file."""
    numbers = sorted((number for number in set(wanted) if number in recipes), key=lambda n: recipes[n].start)
    begins = np.array([recipes[number].start for number in numbers], np.int64)
    ends = np.array([recipes[number].end for number in numbers], np.int64)
    firsts = np.flatnonzero(starts_apart(begins, ends)).tolist()
    bounds = zip(firsts, [*firsts[1:], len(numbers)])
    return [
        Group(int(begins[first]), int(ends[first:last].max()), tuple(numbers[first:last])) for first, last in bounds
    ]


def gathered(recipe: Recipe, memory: memoryview, begin: int, options: StreamOptions) -> Iterator[memoryview]:
    """The tensor's bytes in row-major order, in chunks.  ``memory``: the file from byte ``begin`` on."""
    inside = replace(recipe, start=recipe.start - begin)
    for window in strided_chunks(inside.view(memory), chunk_nbytes=options.window_nbytes):
        for first in range(0, len(window), options.chunk_nbytes):
            yield window[first : first + options.chunk_nbytes]


class Waiting:
    """Keeps the bytes of ``groups`` as they come by, one group at a time."""

    def __init__(self, recipes: Mapping[int, Recipe], groups: list[Group], options: StreamOptions) -> None:
        self._recipes = recipes
        self._groups = groups[::-1]
        self._options = options
        self._spool: SpoolFile | None = None

    def advance(self, position: int, chunk: memoryview | bytes) -> Iterator[tuple[int, memoryview]]:
        """Take the bytes from ``position`` on: (storage, its next bytes) of each that is complete with them."""
        reach = position + len(chunk)
        while self._groups and self._groups[-1].begin < reach:
            group = self._groups[-1]
            if self._spool is None:
                self._spool = self._options.spool.open(
                    why="a tensor that is not contiguous comes through a pipe",
                    nbytes=max(waiting.end - waiting.begin for waiting in self._groups),
                )
            self._spool.append(memoryview(chunk)[max(0, group.begin - position) : group.end - position])
            if reach < group.end:
                return
            yield from self._made(group, self._spool)
            self._groups.pop()
            self.close()

    def _made(self, group: Group, spool: SpoolFile) -> Iterator[tuple[int, memoryview]]:
        memory = memoryview(mmap.mmap(spool.fileno(), group.end - group.begin, access=mmap.ACCESS_READ))
        for number in group.storages:
            for piece in gathered(self._recipes[number], memory, group.begin, self._options):
                yield number, piece

    def close(self) -> None:
        """Free the disk space."""
        if self._spool is not None:
            self._spool.close()
            self._spool = None
