"""Unions of ranges are what sets of their bytes make of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stream_pack.format.ranges import fresh_nbytes, starts_apart

RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda r: (r[0], r[0] + r[1])), max_size=8).map(
    sorted
)


@given(RANGES)
def test_bytes_of_a_range_are_fresh_unless_an_earlier_range_has_them(ranges: list[tuple[int, int]]) -> None:
    begins, ends = np.array(ranges, np.int64).reshape(-1, 2).T
    seen: set[int] = set()
    for (begin, end), nbytes in zip(ranges, fresh_nbytes(begins, ends).tolist(), strict=True):
        assert nbytes == len(set(range(begin, end)) - seen)
        seen |= set(range(begin, end))


@given(RANGES.map(lambda ranges: [r for r in ranges if r[0] < r[1]]))
def test_a_range_starts_apart_where_it_shares_no_byte_with_an_earlier_one(ranges: list[tuple[int, int]]) -> None:
    begins, ends = np.array(ranges, np.int64).reshape(-1, 2).T
    seen: set[int] = set()
    for (begin, end), apart in zip(ranges, starts_apart(begins, ends).tolist(), strict=True):
        assert apart == seen.isdisjoint(range(begin, end))
        seen |= set(range(begin, end))
