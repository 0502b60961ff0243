"""Rows of different lengths in one column, against lists of lists."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stream_pack.format.ragged import Ragged

ROWS = st.lists(st.lists(st.integers(-5, 5), max_size=3), max_size=6)


def ragged(rows: list[list[int]]) -> Ragged[np.int64]:
    values = np.array([value for row in rows for value in row], np.int64)
    return Ragged.of(values, [len(row) for row in rows])


def lists(found: Ragged[np.int64]) -> list[list[int]]:
    return [found.row(row).tolist() for row in range(len(found))]


@given(ROWS)
def test_rows_and_values_know_each_other(rows: list[list[int]]) -> None:
    column = ragged(rows)
    assert lists(column) == rows
    assert column.lengths.tolist() == [len(row) for row in rows]
    pairs = [(number, place) for number, row in enumerate(rows) for place in range(len(row))]
    assert list(zip(column.rows.tolist(), column.places.tolist(), strict=True)) == pairs
    assert lists(column.astype(np.int64)) == rows


@given(ROWS, st.data())
def test_rows_are_taken_in_any_order_and_by_mask(rows: list[list[int]], data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.sampled_from(range(len(rows))) if rows else st.nothing()))
    taken = ragged(rows).take(np.array(numbers, np.int64))
    assert lists(taken) == [rows[number] for number in numbers]
    mask = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    kept = ragged(rows).take(np.array(mask, bool))
    assert lists(kept) == [row for row, keep in zip(rows, mask, strict=True) if keep]


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=2), st.lists(st.integers(0, 1), max_size=2))))
def test_rows_that_differ_are_found(pairs: list[tuple[list[int], list[int]]]) -> None:
    left, right = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    assert ragged(left).differs(ragged(right)).tolist() == [a != b for a, b in pairs]
