"""Which buffers want which bytes: against slicing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_pack.errors import TruncatedSourceError
from stream_pack.pipeline.chunks import Zeros
from stream_pack.pipeline.scatter import Scatter, SingleBuffer
from stream_pack.pipeline.source import Requests

STORAGES = {3: bytes(range(100)), 5: bytes(range(100, 150)), 9: bytes(60)}


def requests(rows: list[tuple[int, int, int]]) -> Requests:
    columns = np.array(rows, np.int64).reshape(-1, 3)
    return Requests(storages=columns[:, 0], starts=columns[:, 1], nbytes=columns[:, 2])


@st.composite
def rows(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    wanted = []
    for _ in range(draw(st.integers(0, 12))):
        storage = draw(st.sampled_from([3, 5]))
        begin = draw(st.integers(0, len(STORAGES[storage]) - 1))
        wanted.append((storage, begin, draw(st.integers(1, len(STORAGES[storage]) - begin))))
    return wanted


@given(rows(), st.integers(1, 110))
def test_every_buffer_gets_its_slice_whatever_the_chunks(wanted: list[tuple[int, int, int]], step: int) -> None:
    scatter = Scatter(requests(wanted))
    received = [b""] * len(wanted)
    for begin in range(0, 100, step):  # the storages alternate
        for storage, data in STORAGES.items():
            for buffer, piece in scatter.pieces(storage, data[begin : begin + step]):
                assert not isinstance(piece, Zeros)
                received[buffer] += bytes(piece)
    scatter.finish()
    assert received == [STORAGES[s][begin : begin + nbytes] for s, begin, nbytes in wanted]


def test_a_storage_that_nobody_wants_gives_nothing() -> None:
    scatter = Scatter(requests([(3, 0, 1)]))
    assert scatter.wants(3)
    assert not scatter.wants(5)
    assert list(scatter.pieces(5, b"abc")) == []


def test_pieces_are_views_of_the_chunk() -> None:
    chunk = memoryview(bytearray(b"abcdef"))
    ((_, piece),) = Scatter(requests([(0, 2, 3)])).pieces(0, chunk)
    chunk[2] = ord("X")
    assert bytes(piece) == b"Xde"  # type: ignore[arg-type]


def test_runs_of_zeros_stay_runs_of_zeros() -> None:
    scatter = Scatter(requests([(0, 2, 2**40), (0, 0, 1)]))
    assert list(scatter.pieces(0, Zeros(2**41))) == [(1, Zeros(1)), (0, Zeros(2**40))]


def test_a_buffer_that_lacks_bytes_at_the_end_is_noticed() -> None:
    scatter = Scatter(requests([(0, 0, 4), (1, 0, 4)]))
    list(scatter.pieces(0, b"abcd"))
    list(scatter.pieces(1, b"abc"))
    with pytest.raises(TruncatedSourceError, match="1 of 2 buffers"):
        scatter.finish()


def test_a_single_buffer_is_cut_out_of_what_passes() -> None:
    single = SingleBuffer(7, 2, 6)
    pieces = [p for data in (b"a", b"bcd", b"efgh") for p in single.pieces(0, data)]
    assert [(b, bytes(p)) for b, p in pieces] == [(7, b"cd"), (7, b"ef")]  # type: ignore[arg-type]
