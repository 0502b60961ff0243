"""safetensors as a source: against the safetensors package, and against headers made by hand."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from stream_pack.errors import (
    LimitError,
    SourceError,
    TruncatedSourceError,
    UnsupportedCheckpointError,
    UnsupportedTensorError,
)
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.sources.safetensors import SafetensorsSource
from tests.sources.byte_sources import Dribble, file_stream, pipe_stream
from tests.sources.source_suite import Expected, MakeSource, SourceSuite, catalog_rows, collect, options, requests_for
from tests.support.damage import may_refuse
from tests.support.taking import taken

# What the format calls each dtype.  Source: the safetensors documentation, "Format".
NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16",
    "F32": "float32", "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn",
}  # fmt: skip


def with_header(header: bytes | object, data: bytes = b"") -> bytes:
    """A file of this header: bytes as they are, anything else as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: object, shape: object, begin: object, end: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def saved() -> bytes:
    """A file that the safetensors package wrote."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (1200,), dtype=torch.uint8, generator=generator)
    tensors = {
        name: data.view(dtype).reshape(6, -1)
        for name, dtype in {
            "u8": torch.uint8, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32,
            "i64": torch.int64, "f16": torch.float16, "bf16": torch.bfloat16,
            "f32": torch.float32, "f64": torch.float64, "e4m3": torch.float8_e4m3fn,
            "e5m2": torch.float8_e5m2, "e8m0": torch.float8_e8m0fnu, "c64": torch.complex64,
            "u16": torch.uint16, "u32": torch.uint32, "u64": torch.uint64,
            "x4": torch.float4_e2m1fn_x2, "fnuz": torch.float8_e4m3fnuz,
        }.items()
    }  # fmt: skip
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    tensors["bool"] = torch.tensor([True, False, True])
    tensors["scalar"] = torch.tensor(3.5)
    tensors["empty"] = torch.empty(3, 0, 2)
    return safetensors.torch.save(tensors, metadata={"format": "pt", "é": "ü\n"})


def as_safetensors_reads(data: bytes) -> dict[str, Expected]:
    """By the package's own reader; in the order of the bytes, which is how the catalog is ordered."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    order = sorted(tensors, key=lambda name: (header[name]["data_offsets"][0], name))
    return {
        name: Expected(NAMES[tensors[name]["dtype"]], tuple(tensors[name]["shape"]), bytes(tensors[name]["data"]))
        for name in order
    }


class TestAFile(SourceSuite):
    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeSource:
        return lambda: SafetensorsSource(file_stream(saved(), tmp_path))

    @pytest.fixture
    def expected(self) -> dict[str, Expected]:
        return as_safetensors_reads(saved())


class TestAPipe(TestAFile):
    chooses_order = False

    @pytest.fixture
    def make(self) -> MakeSource:
        return lambda: SafetensorsSource(pipe_stream(saved()))

    def test_the_catalog_needs_only_the_header(self) -> None:
        data = saved()
        header_end = 8 + int.from_bytes(data[:8], "little")
        pipe = Dribble(data, step=1)
        source = SafetensorsSource(ByteStream(pipe))
        assert len(source.catalog) == 21
        assert pipe.taken <= header_end


def open_both(data: bytes, tmp_path: Path) -> list[Callable[[], SafetensorsSource]]:
    return [
        lambda: taken(SafetensorsSource(file_stream(data, tmp_path))),
        lambda: taken(SafetensorsSource(pipe_stream(data))),
    ]


def read(source: SafetensorsSource) -> list[bytes]:
    with source:
        return collect(source, requests_for(source.catalog)[1], options())


def test_metadata_comes_along(tmp_path: Path) -> None:
    for make in open_both(saved(), tmp_path):
        assert make().catalog.metadata == {"format": "pt", "é": "ü\n"}


def test_a_file_of_no_tensors_is_one(tmp_path: Path) -> None:
    for data in (with_header({}), with_header({"__metadata__": {"a": "b"}})):
        for make in open_both(data, tmp_path):
            assert len(make().catalog) == 0
            assert read(make()) == []


def test_the_header_may_end_in_spaces(tmp_path: Path) -> None:
    header = json.dumps({"w": entry("U8", [2], 0, 2)}).encode() + b" " * 50
    for make in open_both(with_header(header, b"ab"), tmp_path):
        assert read(make()) == [b"ab"]


def test_tensors_stand_by_offset_then_name_whatever_order_the_header_has(tmp_path: Path) -> None:
    header = {
        "c": entry("U8", [0], 1, 1),
        "z": entry("U8", [1], 0, 1),
        "a": entry("U8", [2], 1, 3),
        "b": entry("U8", [3, 0], 3, 3),
    }
    for make in open_both(with_header(header, b"xyz"), tmp_path):
        assert make().catalog.names == ("z", "a", "c", "b")
        assert read(make()) == [b"x", b"yz"]


TWO = entry("U8", [2], 0, 2)


@pytest.mark.parametrize("blanks", ["", " ", "\n\t " * 3000])
def test_blanks_and_values_of_any_length_are_json(blanks: str, tmp_path: Path) -> None:
    members = {"__metadata__": {"}": "x" * 9000, "a": "}"}, "}": TWO, '"': entry("U8", [0], 2, 2)}
    header = json.dumps(members, separators=(f"{blanks},{blanks}", f"{blanks}:{blanks}"))
    for make in open_both(with_header((header + blanks).encode(), b"ab"), tmp_path):
        assert make().catalog.names == ("}", '"')
        assert make().catalog.metadata == members["__metadata__"]


def test_odd_offsets_are_legal(tmp_path: Path) -> None:
    header = {"a": entry("U8", [1], 0, 1), "w": entry("F32", [1], 1, 5)}
    data = with_header(header, b"a" + struct.pack("<f", 1.5))
    for make in open_both(data, tmp_path):
        assert read(make()) == [b"a", struct.pack("<f", 1.5)]


def test_f4_counts_elements_of_which_a_byte_has_two(tmp_path: Path) -> None:
    data = with_header({"w": entry("F4", [2, 4], 0, 4)}, b"abcd")
    assert as_safetensors_reads(data)["w"].data == b"abcd"
    for make in open_both(data, tmp_path):
        assert catalog_rows(make().catalog) == [("w", "float4_e2m1fn", (2, 4), 4)]
        assert read(make()) == [b"abcd"]


def test_the_stream_may_begin_inside_a_file(tmp_path: Path) -> None:
    path = tmp_path / "inside"
    path.write_bytes(b"12345" + with_header({"w": entry("U8", [2], 0, 2)}, b"ab"))
    with path.open("rb") as file:
        file.seek(5)
        assert read(SafetensorsSource(ByteStream(file))) == [b"ab"]


BROKEN_HEADERS: dict[str, tuple[Any, bytes, str]] = {
    "does not begin with a brace": (b' {"w":1}', b"", "starts with"),
    "is a list": (b"[]", b"", "starts with"),
    "has one byte": (b"{", b"", "starts with"),
    "is cut": (b'{"w": {', b"", "not JSON"),
    "ends in a comma": (b'{"w":%b,}' % json.dumps(TWO).encode(), b"ab", "not JSON"),
    "has only a comma": (b"{,}", b"", "not JSON"),
    "has two members without a comma": (b'{"w":%(e)b "v":%(e)b}' % {b"e": json.dumps(TWO).encode()}, b"ab", "not JSON"),
    "has a name without a value": (b'{"w"}', b"", "not JSON"),
    "has a name without quotes": (b"{w:1}", b"", "not JSON"),
    "is two objects": (b"{}{}", b"", "not JSON"),
    "is followed by NUL": (b"{}\0", b"", "not JSON"),
    "is not UTF-8": (b'{"\xff": 1}', b"", "not JSON"),
    "is UTF-16": ("{}".encode("utf-16-le"), b"", "not JSON"),
    "nests 200,000 deep": (b'{"w":' + b"[" * 200_000, b"", "not JSON"),
    "nests 200,000 objects": (b'{"w":' * 200_000, b"", "not JSON"),
    "has a number of 5,000 digits": (
        b'{"w":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,2]}}',
        b"ab",
        "not JSON",
    ),
    "has NaN": (b'{"w":{"dtype":"U8","shape":[NaN],"data_offsets":[0,2]}}', b"ab", "NaN"),
    "names a tensor twice": (b'{"w":%(e)b,"w":%(e)b}' % {b"e": json.dumps(TWO).encode()}, b"ab", "'w' twice"),
    "names a tensor twice, once escaped": (
        rb'{"w":%(e)b,"\u0077":%(e)b}' % {b"e": json.dumps(TWO).encode()},
        b"ab",
        "'w' twice",
    ),
    "has a dtype twice": (
        b'{"w":{"dtype":"U8","dtype":"I8","shape":[2],"data_offsets":[0,2]}}',
        b"ab",
        "'dtype' twice",
    ),
    "has an entry that is a number": ({"w": 1}, b"", "'w'"),
    "has an entry that is a list": ({"w": ["U8", [2], [0, 2]]}, b"ab", "'w'"),
    "lacks the dtype": ({"w": {"shape": [2], "data_offsets": [0, 2]}}, b"ab", "'w'"),
    "lacks the shape": ({"w": {"dtype": "U8", "data_offsets": [0, 2]}}, b"ab", "'w'"),
    "lacks the offsets": ({"w": {"dtype": "U8", "shape": [2]}}, b"ab", "'w'"),
    "has a dtype that is a number": ({"w": entry(8, [2], 0, 2)}, b"ab", "'w'"),
    "has a shape that is text": ({"w": entry("U8", "2", 0, 2)}, b"ab", "'w'"),
    "has a fraction of a dim": ({"w": entry("U8", [2.0], 0, 2)}, b"ab", "'w'"),
    "has a dim that is true": ({"w": entry("U8", [True], 0, 1)}, b"a", "'w'"),
    "has a negative dim": ({"w": entry("U8", [-2], 0, 2)}, b"ab", "'w'"),
    "has a dim of 2**64": ({"w": entry("U8", [2**64, 0], 0, 0)}, b"", "'w'"),
    "has 65 dims": ({"w": entry("U8", [1] * 65, 0, 1)}, b"a", "'w'"),
    "has one offset": ({"w": {"dtype": "U8", "shape": [2], "data_offsets": [2]}}, b"ab", "'w'"),
    "has three offsets": ({"w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2, 2]}}, b"ab", "'w'"),
    "has a negative offset": ({"w": entry("U8", [2], -2, 0)}, b"ab", "'w'"),
    "ends before it begins": ({"w": entry("U8", [2], 0, 2), "v": entry("U8", [1], 2, 1)}, b"ab", "'v'"),
    "has a hole in front": ({"w": entry("U8", [2], 1, 3)}, b"abc", "'w'"),
    "has a hole": ({"v": entry("U8", [1], 0, 1), "w": entry("U8", [1], 2, 3)}, b"abc", "'w'"),
    "has an overlap": ({"v": entry("U8", [2], 0, 2), "w": entry("U8", [2], 1, 3)}, b"abc", "'w'"),
    "has the same bytes twice": ({"v": TWO, "w": TWO}, b"ab", "overlap"),
    "has an empty tensor inside another": ({"v": entry("U8", [2], 0, 2), "w": entry("U8", [0], 1, 1)}, b"ab", "'w'"),
    "has a size that is not shape x dtype": ({"w": entry("F32", [1], 0, 2)}, b"ab", "'w'"),
    "has a scalar of two bytes": ({"w": entry("U8", [], 0, 2)}, b"ab", "'w'"),
    "has metadata that is a list": ({"__metadata__": [], "w": TWO}, b"ab", "__metadata__"),
    "has metadata that is not text": ({"__metadata__": {"a": 1}, "w": TWO}, b"ab", "'a'"),
    "has a lone surrogate in metadata": ({"__metadata__": {"a": "\ud800"}, "w": TWO}, b"ab", "surrogate"),
    "holds shards": ({"__metadata__": {"DCP_SHARDING_INFO": "{}"}, "w": TWO}, b"ab", "may be pieces of tensors"),
}


@pytest.mark.parametrize("case", BROKEN_HEADERS)
def test_refused_is_a_header_that(case: str, tmp_path: Path) -> None:
    header, body, reason = BROKEN_HEADERS[case]
    for make in open_both(with_header(header, body), tmp_path):
        with pytest.raises(UnsupportedCheckpointError) as caught:
            make()
        assert reason in str(caught.value)


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2", "C128", "f32", "", "I4"])
def test_a_dtype_without_a_place_in_a_pack_is_refused_by_name(dtype: str, tmp_path: Path) -> None:
    for make in open_both(with_header({"layer.w": entry(dtype, [4], 0, 3)}, b"abc"), tmp_path):
        with pytest.raises(UnsupportedTensorError, match=repr(dtype)) as caught:
            make()
        assert caught.value.tensor == "layer.w"


def test_dims_that_multiply_past_the_limit_are_refused(tmp_path: Path) -> None:
    header = {"w": entry("U8", [2**62] * 64, 0, 2)}
    for make in open_both(with_header(header, b"ab"), tmp_path):
        with pytest.raises(LimitError, match="'w'"):
            make()


def test_a_name_that_no_text_can_hold_is_refused(tmp_path: Path) -> None:
    for make in open_both(with_header({"\ud800": TWO}, b"ab"), tmp_path):
        with pytest.raises(SourceError, match="lone surrogate"):
            make()


@pytest.mark.parametrize("nbytes", [100_000_001, 2**40, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_format_allows_is_refused_unread(nbytes: int, tmp_path: Path) -> None:
    for make in open_both(struct.pack("<Q", nbytes) + b"{" * 92, tmp_path):
        with pytest.raises(UnsupportedCheckpointError, match=str(nbytes)):
            make()


@pytest.mark.parametrize("nbytes", [99_000_000, 2**40])
def test_a_length_is_not_believed_before_its_bytes_have_come(nbytes: int, tmp_path: Path) -> None:
    # tensorizer#208: as much was allocated as the header claimed.
    claimed = struct.pack("<Q", nbytes) + b"{" * 92
    for make in open_both(claimed, tmp_path):
        tracemalloc.start()
        try:
            with pytest.raises((TruncatedSourceError, UnsupportedCheckpointError)):
                make()
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()


def test_a_file_cut_anywhere_is_never_taken_for_whole(tmp_path: Path) -> None:
    whole = with_header({"v": entry("U8", [2], 0, 2), "w": entry("F32", [3], 2, 14)}, b"x" * 14)
    for nbytes in range(len(whole)):
        for make in open_both(whole[:nbytes], tmp_path):
            with pytest.raises((TruncatedSourceError, UnsupportedCheckpointError)):
                read(make())


def test_a_truncated_file_is_told_before_any_data_is_read(tmp_path: Path) -> None:
    whole = with_header({"w": entry("U8", [1000], 0, 1000)}, b"x" * 1000)
    with pytest.raises(TruncatedSourceError, match="300 are missing"):
        SafetensorsSource(file_stream(whole[:-300], tmp_path))


@pytest.mark.parametrize("trailing", [b"\0", b" ", with_header({})])
def test_bytes_after_the_data_are_refused(trailing: bytes, tmp_path: Path) -> None:
    for make in open_both(with_header({"w": TWO}, b"ab") + trailing, tmp_path):
        with pytest.raises(UnsupportedCheckpointError, match="trailing"):
            read(make())


@given(flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), max_size=4))
def test_damage_anywhere_is_our_error_or_none(flips: list[tuple[int, int]]) -> None:
    data = bytearray(with_header({"__metadata__": {"a": "b"}, "w": TWO, "v": entry("F32", [1], 2, 6)}, b"abcdef"))
    for at, mask in flips:
        data[at % len(data)] ^= mask
    with may_refuse(TruncatedSourceError, UnsupportedCheckpointError, UnsupportedTensorError):
        received = read(taken(SafetensorsSource(pipe_stream(bytes(data), step=1000))))
        assert sum(map(len, received)) == 6


def test_reading_brings_neither_torch_nor_safetensors_in(tmp_path: Path) -> None:
    program = """
import sys
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.sources.safetensors import SafetensorsSource
assert len(SafetensorsSource(ByteStream.open_path(sys.argv[1])).catalog) == 21
assert not {"torch", "safetensors"} & set(sys.modules)
"""
    path = tmp_path / "saved"
    path.write_bytes(saved())
    subprocess.run([sys.executable, "-c", program, path], check=True)


def test_a_tensor_past_four_gib_of_a_sparse_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    header = {"big": entry("U8", [2**32 + 8], 0, 2**32 + 8), "w": entry("F32", [2], 2**32 + 8, 2**32 + 16)}
    head = with_header(header)
    with path.open("wb") as file:
        file.write(head)
        file.seek(len(head) + 2**32 + 8)
        file.write(np.array([1.5, 2.5], "<f4").tobytes())
    with SafetensorsSource(ByteStream.open_path(path)) as source:
        assert source.catalog.starts.tolist() == [0, 2**32 + 8]
        _, requests = requests_for(source.catalog, [1])
        assert collect(source, requests, options()) == [np.array([1.5, 2.5], "<f4").tobytes()]
    path.unlink()
