"""The index: what the generated classes, a foreign reader, see is what went in; what does not hold is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from stream_pack.errors import FormatError, LimitError
from stream_pack.format.align import Alignment
from stream_pack.format.index import (
    NO_BUFFER,
    PACK_NOTE,
    Index,
    _tensor_nbytes,
    decode_index,
    encode_index,
    name_columns,
)
from stream_pack.format.ragged import Ragged
from stream_pack.format.schema.generated import Index as fbs

REGION_NBYTES = 1 << 16


def ints(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def text(*values: str) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    encoded = [value.encode() for value in values]
    return np.cumsum(list(map(len, encoded)), dtype=np.int64), np.frombuffer(b"".join(encoded), np.uint8)


def sound(**changes: object) -> Index:
    """Four tensors by hand: f32 [2, 3] at 0, its row [3] inside at 256 of a longer buffer, i4 [2, 4], and an empty
    one.
    """
    name_ends, names = text("w", "é", "", "b\n")
    note_ends, note_text = text("k", "v", "a", "1", "b", "")
    made = Index(
        block_nbytes=4096,
        alignment=Alignment(small=256, large=16384, large_nbytes=1 << 20),
        dtype_names=("float32", "int4"),
        dtype_bits=np.array([32, 4], np.uint16),
        buffer_offsets=ints(0, 8192),
        buffer_nbytes=ints(5000, 4),
        tensor_buffers=np.array([0, 0, 1, NO_BUFFER], np.uint32),
        tensor_starts=ints(0, 256, 0, 0),
        tensor_dtypes=np.array([0, 0, 1, 0], np.uint8),
        tensor_nbytes=ints(5000, 12, 4, 0),
        dims_ends=ints(2, 3, 5, 7),
        dims=ints(2, 625, 3, 2, 4, 0, 9),
        name_ends=name_ends,
        names=names,
        name_order=np.array([2, 3, 0, 1], np.uint32),
        note_tensors=np.array([1, PACK_NOTE, PACK_NOTE], np.uint32),
        note_ends=note_ends,
        note_text=note_text,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def decoded(made: Index, region_nbytes: int = REGION_NBYTES) -> Index:
    return decode_index(memoryview(encode_index(made)), region_nbytes=region_nbytes)


COLUMNS = {
    "dtype_bits": "DtypeBits",
    "buffer_offsets": "BufferOffsets",
    "buffer_nbytes": "BufferNbytes",
    "tensor_buffers": "TensorBuffers",
    "tensor_starts": "TensorStarts",
    "tensor_dtypes": "TensorDtypes",
    "dims_ends": "DimsEnds",
    "dims": "Dims",
    "name_ends": "NameEnds",
    "names": "Names",
    "name_order": "NameOrder",
    "note_tensors": "NoteTensors",
    "note_ends": "NoteEnds",
    "note_text": "NoteText",
}


def test_the_generated_classes_read_what_was_encoded() -> None:
    # FB#7935, FB#8097: plain 64-bit fields, so that every language sees every buffer
    made = sound()
    foreign = fbs.Index.GetRootAs(encode_index(made))
    assert fbs.Index.IndexBufferHasIdentifier(encode_index(made), 0)
    assert foreign.BlockNbytes() == 4096
    assert (foreign.AlignmentSmall(), foreign.AlignmentLarge(), foreign.LargeNbytes()) == (256, 16384, 1 << 20)
    assert [foreign.DtypeNames(n) for n in range(foreign.DtypeNamesLength())] == [b"float32", b"int4"]
    for ours, theirs in COLUMNS.items():
        count = getattr(foreign, f"{theirs}Length")()
        assert [getattr(foreign, theirs)(n) for n in range(count)] == getattr(made, ours).tolist(), ours


def test_what_was_encoded_decodes_to_the_same_columns() -> None:
    made = sound()
    found = decoded(made)
    for column in (*COLUMNS, "tensor_nbytes"):
        assert np.array_equal(getattr(found, column), getattr(made, column)), column
    assert (found.alignment, found.block_nbytes, found.dtype_names) == (made.alignment, 4096, made.dtype_names)


def test_a_decoded_index_answers_by_number_and_by_name() -> None:
    found = decoded(sound())
    assert len(found) == 4
    assert [found.name(n) for n in range(4)] == ["w", "é", "", "b\n"]
    assert [found.find(name) for name in ("w", "é", "", "b\n")] == [0, 1, 2, 3]
    assert [found.find(name) for name in ("x", "w\0", "e\u0301", "\ud800")] == [None] * 4
    assert [found.shape(n) for n in range(4)] == [(2, 625), (3,), (2, 4), (0, 9)]
    assert [found.offset(n) for n in range(4)] == found.offsets.tolist() == [0, 256, 8192, 0]
    assert [found.dtype_name(n) for n in range(4)] == ["float32", "float32", "int4", "float32"]
    assert found.block_counts.tolist() == [2, 1]
    assert found.checksums_nbytes == 24
    assert found.notes() == {"a": "1", "b": ""}
    assert found.notes(1) == {"k": "v"}
    assert found.notes(0) == {}


def test_an_index_says_where_each_block_is() -> None:
    # Blocks of 4096 bytes: buffer 0 has 5000 bytes, buffer 1 has 4.
    made = sound()
    assert [made.first_block(0), made.first_block(1)] == [0, 2]
    assert [tuple(made.block_range(block)) for block in range(3)] == [(0, 0, 0, 4096), (0, 1, 4096, 5000), (1, 0, 0, 4)]
    assert made.first_blocks.tolist() == [0, 2]


def test_an_index_says_which_tensor_is_the_first_of_a_buffer() -> None:
    assert [sound().first_tensor(0), sound().first_tensor(1)] == [0, 2]


def test_an_index_of_nothing_is_valid() -> None:
    nothing = ints()
    empty = sound(
        dtype_names=(),
        note_tensors=np.empty(0, np.uint32),
        note_text=np.empty(0, np.uint8),
        **{name: nothing for name in COLUMNS if name not in ("note_tensors", "note_text")},
        tensor_nbytes=nothing,
    )
    found = decoded(empty, region_nbytes=0)
    assert (len(found), found.checksums_nbytes, found.notes(), found.find("")) == (0, 0, {}, None)


def u32(*values: int) -> NDArray[np.uint32]:
    return np.array(values, np.uint32)


def u8(*values: int) -> NDArray[np.uint8]:
    return np.array(values, np.uint8)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"block_nbytes": 4097}, "power of two"),
    ({"block_nbytes": 1 << 31}, "power of two"),
    ({"dtype_bits": np.array([32], np.uint16)}, "one number of bits per dtype"),
    ({"dtype_bits": np.array([0, 4], np.uint16)}, "32 bits for the dtype 'float32', found 0"),
    ({"dtype_names": ("float32", "new"), "dtype_bits": np.array([32, 0], np.uint16)}, "bits for the dtype 'new'"),
    ({"tensor_dtypes": u8(0, 0, 1)}, "one dtype per tensor"),
    ({"tensor_dtypes": u8(0, 0, 2, 0)}, "dtype numbers within the table"),
    ({"dims_ends": ints(2, 3, 5)}, "4 ends of dims"),
    ({"dims_ends": ints(3, 2, 5, 7)}, "ascending ends of dims"),
    ({"dims_ends": ints(2, 3, 5, 8)}, "end at 7"),
    ({"dims": ints(2, 625, 3, 2, 4, 0, 9, 1)}, "end at 8"),
    ({"dims": ints(2, 625, 3, 2, 3, 0, 9)}, "whole bytes"),
    ({"dims": ints(2, 625, 3, 2, 4, 0, 2**62 + 1)}, r"dims up to 2\*\*62"),
    ({"dims": ints(2, 625, 3, 2, 4, 0, -1)}, r"dims up to 2\*\*62"),
    ({"dims": ints(2**31, 2**31, 3, 2, 4, 0, 9)}, r"at most 2\*\*62 bytes"),
    ({"dims": ints(2**62, 2**62, 3, 2, 4, 0, 9)}, r"at most 2\*\*62 bytes"),
    ({"dims": ints(2**32, 2**32, 3, 2, 4, 0, 9)}, r"at most 2\*\*62 bytes"),
    ({"dims": ints(2, 626, 3, 2, 4, 0, 9)}, "tensors inside their buffers"),
    ({"dims": ints(2, 625, 3, 2, 4, 1, 9)}, "a buffer for exactly the tensors that have bytes"),
    ({"dims": ints(0, 625, 3, 2, 4, 0, 9)}, "a buffer for exactly the tensors that have bytes"),
    ({"tensor_buffers": u32(0, 0, 2, NO_BUFFER)}, "existing buffers"),
    ({"tensor_buffers": u32(0, 0, 1)}, "one dtype per tensor"),
    ({"tensor_starts": ints(0, 256, 0)}, "one start per tensor"),
    ({"tensor_starts": ints(0, 256, 0, 256)}, "start 0 for tensors of 0 bytes"),
    ({"tensor_starts": ints(0, 257, 0, 0)}, "multiples of their alignment"),
    ({"tensor_starts": ints(0, 4992, 0, 0)}, "inside their buffers"),
    ({"tensor_starts": ints(0, 2**62, 0, 0)}, "inside their buffers"),
    ({"tensor_starts": ints(0, -256, 0, 0)}, r"up to 2\*\*62"),
    ({"buffer_offsets": ints(0)}, "one offset and one length per buffer"),
    ({"buffer_offsets": ints(0, 4096)}, "do not overlap"),
    ({"buffer_offsets": ints(8192, 0)}, "ascending order"),
    ({"buffer_offsets": ints(0, REGION_NBYTES)}, "buffers inside the region"),
    ({"buffer_offsets": ints(0, 2**62)}, "buffers inside the region"),
    ({"buffer_offsets": ints(0, 8193)}, "multiples of their alignment"),
    ({"buffer_nbytes": ints(5000, 2**62)}, "buffers inside the region"),
    ({"buffer_nbytes": ints(5000, -1)}, r"up to 2\*\*62"),
    ({"buffer_nbytes": ints(5000, 0)}, "at least one byte"),
    ({"name_ends": ints(1, 3, 3)}, "4 ends of names"),
    ({"name_ends": ints(1, 2, 3, 5)}, "no end inside a character"),
    ({"name_ends": ints(1, 3, 3, 6)}, "end at 5"),
    ({"names": u8(0x77, 0xFF, 0xA9, 0x62, 0x0A)}, "names in UTF-8"),
    ({"name_order": u32(2, 3, 0)}, "one entry of the name order"),
    ({"name_order": u32(2, 3, 0, 0)}, "a permutation"),
    ({"name_order": u32(2, 3, 0, 4)}, "a permutation"),
    ({"note_tensors": u32(1, 4, PACK_NOTE)}, "of existing tensors"),
    ({"note_tensors": u32(PACK_NOTE, 1, PACK_NOTE)}, "notes sorted"),
    ({"note_tensors": u32(1, PACK_NOTE)}, "4 ends of notes"),
    ({"note_text": u8(0xC3, 0x28, 0x61, 0x31, 0x62)}, "notes in UTF-8"),
]


@pytest.mark.parametrize(("changes", "words"), WRONG, ids=[f"{number}" for number in range(len(WRONG))])
def test_what_does_not_hold_is_refused_with_its_rule(changes: dict[str, Any], words: str) -> None:
    # kekzl/imp#1603, go-huggingface#57, audio.cpp#138, openasr#73, mlx#3364
    with pytest.raises(FormatError, match=words):
        decoded(sound(**changes))


def test_a_dtype_may_be_listed_twice_or_for_no_tensor() -> None:
    found = decoded(
        sound(
            dtype_names=("float32", "int4", "float32", "bool"),
            dtype_bits=np.array([32, 4, 32, 8], np.uint16),
            tensor_dtypes=u8(0, 2, 1, 0),
        )
    )
    assert [found.dtype_name(k) for k in range(4)] == ["float32", "float32", "int4", "float32"]


def test_a_large_tensor_has_to_stand_on_a_page() -> None:
    alignment = Alignment(small=256, large=16384, large_nbytes=5000)
    decoded(sound(alignment=alignment))
    moved = sound(alignment=alignment, buffer_offsets=ints(256, 8192))
    with pytest.raises(FormatError, match="multiples of their alignment"):
        decoded(moved)


def test_buffers_may_fill_the_region_to_its_last_byte() -> None:
    decoded(sound(), region_nbytes=8196)
    with pytest.raises(FormatError, match="inside the region"):
        decoded(sound(), region_nbytes=8195)


@given(
    dims=st.lists(
        st.one_of(st.integers(0, 4), st.integers(0, 2**62), st.sampled_from([2**31, 2**32, 2**62])), max_size=6
    ),
    bits=st.sampled_from([4, 8, 16, 32, 64, 128]),
)
def test_lengths_are_exact_or_refused(dims: list[int], bits: int) -> None:
    # ET#19268, PT#181310, PT#47201: the product wraps in 64 bits
    elements = math.prod(dim or 1 for dim in dims)
    allowed = elements <= 2**62 and elements * bits // 8 <= 2**62 and (dims[-1] if dims else 1) * bits % 8 == 0
    exact = math.prod(dims) * bits // 8
    column = Ragged(np.array(dims, np.int64), np.array([len(dims)], np.int64))
    if not allowed:
        with pytest.raises(FormatError):
            _tensor_nbytes(np.array([bits], np.uint16), column)
    else:
        assert _tensor_nbytes(np.array([bits], np.uint16), column).tolist() == [exact]


def test_an_index_that_would_reach_2_gib_is_refused_before_it_is_built() -> None:
    # FB#234: our own limit, never an error from inside the builder
    blob = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (2**31,), (0,))
    with pytest.raises(LimitError, match="2 GiB"):
        encode_index(sound(names=blob))


@given(names=st.lists(st.text(max_size=6), unique=True, max_size=20))
def test_every_name_is_found_and_no_other(names: list[str]) -> None:
    columns = name_columns(names)
    assert [names[number].encode() for number in columns["name_order"].tolist()] == sorted(
        name.encode() for name in names
    )
    found = sound(**columns, tensor_buffers=np.zeros(len(names), np.uint32))
    assert [found.find(name) for name in names] == list(range(len(names)))
    assert found.find("no such name") is None
