"""Tensors put together from parts that each come row-major and in order.

A tensor's bytes, from the first to the last, are runs of its parts' bytes; and each part's runs follow each other in
the part.  So every part is read once, in order, whatever the dim it was cut along, and no tensor is ever whole in
memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import prod

import numpy as np

from stream_pack.errors import TruncatedSourceError, UnsupportedCheckpointError
from stream_pack.pipeline.chunks import Chunk, Zeros
from stream_pack.text import quoted

__all__ = ["MIN_PART_CHUNK_NBYTES", "Box", "PartStream", "Rows", "assembled", "part_chunk_nbytes", "tiled", "trimmed"]

MIN_PART_CHUNK_NBYTES = 64 << 10
MAX_RUNS = 1_000_000
"""Of the plan of one tensor: 10,000 ranks take as many; only parts cut at odd places along two dims take more."""

PARTS_IN_FLIGHT = 8
"""Chunks that the parts of one tensor hold together; above that many parts, each reads shorter ones."""


def part_chunk_nbytes(parts: int, chunk_nbytes: int) -> int:
    """How much each of ``parts`` parts shall read at once, so that all of them hold a few chunks."""
    fair = max(MIN_PART_CHUNK_NBYTES, PARTS_IN_FLIGHT * chunk_nbytes // max(1, parts))
    return min(chunk_nbytes, fair)


class PartStream:
    """The bytes of one part, from the chunks in which they come.  ``what`` names it in errors."""

    def __init__(self, chunks: Iterable[Chunk], *, what: str) -> None:
        self._chunks = iter(chunks)
        self._rest: Chunk = b""
        self._what = what

    def take(self, nbytes: int) -> Iterator[Chunk]:
        """The next ``nbytes`` bytes as they came.  Copies: none.

        Raises: TruncatedSourceError when the part ends before.
        """
        while nbytes > 0:
            if not len(self._rest):
                chunk = next(self._chunks, None)
                if chunk is None:
                    raise TruncatedSourceError(f"{self._what} ended {nbytes} bytes early")
                self._rest = chunk
            piece, self._rest = _split(self._rest, nbytes)
            nbytes -= len(piece)
            yield piece

    def read(self, nbytes: int) -> memoryview:
        """The next ``nbytes`` bytes together.  Copies: none if they came in one chunk.

        Raises: as :meth:`take`.
        """
        pieces = [bytes(piece.nbytes) if isinstance(piece, Zeros) else piece for piece in self.take(nbytes)]
        return memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces))


@dataclass(frozen=True, slots=True)
class Rows:
    """``count`` times, one after the other: ``runs`` of (part, nbytes)."""

    count: int
    runs: tuple[tuple[int, int], ...]

    @property
    def row_nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.runs)


def assembled(plan: Iterable[Rows], parts: Sequence[PartStream], *, chunk_nbytes: int) -> Iterator[Chunk]:
    """The bytes that ``plan`` describes.

    Copies: none of runs that are longer than a chunk, or the only ones of their row; short ones are gathered, a chunk
    of rows at a time.  Raises: as :meth:`PartStream.take`.
    """
    for rows in plan:
        if len(rows.runs) == 1:
            yield from parts[rows.runs[0][0]].take(rows.count * rows.row_nbytes)
        elif rows.count == 1 or rows.row_nbytes > chunk_nbytes:
            for _ in range(rows.count):
                for part, nbytes in rows.runs:
                    yield from parts[part].take(nbytes)
        else:
            step = chunk_nbytes // rows.row_nbytes
            for begin in range(0, rows.count, step):
                yield _window(min(step, rows.count - begin), rows, parts)


def _window(count: int, rows: Rows, parts: Sequence[PartStream]) -> memoryview:
    window = np.empty((count, rows.row_nbytes), np.uint8)
    begin = 0
    for part, nbytes in rows.runs:
        data = np.frombuffer(parts[part].read(count * nbytes), np.uint8)
        window[:, begin : begin + nbytes] = data.reshape(count, nbytes)
        begin += nbytes
    return window.reshape(-1).data


@dataclass(frozen=True, slots=True)
class Box:
    """Where a part is in its tensor: its first index and its length along each dim.  No length is 0."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def tiled(name: str, shape: Sequence[int], boxes: Sequence[Box], *, bits: int) -> list[Rows]:
    """The plan of the tensor ``name`` made of ``boxes``, in elements of ``bits`` bits; ``shape`` has no 0.

    Raises: UnsupportedCheckpointError unless every element is in exactly one box.
    """
    for number, box in enumerate(boxes):
        ends = [begin + size for begin, size in zip(box.offsets, box.sizes)]
        if (
            len(box.offsets) != len(shape)
            or len(box.sizes) != len(shape)
            or any(begin < 0 for begin in box.offsets)
            or any(size < 1 for size in box.sizes)
            or any(end > dim for end, dim in zip(ends, shape))
        ):
            raise UnsupportedCheckpointError(
                f"part {number} of tensor {quoted(name)}, at {list(box.offsets)} of shape {list(box.sizes)}, is "
                f"outside the tensor's shape {list(shape)}"
            )
    # Beforehand, so that a plan is made only of parts that can tile, and has no more rows than they have.
    covered = sum(prod(box.sizes) for box in boxes)
    if covered != prod(shape):
        raise _no_tiling(name, f"they hold {covered} elements, it has {prod(shape)}")
    return _Tiling(name, shape, boxes, bits).rows(list(range(len(boxes))), 0)


class _Tiling:
    """One tensor being planned; counts the runs that its plan has so far."""

    def __init__(self, name: str, shape: Sequence[int], boxes: Sequence[Box], bits: int) -> None:
        self._name, self._shape, self._boxes, self._bits = name, shape, boxes, bits
        self._runs = 0

    def rows(self, inside: list[int], dim: int) -> list[Rows]:
        """One index after the other along ``dim``, for boxes that share all indices before it."""
        if dim == len(self._shape):
            if len(inside) > 1:
                raise _no_tiling(self._name, f"{len(inside)} of them hold the same element")
            return [Rows(1, ((inside[0], self._nbytes(1)),))]
        plan: list[Rows] = []
        position = 0
        tail = tuple(self._shape[dim + 1 :])
        spans = [(self._boxes[b].offsets[dim], self._boxes[b].sizes[dim], b) for b in inside]
        for begin, end, band in _bands(spans):
            if begin != position:
                break
            position = end
            self._count(len(band))
            if len(band) == 1 and self._boxes[band[0]].sizes[dim + 1 :] == tail:
                plan.append(Rows(1, ((band[0], self._nbytes((end - begin) * prod(tail))),)))
                continue
            repeated = self.rows(band, dim + 1)
            if len(repeated) == 1:
                plan.append(Rows((end - begin) * repeated[0].count, repeated[0].runs))
            else:
                self._count((end - begin) * sum(len(rows.runs) for rows in repeated))
                plan.extend(repeated * (end - begin))
        if position != self._shape[dim]:
            raise _no_tiling(self._name, f"none holds the elements from {position} on along dim {dim}")
        return _merged(plan)

    def _count(self, runs: int) -> None:
        self._runs += runs
        if self._runs > MAX_RUNS:
            raise UnsupportedCheckpointError(
                f"tensor {quoted(self._name)} is cut into {len(self._boxes)} parts so irregularly that it would take "
                f"more than {MAX_RUNS} runs to put it together: consolidate the checkpoint first"
            )

    def _nbytes(self, elements: int) -> int:
        if elements * self._bits % 8:
            raise UnsupportedCheckpointError(
                f"tensor {quoted(self._name)} of {self._bits}-bit elements is cut inside a byte: consolidate the "
                "checkpoint first"
            )
        return elements * self._bits // 8


def _bands(spans: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, list[int]]]:
    """Cut one dim at all ends of ``spans`` (begin, length, box): (begin, end, boxes there), without gaps."""
    begins = sorted(spans)
    cuts = sorted({cut for begin, size, _ in spans for cut in (begin, begin + size)})
    active: list[tuple[int, int]] = []  # (end, box)
    following = 0
    for begin, end in pairwise(cuts):
        active = [(stop, box) for stop, box in active if stop > begin]
        while following < len(begins) and begins[following][0] == begin:
            first, size, box = begins[following]
            active.append((first + size, box))
            following += 1
        if active:
            yield begin, end, [box for _, box in active]


def _merged(plan: list[Rows]) -> list[Rows]:
    """The same bytes in fewer rows: neighbours that come once each are one row."""
    merged: list[Rows] = []
    for single, group in groupby(plan, key=lambda rows: rows.count == 1):
        if single:
            merged.append(Rows(1, tuple(run for rows in group for run in rows.runs)))
        else:
            merged.extend(group)
    return merged


def _no_tiling(name: str, why: str) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(
        f"the parts of tensor {quoted(name)} do not cover each element exactly once: {why}"
    )


def _split(chunk: Chunk, nbytes: int) -> tuple[Chunk, Chunk]:
    if isinstance(chunk, Zeros):
        first = min(nbytes, chunk.nbytes)
        return Zeros(first), Zeros(chunk.nbytes - first)
    view = memoryview(chunk)
    return view[:nbytes], view[nbytes:]


def trimmed(chunks: Iterable[Chunk], begin: int, end: int) -> Iterator[Chunk]:
    """Bytes ``[begin, end)`` of the concatenated chunks, all of which are taken."""
    position = 0
    for chunk in chunks:
        first = min(max(begin - position, 0), len(chunk))
        last = min(max(end - position, 0), len(chunk))
        if last > first:
            yield _split(_split(chunk, last)[0], first)[1]
        position += len(chunk)
