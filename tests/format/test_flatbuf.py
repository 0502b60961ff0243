"""Reading flatbuffers that may be forged, against the flatbuffers package as the writer of sound ones."""

from __future__ import annotations

import struct

import flatbuffers
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_pack.errors import FormatError
from stream_pack.format.flatbuf import Table, Tables, root_table
from tests.support.damage import check_each, cut, flipped, may_refuse

SCALAR, VECTOR, TEXT, TEXTS, ABSENT = range(5)


def sound(number: int, values: list[int], text: str, texts: list[str]) -> bytes:
    """A table of a u64, a vector of u32, a string and a vector of strings; the fifth slot is absent."""
    builder = flatbuffers.Builder(0)
    offsets = [builder.CreateString(each) for each in texts]
    vector = builder.CreateNumpyVector(np.array(values, np.uint32))
    string = builder.CreateString(text)
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    strings = builder.EndVector()
    builder.StartObject(5)
    builder.PrependUint64Slot(SCALAR, number, 0)
    builder.PrependUOffsetTRelativeSlot(VECTOR, vector, 0)
    builder.PrependUOffsetTRelativeSlot(TEXT, string, 0)
    builder.PrependUOffsetTRelativeSlot(TEXTS, strings, 0)
    builder.Finish(builder.EndObject(), b"TEST")
    return bytes(builder.Output())


def everything(table: Table) -> tuple[int, list[int], str | None, list[str]]:
    return (
        table.scalar(SCALAR, "<Q"),
        table.vector(VECTOR, np.uint32).tolist(),
        table.string(TEXT),
        table.strings(TEXTS, limit=10),
    )


@given(
    number=st.integers(0, 2**64 - 1),
    values=st.lists(st.integers(0, 2**32 - 1), max_size=8),
    text=st.text(max_size=8),
    texts=st.lists(st.text(max_size=4), max_size=4),
)
def test_what_the_flatbuffers_package_wrote_is_read(
    number: int, values: list[int], text: str, texts: list[str]
) -> None:
    table = root_table(memoryview(sound(number, values, text, texts)), b"TEST", "it")
    assert everything(table) == (number, values, text, texts)


def test_absent_fields_are_defaults_and_empty() -> None:
    table = root_table(memoryview(sound(0, [], "", [])), b"TEST", "it")
    for slot in (ABSENT, 5, 1000):
        assert table.scalar(slot, "<Q", 7) == 7
        assert table.vector(slot, np.uint64).tolist() == []
        assert table.string(slot) is None
        assert table.strings(slot, limit=0) == []
        assert table.vector_position(slot, 4) is None


def test_vectors_are_in_place() -> None:
    data = bytearray(sound(1, [1, 2, 3], "", []))
    table = root_table(memoryview(data), b"TEST", "it")
    vector = table.vector(VECTOR, np.uint32)
    place = data.index(struct.pack("<III", 1, 2, 3))
    data[place] = 9
    assert vector.tolist() == [9, 2, 3]


SOUND = sound(2**40, [1, 2, 3], "text", ["a", "bc"])


def read_or_refuse(data: bytes | bytearray, *, or_else: bool = True) -> None:
    """Everything is read and is no more than the file could hold, or the error says of what it speaks."""
    with may_refuse(FormatError, begins="it"):
        _, values, text, texts = everything(root_table(memoryview(data), b"TEST", "it"))
        assert 4 * len(values) + len(text or "") + sum(map(len, texts)) <= 3 * len(data)
        assert or_else


def test_no_flipped_byte_does_more_than_an_error_of_ours() -> None:
    # FB#5098, FB#7303, FB#9121
    check_each(flipped(SOUND, masks=range(1, 256)), read_or_refuse)


def test_no_cut_does_more_than_an_error_of_ours() -> None:
    # Only the zero bytes after the last text are no part of anything.
    end = len(SOUND.rstrip(b"\0"))
    check_each(cut(SOUND, range(len(SOUND))), lambda data: read_or_refuse(data, or_else=len(data) >= end))


@given(st.binary(max_size=64))
def test_random_bytes_with_the_right_identifier_are_an_error_or_a_table(data: bytes) -> None:
    read_or_refuse(data[:4] + b"TEST" + data[4:])


@given(
    changes=st.lists(
        st.tuples(st.integers(0, len(SOUND) // 4 - 1), st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 4, 2**32 - 1])),
        min_size=1,
        max_size=4,
    )
)
def test_no_word_at_an_edge_does_more_than_an_error_of_ours(changes: list[tuple[int, int]]) -> None:
    changed = bytearray(SOUND)
    for word, value in changes:
        struct.pack_into("<I", changed, 4 * word, value)
    struct.pack_into("<4s", changed, 4, b"TEST")
    read_or_refuse(changed)


def test_another_identifier_is_named() -> None:
    with pytest.raises(FormatError, match="expected the identifier ABCD"):
        root_table(memoryview(SOUND), b"ABCD", "it")


def test_more_texts_than_there_may_be_are_refused_before_they_are_read() -> None:
    table = root_table(memoryview(SOUND), b"TEST", "it")
    with pytest.raises(FormatError, match="2 strings, the limit is 1"):
        table.strings(TEXTS, limit=1)


def test_texts_that_share_their_bytes_to_exceed_the_file_are_refused() -> None:
    data = bytearray(sound(0, [], "", ["x" * 200, "", "", "", ""]))
    strings = data.index(struct.pack("<I", 5), 8)
    long = data.index(b"x" * 200) - 4
    for number in range(5):
        field = strings + 4 + 4 * number
        struct.pack_into("<I", data, field, long - field)
    table = root_table(memoryview(data), b"TEST", "it")
    with pytest.raises(FormatError, match="it is broken"):
        table.strings(TEXTS, limit=10)


ROWS = st.lists(
    st.tuples(st.none() | st.integers(1, 2**64 - 1), st.none() | st.lists(st.integers(0, 2**32 - 1), max_size=4)),
    max_size=6,
)


def rows_of(rows: list[tuple[int | None, list[int] | None]]) -> bytes:
    """A root whose only field is a vector of tables, each of a u64 and a vector of u32, both of which may be absent."""
    builder = flatbuffers.Builder(0)
    tables = []
    for number, values in rows:
        vector = None if values is None else builder.CreateNumpyVector(np.array(values, np.uint32))
        builder.StartObject(2)
        if number is not None:
            builder.PrependUint64Slot(0, number, 0)
        if vector is not None:
            builder.PrependUOffsetTRelativeSlot(1, vector, 0)
        tables.append(builder.EndObject())
    builder.StartVector(4, len(tables), 4)
    for table in reversed(tables):
        builder.PrependUOffsetTRelative(table)
    vector = builder.EndVector()
    builder.StartObject(1)
    builder.PrependUOffsetTRelativeSlot(0, vector, 0)
    builder.Finish(builder.EndObject(), b"TEST")
    return bytes(builder.Output())


def tables_of(data: bytes | bytearray) -> Tables:
    return root_table(memoryview(data), b"TEST", "it").tables(0)


@given(ROWS)
def test_many_tables_are_read_side_by_side(rows: list[tuple[int | None, list[int] | None]]) -> None:
    tables = tables_of(rows_of(rows))
    assert len(tables) == len(rows)
    assert tables.scalars(0, np.dtype("<u8")).tolist() == [number or 0 for number, _ in rows]
    found = tables.vectors(1, np.dtype("<u4"), longest=4)
    assert found.values.tolist() == [value for _, row in rows for value in row or []]
    assert found.lengths.tolist() == [len(row or []) for _, row in rows]
    assert (tables.targets(1) > 0).tolist() == [row is not None for _, row in rows]
    assert tables.scalars(7, np.dtype("<u8")).tolist() == [0] * len(rows)


def test_of_many_tables_only_the_first_are_read_when_so_asked() -> None:
    data = rows_of([(1, None), (2, None), (3, None)])
    table = root_table(memoryview(data), b"TEST", "it")
    assert table.tables(0, most=2).scalars(0, np.dtype("<u8")).tolist() == [1, 2]


def test_a_field_behind_the_end_of_its_table_is_refused() -> None:
    data = bytearray(rows_of([(5, None), (6, None)]))
    (root,) = struct.unpack_from("<I", data)
    (field,) = struct.unpack_from("<H", data, root - struct.unpack_from("<i", data, root)[0] + 4)
    vector = root + field + struct.unpack_from("<I", data, root + field)[0]
    table = vector + 4 + struct.unpack_from("<I", data, vector + 4)[0]
    vtable = table - struct.unpack_from("<i", data, table)[0]
    # nbytes of the vtable and of the table, and where in it the u64 stands: at its end.
    _, nbytes, number = struct.unpack_from("<HHH", data, vtable)
    assert number + 8 == nbytes
    struct.pack_into("<H", data, vtable + 2, nbytes - 1)
    with pytest.raises(FormatError, match="a field is outside its table"):
        tables_of(data).scalars(0, np.dtype("<u8"))


def test_a_vector_that_reaches_past_the_end_is_refused_though_all_together_would_fit() -> None:
    data = bytearray(rows_of([(None, [7, 8, 9])]))
    place = data.index(struct.pack("<4I", 3, 7, 8, 9))
    room = (len(data) - place - 4) // 4
    struct.pack_into("<I", data, place, room)
    tables_of(data).spans(1, 4)
    struct.pack_into("<I", data, place, room + 1)
    with pytest.raises(FormatError, match="a vector ends after"):
        tables_of(data).spans(1, 4)


def test_a_vector_longer_than_the_limit_is_refused() -> None:
    with pytest.raises(FormatError, match="a vector of 3, the limit is 2"):
        tables_of(rows_of([(None, [7, 8, 9])])).vectors(1, np.dtype("<u4"), longest=2)


def test_a_table_that_has_to_be_there_and_is_not_is_an_error() -> None:
    tables = tables_of(rows_of([(None, [1]), (None, None)]))
    with pytest.raises(FormatError, match="a table is missing"):
        tables.tables(1, np.array([0, 1]))
