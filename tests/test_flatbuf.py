"""Reading flatbuffers that may be forged, against the flatbuffers package as the writer of sound ones."""

from __future__ import annotations

import struct

import flatbuffers
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_pack.errors import FormatError
from stream_pack.flatbuf import Table, root_table

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


@pytest.mark.parametrize("place", range(len(SOUND)))
def test_no_flipped_byte_does_more_than_an_error_of_ours(place: int) -> None:
    # FB#5098, FB#7303, FB#9121
    for value in range(256):
        changed = bytearray(SOUND)
        changed[place] = value
        try:
            everything(root_table(memoryview(bytes(changed)), b"TEST", "it"))
        except FormatError as error:
            assert str(error).startswith("it")  # noqa: PT017 - most changes are harmless, and raise nothing


@pytest.mark.parametrize("nbytes", range(len(SOUND)))
def test_no_cut_does_more_than_an_error_of_ours(nbytes: int) -> None:
    try:
        everything(root_table(memoryview(SOUND[:nbytes]), b"TEST", "it"))
    except FormatError:
        return
    # Only the zero bytes after the last text are no part of anything.
    assert not SOUND[nbytes:].strip(b"\0")


@given(st.binary(max_size=64))
def test_random_bytes_with_the_right_identifier_are_an_error_or_a_table(data: bytes) -> None:
    try:
        everything(root_table(memoryview(data[:4] + b"TEST" + data[4:]), b"TEST", "it"))
    except FormatError:
        pass


@given(
    changes=st.lists(
        st.tuples(
            st.integers(0, len(SOUND) // 4 - 1),
            st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 4, 2**32 - 1]),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_no_word_at_an_edge_does_more_than_an_error_of_ours(changes: list[tuple[int, int]]) -> None:
    changed = bytearray(SOUND)
    for word, value in changes:
        struct.pack_into("<I", changed, 4 * word, value)
    struct.pack_into("<4s", changed, 4, b"TEST")
    try:
        everything(root_table(memoryview(changed), b"TEST", "it"))
    except FormatError:
        pass


def test_another_identifier_is_named() -> None:
    with pytest.raises(FormatError, match="expected the identifier ABCD"):
        root_table(memoryview(SOUND), b"ABCD", "it")


def test_more_texts_than_there_may_be_are_refused_before_they_are_read() -> None:
    table = root_table(memoryview(SOUND), b"TEST", "it")
    with pytest.raises(FormatError, match="2 texts where at most 1"):
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
