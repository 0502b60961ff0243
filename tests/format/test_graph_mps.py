"""The graph: what the generated classes, a foreign reader, see in it; and that forged ones harm nobody."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_pack.errors import FormatError, LimitError
from stream_pack.format import graph_mps
from stream_pack.format.catalog import CatalogBuilder
from stream_pack.format.dtypes import DTYPES
from stream_pack.format.index import Index
from stream_pack.format.layout import Policy, plan
from stream_pack.format.schema.generated import Graph as fbs
from tests.support.damage import Share, check_each, cut, flipped, may_refuse, some_or_all


def index_of(*tensors: tuple[str, tuple[int, ...]]) -> Index:
    numbers = {dtype.name: number for number, dtype in enumerate(DTYPES)}
    builder = CatalogBuilder()
    for storage, (dtype, shape) in enumerate(tensors):
        builder.add(f"t{storage}", numbers[dtype], shape, storage=storage, start=0)
    return plan(builder.build(storages_nbytes=0), Policy()).index


def foreign(data: bytes) -> list[dict[str, object]]:
    """What flatc's classes read: the value of every constant."""
    assert fbs.Graph.GraphBufferHasIdentifier(data, 0)
    root = fbs.Graph.GetRootAs(data)
    values = []
    for number in range(root.ConstantIdsLength()):
        value = root.MpsValues(root.ConstantIds(number))
        values.append(
            {
                "datatype": value.Datatype(),
                "num_dims": value.NumDims(),
                "dims": [value.Dims(n) for n in range(value.DimsLength())],
                "nbytes": value.ConstantBufferSize(),
                "offset": value.SegmentOffset(),
            }
        )
        assert not value.ConstantBuffer().StorageIsNone()
        assert value.ConstantBuffer().StorageLength() == 0
    return values


SHAPES = st.lists(st.integers(0, 3), max_size=5).map(tuple)
WHOLE = [dtype.name for dtype in DTYPES if dtype.bits >= 8]


@given(st.lists(st.tuples(st.sampled_from(WHOLE), SHAPES), max_size=12))
def test_a_foreign_reader_sees_every_tensor(tensors: list[tuple[str, tuple[int, ...]]]) -> None:
    index = index_of(*tensors)
    data = graph_mps.encode(index)
    by_name = {dtype.name: dtype for dtype in DTYPES}
    values = foreign(data)
    assert len(values) == len(tensors)
    for value, (dtype, shape), offset in zip(values, tensors, index.offsets.tolist(), strict=True):
        named = by_name[dtype].mps != 0
        assert value == {
            "datatype": by_name[dtype].mps,
            "num_dims": len(shape) if named else 0,
            "dims": list(shape) if named else [],
            "nbytes": int(np.prod(shape, dtype=object)) * by_name[dtype].bits // 8,
            "offset": offset,
        }
    root = fbs.Graph.GetRootAs(data)
    assert root.Version() == b"0"
    for vector in ("MpsNodes", "InputIds", "OutputIds", "MpsValues", "ConstantIds"):
        # The device dereferences them without a null check.
        assert not getattr(root, f"{vector}IsNone")()
    assert (root.MpsNodesLength(), root.InputIdsLength(), root.OutputIdsLength()) == (0, 0, 0)
    assert (root.ConstantSegment().Offset(), root.ConstantSegment().Size()) == (0, 0)


def test_dims_that_31_bits_cannot_hold_make_the_value_invalid() -> None:
    for dim, named in ((2**31 - 1, True), (2**31, False)):
        (value,) = foreign(graph_mps.encode(index_of(("uint8", (dim, 1)))))
        assert value["datatype"] == (11 if named else 0)
        assert value["dims"] == ([dim, 1] if named else [])
        assert value["nbytes"] == dim


def test_positions_beyond_4_gib_are_exact() -> None:
    # FB#7536, ET#4574
    index = index_of(("uint8", (2**33 + 5,)), ("float64", (2**40,)), ("bool", (1,)))
    values = foreign(graph_mps.encode(index))
    assert [value["offset"] for value in values] == index.offsets.tolist()
    assert values[1]["offset"] == 2**33 + 16384
    assert [value["nbytes"] for value in values] == [2**33 + 5, 2**43, 1]
    assert len(graph_mps.encode(index)) < 1024  # FB#7391: the flatbuffer does not grow with the weights


@given(st.lists(st.tuples(st.sampled_from(WHOLE), SHAPES), max_size=12))
def test_what_was_encoded_decodes_to_what_is_expected(tensors: list[tuple[str, tuple[int, ...]]]) -> None:
    index = index_of(*tensors)
    found, wanted = (graph_mps.decode(memoryview(graph_mps.encode(index))), graph_mps.expected_values(index))
    for field in ("ids", "datatypes", "num_dims", "nbytes", "offsets"):
        assert np.array_equal(getattr(found, field), getattr(wanted, field)), field
    assert np.array_equal(found.dims.values, wanted.dims.values)
    assert np.array_equal(found.dims.ends, wanted.dims.ends)


SOUND = graph_mps.encode(index_of(("float32", (2, 3)), ("int64", ()), ("bool", (0, 7))))


@some_or_all(23)
def test_no_flipped_byte_does_more_than_an_error_of_ours(share: Share) -> None:
    def check(changed: bytes) -> None:
        with may_refuse(FormatError):
            values = graph_mps.decode(memoryview(changed))
            assert len(values.ids) <= 3
            assert len(values.dims.values) * 4 <= len(SOUND)

    check_each(flipped(SOUND, masks=range(1, 256), share=share), check)


def test_no_cut_does_more_than_an_error_of_ours() -> None:
    def check(data: bytes) -> None:
        with may_refuse(FormatError):
            graph_mps.decode(memoryview(data))
            assert len(SOUND) - len(data) <= 24  # only the empty Buffer at the end is not looked at

    check_each(cut(SOUND, range(0, len(SOUND), 4)), check)


def test_many_values_that_share_one_long_vector_of_dims_are_refused() -> None:
    # A table of 64 dims that 1000 values refer to would be 64,000 dims.
    index = index_of(("uint8", (1,) * 64), *[("uint8", ())] * 1000)
    data = bytearray(graph_mps.encode(index))
    words = np.frombuffer(data, "<u4").copy()
    root = int(words[0]) // 4
    values = root + 3 + int(words[root + 3]) // 4
    first = values + 1
    target = first + int(words[first]) // 4
    for number in range(1001):
        words[first + number] = 4 * (target - (first + number))
    with pytest.raises(FormatError, match=r"elements in \d+ bytes"):
        graph_mps.decode(memoryview(words.tobytes()))


def test_constants_may_not_outnumber_the_values() -> None:
    data = bytearray(SOUND)
    ids = SOUND.index(struct.pack("<4I", 3, 0, 1, 2))
    struct.pack_into("<I", data, ids, 4)
    with pytest.raises(FormatError, match="4 constant ids"):
        graph_mps.decode(memoryview(data))
    struct.pack_into("<Ii", data, ids, 3, -1)
    with pytest.raises(FormatError, match="from -1"):
        graph_mps.decode(memoryview(data))


def test_one_value_may_not_be_many_constants() -> None:
    data = bytearray(graph_mps.encode(index_of(*[("float32", (2, 3))] * 4)))
    words = np.frombuffer(data, "<u4").copy()
    root = int(words[0]) // 4
    values, ids = (root + slot + int(words[root + slot]) // 4 for slot in (3, 6))
    assert words[values] == words[ids] == 4
    words[values] = 1
    words[ids + 1 : ids + 5] = 0
    with pytest.raises(FormatError, match="4 constant ids from 0 to 0 for 1 values"):
        graph_mps.decode(memoryview(words.tobytes()))


def test_a_vtable_for_every_value_is_read_as_if_they_shared_one() -> None:
    count = 1025
    sound = graph_mps.encode(index_of(*[("float32", ())] * count))
    words = np.frombuffer(sound + bytes(16 * count), "<u4").copy()
    root = int(words[0]) // 4
    first = root + 3 + int(words[root + 3]) // 4 + 1
    for number in range(count):
        value = first + number + int(words[first + number]) // 4
        vtable = value - int(words[value]) // 4
        own = len(sound) // 4 + 4 * number
        words[own : own + 4] = words[vtable : vtable + 4]
        words[value] = (4 * (value - own)) % 2**32
    found, wanted = (graph_mps.decode(memoryview(words.tobytes())), graph_mps.decode(memoryview(sound)))
    for field in ("ids", "datatypes", "num_dims", "nbytes", "offsets"):
        assert np.array_equal(getattr(found, field), getattr(wanted, field)), field
    assert np.array_equal(found.dims.values, wanted.dims.values)
    assert np.array_equal(found.dims.ends, wanted.dims.ends)


def test_constants_that_nobody_asked_for_are_not_decoded() -> None:
    index = index_of(("float32", (2, 3)), ("int64", ()), ("bool", (0, 7)))
    data = bytearray(graph_mps.encode(index))
    whole = graph_mps.decode(memoryview(data))
    field = struct.unpack_from("<I", data)[0] + 12  # of the root table: mps_values
    values = field + struct.unpack_from("<I", data, field)[0]
    assert struct.unpack_from("<I", data, values) == (3,)
    struct.pack_into("<I", data, values + 4 + 2 * 4, 2**31)  # the third leads out of the graph
    with pytest.raises(FormatError, match="points outside"):
        graph_mps.decode(memoryview(data))
    found = graph_mps.decode(memoryview(data), most=2)
    assert found.ids.tolist() == [0, 1]
    assert found.nbytes.tolist() == whole.nbytes[:2].tolist() == [24, 8]
    assert found.dims.values.tolist() == [2, 3]


def test_a_graph_past_2_gib_is_refused_before_it_is_built() -> None:
    # A stand-in for 40 million tensors: only its length is looked at before the limit is.
    class Many:
        def __len__(self) -> int:
            return 2**31

    with pytest.raises(LimitError, match="31 bits"):
        graph_mps.encode(Many())  # type: ignore[arg-type]
