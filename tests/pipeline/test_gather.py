"""Windows over strided arrays: row-major order, and never more than a window at once."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_pack.pipeline.gather import row_windows, strided_chunks

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@given(SHAPES, st.sampled_from([2, 4, 8]), st.integers(1, 60))
def test_windows_in_order_are_the_whole_array(shape: tuple[int, ...], itemsize: int, window_nbytes: int) -> None:
    array = np.arange(prod(shape), dtype=f"<u{itemsize}").reshape(shape)
    windows = [array[index].ravel() for index in row_windows(shape, itemsize, window_nbytes)]
    joined = np.concatenate([*windows, np.empty(0, array.dtype)])
    assert joined.tolist() == list(range(prod(shape)))
    for window in windows:
        assert window.nbytes <= max(window_nbytes, itemsize)


@given(SHAPES, st.permutations(range(4)), st.integers(1, 50))
def test_chunks_of_a_permuted_array_are_its_row_major_bytes(
    shape: tuple[int, ...], axes: list[int], chunk_nbytes: int
) -> None:
    array = np.arange(prod(shape), dtype="<u2").reshape(shape)
    permuted = array.transpose([axis for axis in axes if axis < array.ndim])
    chunks = list(strided_chunks(permuted, chunk_nbytes=chunk_nbytes))
    assert b"".join(chunks) == permuted.tobytes()


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u4", "<u8", "V16"])
@pytest.mark.parametrize("axes", [(2, 1, 0), (1, 2, 0), (2, 0, 1)])
def test_large_windows_are_copied_in_slabs_and_are_the_same_bytes(axes: tuple[int, ...], dtype: str) -> None:
    data = np.random.default_rng(0).bytes(45 * 67 * 130 * np.dtype(dtype).itemsize)
    permuted = np.frombuffer(data, dtype).reshape(45, 67, 130).transpose(axes)
    assert b"".join(strided_chunks(permuted, chunk_nbytes=1_000_000)) == permuted.tobytes()


def test_an_element_expanded_to_a_tebibyte_yields_windows_at_once() -> None:
    array = np.broadcast_to(np.array([7], "u1"), (1 << 40,))
    assert bytes(next(strided_chunks(array, chunk_nbytes=5))) == b"\7" * 5
