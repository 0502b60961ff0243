"""GGUF as a source: against the gguf package, and against headers made by hand."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Kind
from hypothesis import given
from hypothesis import strategies as st

import stream_pack
from stream_pack.errors import SourceError, TruncatedSourceError, UnsupportedCheckpointError, UnsupportedTensorError
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.sources.gguf import header as gguf_header
from stream_pack.sources.gguf.source import GgufSource
from stream_pack.sources.open import open_source
from tests.sources.byte_sources import Dribble, file_stream, pipe_stream
from tests.sources.source_suite import Expected, MakeSource, SourceSuite, catalog_rows, collect, options, requests_for
from tests.support.damage import may_refuse
from tests.support.taking import taken

PLAIN = {
    Type.F32: "float32", Type.F16: "float16", Type.BF16: "bfloat16", Type.F64: "float64",
    Type.I8: "int8", Type.I16: "int16", Type.I32: "int32", Type.I64: "int64",
}  # fmt: skip
QUANTISED = [t for t in Type if t not in PLAIN]


def random_bytes(*shape: int) -> Any:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def write(path: Path, *, alignment: int | None = None) -> Path:
    """A file that the gguf package wrote: every type, and every kind of value."""
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_name("a model, né")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 60_000)
    writer.add_int16("i16", -300)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -70_000)
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 1e-5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_array("tokens", ["<s>", "né", "\n"])
    writer.add_array("raw", [b"\xff\xfe", b"ok"])
    writer.add_array("scores", [0.5, -1.0])
    writer.add_array("types", [1, 2, 3])
    writer.add_array("flags", [True, False])
    for kind in PLAIN:
        itemsize = gguf.GGML_QUANT_SIZES[kind][1]
        data = random_bytes(3, 2, 5 * itemsize)
        writer.add_tensor(f"plain.{kind.name}", data, raw_shape=(3, 2, 5 * itemsize), raw_dtype=kind)
    for kind in QUANTISED:
        row = 2 * gguf.GGML_QUANT_SIZES[kind][1]
        writer.add_tensor(f"blocks.{kind.name}", random_bytes(4, row), raw_shape=(4, row), raw_dtype=kind)
    writer.add_tensor("vector", np.arange(3, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "model.gguf")


def as_gguf_reads(path: Path) -> dict[str, Expected]:
    """By the package's own reader, which keeps the order of the file."""
    tensors = {}
    for tensor in gguf.GGUFReader(path).tensors:
        data = tensor.data.tobytes()
        if tensor.tensor_type in PLAIN:
            shape = tuple(int(dim) for dim in reversed(tensor.shape))
            tensors[tensor.name] = Expected(PLAIN[tensor.tensor_type], shape, data)
        else:
            tensors[tensor.name] = Expected("uint8", tensor.data.shape, data)
    return tensors


class TestAFile(SourceSuite):
    @pytest.fixture
    def make(self, written: Path) -> MakeSource:
        return lambda: open_source(written)

    @pytest.fixture
    def expected(self, written: Path) -> dict[str, Expected]:
        return as_gguf_reads(written)


class TestAPipe(TestAFile):
    chooses_order = False

    @pytest.fixture
    def make(self, written: Path) -> MakeSource:
        return lambda: GgufSource(pipe_stream(written.read_bytes()))

    def test_the_catalog_needs_only_the_header(self, written: Path) -> None:
        pipe = Dribble(written.read_bytes(), step=1)
        source = GgufSource(ByteStream(pipe))
        assert len(source.catalog) == len(PLAIN) + len(QUANTISED) + 1
        assert pipe.taken < gguf.GGUFReader(written).data_offset


def test_key_values_become_metadata_text_as_it_is_and_the_rest_as_json(written: Path) -> None:
    with open_source(written) as source:
        metadata = dict(source.catalog.metadata)
    assert metadata.pop("general.architecture") == "llama"
    assert metadata.pop("general.name") == "a model, né"
    assert {key: json.loads(value) for key, value in metadata.items()} == {
        "u8": 200, "i8": -3, "u16": 60_000, "i16": -300, "u32": 4_000_000_000, "i32": -70_000,
        "u64": 2**64 - 1, "i64": -(2**63), "f32": float(np.float32(1e-5)), "f64": 0.1, "yes": True,
        "tokens": ["<s>", "né", "\n"], "raw": ["\udcff\udcfe", "ok"], "scores": [0.5, -1.0],
        "types": [1, 2, 3], "flags": [True, False],
    }  # fmt: skip
    assert metadata["raw"].isascii()


def test_blocks_keep_their_bytes_and_say_in_notes_what_they_are(written: Path, tmp_path: Path) -> None:
    stream_pack.convert(written, tmp_path / "out.pack")
    with open_source(tmp_path / "out.pack") as source:
        names, notes = source.catalog.names, source.catalog.notes
    noted = {(names[row], key): value for row, key, value in notes}
    for kind in QUANTISED:
        elements = 2 * gguf.GGML_QUANT_SIZES[kind][0]
        assert noted[f"blocks.{kind.name}", "gguf.type"] == kind.name
        assert json.loads(noted[f"blocks.{kind.name}", "gguf.shape"]) == [4, elements]
    assert len(noted) == 2 * len(QUANTISED)
    with stream_pack.open(tmp_path / "out.pack") as pack:
        # The gguf package can still make numbers of them.
        for tensor in gguf.GGUFReader(written).tensors:
            if tensor.tensor_type is Type.Q8_0:
                raw = pack[tensor.name].numpy()
                mine = gguf.dequantize(raw, tensor.tensor_type)
                assert np.array_equal(mine, gguf.dequantize(tensor.data, Type.Q8_0), equal_nan=True)


def test_the_types_are_those_of_the_gguf_package() -> None:
    blocks = {t.value: (t.name, *gguf.GGML_QUANT_SIZES[t]) for t in QUANTISED}
    assert dict(gguf_header._QUANTISED) == blocks
    assert set(gguf_header._PLAIN) == {t.value for t in PLAIN}


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_another_alignment_is_followed(tmp_path: Path, alignment: int) -> None:
    path = write(tmp_path / "model.gguf", alignment=alignment)
    expected = as_gguf_reads(path)
    for stream in (ByteStream.open_path(path), pipe_stream(path.read_bytes(), step=999)):
        assert read(GgufSource(stream)) == {name: tensor.data for name, tensor in expected.items()}


def test_file_and_pipe_give_the_same_pack(written: Path, tmp_path: Path) -> None:
    stream_pack.convert(written, tmp_path / "file.pack")
    report = stream_pack.convert(Dribble(written.read_bytes(), step=777), tmp_path / "pipe.pack")
    assert (tmp_path / "file.pack").read_bytes() == (tmp_path / "pipe.pack").read_bytes()
    assert report.source_kind == "GGUF"
    assert report.verification == "the source carries no checksum"


# -- headers made by hand


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def info(name: str | bytes, dims: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def made(infos: list[bytes], pairs: list[bytes] | None = None, *, data: bytes = b"", version: int = 3) -> bytes:
    """A file of these parts, its data at a multiple of 32."""
    pairs = pairs or []
    head = b"GGUF" + struct.pack("<IQQ", version, len(infos), len(pairs)) + b"".join(pairs + infos)
    return head + bytes(-len(head) % 32) + data if infos else head


def read(source: GgufSource) -> dict[str, bytes]:
    with source:
        tensors, requests = requests_for(source.catalog)
        data = collect(source, requests, options(chunk_nbytes=16))
        return dict.fromkeys(source.catalog.names, b"") | {
            source.catalog.names[k]: received for k, received in zip(tensors, data, strict=True)
        }


def from_file_and_pipe(data: bytes, folder: Path) -> list[Callable[[], GgufSource]]:
    return [lambda: GgufSource(file_stream(data, folder)), lambda: GgufSource(pipe_stream(data))]


TWO = [info("a", [3, 2], 24, 0), info("b", [2], 24, 32)]
DATA = b"abcdef" + bytes(26) + b"xy"


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("padding", [0, 7, 30])
def test_dims_are_turned_round_and_the_last_padding_may_be_missing(tmp_path: Path, version: int, padding: int) -> None:
    for make in from_file_and_pipe(made(TWO, data=DATA + bytes(padding), version=version), tmp_path):
        with make() as source:
            assert catalog_rows(source.catalog) == [("a", "int8", (2, 3), 6), ("b", "int8", (2,), 2)]
        assert read(make()) == {"a": b"abcdef", "b": b"xy"}


def test_tensors_stand_by_offset_whatever_order_the_header_has(tmp_path: Path) -> None:
    scalar_and_empty = [info("e", [0], 0, 64), info("s", [], 24, 64)]
    for make in from_file_and_pipe(made([*scalar_and_empty, *reversed(TWO)], data=DATA + bytes(30) + b"s"), tmp_path):
        assert list(make().catalog.names) == ["a", "b", "e", "s"]
        assert read(make()) == {"a": b"abcdef", "b": b"xy", "e": b"", "s": b"s"}


@pytest.mark.parametrize("padding", [0, 5])
def test_a_file_of_a_vocabulary_alone_has_no_tensors(tmp_path: Path, padding: int) -> None:
    data = made([], [pair("k", 8, text("v"))]) + bytes(padding)
    for make in from_file_and_pipe(data, tmp_path):
        assert make().catalog.metadata == {"k": "v"}
        assert read(make()) == {}


def test_arrays_may_hold_arrays(tmp_path: Path) -> None:
    inner = struct.pack("<IQ2B", 0, 2, 1, 2)
    nested = struct.pack("<IQ", 9, 2) + inner + struct.pack("<IQ", 8, 1) + text("x")
    for make in from_file_and_pipe(made(TWO, [pair("k", 9, nested)], data=DATA), tmp_path):
        assert make().catalog.metadata == {"k": '[[1, 2], ["x"]]'}


def test_long_arrays_are_the_json_of_all_their_elements(tmp_path: Path) -> None:
    numbers, tokens = list(range(-5000, 5000)), [f"t{n}" for n in range(4096)]
    writer = gguf.GGUFWriter(tmp_path / "long", "llama")
    writer.add_array("numbers", numbers)
    writer.add_array("tokens", tokens)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_source(tmp_path / "long") as source:
        assert source.catalog.metadata["numbers"] == json.dumps(numbers)
        assert source.catalog.metadata["tokens"] == json.dumps(tokens)


def test_bytes_that_are_missing_are_counted(tmp_path: Path) -> None:
    data = made(TWO, data=DATA)
    with pytest.raises(TruncatedSourceError) as caught:
        taken(GgufSource(file_stream(data[:-1], tmp_path)))
    assert caught.value.missing_nbytes == 1
    with pytest.raises(TruncatedSourceError):
        read(GgufSource(pipe_stream(data[:-1])))


def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    data = made(TWO, [pair("k", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b"))], data=DATA)
    for nbytes in range(len(data)):
        for make in from_file_and_pipe(data[:nbytes], tmp_path):
            with pytest.raises(TruncatedSourceError):
                read(make())


@pytest.mark.parametrize("tail", [b"\0" * 31, b"GGUF" * 20])
def test_trailing_bytes_are_refused(tmp_path: Path, tail: bytes) -> None:
    for make in from_file_and_pipe(made(TWO, data=DATA + tail), tmp_path):
        with pytest.raises(UnsupportedCheckpointError, match="trailing bytes"):
            read(make())


HUGE = 2**63


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GGML" + made(TWO)[4:], "not GGUF"),
        (made(TWO, version=1), "version 1; this version reads 2 and 3"),
        (made(TWO, version=4), "version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(100), "big-endian GGUF file .version 3."),
        (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), "announces 9223372036854775808 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "9223372036854775808 key-values"),
        (made([], [struct.pack("<Q", HUGE)]), "a key of 9223372036854775808 bytes"),
        (made([], [struct.pack("<Q", 65_536)]), "a key of 65536 bytes"),
        (made([], [pair("k", 8, struct.pack("<Q", HUGE))]), "a string of 9223372036854775808 bytes"),
        (made([], [pair("k", 8, text(b"\xff"))]), "a string is not UTF-8"),
        (made([], [pair(b"\xff", 8, text("v"))]), "a key is not UTF-8"),
        (made([], [pair("k", 13, b"")]), "a value of type 13"),
        (made([], [pair("k", 7, b"\2")]), "a boolean other"),
        (made([], [pair("k", 8, text("v"))] * 2), "duplicate key 'k'"),
        (made([], [pair("k", 9, struct.pack("<IQ", 0, HUGE))]), "more than 4000000 elements"),
        (made([], [pair("k", 9, struct.pack("<IQ", 8, HUGE))]), "more than 4000000 elements"),
        (made([], [pair("k", 9, struct.pack("<IQ", 13, 1))]), "an array of type 13"),
        (made([], [pair("k", 9, struct.pack("<IQ", 7, 2) + b"\1\2")]), "a boolean other"),
        (made([], [pair("k", 9, struct.pack("<IQ", 9, 1) * 6)]), "nested more than 4 deep"),
        (made([], [pair("k", 9, struct.pack("<IQIQ", 9, 2_000_000, 9, 2_000_001))]), "more than 4000000"),
        (made([], [pair("general.alignment", 4, struct.pack("<I", 24))]), "alignment is 24, expected a power of two"),
        (made([], [pair("general.alignment", 4, struct.pack("<I", 0))]), "alignment is 0"),
        (made([], [pair("general.alignment", 4, struct.pack("<I", 2**31))]), "alignment is 2147483648"),
        (made([], [pair("general.alignment", 8, text("32"))]), "alignment is '32'"),
        (made([], [pair("general.alignment", 7, b"\1")]), "alignment is True"),
        (made([], [pair("split.count", 2, struct.pack("<H", 3))]), "one of the 3 files of a split"),
        (made([info("a", [1] * 9, 24, 0)]), "has 9 dims"),
        (made([struct.pack("<Q", 1) + b"a" + struct.pack("<I", 2**32 - 1)]), "has 4294967295 dims"),
        (made([info("a", [HUGE, HUGE], 24, 0)]), "too many elements"),
        (made([info("a", [HUGE, 0], 24, 0)]), "too many elements"),
        (made([info(f"c{k}", [2**57], 28, k * 2**60) for k in range(9)]), "span more than"),
        (made([info("a", [3], 24, 1)]), "has the offset 1, expected 0"),
        (made([info("a", [3], 24, HUGE)]), "expected 0"),
        (made([info("a", [3], 24, 0), info("b", [3], 24, 0)]), "'b' has the offset 0, expected 32"),
        (made([info("a", [3], 24, 0), info("b", [3], 24, 64)]), "'b' has the offset 64, expected 32"),
        (made([info("a", [3], 24, 0), info("b", [3], 24, 3)]), "'b' has the offset 3, expected 32"),
        (made([info("a", [33], 8, 0)]), "no whole blocks of Q8_0"),
        (made([info("a", [], 8, 0)]), "no whole blocks of Q8_0"),
        (made([info(b"\xff", [1], 24, 0)]), "the name of a tensor is not UTF-8"),
        (made([info("a", [3], 24, 0), info("a", [3], 24, 32)], data=bytes(64)), "two tensors are named 'a'"),
    ],
)  # fmt: skip
def test_a_header_that_breaks_a_rule_is_refused(tmp_path: Path, data: bytes, why: str) -> None:
    """go-huggingface#57, audio.cpp#138, openasr#73: negative, overlapping, out of range, twice, giant."""
    for make in from_file_and_pipe(data, tmp_path):
        with pytest.raises(SourceError, match=why):
            make()


@pytest.mark.parametrize("kind", [4, 5, 31, 36, 99, 2**32 - 1])
def test_a_type_that_is_not_known_is_refused_by_name(tmp_path: Path, kind: int) -> None:
    """kekzl/imp#1603: the checks were skipped for a dtype that was not known."""
    for make in from_file_and_pipe(made([info("odd", [256], kind, 0)], data=bytes(512)), tmp_path):
        with pytest.raises(UnsupportedTensorError, match=f"'odd' has the GGUF type {kind}"):
            taken(make())


def test_a_header_longer_than_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = made(TWO, [pair(f"k{n}", 8, text("v" * 100)) for n in range(20)], data=DATA)
    monkeypatch.setattr(gguf_header, "MAX_HEADER_NBYTES", 1000)
    for make in from_file_and_pipe(data, tmp_path):
        with pytest.raises(UnsupportedCheckpointError, match="longer than 1000 bytes"):
            make()


@given(st.data())
def test_damage_anywhere_in_the_header_is_an_error_of_ours_or_harmless(data: st.DataObject) -> None:
    whole = bytearray(made(TWO, [pair("k", 9, struct.pack("<IQ", 4, 1) + bytes(4))], data=DATA))
    header_nbytes = len(whole) - len(DATA)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, header_nbytes - 1))
        whole[at] = data.draw(st.integers(0, 255))
    with may_refuse(TruncatedSourceError, UnsupportedCheckpointError, UnsupportedTensorError):
        received = read(GgufSource(pipe_stream(bytes(whole), step=1000)))
        assert all(len(value) <= len(DATA) for value in received.values())


def test_the_kinds_of_values_are_those_of_the_gguf_package() -> None:
    numbers = {Kind[name].value: code for name, code in (
        ("UINT8", "<u1"), ("INT8", "<i1"), ("UINT16", "<u2"), ("INT16", "<i2"), ("UINT32", "<u4"), ("INT32", "<i4"),
        ("FLOAT32", "<f4"), ("UINT64", "<u8"), ("INT64", "<i8"), ("FLOAT64", "<f8"),
    )}  # fmt: skip
    assert dict(gguf_header._NUMBERS) == numbers
