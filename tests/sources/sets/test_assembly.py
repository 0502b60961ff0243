"""Putting tensors together from parts: against NumPy, for any way of cutting them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from stream_pack.errors import TruncatedSourceError, UnsupportedCheckpointError
from stream_pack.pipeline.chunks import Chunk, Zeros
from stream_pack.sources.sets.assembly import Box, PartStream, Rows, assembled, part_chunk_nbytes, tiled, trimmed


def numbered(shape: tuple[int, ...], dtype: str = "<u2") -> NDArray[np.generic]:
    return np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)


def chunks_of(data: bytes, nbytes: int) -> Iterator[memoryview]:
    return (memoryview(data)[at : at + nbytes] for at in range(0, len(data), nbytes))


def joined(chunks: Iterator[Chunk]) -> bytes:
    return b"".join(bytes(c.nbytes) if isinstance(c, Zeros) else c for c in chunks)


def put_together(array: NDArray[np.generic], boxes: list[Box], *, chunk_nbytes: int) -> bytes:
    """The array's bytes by way of the boxes, each cut out by NumPy and given in chunks."""
    parts = []
    for box in boxes:
        index = tuple(slice(b, b + n) for b, n in zip(box.offsets, box.sizes))
        parts.append(PartStream(chunks_of(array[index].tobytes(), chunk_nbytes), what="a part"))
    plan = tiled("w", array.shape, boxes, bits=8 * array.itemsize)
    chunks = list(assembled(plan, parts, chunk_nbytes=chunk_nbytes))
    assert all(0 < len(chunk) <= chunk_nbytes for chunk in chunks)
    for part in parts:
        with pytest.raises(TruncatedSourceError):  # nothing is left over
            part.read(1)
    return joined(iter(chunks))


def cut_at(shape: tuple[int, ...], dim: int, *cuts: int) -> list[Box]:
    ends = [*cuts, shape[dim]]
    return [
        Box(
            tuple(begin if k == dim else 0 for k in range(len(shape))),
            tuple(end - begin if k == dim else n for k, n in enumerate(shape)),
        )
        for begin, end in zip([0, *cuts], ends)
    ]


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, cut in two again and again, anywhere along any dim; the boxes in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [dim for dim, size in enumerate(box.sizes) if size > 1]
        if not dims:
            boxes.append(box)
            continue
        dim = draw(st.sampled_from(dims))
        for part in cut_at(box.sizes, dim, draw(st.integers(1, box.sizes[dim] - 1))):
            offsets = tuple(a + b for a, b in zip(box.offsets, part.offsets))
            boxes.append(Box(offsets, part.sizes))
    return shape, draw(st.permutations(boxes))


@given(tilings(), st.sampled_from([1, 2, 7, 64, 4096]))
def test_any_tiling_gives_back_the_whole(tiling: tuple[tuple[int, ...], list[Box]], chunk_nbytes: int) -> None:
    shape, boxes = tiling
    array = numbered(shape)
    assert put_together(array, boxes, chunk_nbytes=chunk_nbytes) == array.tobytes()


@given(tilings(), st.data())
def test_a_tiling_with_one_box_moved_or_changed_is_refused(
    tiling: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = tiling
    if not shape:
        return
    k = data.draw(st.integers(0, len(boxes) - 1))
    dim = data.draw(st.integers(0, len(shape) - 1))
    offsets, sizes = list(boxes[k].offsets), list(boxes[k].sizes)
    changed = data.draw(st.sampled_from([offsets, sizes]))
    changed[dim] += data.draw(st.sampled_from([-1, 1]))
    boxes = [*boxes[:k], Box(tuple(offsets), tuple(sizes)), *boxes[k + 1 :]]
    with pytest.raises(UnsupportedCheckpointError, match=r"'w'"):
        tiled("w", shape, boxes, bits=16)


def test_rows_cut_across_two_parts_are_gathered_a_chunk_at_a_time() -> None:
    array = numbered((100, 12))
    boxes = cut_at((100, 12), 1, 5)
    assert tiled("w", (100, 12), boxes, bits=16) == [Rows(100, ((0, 10), (1, 14)))]
    parts = [
        PartStream(chunks_of(array[:, :5].tobytes(), 333), what="left"),
        PartStream(chunks_of(array[:, 5:].tobytes(), 77), what="right"),
    ]
    chunks = list(assembled([Rows(100, ((0, 10), (1, 14)))], parts, chunk_nbytes=100))
    assert [len(chunk) for chunk in chunks] == [96] * 25  # four rows of 24 bytes each
    assert joined(iter(chunks)) == array.tobytes()


def test_parts_one_after_the_other_are_passed_on_without_a_copy() -> None:
    first, second = bytes(range(100)), bytes(range(100, 200))
    parts = [PartStream([memoryview(first)], what="first"), PartStream([memoryview(second)], what="second")]
    plan = tiled("w", (2, 100), cut_at((2, 100), 0, 1), bits=8)
    chunks = list(assembled(plan, parts, chunk_nbytes=1000))
    assert [c.obj for c in chunks if isinstance(c, memoryview)] == [first, second]


def test_ten_thousand_parts_are_planned_without_comparing_each_with_each() -> None:
    boxes = cut_at((10_000, 3), 0, *range(1, 10_000))
    assert tiled("w", (10_000, 3), boxes[::-1], bits=8) == [Rows(1, tuple((9_999 - k, 3) for k in range(10_000)))]


def test_a_gap_an_overlap_and_a_part_outside_are_told_apart() -> None:
    gap_and_overlap = [Box((0, 0), (2, 3)), Box((1, 0), (2, 3)), Box((0, 3), (3, 1))]
    with pytest.raises(UnsupportedCheckpointError, match="they hold 15 elements, it has 12"):
        tiled("w", (3, 4), gap_and_overlap, bits=8)
    with pytest.raises(UnsupportedCheckpointError, match="2 of them hold the same element"):
        tiled("w", (4,), [Box((0,), (2,)), Box((1,), (2,))], bits=8)
    with pytest.raises(UnsupportedCheckpointError, match="from 1 on along dim 0"):
        tiled("w", (4,), [Box((0,), (1,)), Box((2,), (2,)), Box((2,), (1,))], bits=8)
    with pytest.raises(UnsupportedCheckpointError, match="is outside"):
        tiled("w", (4,), [Box((2,), (4,))], bits=8)
    with pytest.raises(UnsupportedCheckpointError, match="is outside"):
        tiled("w", (4,), [Box((0, 0), (4, 1))], bits=8)
    with pytest.raises(UnsupportedCheckpointError, match="they hold 0 elements"):
        tiled("w", (4,), [], bits=8)


def test_four_bit_elements_may_not_be_cut_inside_a_byte() -> None:
    assert tiled("w", (2, 4), cut_at((2, 4), 1, 2), bits=4) == [Rows(2, ((0, 1), (1, 1)))]
    with pytest.raises(UnsupportedCheckpointError, match="cut inside a byte"):
        tiled("w", (2, 4), cut_at((2, 4), 1, 1), bits=4)


def test_a_plan_never_grows_beyond_its_limit() -> None:
    # Along the last dim the lower half is cut otherwise than the upper, so no two rows repeat.
    boxes = [
        *(Box((0, j, k), (2**20, 1, 1)) for j, k in [(0, 0), (0, 1)]),
        Box((0, 1, 0), (2**20, 2, 1)),
        Box((0, 1, 1), (2**20, 2, 1)),
    ]
    with pytest.raises(UnsupportedCheckpointError, match="irregularly"):
        tiled("w", (2**20, 3, 2), boxes, bits=8)


def test_parts_that_all_overlap_along_the_first_dim_do_not_take_for_ever() -> None:
    # Each column is cut in two at another row, so every row is made of runs that no other row has.
    n = 3000
    upper = [Box((0, k), (k + 1, 1)) for k in range(n)]
    lower = [Box((k + 1, k), (n - k, 1)) for k in range(n)]
    with pytest.raises(UnsupportedCheckpointError, match="more than 1000000 runs"):
        tiled("w", (n + 1, n), upper + lower, bits=8)


def test_a_part_that_ends_early_is_named() -> None:
    parts = [PartStream([b"ab"], what="the chunk of w"), PartStream([b"cdef"], what="the other")]
    with pytest.raises(TruncatedSourceError, match="the chunk of w ended 2 bytes early"):
        list(assembled([Rows(2, ((0, 2), (1, 2)))], parts, chunk_nbytes=4))


def test_zeros_stay_zeros_where_they_can_and_are_bytes_where_they_must() -> None:
    parts = [PartStream([Zeros(6)], what="zeros"), PartStream([b"abcdef"], what="bytes")]
    chunks = list(assembled([Rows(1, ((0, 4),)), Rows(2, ((0, 1), (1, 3)))], parts, chunk_nbytes=8))
    assert chunks == [Zeros(4), b"\0abc\0def"]


@pytest.mark.parametrize("nbytes", [1, 2, 100])
def test_trimming_takes_all_and_gives_a_range(nbytes: int) -> None:
    data = bytes(range(50))
    chunks = chunks_of(data, nbytes)
    assert joined(trimmed(chunks, 7, 31)) == data[7:31]
    assert next(chunks, None) is None
    assert list(trimmed([Zeros(10)], 2, 5)) == [Zeros(3)]


def test_many_parts_read_shorter_chunks() -> None:
    mib = 1 << 20
    assert part_chunk_nbytes(2, mib) == mib
    assert part_chunk_nbytes(8, mib) == mib
    assert part_chunk_nbytes(64, mib) == mib // 8
    assert part_chunk_nbytes(100_000, mib) == 64 << 10
    assert part_chunk_nbytes(100_000, 7) == 7
