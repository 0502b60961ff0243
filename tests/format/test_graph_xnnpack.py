"""The graph of an XNNPACK payload: what flatc's classes and ExecuTorch's samples say; forged ones harm nobody."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_pack.errors import FormatError, LimitError
from stream_pack.format import graph_xnnpack
from stream_pack.format.dtypes import BY_NAME, DTYPES
from stream_pack.format.schema.generated import XnnGraph as fbs
from tests.format.test_graph_mps import SHAPES, WHOLE, index_of
from tests.support.damage import Share, assert_refusal, check_each, cut, flipped, may_refuse, some_or_all

GOLD = Path(__file__).parent.parent / "vectors" / "executorch" / "xnnpack"
DATATYPES = {
    # XNNPACK's datatypes, in the order of ExecuTorch's schema.
    name: number
    for number, name in enumerate(
        "invalid fp32 fp16 qint8 quint8 qint32 qcint8 qcint32 qcint4 qdint8 qbint4 qpint8 int32 pfp32 bf16".split()
    )
}


@given(st.lists(st.tuples(st.sampled_from(WHOLE), SHAPES), max_size=12))
def test_a_foreign_reader_sees_every_tensor_behind_the_reserved_entry(
    tensors: list[tuple[str, tuple[int, ...]]],
) -> None:
    index = index_of(*tensors)
    data = graph_xnnpack.encode(index)
    bits = {dtype.name: dtype.bits for dtype in DTYPES}
    assert fbs.XnnGraph.XnnGraphBufferHasIdentifier(data, 0)
    root = fbs.XnnGraph.GetRootAs(data)
    assert root.Version() == b"0"
    # The runtime dereferences them without a null check.
    for vector in ("Xnodes", "Xvalues", "InputIds", "OutputIds"):
        assert not getattr(root, f"{vector}IsNone")()
        assert getattr(root, f"{vector}Length")() == 0
    constants = [root.ConstantData(number) for number in range(root.ConstantDataLength())]
    assert [constant.NamedKey() for constant in constants] == [None] * len(constants)
    lengths = [int(np.prod(shape, dtype=object)) * bits[dtype] // 8 for dtype, shape in tensors]
    places = zip(index.offsets.tolist(), lengths, strict=True)
    assert [(constant.Offset(), constant.Size()) for constant in constants] == [(0, 0), *places]


def test_positions_beyond_4_gib_are_exact() -> None:
    # FB#7536
    index = index_of(("uint8", (2**33 + 5,)), ("float64", (2**40,)), ("bool", (1,)))
    root = fbs.XnnGraph.GetRootAs(graph_xnnpack.encode(index))
    constants = [root.ConstantData(number) for number in range(1, 4)]
    assert [constant.Size() for constant in constants] == [2**33 + 5, 2**43, 1]
    assert constants[1].Offset() == 2**33 + 16384
    assert constants[2].Offset() == 2**33 + 16384 + 2**43


@given(st.lists(st.tuples(st.sampled_from(WHOLE), SHAPES), max_size=12))
def test_what_was_encoded_agrees_with_its_index(tensors: list[tuple[str, tuple[int, ...]]]) -> None:
    index = index_of(*tensors)
    data = memoryview(graph_xnnpack.encode(index))
    assert not graph_xnnpack.disagreements(data, index).any()
    found = graph_xnnpack.decode(data)
    assert [found.key(number) for number in range(1 + len(tensors))] == [None] * (1 + len(tensors))
    assert len(found.values.constants) == 0


INDEX = index_of(("float32", (2, 3)), ("int64", ()), ("bool", (0, 7)))
SOUND = graph_xnnpack.encode(INDEX)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("slot", ["offset", "size"])
def test_each_thing_that_differs_is_told_of_its_tensor(number: int, slot: str) -> None:
    data = bytearray(SOUND)
    root = fbs.XnnGraph.GetRootAs(data)
    position = root.ConstantData(number)._tab.Pos
    data[position + (8 if slot == "offset" else 16) + 5] ^= 1
    wanted = [other == number for other in (1, 2, 3)]
    assert graph_xnnpack.disagreements(memoryview(data), INDEX).tolist() == wanted


def test_a_tensor_with_a_key_is_told() -> None:
    data = bytearray(SOUND)
    position = fbs.XnnGraph.GetRootAs(data).ConstantData(2)._tab.Pos
    # The table gets a vtable of its own, with a third slot, and its unused word refers to the key.
    vtable, key = len(data), len(data) + 12
    data += struct.pack("<5H2x", 10, 24, 8, 16, 4) + struct.pack("<I2s2x", 1, b"k\0")
    struct.pack_into("<iI", data, position, position - vtable, key - (position + 4))
    assert graph_xnnpack.decode(memoryview(data)).key(2) == "k"
    assert graph_xnnpack.disagreements(memoryview(data), INDEX).tolist() == [False, True, False]


def test_a_graph_of_fewer_constants_than_tensors_is_refused() -> None:
    with pytest.raises(FormatError, match=r"4 constants.*for 4 tensors"):
        graph_xnnpack.disagreements(memoryview(SOUND), index_of(*[("float32", ())] * 4))


def test_no_flipped_byte_does_more_than_an_error_of_ours() -> None:
    def check(changed: bytes) -> None:
        with may_refuse(FormatError):
            found = graph_xnnpack.decode(memoryview(changed))
            [found.key(number) for number in range(len(found.offsets))]
            assert 4 * len(found.offsets) <= len(SOUND)

    check_each(flipped(SOUND, masks=(1, 2, 4, 8, 16, 32, 64, 128, 255)), check)


def test_no_cut_does_more_than_an_error_of_ours() -> None:
    def check(data: bytes) -> None:
        with pytest.raises(FormatError) as caught:
            graph_xnnpack.decode(memoryview(data))
        assert_refusal(caught.value, FormatError)

    check_each(cut(SOUND, range(0, len(SOUND), 4)), check)


def test_a_graph_past_2_gib_is_refused_before_it_is_built() -> None:
    class Many:
        def __len__(self) -> int:
            return 2**30

    with pytest.raises(LimitError, match="below 2 GiB"):
        graph_xnnpack.encode(Many())  # type: ignore[arg-type]


def gold() -> Iterator[tuple[bytes, Any]]:
    """The flatbuffer of each sample, and what ExecuTorch's own schema and flatc made of it."""
    for path in sorted(GOLD.glob("*.graph.json")):
        payload = path.with_name(path.name.replace(".graph.json", ".xh00")).read_bytes()
        begin, nbytes = struct.unpack_from("<II", payload, 10)
        yield payload[begin : begin + nbytes], json.loads(path.read_text())


SAMPLES = list(gold())
NAMES = [path.name for path in sorted(GOLD.glob("*.graph.json"))]


def wanted_values(graph: Any) -> Iterator[tuple[int, int, int, list[int]]]:
    """Constant, datatype, num_dims and dims of every value and table of scales that has one."""
    for value in graph["xvalues"]:
        union = value["xvalue_union"]
        tensor = union.get("tensor_value", union)
        if tensor["constant_buffer_idx"]:
            datatype = DATATYPES[tensor["datatype"].removeprefix("xnn_datatype_")]
            yield tensor["constant_buffer_idx"], datatype, tensor["num_dims"], tensor["dims"]
        scales = union.get("quant_params", {})
        if scales.get("scale_buffer_idx"):
            grouped = union["quant_params_type"] == "PerChannelGroupQuant"
            kind = DATATYPES["bf16" if grouped else "fp32"]
            yield scales["scale_buffer_idx"], kind, 1, [scales["num_scales"]]


@pytest.mark.parametrize(("data", "graph"), SAMPLES, ids=NAMES)
def test_the_constants_of_executorchs_samples_are_what_its_own_schema_says(data: bytes, graph: Any) -> None:
    found = graph_xnnpack.decode(memoryview(data))
    constants = graph["constant_data"]
    assert found.offsets.tolist() == [constant["offset"] for constant in constants]
    assert found.nbytes.tolist() == [constant["size"] for constant in constants]
    keys = [found.key(number) for number in range(len(constants))]
    assert keys == [constant.get("named_key") or None for constant in constants]
    values = found.values
    dims = [values.dims.row(row) for row in range(len(values.dims))]
    columns = (values.constants, values.datatypes, values.num_dims)
    rows = zip(*(column.tolist() for column in columns), map(np.ndarray.tolist, dims), strict=True)
    assert sorted(rows) == sorted(wanted_values(graph))


@pytest.mark.parametrize(("data", "graph"), SAMPLES, ids=NAMES)
def test_the_constants_of_samples_have_the_lengths_of_their_dtypes(data: bytes, graph: Any) -> None:
    found = graph_xnnpack.decode(memoryview(data))
    begin = 0
    rows = zip(found.values.constants.tolist(), found.values.datatypes.tolist(), strict=True)
    for (constant, datatype), end in zip(rows, found.values.dims.ends.tolist(), strict=True):
        bits = DTYPES[BY_NAME[graph_xnnpack.DTYPE_NAMES[datatype]]].bits
        elements = int(np.prod(found.values.dims.values[begin:end], dtype=object))
        begin = end
        assert int(found.nbytes[constant]) == elements * bits // 8


@some_or_all(5)
def test_a_sample_with_a_byte_changed_gives_an_error_of_ours_or_a_graph_in_bounds(share: Share) -> None:
    data, _ = SAMPLES[NAMES.index("linear_dynamic_qcs8.0.graph.json")]

    def check(changed: bytes) -> None:
        with may_refuse(FormatError):
            found = graph_xnnpack.decode(memoryview(changed))
            assert int(found.values.constants.max(initial=0)) < max(len(found.offsets), 1)
            assert len(found.values.dims.values) * 4 <= 3 * len(data)

    for number, mask in enumerate((1, 2, 0x80, 0xFF)):
        places = [place for place in range(len(data)) if place // 4 % 4 == number]
        check_each(flipped(data, places, masks=(mask,), share=share), check)


def test_the_identifier_of_the_runtimes_schema_is_known_too() -> None:
    data = SOUND.replace(b"XN01", b"XN00")
    assert len(graph_xnnpack.decode(memoryview(data)).offsets) == 4
    with pytest.raises(FormatError, match="XN01 or XN00"):
        graph_xnnpack.decode(memoryview(SOUND.replace(b"XN01", b"XN02")))
