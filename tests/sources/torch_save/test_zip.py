"""Checkpoints of torch.save as a source: every tensor equals torch's own, bit for bit, from a file and from a pipe."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stream_pack.errors import (
    LimitError,
    SourceChecksumError,
    SourceError,
    TruncatedSourceError,
    UnsupportedCheckpointError,
    UnsupportedTensorError,
)
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.pipeline.spool import Spool
from stream_pack.sources.torch_save.zip import TorchZipSource
from tests.sources.byte_sources import Dribble, file_stream, pipe_stream
from tests.sources.source_suite import Expected, MakeSource, SourceSuite, catalog_rows, collect, options, requests_for
from tests.support.damage import (
    UNREADABLE,
    Share,
    assert_refusal,
    check_each,
    cut,
    may_refuse,
    some_or_all,
    two_bits_of_each_byte,
)
from tests.support.spools import without_a_folder
from tests.support.taking import taken
from tests.support.torch_zips import as_torch_has_it, records, repacked, saved
from tests.support.zips import Member, archive

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:.*torch.jit", "ignore:.*TypedStorage")

DTYPES = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16",
    "bfloat16", "float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn",
    "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bits: NaN payloads, denormals, infinities, negative zeros."""
    generator = torch.Generator().manual_seed(shape[0])
    nbytes = int(np.prod(shape)) * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    data = torch.randint(0, high, (nbytes,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape)


def everything() -> dict[str, torch.Tensor]:
    """Every dtype, every kind of view."""
    tensors = {name: random_bits(getattr(torch, name), 3, 5) for name in DTYPES}
    w = random_bits(torch.float32, 6, 4)
    c = torch.randn(5, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(3))
    d = torch.randn(3, dtype=torch.complex128, generator=torch.Generator().manual_seed(4))
    return tensors | {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0),
        "empty3": torch.empty(3, 0, 2),
        "w": w,
        "tied": w,
        "row": w[1:3],
        "columns": w[:, 1:3],
        "transposed": w.t(),
        "again": w.t(),
        "expanded": torch.tensor([1.0, 2.0]).expand(5, 2),
        "overlapping": torch.as_strided(torch.arange(9.0), (4, 3), (2, 1)),
        "reversed": torch.as_strided(torch.arange(108.0), (4, 3, 3, 3), (1, 4, 12, 36)),
        "channels_last": torch.arange(120.0).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "small": torch.arange(10_000.0)[500:510],
        "conj": c.conj(),
        "conj_t": c.conj().t(),
        "neg": d.conj().imag,
        "parameter": torch.nn.Parameter(torch.ones(2, 3)),
        "buffer": torch.nn.Buffer(torch.ones(4)),
        "": torch.ones(1),
        "../../etc/x": torch.ones(1),
        "\u00e9": torch.ones(1),
        "e\u0301": torch.ones(1),
        "new\nline\0": torch.ones(1),
        "n" * 5000: torch.ones(1),
    }


def expected_of(tensors: dict[str, torch.Tensor]) -> dict[str, Expected]:
    return {
        name: Expected(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), as_torch_has_it(tensor))
        for name, tensor in tensors.items()
    }


class TestAFile(SourceSuite):
    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeSource:
        data = saved(everything())
        return lambda: TorchZipSource(file_stream(data, tmp_path))

    @pytest.fixture
    def expected(self) -> dict[str, Expected]:
        return expected_of(everything())


class TestAPipe(TestAFile):
    chooses_order = False

    @pytest.fixture
    def make(self) -> MakeSource:
        data = saved(everything())
        return lambda: TorchZipSource(pipe_stream(data, step=1))

    def test_nothing_of_a_storage_is_read_for_the_catalog(self) -> None:
        data = saved({"w": torch.arange(1_000_000.0)})
        pipe = Dribble(data, step=1)
        assert len(TorchZipSource(ByteStream(pipe)).catalog) == 1
        assert pipe.taken <= data.index(torch.arange(3.0).numpy().tobytes())


class TestAnOldFile(SourceSuite):
    """As torch 1.6 to 2.5 wrote them: no byteorder, keys in lexicographic order."""

    @pytest.fixture
    def tensors(self) -> dict[str, torch.Tensor]:
        w = torch.arange(12.0).reshape(3, 4)
        return {f"t{k}": w[k % 3] + k for k in range(12)} | {"w": w, "wt": w.t()}

    @pytest.fixture
    def data(self, tensors: dict[str, torch.Tensor]) -> bytes:
        parts = records(saved(tensors))
        storages = sorted(name for name in parts if name.startswith("data/"))
        assert storages.index("data/10") < storages.index("data/2")
        order = ["data.pkl", *storages, "version"]
        return repacked({name: parts[name] for name in order})

    @pytest.fixture
    def make(self, data: bytes, tmp_path: Path) -> MakeSource:
        return lambda: TorchZipSource(file_stream(data, tmp_path))

    @pytest.fixture
    def expected(self, tensors: dict[str, torch.Tensor]) -> dict[str, Expected]:
        return expected_of(tensors)


class TestAnOldFileThroughAPipe(TestAnOldFile):
    chooses_order = False

    @pytest.fixture
    def make(self, data: bytes) -> MakeSource:
        return lambda: TorchZipSource(pipe_stream(data, step=65536))


class TestAFileWhosePickleIsNotFirst(TestAnOldFile):
    @pytest.fixture
    def data(self, tensors: dict[str, torch.Tensor]) -> bytes:
        parts = records(saved(tensors))
        return repacked({name: parts[name] for name in sorted(parts, reverse=True)})


class TestABigEndianFile(SourceSuite):
    @pytest.fixture
    def data(self) -> bytes:
        parts = records(saved(self.tensors()))
        parts["byteorder"] = b"big"
        for key, tensor in enumerate(self.tensors().values()):
            if key < 13:  # the storages of the views below are those of other tensors
                unit = tensor.dtype.itemsize // (2 if tensor.dtype.is_complex else 1)
                data = np.frombuffer(parts[f"data/{key}"], np.dtype(f"u{unit}"))
                parts[f"data/{key}"] = data.byteswap().tobytes()
        return repacked(parts)

    def tensors(self) -> dict[str, torch.Tensor]:
        plain = {name: random_bits(getattr(torch, name), 3, 5) for name in DTYPES[5:18]}
        return plain | {"view": plain["float32"][1:], "transposed": plain["complex64"].t()}

    @pytest.fixture
    def make(self, data: bytes, tmp_path: Path) -> MakeSource:
        return lambda: TorchZipSource(file_stream(data, tmp_path))

    @pytest.fixture
    def expected(self) -> dict[str, Expected]:
        return expected_of(self.tensors())


class TestABigEndianPipe(TestABigEndianFile):
    chooses_order = False

    @pytest.fixture
    def make(self, data: bytes) -> MakeSource:
        return lambda: TorchZipSource(pipe_stream(data, step=65536))


@pytest.fixture(params=["file", "pipe"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[bytes], TorchZipSource]:
    if request.param == "file":
        return lambda data: taken(TorchZipSource(file_stream(data, tmp_path)))
    return lambda data: taken(TorchZipSource(pipe_stream(data, step=65536)))


def read(source: TorchZipSource, spool: Spool | None = None, jobs: int = 1) -> dict[str, bytes]:
    """Every tensor's bytes by name, after the source has checked all of itself."""
    with source:
        catalog = source.catalog
        tensors, requests = requests_for(catalog)
        data = collect(source, requests, options(spool=spool, jobs=jobs))
        found = dict.fromkeys(catalog.names, b"")
        return found | {catalog.names[k]: d for k, d in zip(tensors, data)}


def simple() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(5.0), "b": torch.arange(300, dtype=torch.uint8)}


def wanted(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: as_torch_has_it(tensor) for name, tensor in tensors.items()}


Opened = Callable[[bytes], TorchZipSource]


# -- what is inside


def test_views_of_one_storage_share_it_and_equal_gathers_are_one(opened: Opened) -> None:
    w = torch.arange(12.0).reshape(3, 4)
    views = {"w": w, "v": w[1:], "t": w.t(), "t2": w.t(), "f": w.view(-1), "c": w[:, :2]}
    catalog = opened(saved(views)).catalog
    storages = dict(zip(catalog.names, catalog.storages.tolist()))
    starts = dict(zip(catalog.names, catalog.starts.tolist()))
    assert storages["w"] == storages["v"] == storages["f"]
    assert storages["t"] == storages["t2"]
    assert len({storages["w"], storages["t"], storages["c"]}) == 3
    assert starts == {"w": 0, "v": 16, "t": 0, "t2": 0, "f": 0, "c": 0}
    assert dict(catalog.derived) == {storages["t"]: (storages["w"], 0, 48), storages["c"]: (storages["w"], 0, 40)}
    assert catalog.storages_nbytes == 48


def test_a_state_dict_of_a_module_has_all_its_tensors(opened: Opened) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    state = module.state_dict()
    assert read(opened(saved(state))) == wanted(dict(state))
    assert len(state) == 7


def test_tensors_and_parameters_with_attributes_are_plain_tensors(opened: Opened) -> None:
    tensor, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(3))
    tensor.tag = parameter.tag = {"x": torch.Size([1])}  # type: ignore[attr-defined]
    assert read(opened(saved({"t": tensor, "p": parameter}))) == wanted({"t": tensor, "p": parameter})


def test_values_beside_the_tensors_are_left_out_and_counted(opened: Opened) -> None:
    misc = {
        "w": torch.ones(2), "size": torch.Size([1, 2]), "dtype": torch.float32, "int8": torch.quint8,
        "device": torch.device("cuda:7"), "set": {1, 2}, "bytes": b"abc", "none": b"", "ba": bytearray(b"x"),
        "complex": 1j, "long": 1 << 70, "nan": float("nan"), "counter": Counter("aab"),
        "layout": torch.strided, "dd": defaultdict(list), "frozen": frozenset([1]), "list": [1, "a"],
        "slice": slice(1, 2), "range": range(3), "path": Path("/a"), "nested": {"a": {"b": None}},
        "ordered": OrderedDict(a=1), "true": True, "q": torch.per_tensor_affine, 5: "number",
    }  # fmt: skip
    for protocol in (2, 4):
        source = opened(saved(misc, pickle_protocol=protocol))
        assert source.ignored == len(misc) - 1
        assert read(source) == wanted({"w": torch.ones(2)})


def test_an_empty_state_dict_is_an_empty_catalog(opened: Opened) -> None:
    assert read(opened(saved({}))) == {}


def test_float4_counts_elements_where_torch_counts_pairs(opened: Opened) -> None:
    tensor = torch.arange(8, dtype=torch.uint8).reshape(2, 4).view(torch.float4_e2m1fn_x2)
    source = opened(saved({"x": tensor}))
    assert catalog_rows(source.catalog) == [("x", "float4_e2m1fn", (2, 8), 8)]
    assert read(source) == {"x": bytes(range(8))}


def test_one_storage_under_two_dtypes_is_read_under_both(opened: Opened) -> None:
    words = random_bits(torch.uint32, 6)
    views = {"words": words, "halves": words.view(torch.uint16)[2:]}
    assert read(opened(saved(views))) == wanted(views)


def test_one_element_expanded_to_2_to_the_40_allocates_nothing(opened: Opened) -> None:
    source = opened(saved({"x": torch.tensor(1.0).expand(2**40)}))
    assert catalog_rows(source.catalog) == [("x", "float32", (2**40,), 2**42)]
    assert list(source.catalog.derived.values()) == [(0, 0, 4)]


NAMED_REFUSALS: dict[str, Callable[[], object]] = {
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "sparse": lambda: torch.ones(3).to_sparse(),
    "sparse csr": lambda: torch.ones(2, 2).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "meta": lambda: torch.empty(2, device="meta"),
    "bits": lambda: torch.ones(2, dtype=torch.uint8).view(torch.bits8),
    "uninitialised": torch.nn.parameter.UninitializedParameter,
    "subclass": lambda: torch.ones(2).as_subclass(Subclass),
}


class Subclass(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", NAMED_REFUSALS)
def test_a_tensor_that_no_pack_can_hold_is_refused_by_its_name(opened: Opened, kind: str) -> None:
    data = saved({"fine": torch.ones(1), "layer.odd": NAMED_REFUSALS[kind]()})
    with pytest.raises(UnsupportedTensorError, match=r"tensor 'layer\.odd' is "):
        opened(data)


def test_a_four_bit_scalar_is_refused_by_its_name(opened: Opened) -> None:
    scalar = torch.ones((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pytest.raises(UnsupportedTensorError, match="'x'"):
        opened(saved({"x": scalar}))


SHAPE_REFUSALS = {
    "nested": (
        {"net": {"w": torch.ones(1)}, "optimizer": {"state": {0: torch.ones(1)}}, "epoch": 3},
        r"'net', 'optimizer' \(its keys: 'net', 'optimizer', 'epoch'\)",
    ),
    "colliding paths": ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "below 'a'"),
    "in a list": ({"a": [1, (torch.ones(1),)]}, "below 'a'"),
    "in a set of a deque": ({"a": Counter({"x": torch.ones(1)})}, "below 'a'"),
    "tensor": (torch.ones(1), "single tensor"),
    "list": ([torch.ones(1)], "a list"),
    "tuple": ((torch.ones(1),), "a tuple"),
    "number": (3, "3, not a dict"),
    "no tensors": ({"epoch": 3}, "no tensors; its keys: 'epoch'"),
    "tuple key": ({("a", 1): torch.ones(1)}, r"under the key \('a', 1\)"),
    "None key": ({None: torch.ones(1)}, "under the key None"),
    "float key": ({1.5: torch.ones(1)}, "under the key 1.5"),
    "bytes key": ({b"a": torch.ones(1)}, "under the key"),
    "module": (torch.nn.Sequential(torch.nn.Linear(1, 1)), r"whole pickled module.*state_dict\(\)"),
    "storage": ({"s": torch.ones(1).untyped_storage()}, "'s' is a bare storage"),
    "numpy": ({"w": torch.ones(1), "n": np.array([None])}, "numpy.*_reconstruct"),
}


@pytest.mark.parametrize(("value", "message"), SHAPE_REFUSALS.values(), ids=SHAPE_REFUSALS)
def test_what_is_no_flat_state_dict_is_refused_with_a_reason(opened: Opened, value: object, message: str) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=message):
        opened(saved(value))


def test_a_name_with_a_lone_surrogate_is_refused(opened: Opened) -> None:
    with pytest.raises(SourceError, match="lone surrogate"):
        opened(saved({"\ud800": torch.ones(1)}, pickle_protocol=4))


# -- how it is stored


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_pickles_of_every_protocol_are_read(opened: Opened, protocol: int) -> None:
    tensors = simple() | {"f": torch.ones(2, dtype=torch.uint16)}
    assert read(opened(saved(tensors, pickle_protocol=protocol))) == wanted(tensors)


def test_a_pickle_of_protocol_0_is_refused(opened: Opened) -> None:
    parts = records(saved({}))
    parts["data.pkl"] = b"(dp0\nS'a'\np1\nI1\ns."
    with pytest.raises(UnsupportedCheckpointError, match="opcode"):
        opened(repacked(parts))


def test_storages_aligned_to_4096_are_read(opened: Opened) -> None:
    from torch.utils.serialization import config

    before = config.save.storage_alignment
    config.save.storage_alignment = 4096
    try:
        data = saved(simple())
    finally:
        config.save.storage_alignment = before
    assert data.index(as_torch_has_it(simple()["b"])) % 4096 == 0
    assert read(opened(data)) == wanted(simple())


def test_without_crcs_the_report_says_that_nothing_was_verified(opened: Opened) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        data = saved(simple())
    finally:
        torch.serialization.set_crc32_options(True)
    source = opened(data)
    assert read(source) == wanted(simple())
    assert source.verification == "the source carries no checksums"
    whole = opened(saved(simple()))
    read(whole)
    assert whole.verification == "CRC-32 of every record verified"


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_descriptors_of_both_lengths_and_lengths_in_the_header_are_read(
    opened: Opened, wide: bool, streamed: bool
) -> None:
    parts = records(saved(simple() | {"e": torch.empty(0)}))
    data = repacked(parts, lambda m: replace(m, wide=wide and streamed, streamed=streamed and m.streamed, pad=7))
    assert read(opened(data)) == wanted(simple() | {"e": torch.empty(0)})


def test_a_record_that_no_tensor_names_is_passed_over(opened: Opened) -> None:
    decoys = b"x" + b"PK\7\10" + bytes(12) + b"PK\3\4" + os.urandom(100_000) + b"PK\1\2"
    parts = list(records(saved(simple())).items())
    for place in range(1, len(parts) + 1):
        source = opened(repacked([*parts[:place], ("data/77", decoys), *parts[place:]]))
        assert read(source) == wanted(simple())
        assert source.unreferenced == 1


def test_a_payload_that_holds_zip_signatures_is_read(opened: Opened) -> None:
    payload = b"PK\7\10" + bytes(12) + b"PK\3\4PK\1\2PK\5\6" + b"\0" * 10
    tensor = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    assert read(opened(saved({"x": tensor}))) == {"x": payload}


def test_a_prefix_other_than_archive_is_read(opened: Opened, tmp_path: Path) -> None:
    torch.save(simple(), tmp_path / "my model é.pt")
    assert read(opened((tmp_path / "my model é.pt").read_bytes())) == wanted(simple())


def test_a_pickle_that_is_not_first_takes_a_file(tmp_path: Path) -> None:
    parts = records(saved(simple()))
    data = repacked({name: parts[name] for name in sorted(parts)})
    assert read(TorchZipSource(file_stream(data, tmp_path))) == wanted(simple())
    with pytest.raises(UnsupportedCheckpointError, match=r"first record is .*, not data\.pkl"):
        TorchZipSource(pipe_stream(data))


def test_a_file_is_read_from_where_its_descriptor_stands(tmp_path: Path) -> None:
    tensors = simple() | {"t": torch.arange(6.0).reshape(2, 3).t()}
    for parts in (records(saved(tensors)), dict(sorted(records(saved(tensors)).items()))):
        (tmp_path / "data").write_bytes(b"x" * 64 + repacked(parts))
        with open(tmp_path / "data", "rb") as file:
            file.seek(64)
            assert read(TorchZipSource(ByteStream(file))) == wanted(tensors)


@functools.cache
def seventy_thousand_tensors() -> bytes:
    """More records than a zip archive without zip64 can list."""
    values = torch.arange(70_000, dtype=torch.int32)
    return saved({f"layer.{k}.weight": value.clone() for k, value in enumerate(values)})


@pytest.mark.slow
def test_seventy_thousand_tensors_are_read(opened: Opened) -> None:
    found = read(opened(seventy_thousand_tensors()))
    assert b"".join(found.values()) == np.arange(70_000, dtype="<i4").tobytes()
    assert list(found)[69_999] == "layer.69999.weight"


# -- what was damaged on the way


@some_or_all(7)
def test_an_archive_cut_at_any_byte_is_refused(share: Share, tmp_path: Path) -> None:
    data = saved(simple())
    assert len(data) < 4000

    def check(beginning: bytes) -> None:
        for make in (file_stream(beginning, tmp_path), pipe_stream(beginning, step=65536)):
            with closing(make), pytest.raises(SourceError) as caught:
                read(TorchZipSource(make))
            assert_refusal(caught.value, TruncatedSourceError)

    check_each(cut(data, share.of(range(1, len(data)))), check)


@some_or_all(7)
def test_a_flipped_bit_in_any_byte_is_refused_or_changes_nothing(share: Share, tmp_path: Path) -> None:
    data = saved(simple())
    clean = read(TorchZipSource(pipe_stream(data, step=65536)))
    silent = 0

    def check(broken: bytes) -> None:
        nonlocal silent
        with may_refuse(*UNREADABLE):
            assert read(TorchZipSource(pipe_stream(broken, step=65536))) == clean
            silent += 1

    check_each(two_bits_of_each_byte(data, 3, share), check)
    # Alignment padding, timestamps and the like mean nothing.
    assert silent < len(data) * 2 // 3 // share.one_of


@pytest.mark.parametrize("jobs", [1, 4])
def test_a_flipped_bit_in_a_storage_names_the_tensor(opened: Opened, jobs: int) -> None:
    tensors = {"first": torch.arange(100.0), "second": torch.arange(2_000_000.0)}
    data = bytearray(saved(tensors))
    data[data.index(torch.arange(70.0, 80.0).numpy().tobytes(), len(data) // 2 - 4_000_000)] ^= 1
    with pytest.raises(SourceChecksumError, match="tensor 'first'|tensor 'second'") as caught:
        read(opened(bytes(data)), jobs=jobs)
    assert "is damaged in the source" in str(caught.value)


@pytest.mark.parametrize("in_order", [False, True])
def test_a_storage_that_nobody_wants_is_checked_too(tmp_path: Path, in_order: bool) -> None:
    data = bytearray(saved(simple()))
    data[data.index(bytes(range(100, 200)))] ^= 1
    source = TorchZipSource(file_stream(bytes(data), tmp_path))
    _, requests = requests_for(source.catalog, [0])
    with source, pytest.raises(SourceChecksumError, match="tensor 'b'"):
        collect(source, requests, options(in_order=in_order))


def test_a_short_write_inside_a_storage_is_refused_and_guessed(opened: Opened) -> None:
    data = repacked(
        records(saved(simple())), lambda member: replace(member, drop=50) if member.name.endswith("data/1") else member
    )
    with pytest.raises(SourceError, match="no data descriptor.*short write upstream"):
        read(opened(data))


def test_an_archive_whose_writer_was_interrupted_is_refused(opened: Opened) -> None:
    parts = records(saved(simple()))
    del parts["data/1"]
    with pytest.raises(TruncatedSourceError, match="1 of its 2 storages.*tensor 'b'.*interrupted"):
        read(opened(repacked(parts)))


@pytest.mark.filterwarnings("ignore")
def test_an_archive_without_a_pickle_is_refused(opened: Opened) -> None:
    parts = records(saved(simple()))
    del parts["data.pkl"]
    with pytest.raises(UnsupportedCheckpointError, match="interrupted save|first record is"):
        opened(repacked(parts))


@pytest.mark.parametrize("trailing", [bytes(100), saved({"other": torch.ones(1)})])
def test_bytes_behind_the_archive_are_refused(opened: Opened, trailing: bytes) -> None:
    with pytest.raises(SourceError, match="bytes follow the end"):
        read(opened(saved(simple()) + trailing))


@pytest.mark.parametrize("name", ["data/0", "data.pkl", "version", "data/other"])
def test_two_records_of_one_name_are_refused(opened: Opened, name: str) -> None:
    parts = [*records(saved(simple())).items(), ("data/other", b"x")]
    double = next(part for part in parts if part[0] == name)
    with pytest.raises(SourceError, match="two records named"):
        read(opened(repacked([*parts, double])))


@pytest.mark.parametrize("nbytes", [10, 19, 21, 40])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_record_of_another_length_than_its_storage_is_refused(opened: Opened, nbytes: int, streamed: bool) -> None:
    parts = records(saved({"a": torch.arange(5.0)}))
    parts["data/0"] = bytes(nbytes)
    data = repacked(parts, lambda m: replace(m, streamed=streamed and m.streamed))
    with pytest.raises(SourceError):
        read(opened(data))


def test_a_directory_that_contradicts_the_records_is_refused(opened: Opened) -> None:
    data = saved(simple())
    for at in (16, 42):  # the CRC and the position of the first entry
        broken = bytearray(data)
        broken[data.index(b"PK\1\2") + at] ^= 1
        with pytest.raises(SourceError, match=r"directory|CRC"):
            read(opened(bytes(broken)))


def test_a_byte_order_that_is_neither_is_refused(opened: Opened) -> None:
    parts = records(saved(simple())) | {"byteorder": b"middle"}
    with pytest.raises(UnsupportedCheckpointError, match="middle"):
        opened(repacked(parts))


def test_a_byte_order_told_too_late_is_refused(opened: Opened) -> None:
    parts = records(saved(simple()))
    del parts["byteorder"]
    assert read(opened(repacked(parts | {"byteorder": b"little"}))) == wanted(simple())
    with pytest.raises(UnsupportedCheckpointError, match="stated after its tensors"):
        read(opened(repacked(parts | {"byteorder": b"big"})))


def test_other_archives_are_refused_with_what_they_look_like(opened: Opened, tmp_path: Path) -> None:
    module = torch.jit.trace(torch.nn.Linear(1, 1), torch.ones(1, 1))  # type: ignore[no-untyped-call]
    torch.jit.save(module, tmp_path / "jit.pt")
    np.savez(tmp_path / "arrays.npz", a=np.ones(2))
    for name, message in (("jit.pt", "TorchScript"), ("arrays.npz", "NumPy archive")):
        with pytest.raises(UnsupportedCheckpointError, match=message):
            opened((tmp_path / name).read_bytes())
    with pytest.raises(UnsupportedCheckpointError, match="empty"):
        opened(archive([]))
    with pytest.raises(UnsupportedCheckpointError, match="its records: 'a/b'"):
        opened(archive([Member("a/b", b"x")]))


# -- what it takes


def test_a_strided_tensor_from_a_pipe_takes_the_spool_and_says_how_much(tmp_path: Path) -> None:
    tensors = {"t": torch.arange(600.0).reshape(20, 30).t(), "u": torch.ones(5, 7).t(), "w": torch.ones(9)}
    source = TorchZipSource(pipe_stream(saved(tensors), step=65536))
    _, requests = requests_for(source.catalog)
    assert source.demand(requests, in_order=False, chunk_nbytes=7).spool_nbytes == 2400
    spool = Spool(tmp_path)
    assert read(source, spool) == wanted(tensors)
    assert spool.peak_nbytes == 2400
    refused = TorchZipSource(pipe_stream(saved(tensors), step=65536))
    with without_a_folder(), pytest.raises(LimitError, match="not contiguous"):
        read(refused, Spool(None))


def test_a_strided_tensor_from_a_file_needs_no_spool(tmp_path: Path) -> None:
    tensors = {"t": torch.arange(600.0).reshape(20, 30).t()}
    source = TorchZipSource(file_stream(saved(tensors), tmp_path))
    _, requests = requests_for(source.catalog)
    assert source.demand(requests, in_order=False, chunk_nbytes=7).spool_nbytes == 0
    assert read(source, Spool(None)) == wanted(tensors)


def test_streaming_holds_a_few_chunks_only() -> None:
    import tracemalloc

    data = saved({"w": torch.zeros(64 << 20, dtype=torch.uint8)})
    source = TorchZipSource(pipe_stream(data, step=1 << 20))
    _, requests = requests_for(source.catalog)
    tracemalloc.start()
    try:
        for _ in source.stream(requests, options(chunk_nbytes=1 << 20, jobs=2)):
            pass
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_reading_a_checkpoint_does_not_import_torch(tmp_path: Path) -> None:
    torch.save(simple(), tmp_path / "model.pt")
    program = (
        "import sys; from stream_pack.sources.torch_save.zip import TorchZipSource as S; "
        "from stream_pack.pipeline.bytestream import ByteStream as B; "
        "assert len(S(B.open_path(sys.argv[1])).catalog) == 2; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "model.pt")], check=True)
