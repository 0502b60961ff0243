"""Tensors in memory as a source: what their bytes are, what they share, and what is refused."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import stream_pack
from stream_pack.errors import (
    LimitError,
    SourceChangedError,
    SourceError,
    StateError,
    StreamPackError,
    UnsupportedTensorError,
)
from stream_pack.sources.memory import torch_tensors as live_torch
from stream_pack.sources.memory.source import LiveSource
from tests.sources.source_suite import (
    Expected,
    MakeSource,
    SourceSuite,
    catalog_rows,
    collect,
    options,
    ranges,
    requests_for,
)
from tests.support.taking import taken

PLAIN = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32,
    torch.uint64, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex32, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


def random_bytes(nbytes: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def of_bytes(data: NDArray[np.uint8], dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of just these bytes; bool gets its own 0 and 1."""
    if dtype == torch.bool:
        data = np.bitwise_and(data, 1, dtype=np.uint8)
    return torch.from_numpy(data.copy()).view(dtype).reshape(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The tensor's elements, by torch's own copy to row-major order and NumPy's tobytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of complex32
        plain = tensor.detach().clone(memory_format=torch.contiguous_format)
        plain = plain.resolve_conj().resolve_neg()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def expect(tensor: torch.Tensor) -> Expected:
    return Expected(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), bytes_of(tensor))


def packed(tensors: Mapping[str, object], *, chunk_nbytes: int = 4096) -> dict[str, bytes]:
    """What the source gives for each tensor that has bytes."""
    with LiveSource(tensors) as source:
        rows, requests = requests_for(source.catalog)
        data = collect(source, requests, options(chunk_nbytes=chunk_nbytes))
        return dict(zip((source.catalog.names[k] for k in rows), data, strict=True))


def places(tensors: Mapping[str, object]) -> dict[str, tuple[int, int]]:
    """(storage, start) of every tensor."""
    catalog = LiveSource(tensors).catalog
    return {name: (int(catalog.storages[k]), int(catalog.starts[k])) for k, name in enumerate(catalog.names)}


def sample_tensors() -> dict[str, torch.Tensor]:
    base = of_bytes(random_bytes(4 * 3000, 1), torch.float32, 50, 60)
    complex_base = torch.view_as_complex(torch.arange(24.0).reshape(12, 2))
    return {
        **{str(d): of_bytes(random_bytes(16 * 15, 2), d, 15, -1) for d in PLAIN},
        "row": base[1],
        "columns": base[:, 1:3],
        "transposed": base.t(),
        "tied": base,
        "scalar": torch.tensor(3.5),
        "no elements": torch.empty(3, 0, 2),
        "no dims, no elements": torch.empty(0),
        "expanded": torch.tensor([1.0, 2.0]).expand(5, 2),
        "overlapping strides": base.as_strided((4, 5), (2, 1)),
        "reversed strides": torch.empty_strided((10, 3, 3, 3), (1, 10, 30, 90)).copy_(
            torch.arange(270.0).reshape(10, 3, 3, 3)
        ),
        "channels_last": torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conj": complex_base.conj(),
        "conj transposed": complex_base.reshape(3, 4).mH,
        "neg": complex_base.conj().imag,
        "bool columns": torch.arange(12).reshape(3, 4).gt(5)[:, ::2],
        "parameter": torch.nn.Parameter(torch.arange(5.0)),
        "buffer": torch.nn.Buffer(torch.arange(4)),
    }


class TestTorchTensors(SourceSuite):
    @pytest.fixture
    def make(self) -> MakeSource:
        tensors = sample_tensors()
        return lambda: LiveSource(tensors)

    @pytest.fixture
    def expected(self) -> dict[str, Expected]:
        return {name: expect(tensor) for name, tensor in sample_tensors().items()}


class TestTensorsOfAnotherDevice(TestTorchTensors):
    """No accelerator is at hand: CPU tensors are taken for ones whose memory cannot be read by address."""

    @pytest.fixture(autouse=True)
    def out_of_reach(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(live_torch, "in_host_memory", lambda tensor: False)

    def test_they_are_fetched_a_chunk_at_a_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fetched: list[int] = []
        to_host = torch.Tensor.cpu

        def counted(tensor: torch.Tensor) -> torch.Tensor:
            fetched.append(tensor.numel() * tensor.itemsize)
            return to_host(tensor)

        monkeypatch.setattr(torch.Tensor, "cpu", counted)
        packed({"w": torch.zeros(1000), "t": torch.zeros(20, 50).t()}, chunk_nbytes=400)
        assert fetched == [400] * 10 + [400] * 10

    def test_tied_ones_and_views_still_share_a_storage(self) -> None:
        w = torch.zeros(8, 8)
        assert places({"w": w, "tied": w, "view": w[2:], "other": torch.zeros(8, 8)}) == {
            "w": (0, 0), "tied": (0, 0), "view": (0, 64), "other": (1, 0),
        }  # fmt: skip


@pytest.mark.parametrize("device", ["cuda:1", "mps", "xpu", "hpu", "vulkan", "privateuseone:0"])
def test_no_tensor_of_another_device_is_read_by_address(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pointer may well be one that can be read, of other bytes: nothing but a copy to the CPU will do."""
    to_host = torch.Tensor.cpu
    fetched: list[torch.Tensor] = []

    def fetch(tensor: torch.Tensor) -> torch.Tensor:
        assert str(tensor.device) == device
        monkeypatch.setattr(torch.Tensor, "data_ptr", data_ptr)  # of the copy it may be asked for
        fetched.append(to_host(tensor))
        return fetched[-1]

    def no_address(tensor: torch.Tensor) -> int:
        raise AssertionError(f"the address of a tensor on {device} was asked for")

    data_ptr = torch.Tensor.data_ptr
    w = torch.arange(12.0).reshape(3, 4)
    # The name of the device is all that tells: no accelerator is at hand.
    monkeypatch.setattr(torch.Tensor, "device", torch.device(device), raising=False)
    monkeypatch.setattr(torch.Tensor, "data_ptr", no_address)
    monkeypatch.setattr(torch.Tensor, "cpu", fetch)
    source = LiveSource({"w": w})
    assert fetched == []
    _, requests = requests_for(source.catalog)
    data = collect(source, requests, options())
    assert len(fetched) == 1
    assert data == [np.arange(12, dtype="<f4").tobytes()]


def sample_arrays() -> dict[str, NDArray[Any]]:
    base = random_bytes(4 * 3000, 3).view(np.float32).reshape(50, 60)
    names = ["bool", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8", "c16"]
    extra = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
    return {
        **{n: (random_bytes(240, 4) & 1).view(n).reshape(3, -1) for n in names},
        **{n: random_bytes(240, 5).view(getattr(ml_dtypes, n)).reshape(3, -1) for n in extra},
        **{">" + n: random_bytes(240, 6).view(">" + n).reshape(3, -1) for n in names[3:]},
        "bfloat16 columns": random_bytes(240, 5).view(ml_dtypes.bfloat16).reshape(3, -1)[:, ::3],
        "big-endian columns": random_bytes(240, 7).view(">c8").reshape(5, 6)[:, 1:4],
        "big-endian and empty": np.empty((0, 3), ">f4"),
        "row": base[1],
        "columns": base[:, 1:3],
        "Fortran": np.asfortranarray(base),
        "reversed": base[::-1, ::-2],
        "expanded": np.broadcast_to(np.float32(2.5), (3, 4)),
        "read-only": np.frombuffer(bytes(range(16)), np.int32),
        "scalar": np.array(7, np.int16),
        "scalar, big-endian": np.array(7, ">i2"),
        "empty": np.empty((3, 0), np.float64),
    }


class TestArrays(SourceSuite):
    @pytest.fixture
    def make(self) -> MakeSource:
        arrays = sample_arrays()
        return lambda: LiveSource(arrays)

    @pytest.fixture
    def expected(self) -> dict[str, Expected]:
        def one(array: NDArray[Any]) -> Expected:
            little = array.astype(array.dtype.newbyteorder("<")) if array.dtype.kind in "biufc" else array
            return Expected(array.dtype.name, array.shape, little.tobytes())

        return {name: one(array) for name, array in sample_arrays().items()}


class TestAModule(SourceSuite):
    @staticmethod
    def module() -> torch.nn.Module:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        module.register_buffer("scratch", torch.zeros(4), persistent=False)
        return module

    @pytest.fixture
    def make(self) -> MakeSource:
        module = self.module()
        return lambda: LiveSource(module)

    @pytest.fixture
    def expected(self) -> dict[str, Expected]:
        expected = {name: expect(tensor) for name, tensor in self.module().state_dict().items()}
        assert list(expected) == [
            "0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var",
            "1.num_batches_tracked",
        ]  # fmt: skip
        return expected


# What is shared.


def other_dtype(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.bfloat16()


def other_memory(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.clone()


def other_shape(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.reshape(3, 2)


def other_strides(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.t()


def shorter(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data[:1]


@pytest.mark.parametrize("change", [other_dtype, other_memory, other_shape, other_strides, shorter])
@pytest.mark.parametrize("turned", [False, True])
def test_a_tensor_that_is_another_by_the_time_it_is_read_is_refused(
    change: Callable[[torch.Tensor], None], turned: bool, tmp_path: Path
) -> None:
    """As when a model is trained or cast on while it is saved: the old dtype with the new bytes would look right."""
    tensor = torch.arange(6.0).half().reshape(2, 3)
    tensor = tensor.reshape(3, 2).t() if turned else tensor
    given = {"first": torch.ones(1), "w": tensor, "last": torch.ones(2)}

    def then(_done: int, _total: int) -> None:
        if given:
            change(given.pop("w"))
            given.clear()

    with pytest.raises(SourceChangedError, match="'w' was given another memory, shape or dtype"):
        stream_pack.convert(dict(given), tmp_path / "pack", progress=then, jobs=1)
    assert list(tmp_path.iterdir()) == []


def test_a_contiguous_tensor_is_read_where_it_lies() -> None:
    w = torch.arange(1000, dtype=torch.bfloat16)
    a = np.arange(1000)
    with LiveSource({"w": w[10:], "a": a[10:]}) as source:
        _, requests = requests_for(source.catalog)
        chunks = [chunk for _, chunk in source.stream(requests, options())]
    addresses = [np.frombuffer(chunk, np.uint8).ctypes.data for chunk in chunks]  # type: ignore[arg-type]
    assert addresses == [w.data_ptr() + 20, a.ctypes.data + 80]
    assert all(isinstance(chunk, memoryview) and chunk.readonly for chunk in chunks[:1])


def test_a_chunk_outlives_its_tensor_and_the_source() -> None:
    source = LiveSource({"w": torch.full((1 << 16,), 7, dtype=torch.uint8)})
    _, requests = requests_for(source.catalog)
    chunk = next(iter(source.stream(requests, options())))[1]
    source.close()
    del source
    gc.collect()
    decoys = [torch.zeros(1 << 16, dtype=torch.uint8) for _ in range(8)]
    assert bytes(chunk) == b"\7" * (1 << 16)  # type: ignore[arg-type]
    assert len(decoys) == 8


def test_a_closed_source_lets_go_of_the_tensors() -> None:
    array = np.zeros(10)
    alive = weakref.ref(array)
    source = LiveSource({"a": array})
    source.close()
    del array
    gc.collect()
    assert alive() is None
    with pytest.raises(StateError, match="closed"):
        list(source.stream(ranges([(0, 0, 80)]), options()))


def test_tied_tensors_and_views_share_a_storage() -> None:
    w, other = torch.zeros(64, 64), torch.zeros(64, 64)
    assert places({"head": w, "other": other, "embed": w, "rows": w[1:3], "o": other}) == {
        "head": (0, 0), "other": (1, 0), "embed": (0, 0), "rows": (0, 256), "o": (1, 0),
    }  # fmt: skip


def test_arrays_share_through_their_base_and_through_torch() -> None:
    base = np.zeros(100, np.float32)
    tensors = {
        "rows": base[10:20],
        "base": base,
        "reversed twice": base[::-1][::-1],
        "torch": torch.from_numpy(base)[5:],
        "other": np.zeros(100, np.float32),
    }
    assert places(tensors) == {
        "rows": (0, 40), "base": (0, 0), "reversed twice": (0, 0), "torch": (0, 20), "other": (1, 0),
    }  # fmt: skip


def test_arrays_over_one_foreign_memory_share_it_where_they_overlap() -> None:
    memory = bytes(100)
    arrays = {"all": np.frombuffer(memory, np.uint8), "tail": np.frombuffer(memory, np.uint8, offset=50)}
    assert places(arrays) == {"all": (0, 0), "tail": (0, 50)}
    apart = {"head": np.frombuffer(memory, np.uint8, count=50), "tail": np.frombuffer(memory, np.uint8, offset=50)}
    assert places(apart) == {"head": (0, 0), "tail": (1, 0)}
    assert [LiveSource(tensors).catalog.storages_nbytes for tensors in (arrays, apart)] == [100, 100]


def test_equal_transformations_of_equal_bytes_are_derived_once() -> None:
    w = torch.zeros(4, 6, dtype=torch.complex64)
    source = LiveSource({"t": w.t(), "w": w, "t again": w.t(), "conj": w.conj(), "H": w.mH, "H again": w.mH})
    catalog = source.catalog
    assert catalog.storages.tolist() == [1, 0, 1, 2, 3, 3]
    assert catalog.derived == {1: (0, 0, 192), 2: (0, 0, 192), 3: (0, 0, 192)}


def test_derivations_that_only_begin_alike_are_kept_apart() -> None:
    square = np.arange(16, dtype=np.float32).reshape(4, 4)
    swapped = square.view(">f4")
    tensors: dict[str, Any] = {
        "torch": torch.from_numpy(square)[:2, :2],
        "torch, transposed": torch.from_numpy(square).t()[:2, :2],
        "NumPy": square[:2, :2],
        "NumPy, transposed": square.T[:2, :2],
        "NumPy, swapped": swapped[:2, :2],
        "NumPy, integers": square.view(np.int32)[:2, :2],
        "NumPy, backwards": square[1::-1, 1::-1],
    }
    catalog = LiveSource(tensors).catalog
    # Neither the library nor the dtype makes another storage of the same bytes.
    assert catalog.storages.tolist() == [1, 2, 1, 2, 3, 1, 4]
    little = np.array([0, 1, 4, 5], "<f4").tobytes()
    across = np.array([0, 4, 1, 5], "<f4").tobytes()
    assert list(packed(tensors).values()) == [
        little, across, little, across, np.array([0, 1, 4, 5], ">f4").tobytes(), little,
        np.array([5, 4, 1, 0], "<f4").tobytes(),
    ]  # fmt: skip


def twice(tensors: Mapping[str, torch.Tensor], tmp_path: Path) -> tuple[bytes, bytes]:
    """The packs that are made of tensors in memory, and of the checkpoint that torch.save makes of them."""
    torch.save(dict(tensors), tmp_path / "checkpoint")
    stream_pack.save_file(tensors, tmp_path / "live")
    stream_pack.convert(tmp_path / "checkpoint", tmp_path / "converted")
    return (tmp_path / "live").read_bytes(), (tmp_path / "converted").read_bytes()


def test_tensors_and_their_checkpoint_make_the_same_pack_however_their_dims_cut_the_elements_up(tmp_path: Path) -> None:
    base, square = torch.arange(4096.0), torch.arange(64.0).reshape(8, 8)
    number, z = torch.tensor([5.0]), torch.arange(8).to(torch.complex64).reshape(2, 4)
    live, converted = twice(
        {
            "a": base[::2],
            "b": base[::2].view(32, 64),
            "c": base[::2].view(2, 1, 1024),
            "expanded": number.expand(6),
            "expanded, of two dims": number.expand(2, 3),
            "t": square.t(),
            "t, with a dim of one": square.t().unsqueeze(1),
            "conj": z.conj(),
            "conj, flat": z.conj().view(8),
            "imag": z.clone().conj().imag,
            "diagonal": square.diagonal(),
        },
        tmp_path,
    )
    assert live == converted
    with stream_pack.open(tmp_path / "live") as pack:
        assert len({pack[name].file_offset for name in pack}) == 6


def test_strided_memory_is_stored_once_whichever_library_it_is_seen_through() -> None:
    array = np.arange(4096, dtype=np.float32)
    tensor = torch.from_numpy(array)
    tensors = {
        "NumPy": array.reshape(64, 64)[:, ::2],
        "torch": tensor[::2].view(32, 1, 64),
        "all of it": tensor,
        "all of it, of two dims": array.reshape(64, 64),
    }
    assert LiveSource(tensors).catalog.storages.tolist() == [1, 1, 0, 0]


def test_tensors_without_elements_lie_nowhere() -> None:
    base, array = torch.zeros(10), np.zeros(10, ">f4")
    catalog = LiveSource({"a": base[7:7], "b": array[3:3], "c": base.expand(0, 10)}).catalog
    assert catalog.starts.tolist() == [0, 0, 0]
    assert catalog.derived == {}


def test_a_derived_storage_tells_which_bytes_it_is_made_from() -> None:
    base = torch.zeros(10, 10)
    array = np.zeros((10, 10), ">f4")
    catalog = LiveSource(
        {
            "one element, many times": base[2, 3].expand(5, 5),
            "columns": base[1:3, 4:6],
            "backwards": np.zeros(10)[8:2:-2],
            "swapped": array[1:3],
        }
    ).catalog
    assert [tuple(catalog.derived[int(k)]) for k in catalog.storages] == [
        (0, 92, 96),
        (0, 56, 104),
        (3, 32, 72),
        (5, 40, 120),
    ]


def test_one_element_expanded_to_a_terabyte_costs_nothing_to_name() -> None:
    source = LiveSource({"w": torch.ones(1).expand(2**40)})
    assert source.catalog.nbytes.tolist() == [2**42]
    first = next(source.stream(ranges([(1, 0, 2**42)]), options(chunk_nbytes=8)))
    assert (first[0], bytes(first[1])) == (0, np.ones(2, "<f4").tobytes())  # type: ignore[arg-type]


def test_no_more_is_gathered_than_was_asked_for() -> None:
    source = LiveSource({"w": np.broadcast_to(np.float32(1), (2**40,))})
    assert collect(source, ranges([(1, 4, 8)]), options()) == [np.ones(2, "<f4").tobytes()]


def test_a_slice_of_a_large_storage_counts_all_of_it_as_held() -> None:
    # PT#33101: ten elements of 10**8 asked for.
    catalog = LiveSource({"w": torch.zeros(10**8)[:10]}).catalog
    assert catalog.nbytes.tolist() == [40]
    assert catalog.storages_nbytes == 4 * 10**8
    catalog = LiveSource({"a": np.zeros(10**6)[:10], "b": np.zeros(5)}).catalog
    assert catalog.storages_nbytes == 8 * 10**6 + 40


def test_more_elements_than_32_bits_count_are_named_exactly() -> None:
    # PT#47201.  No page of these 4 GiB is ever touched.
    catalog = LiveSource({"w": torch.empty(2**31 + 1, dtype=torch.bfloat16)[1:]}).catalog
    assert catalog.nbytes.tolist() == [2**32]
    assert catalog.starts.tolist() == [2]


def test_a_mapping_is_asked_for_each_value_once() -> None:
    class Lazy(Mapping[str, object]):
        def __init__(self) -> None:
            self.asked: list[str] = []

        def __len__(self) -> int:
            return 50

        def __iter__(self) -> Iterator[str]:
            return (str(k) for k in range(50))

        def __getitem__(self, name: str) -> object:
            self.asked.append(name)
            return np.full(1000, int(name))

    lazy = Lazy()
    # Each value would be at the freed address of the one before, were it not kept.
    assert packed(lazy) == {str(k): np.full(1000, k).tobytes() for k in range(50)}
    assert lazy.asked == [str(k) for k in range(50)]


@given(data=st.data(), shape=st.lists(st.integers(1, 4), max_size=4), chunk_nbytes=st.integers(1, 40))
def test_any_strided_view_gives_its_elements(data: st.DataObject, shape: list[int], chunk_nbytes: int) -> None:
    strides = [data.draw(st.integers(0, 8)) for _ in shape]
    base = torch.arange(200, dtype=torch.int16)
    tensor = base.as_strided(shape, strides, 3)
    array = tensor.numpy()
    for axis in range(len(shape)):
        array = np.flip(array, axis) if data.draw(st.booleans()) else array
    expected = {"torch": tensor.clone().numpy().tobytes(), "NumPy": array.tobytes()}
    assert packed({"torch": tensor, "NumPy": array}, chunk_nbytes=chunk_nbytes) == expected
    catalog = LiveSource({"torch": tensor, "NumPy": array}).catalog
    for _, begin, end in catalog.derived.values():
        # The bytes in between: from the lowest element's first to the highest one's last.
        highest = sum((dim - 1) * stride for dim, stride in zip(shape, strides, strict=True))
        assert (end - begin) == 2 * highest + 2


# Dtypes.


def test_two_float4_elements_a_byte_double_the_last_dim() -> None:
    data = random_bytes(24).reshape(4, 6)
    tensor = torch.from_numpy(data.copy()).view(torch.float4_e2m1fn_x2)
    with LiveSource({"w": tensor, "columns": tensor[:, 1:3], "empty": tensor[:, :0]}) as source:
        assert catalog_rows(source.catalog) == [
            ("w", "float4_e2m1fn", (4, 12), 24),
            ("columns", "float4_e2m1fn", (4, 4), 8),
            ("empty", "float4_e2m1fn", (4, 0), 0),
        ]
        _, requests = requests_for(source.catalog)
        assert collect(source, requests, options()) == [data.tobytes(), data[:, 1:3].tobytes()]


def test_one_float4_pair_without_a_dim_is_refused() -> None:
    tensor = torch.zeros(1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)[0]
    with pytest.raises(UnsupportedTensorError, match=r"rank 0.*reshape"):
        taken(LiveSource({"w": tensor}))


def test_a_pack_is_little_endian_whatever_the_array_is() -> None:
    assert packed({"w": np.array([1, 258], ">u2"), "c": np.array([1 + 2j], ">c8")}) == {
        "w": bytes([1, 0, 2, 1]),
        "c": bytes.fromhex("0000803f 00000040"),
    }


def test_signs_and_payloads_of_special_floats_survive() -> None:
    patterns = np.array([0x7FC12345, 0xFF812345, 0x80000000, 0x7F800000, 0x00000001], np.uint32)
    as_torch = torch.from_numpy(patterns.view(np.float32))
    assert packed(
        {
            "torch": as_torch,
            "strided": torch.stack([as_torch, as_torch], 1)[:, 0],
            "big-endian": patterns.astype(">u4").view(">f4"),
        }
    ) == dict.fromkeys(["torch", "strided", "big-endian"], patterns.tobytes())


def test_gradients_and_modes_of_the_caller_do_not_matter() -> None:
    w = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    with torch.inference_mode():
        inferred = w.t() * 1
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert packed({"w": w, "t": w.t(), "inferred": inferred}) == {
            "w": np.arange(6, dtype="<f4").tobytes(),
            "t": np.array([0, 3, 1, 4, 2, 5], "<f4").tobytes(),
            "inferred": np.array([0, 3, 1, 4, 2, 5], "<f4").tobytes(),
        }


# What is refused, by name, when the source is made.


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(2)


def vmapped() -> torch.Tensor:
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    torch.func.vmap(keep)(torch.ones(2, 3))
    return kept[0]


def resized(nbytes: int) -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


class Subclass(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make_tensor", "reason"),
    [
        (lambda: torch.empty(2, device="meta"), "meta device"),
        (lambda: torch.empty(0, device="meta"), "meta device"),
        (fake, "FakeTensor"),
        (lambda: torch._to_functional_tensor(torch.ones(2)), "functionalize"),
        (vmapped, "vmap"),
        (lambda: torch.ones(2).as_subclass(Subclass), "Subclass"),
        (lambda: torch.nn.Parameter(torch.ones(2).as_subclass(Subclass)), "Subclass"),
        (lambda: torch.nn.parameter.UninitializedParameter(), "UninitializedParameter"),
        (lambda: torch.eye(2).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(2).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.eye(2).to_sparse_csc(), "sparse_csc"),
        (lambda: torch.eye(2).to_sparse_bsr((1, 1)), "sparse_bsr"),
        (lambda: torch.eye(2).to_sparse_bsc((1, 1)), "sparse_bsc"),
        (lambda: torch.ones(2).to_mkldnn(), "_mkldnn"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "NestedTensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "quantized"),
        (
            lambda: torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint8),
            "quantized",
        ),
        (lambda: torch._efficientzerotensor((2,)), "placeholder for zeros"),
        (lambda: resized(0), "freed"),
        (lambda: resized(15), "byte 16 of a storage of 15 bytes"),
        *[
            (lambda name=name: torch.ones(2, dtype=torch.uint8).view(getattr(torch, name)), name)
            for name in ("bits8", "bits1x8", "int1", "int4", "int7", "uint1", "uint4", "uint7")
        ],
    ],
)
def test_a_torch_tensor_without_plain_bytes_is_refused_by_name(
    make_tensor: Callable[[], torch.Tensor], reason: str
) -> None:
    tensors = {"good": torch.ones(2), "layer.weight": make_tensor()}
    with pytest.raises(UnsupportedTensorError, match=reason) as caught:
        taken(LiveSource(tensors))
    assert caught.value.tensor == "layer.weight"
    assert "'layer.weight'" in str(caught.value)


def test_a_dtensor_is_refused_by_name() -> None:
    from torch.distributed.tensor import DTensor

    class Stub(DTensor):
        """A DTensor needs a process group; what is refused is its type."""

    tensor = torch.Tensor._make_wrapper_subclass(Stub, (2,))
    with pytest.raises(UnsupportedTensorError, match=r"'w' is a .*Stub"):
        taken(LiveSource({"w": tensor}))


@pytest.mark.parametrize(
    "array",
    [
        np.array([None]),
        np.array(["a"]),
        np.array([b"a"]),
        np.zeros(2, [("a", "f4"), ("b", "i4")]),
        np.zeros(2, "V4"),
        np.zeros(2, "M8[s]"),
        np.zeros(2, "m8[s]"),
        np.zeros(2, np.longdouble),
        np.zeros(2, np.clongdouble),
        np.zeros(2, ml_dtypes.int4),
        np.zeros(2, ml_dtypes.uint4),
        np.zeros(2, ml_dtypes.float4_e2m1fn),
        np.zeros(2, ml_dtypes.float8_e3m4),
    ],
    ids=lambda array: str(array.dtype),
)
def test_an_array_whose_dtype_a_pack_has_no_name_for_is_refused_by_name(array: NDArray[Any]) -> None:
    with pytest.raises(UnsupportedTensorError, match=r"'layer\.weight'") as caught:
        taken(LiveSource({"layer.weight": array}))
    assert str(array.dtype) in str(caught.value)
    assert caught.value.tensor == "layer.weight"


@pytest.mark.parametrize("value", [3.5, [1, 2], None, "text", np.float32(1), {"nested": 1}, np.ma.masked_array([1, 2])])
def test_a_value_that_is_no_plain_tensor_is_refused_by_name_and_type(value: object) -> None:
    with pytest.raises(UnsupportedTensorError, match=type(value).__name__) as caught:
        taken(LiveSource({"step": value}))
    assert caught.value.tensor == "step"


def test_a_modules_extra_state_is_refused_unless_it_is_a_tensor() -> None:
    class WithState(torch.nn.Module):
        def __init__(self, state: object) -> None:
            super().__init__()
            self.state = state

        def get_extra_state(self) -> object:
            return self.state

    with pytest.raises(UnsupportedTensorError, match="_extra_state"):
        taken(LiveSource(WithState({"calibrated": True})))
    assert LiveSource(WithState(torch.ones(2))).catalog.names == ("_extra_state",)


@pytest.mark.parametrize("key", [0, None, ("a", 1), b"w", 1.5])
def test_names_are_text(key: object) -> None:
    with pytest.raises(SourceError, match="tensor names must be strings") as caught:
        taken(LiveSource({key: np.zeros(1)}))  # type: ignore[dict-item]
    assert repr(key) in str(caught.value)


def test_odd_names_are_kept_exactly() -> None:
    names = ["", "../../etc/x", "a/b", "\u00e9", "e\u0301", "a\nb", "a\0b", "x" * 5000]
    assert LiveSource({name: np.zeros(1) for name in names}).catalog.names == tuple(names)
    with pytest.raises(SourceError, match="lone surrogate"):
        taken(LiveSource({"\ud800": np.zeros(1)}))


@pytest.mark.parametrize("value", [[("w", np.zeros(1))], np.zeros(1), torch.zeros(1), None])
def test_what_has_no_names_is_refused(value: object) -> None:
    with pytest.raises(SourceError, match="expected a mapping of names to tensors"):
        taken(LiveSource(value))  # type: ignore[arg-type]


def test_an_array_too_large_for_a_pack_is_refused() -> None:
    with pytest.raises(LimitError, match="'w'"):
        taken(LiveSource({"w": np.broadcast_to(np.uint8(0), (2**62 + 2,))}))


def test_errors_are_of_this_package_whatever_a_mapping_holds() -> None:
    for value in (object(), type, lambda: None, memoryview(b"a"), np.zeros(1).dtype):
        with pytest.raises(StreamPackError):
            taken(LiveSource({"w": value}))


def test_arrays_do_not_bring_torch_in() -> None:
    program = """
import sys
import numpy as np
from stream_pack.sources.memory.source import LiveSource
LiveSource({"w": np.zeros(3)})
try:
    LiveSource({"w": 1})
except ValueError:
    pass
try:
    LiveSource(3)
except ValueError:
    pass
assert "torch" not in sys.modules and "ml_dtypes" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.skipif(not hasattr(torch.Tensor, "_lazy_clone"), reason="this version of torch has no lazy clones")
@pytest.mark.parametrize("rows", [slice(None), slice(3, 9)], ids=["whole", "view"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["contiguous", "transposed"])
def test_packing_a_lazy_clone_makes_no_copy_of_it(rows: slice, order: tuple[int, int], tmp_path: Path) -> None:
    weight = torch.randn(64, 64)
    lazy = weight._lazy_clone()[rows].permute(order)
    stream_pack.save_file({"w": lazy}, tmp_path / "pack")
    assert torch._C._is_cow_tensor(lazy)  # type: ignore[attr-defined]
    assert torch.equal(stream_pack.load_file(tmp_path / "pack")["w"], weight[rows].permute(order))
