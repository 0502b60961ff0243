"""Flatbuffers written by columns, read back by the flatbuffers package."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flatbuffers import encode, number_types
from flatbuffers.table import Table
from hypothesis import given
from hypothesis import strategies as st

from stream_pack.errors import LimitError
from stream_pack.format.flatbuf_write import ColumnWriter, text_words
from stream_pack.format.ragged import Ragged

ROWS = st.lists(
    st.tuples(
        st.integers(0, 2**64 - 1),
        st.integers(0, 2**32 - 1),
        st.binary(max_size=9),
        st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3),
    ),
    max_size=5,
)


@given(ROWS)
def test_tables_are_read_back_by_the_flatbuffers_package(rows: list[Any]) -> None:
    wide, narrow, texts, vectors = ([row[column] for row in rows] for column in range(4))
    text_rows = Ragged.of(np.frombuffer(b"".join(texts), np.uint8), [len(text) for text in texts])
    vector_rows = Ragged.of(
        np.array([value for row in vectors for value in row], np.int32), [len(row) for row in vectors]
    )
    writer = ColumnWriter(b"TEST")
    root_vtable, row_vtable = writer.vtable(12, 4, 0, 8), writer.vtable(28, 8, 16, 20, 24)
    root, label, references = writer.reserve(3), writer.reserve(3), writer.reserve(1 + len(rows))
    writer.align(2)
    places = writer.reserve_each(np.full(len(rows), 8))
    text_places = writer.reserve_each(text_words(text_rows.lengths))
    vector_places = writer.reserve_each(1 + vector_rows.lengths)
    writer.allocate("a test")
    table = writer.root(root_vtable, root)
    table.refer(0, label)
    table.refer(2, references)
    writer.text(label, b"label")
    writer.references(references, places)
    table = writer.tables(row_vtable, places)
    table.u64(0, np.array(wide, np.uint64))
    table.u32(1, np.array(narrow, np.uint32))
    table.refer(2, text_places)
    table.refer(3, vector_places)
    writer.texts(text_places, text_rows)
    writer.vectors(vector_places, vector_rows)

    data = writer.finish()
    assert data[4:8] == b"TEST"
    top = Table(data, encode.Get(number_types.UOffsetTFlags.packer_type, data, 0))
    assert top.String(top.Pos + top.Offset(4)) == b"label"
    assert top.Offset(6) == 0
    field = top.Offset(8)
    assert top.VectorLen(field) == len(rows)
    for number, wanted in enumerate(rows):
        row = Table(data, top.Indirect(top.Vector(field) + 4 * number))
        assert (row.Pos + row.Offset(4)) % 8 == 0
        numbers = [row.Vector(row.Offset(10)) + 4 * k for k in range(row.VectorLen(row.Offset(10)))]
        assert wanted == (
            row.Get(number_types.Uint64Flags, row.Pos + row.Offset(4)),
            row.Get(number_types.Uint32Flags, row.Pos + row.Offset(6)),
            row.String(row.Pos + row.Offset(8)),
            [row.Get(number_types.Int32Flags, position) for position in numbers],
        )


def test_a_flatbuffer_past_2_gib_is_refused_before_it_takes_memory() -> None:
    writer = ColumnWriter(b"TEST")
    writer.reserve(2**29 - 2)  # two words are there already
    with pytest.raises(LimitError, match="a test of 2147483648 bytes: .* below 2 GiB"):
        writer.allocate("a test")
