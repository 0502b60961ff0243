"""Checkpoints in the format before torch 1.6: every tensor equals torch's own, from a file and from a pipe."""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import stream_pack
from stream_pack.errors import SourceError, TruncatedSourceError, UnsupportedCheckpointError
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.pipeline.source import Source
from stream_pack.pipeline.spool import Spool
from stream_pack.sources.open import open_source
from stream_pack.sources.torch_save.legacy import LegacyTorchSource
from tests.sources.byte_sources import file_stream, pipe_stream
from tests.sources.source_suite import Expected, MakeSource, SourceSuite, collect, options, requests_for
from tests.sources.torch_save.test_zip import expected_of, random_bits
from tests.support.damage import UNREADABLE, assert_refusal, check_each, cut, may_refuse, two_bits_of_each_byte
from tests.support.spools import without_a_folder
from tests.support.taking import taken
from tests.support.torch_zips import as_torch_has_it

MAGIC = 0x1950A86A20F9469CFC6C
FLOAT8 = [
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip


def legacy(value: object, **options: object) -> bytes:
    target = io.BytesIO()
    torch.save(value, target, _use_new_zipfile_serialization=False, **options)  # type: ignore[arg-type]
    return target.getvalue()


def everything() -> dict[str, torch.Tensor]:
    w = random_bits(torch.float32, 6, 4)
    c = torch.randn(5, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(3))
    dtypes = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float64"]
    return {name: random_bits(getattr(torch, name), 3, 5) for name in dtypes} | {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(3, 0, 2),
        "w": w,
        "tied": w,
        "row": w[1:3],
        "transposed": w.t(),
        "expanded": torch.tensor([1.0, 2.0]).expand(5, 2),
        "small": torch.arange(10_000.0)[500:510],
        "conj": c.conj(),
        "parameter": torch.nn.Parameter(torch.ones(2, 3)),
        "u32": random_bits(torch.uint32, 4),
        # The channels of facenet's first network: strides that rise.
        "reversed": torch.empty_strided((10, 3, 3, 3), (1, 10, 30, 90)).copy_(torch.arange(270.0).reshape(10, 3, 3, 3)),
    }


class TestAFile(SourceSuite):
    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeSource:
        data = legacy(everything())
        return lambda: LegacyTorchSource(file_stream(data, tmp_path))

    @pytest.fixture
    def expected(self) -> dict[str, Expected]:
        return expected_of(everything())


class TestAPipe(TestAFile):
    chooses_order = False

    @pytest.fixture
    def make(self) -> MakeSource:
        data = legacy(everything())
        return lambda: LegacyTorchSource(pipe_stream(data, step=1))


Opened = Callable[[bytes], Source]


@pytest.fixture(params=["file", "pipe"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opened:
    """Whatever the bytes claim to be."""

    def open_file(data: bytes) -> Source:
        (tmp_path / "source").write_bytes(data)
        return taken(open_source(tmp_path / "source"))

    return open_file if request.param == "file" else lambda data: taken(open_source(io.BytesIO(data)))


def read(source: Source, spool: Spool | None = None) -> dict[str, bytes]:
    with source:
        catalog = source.catalog
        tensors, requests = requests_for(catalog)
        data = collect(source, requests, options(spool=spool))
        return dict.fromkeys(catalog.names, b"") | {catalog.names[k]: d for k, d in zip(tensors, data)}


def wanted(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: as_torch_has_it(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_pickles_of_every_protocol_are_read(opened: Opened, protocol: int) -> None:
    """ET#2907: tools that map checkpoints refuse this format."""
    tensors = {"a": torch.arange(5.0), "b": torch.arange(7, dtype=torch.uint8)}
    assert read(opened(legacy(tensors, pickle_protocol=protocol))) == wanted(tensors)


def test_the_report_says_that_the_source_has_no_checksums(tmp_path: Path) -> None:
    data = legacy({"a": torch.arange(5.0)})
    report = stream_pack.convert(io.BytesIO(data), tmp_path / "pack")
    assert report.verification == "the source carries no checksums"
    assert report.source_kind == "torch legacy"


def test_float8_that_torch_itself_cannot_load_is_read(opened: Opened) -> None:
    tensors = {name: random_bits(getattr(torch, name), 4) for name in FLOAT8}
    with pytest.raises(Exception):  # noqa: B017  (the day it can, this test compares with it)
        torch.load(io.BytesIO(legacy(tensors)), weights_only=True)
    assert read(opened(legacy(tensors))) == wanted(tensors)


# -- files that only old versions wrote, made by hand


def text(value: str) -> bytes:
    """A ``str`` of Python 2."""
    return b"U" + bytes([len(value)]) + value.encode()


def old_file(value: bytes, storages: dict[str, bytes], *, itemsize: int = 4) -> bytes:
    """``value``: the opcodes of a pickle, as Python 2 with protocol 2 had them."""
    data = pickle.dumps(MAGIC, 2) + pickle.dumps(1001, 2)
    data += b"\x80\x02}q\0(" + text("little_endian") + b"\x88" + text("protocol_version") + b"M\xe9\x03u."
    data += b"\x80\x02" + value + b"."
    data += b"\x80\x02](" + b"".join(map(text, storages)) + b"e."
    for payload in storages.values():
        data += struct.pack("<q", len(payload) // itemsize) + payload
    return data


def old_tensor(key: str, numel: int, shape: int, *, offset: int = 0, view: bytes = b"N") -> bytes:
    return (
        b"ctorch._utils\n_rebuild_tensor\n((" + text("storage") + b"ctorch\nFloatStorage\n" + text(key)
        + text("cpu") + bytes([ord("K"), numel]) + view + b"tQ"
        + bytes([ord("K"), offset, ord("K"), shape]) + b"\x85K\1\x85tR"
    )  # fmt: skip


FLOATS = struct.pack("<8f", *range(8))


def test_a_pickle_of_python_2_is_read(opened: Opened) -> None:
    items = b"]]" + text("w") + b"a" + old_tensor("44", 8, 8) + b"aa"
    value = b"ccollections\nOrderedDict\n" + items + b"\x85R"
    data = old_file(value, {"44": FLOATS})
    assert torch.equal(torch.load(io.BytesIO(data), weights_only=True)["w"], torch.arange(8.0))
    assert read(opened(data)) == {"w": FLOATS}


def view(offset: int, numel: int) -> bytes:
    return text("view") + bytes([ord("K"), offset, ord("K"), numel]) + b"\x87"


def test_a_view_of_a_storage_is_read_from_where_it_begins(opened: Opened) -> None:
    value = b"}" + text("w") + old_tensor("44", 8, 2, offset=1, view=view(3, 4)) + b"s"
    data = old_file(value, {"44": FLOATS})
    as_torch = torch.load(io.BytesIO(data), weights_only=True)["w"]
    assert as_torch.tolist() == [4.0, 5.0]
    assert read(opened(data)) == {"w": FLOATS[16:24]}


@pytest.mark.parametrize(
    "tensor",
    [
        old_tensor("44", 8, 5, view=view(3, 4)),
        old_tensor("44", 8, 4, offset=1, view=view(3, 4)),
        old_tensor("44", 8, 1, view=view(3, 6)),
        old_tensor("44", 8, 1, view=text("x")),
        old_tensor("44", 8, 1, view=text("x") + text("y") + b"K\1\x87"),
        old_tensor("44", 8, 1, view=text("x") + b"J\xff\xff\xff\xffK\1\x87"),
    ],
)
def test_a_tensor_beyond_its_view_is_refused(opened: Opened, tensor: bytes) -> None:
    with pytest.raises(SourceError):
        read(opened(old_file(b"}" + text("w") + tensor + b"s", {"44": FLOATS})))


# -- what is refused


def test_a_whole_module_is_refused_with_advice(opened: Opened) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=r"state_dict\(\)"):
        opened(legacy(torch.nn.Sequential(torch.nn.Linear(1, 1))))
    persistent = b"(" + text("module") + b"ctorch.nn\nLinear\n" + text("f.py") + text("x") + b"tQ"
    with pytest.raises(UnsupportedCheckpointError, match=r"whole pickled module.*state_dict\(\)"):
        opened(old_file(persistent, {}))


def test_another_magic_number_or_version_is_refused(opened: Opened) -> None:
    data = legacy({"a": torch.ones(1)})
    with pytest.raises(UnsupportedCheckpointError, match="version"):
        opened(data.replace(b"M\xe9\x03.", b"M\xe8\x03.", 1))


@pytest.mark.parametrize("keys", [{}, {"44": FLOATS, "45": FLOATS}, {"45": FLOATS}])
def test_keys_that_are_not_those_of_the_tensors_are_refused(opened: Opened, keys: dict[str, bytes]) -> None:
    with pytest.raises(UnsupportedCheckpointError, match="lists . storages"):
        opened(old_file(b"}" + text("w") + old_tensor("44", 8, 8) + b"s", keys))


def test_another_number_of_elements_than_the_pickle_says_is_refused(opened: Opened) -> None:
    value = b"}" + text("w") + old_tensor("44", 7, 7) + b"s"
    with pytest.raises(SourceError, match="has 8 elements in the file, and 7"):
        read(opened(old_file(value, {"44": FLOATS})))


@pytest.mark.parametrize("trailing", [b"\0", legacy({"b": torch.ones(1)})])
def test_bytes_behind_the_last_storage_are_refused(opened: Opened, trailing: bytes) -> None:
    with pytest.raises(SourceError, match="bytes follow"):
        read(opened(legacy({"a": torch.ones(1)}) + trailing))


def test_a_storage_longer_than_its_file_is_refused_at_once(tmp_path: Path) -> None:
    data = legacy({"a": torch.arange(1000.0)})
    with pytest.raises(TruncatedSourceError, match="cut short"):
        LegacyTorchSource(file_stream(data[:2000], tmp_path))


# -- damage


def small() -> bytes:
    data = legacy({"a": torch.arange(5.0), "b": torch.arange(300, dtype=torch.uint8)})
    assert 500 < len(data) < 2000
    return data


def test_a_checkpoint_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    data = small()

    def check(beginning: bytes) -> None:
        for stream in (file_stream(beginning, tmp_path), pipe_stream(beginning, step=65536)):
            with pytest.raises(SourceError) as caught:
                read(_opened(stream))
            assert_refusal(caught.value, TruncatedSourceError)

    check_each(cut(data, range(len(data))), check)


def test_a_flipped_bit_ends_in_our_errors_only_though_no_checksum_finds_it() -> None:
    data = small()
    clean = read(_opened(pipe_stream(data, step=65536)))
    different = 0

    def check(broken: bytes) -> None:
        nonlocal different
        with may_refuse(*UNREADABLE):
            different += read(_opened(pipe_stream(broken, step=65536)), Spool(None)) != clean

    with without_a_folder():  # for strides that a flip changes
        check_each(two_bits_of_each_byte(data, 5), check)
    # Every flip in the 320 bytes of tensors, and a few that leave another name, shape or dtype possible.
    assert 640 <= different < 660


def _opened(stream: ByteStream) -> Source:
    try:
        return taken(LegacyTorchSource(stream))
    except BaseException:
        stream.close()
        raise


def test_reading_a_checkpoint_does_not_hold_it(tmp_path: Path) -> None:
    import tracemalloc

    data = legacy({"w": torch.zeros(64 << 20, dtype=torch.uint8)})
    source = LegacyTorchSource(pipe_stream(data, step=1 << 20))
    _, requests = requests_for(source.catalog)
    tracemalloc.start()
    try:
        for _ in source.stream(requests, options(chunk_nbytes=1 << 20, jobs=2)):
            pass
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
