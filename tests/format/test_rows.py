"""Columns read row by row."""

from __future__ import annotations

import numpy as np

from stream_pack.format.rows import rows


def test_rows_are_tuples_of_ints_in_order() -> None:
    count = 10_000  # several steps, the last one short
    found = list(rows(np.arange(count), np.arange(count, dtype=np.uint8)))
    assert found == [(row, row % 256) for row in range(count)]
    assert all(type(value) is int for row in found[::999] for value in row)


def test_there_may_be_none() -> None:
    assert list(rows(np.empty(0, np.int64))) == []
