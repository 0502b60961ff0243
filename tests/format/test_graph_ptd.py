"""The flatbuffer of a .ptd: what flatc's classes and ExecuTorch's samples say, and that forged ones harm nobody."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_pack.errors import FormatError, LimitError, UnsupportedTensorError
from stream_pack.format import graph_ptd
from stream_pack.format.catalog import CatalogBuilder
from stream_pack.format.dtypes import BY_NAME, DTYPES
from stream_pack.format.header_kinds import decode_header
from stream_pack.format.index import Index
from stream_pack.format.layout import Policy, plan
from stream_pack.format.schema.generated import FlatTensor as fbs
from tests.format.test_graph_mps import SHAPES, WHOLE
from tests.support.damage import assert_refusal, check_each, cut, flipped, may_refuse

GOLD = Path(__file__).parent.parent / "vectors" / "executorch" / "ptd"
SCALAR_TYPES = {
    # c10/core/ScalarType.h, as far as ExecuTorch's schema/scalar_type.fbs has them.
    "uint8": 0,
    "int8": 1,
    "int16": 2,
    "int32": 3,
    "int64": 4,
    "float16": 5,
    "float32": 6,
    "float64": 7,
    "bool": 11,
    "bfloat16": 15,
    "float8_e5m2": 23,
    "float8_e4m3fn": 24,
    "float8_e5m2fnuz": 25,
    "float8_e4m3fnuz": 26,
    "uint16": 27,
    "uint32": 28,
    "uint64": 29,
}
# The runtime ends names at a NUL.
NAME = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=9)
TENSORS = st.dictionaries(NAME, st.tuples(st.sampled_from(WHOLE), SHAPES), max_size=12)


def index_of(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Index:
    builder = CatalogBuilder()
    for storage, (name, (dtype, shape)) in enumerate(tensors.items()):
        builder.add(name, BY_NAME[dtype], shape, storage=storage, start=0)
    return plan(builder.build(storages_nbytes=0), Policy()).index


def foreign(data: bytes) -> dict[str, tuple[int, int, tuple[int, list[int], list[int]] | None]]:
    """What flatc's classes read: offset, nbytes, and ScalarType, sizes and dim order where there is a layout."""
    assert fbs.FlatTensor.FlatTensorBufferHasIdentifier(data, 0)
    root = fbs.FlatTensor.GetRootAs(data)
    assert root.Version() == 0
    # The runtime refuses files in which they are absent.
    assert not root.SegmentsIsNone()
    assert not root.NamedDataIsNone()
    found = {}
    for number in range(root.NamedDataLength()):
        entry = root.NamedData(number)
        segment = root.Segments(entry.SegmentIndex())
        layout = entry.TensorLayout()
        if layout is not None:
            # Dereferenced without a null check.
            assert not layout.SizesIsNone()
            assert not layout.DimOrderIsNone()
        found[entry.Key().decode()] = (
            segment.Offset(),
            segment.Size(),
            None
            if layout is None
            else (
                layout.ScalarType(),
                [layout.Sizes(n) for n in range(layout.SizesLength())],
                [layout.DimOrder(n) for n in range(layout.DimOrderLength())],
            ),
        )
    return found


@given(TENSORS)
def test_a_foreign_reader_sees_every_tensor(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    index = index_of(tensors)
    bits = {dtype.name: dtype.bits for dtype in DTYPES}
    found = foreign(graph_ptd.encode(index))
    assert list(found) == list(tensors)
    for (name, (dtype, shape)), offset in zip(tensors.items(), index.offsets.tolist(), strict=True):
        nbytes = int(np.prod(shape, dtype=object)) * bits[dtype] // 8
        number = SCALAR_TYPES.get(dtype)
        layout = None if number is None else (number, list(shape), list(range(len(shape))))
        assert found[name] == (offset, nbytes, layout)


@given(TENSORS)
def test_segments_are_distinct_and_sorted_by_offset(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    root = fbs.FlatTensor.GetRootAs(graph_ptd.encode(index_of(tensors)))
    segments = [root.Segments(number) for number in range(root.SegmentsLength())]
    places = [(segment.Offset(), segment.Size()) for segment in segments]
    assert places == sorted(set(places))


def test_tied_tensors_share_a_segment_and_a_part_has_its_own() -> None:
    builder = CatalogBuilder()
    float32 = BY_NAME["float32"]
    builder.add("whole", float32, (256, 8), storage=0, start=0)
    builder.add("tied", float32, (8, 256), storage=0, start=0)
    builder.add("rows", float32, (64, 8), storage=0, start=2048)
    builder.add("none", float32, (0, 8), storage=0, start=0)
    index = plan(builder.build(storages_nbytes=0), Policy()).index
    data = graph_ptd.encode(index)
    root = fbs.FlatTensor.GetRootAs(data)
    assert root.SegmentsLength() == 3
    found = foreign(data)
    assert {name: place[:2] for name, place in found.items()} == {
        "whole": (0, 8192),
        "tied": (0, 8192),
        "rows": (2048, 2048),
        "none": (0, 0),
    }


def test_dims_that_31_bits_cannot_hold_make_a_blob() -> None:
    for dim, named in ((2**31 - 1, True), (2**31, False)):
        found = foreign(graph_ptd.encode(index_of({"t": ("uint8", (dim, 1))})))
        assert found == {"t": (0, dim, (0, [dim, 1], [0, 1]) if named else None)}


def test_positions_beyond_4_gib_are_exact() -> None:
    # FB#7536
    tensors = {"a": ("uint8", (2**33 + 5,)), "b": ("float64", (2**30, 2**10)), "c": ("bool", (1,))}
    found = foreign(graph_ptd.encode(index_of(tensors)))
    assert found["a"][:2] == (0, 2**33 + 5)
    assert found["b"][:2] == (2**33 + 16384, 2**43)
    assert found["c"][:2] == (2**33 + 16384 + 2**43, 1)


def test_a_name_that_the_runtime_would_cut_is_refused() -> None:
    with pytest.raises(UnsupportedTensorError, match=r"'a\\x00b'") as caught:
        graph_ptd.encode(index_of({"a": ("bool", (1,)), "a\0b": ("bool", (1,))}))
    assert caught.value.tensor == "a\0b"


def test_a_flatbuffer_past_2_gib_is_refused_before_it_is_built() -> None:
    class Long(Index):
        """300 tensors whose names, on paper, have 8 MiB each."""

    index = index_of({f"{number}": ("bool", (1,)) for number in range(300)})
    fields = {name: getattr(index, name) for name in Index.__dataclass_fields__}
    fields["name_ends"] = np.arange(1, 301) * (8 << 20)
    with pytest.raises(LimitError, match="below 2 GiB"):
        graph_ptd.encode(Long(**fields))


INDEX = index_of(
    {"matrix": ("float32", (2, 3)), "step": ("int64", ()), "none": ("bool", (0, 7)), "pairs": ("complex64", (2,))}
)
SOUND = graph_ptd.encode(INDEX)


@given(TENSORS)
def test_what_was_encoded_agrees_with_its_index(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    index = index_of(tensors)
    data = memoryview(graph_ptd.encode(index))
    assert not graph_ptd.disagreements(data, index).any()
    found = graph_ptd.decode(data)
    assert [found.key(entry) for entry in range(len(found))] == list(tensors)


def test_each_thing_that_differs_is_told_of_its_tensor() -> None:
    root = fbs.FlatTensor.GetRootAs(SOUND)
    entry = root.NamedData(0)
    segment = root.Segments(entry.SegmentIndex())
    key = SOUND.index(b"matrix")
    layout = entry.TensorLayout()._tab.Pos
    sizes = SOUND.index(struct.pack("<3I", 2, 2, 3)) + 4
    order = SOUND.index(struct.pack("<I4B", 2, 0, 1, 0, 0)) + 4
    places = {
        "offset": segment._tab.Pos + 8,
        "nbytes": segment._tab.Pos + 16,
        "segment": entry._tab.Pos + 8,
        "key": key,
        "scalar type": layout + 12,
        "sizes": sizes,
        "dim order": order,
    }
    for what, place in places.items():
        changed = bytearray(SOUND)
        changed[place] ^= 1
        wrong = graph_ptd.disagreements(memoryview(changed), INDEX).tolist()
        shared = what == "dim order"  # by all tensors of a rank
        assert wrong == [True, False, shared, False], what
    shorter = bytearray(SOUND)
    struct.pack_into("<I", shorter, key - 4, 5)
    assert graph_ptd.disagreements(memoryview(shorter), INDEX).tolist()[0]


def test_a_blob_where_a_layout_belongs_and_the_other_way_round_are_told() -> None:
    as_floats = index_of(
        {"matrix": ("complex64", (3, 1)), "step": ("int64", ()), "none": ("bool", (0, 7)), "pairs": ("float64", (2,))}
    )
    assert graph_ptd.disagreements(memoryview(SOUND), as_floats).tolist() == [True, False, False, True]


@pytest.mark.parametrize(("names", "words"), [(3, "at least 4"), (5, "has 4 named data")])
def test_another_number_of_names_than_tensors_is_refused(names: int, words: str) -> None:
    index = index_of({f"t{number}": ("bool", (1,)) for number in range(names)})
    with pytest.raises(FormatError, match=words):
        graph_ptd.disagreements(memoryview(SOUND), index)


def test_no_flipped_byte_does_more_than_an_error_of_ours() -> None:
    def check(changed: bytes) -> None:
        with may_refuse(FormatError):
            found = graph_ptd.decode(memoryview(changed))
            [found.key(entry) for entry in range(len(found))]
            assert 4 * len(found) <= len(SOUND)
            assert 4 * len(found.dims.values) <= len(SOUND)
            assert int(found.segments.max(initial=0)) < max(1, len(found.segment_offsets))

    check_each(flipped(SOUND, masks=(1, 2, 4, 8, 16, 32, 64, 128, 255)), check)


def test_no_cut_does_more_than_an_error_of_ours() -> None:
    def check(data: bytes) -> None:
        with pytest.raises(FormatError) as caught:
            graph_ptd.decode(memoryview(data))
        assert_refusal(caught.value, FormatError)

    check_each(cut(SOUND, range(0, len(SOUND), 4)), check)


def test_a_dim_order_of_another_length_than_the_sizes_is_refused() -> None:
    changed = bytearray(SOUND)
    place = SOUND.index(struct.pack("<I4B", 2, 0, 1, 0, 0))
    for length in (1, 3):
        struct.pack_into("<I", changed, place, length)
        with pytest.raises(FormatError, match="differ in length"):
            graph_ptd.decode(memoryview(changed))


def test_many_names_that_share_one_long_text_are_refused() -> None:
    # 100 names of 1000 bytes each would be 100,000 bytes in a file of 10,000.
    tensors = {"n" * 1000: ("bool", (1,)), **{f"t{n}": ("bool", (1,)) for n in range(100)}}
    data = bytearray(graph_ptd.encode(index_of(tensors)))
    root = fbs.FlatTensor.GetRootAs(data)
    long = root.NamedData(0)._tab.Pos + 4
    target = long + struct.unpack_from("<I", data, long)[0]
    for number in range(1, 101):
        field = root.NamedData(number)._tab.Pos + 4
        struct.pack_into("<I", data, field, target - field)
    with pytest.raises(FormatError, match=r"elements in \d+ bytes"):
        graph_ptd.decode(memoryview(data))


@pytest.mark.parametrize("name", ["mlp_portable", "mlp_xnnpack"])
def test_executorchs_samples_are_read_as_flatcs_classes_read_them(name: str) -> None:
    data = (GOLD / f"{name}.ptd").read_bytes()
    header = decode_header(data[:56])
    assert header.graph_nbytes is not None
    found = graph_ptd.decode(memoryview(data)[: header.graph_nbytes])
    wanted = foreign(data)
    assert {
        found.key(k): (
            int(found.segment_offsets[found.segments[k]]),
            int(found.segment_nbytes[found.segments[k]]),
            (int(found.scalar_types[k]), found.dims.row(k).tolist(), found.dim_order.row(k).tolist())
            if found.has_layout[k]
            else None,
        )
        for k in range(len(found))
    } == wanted
    assert len(wanted) == 5


def test_a_sample_holds_the_weights_that_executorch_was_given() -> None:
    data = (GOLD / "mlp_portable.ptd").read_bytes()
    header = decode_header(data[:56])
    found = graph_ptd.decode(memoryview(data)[: header.graph_nbytes])
    with np.load(GOLD / "mlp.io.npz") as weights:
        for entry in range(len(found)):
            wanted = weights["w_" + found.key(entry)]
            segment = found.segments[entry]
            begin = header.region_file_offset + int(found.segment_offsets[segment])
            assert data[begin : begin + int(found.segment_nbytes[segment])] == wanted.tobytes()
