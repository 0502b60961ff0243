"""Tensors are used where they stand: by address, by dtype, by slice, and without the file ever noticing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import stream_pack
from stream_pack import FormatError, MissingPackageError, Pack, StateError, UnknownTensorError
from stream_pack.format.catalog import CatalogBuilder
from stream_pack.format.dtypes import BY_NAME
from tests.support.memory import needs_proc
from tests.support.packs import pack_bytes, places, reseal, tensors
from tests.support.smaps import mapped_file

WHOLE_BYTES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
]
ML_DTYPES = [name for name in WHOLE_BYTES if name == "bfloat16" or name.startswith("float8")]


def pattern(dtype: str, shape: tuple[int, ...] = (3, 4)) -> torch.Tensor:
    """Distinct bytes under a dtype; 0 and 1 for bool."""
    torch_dtype = getattr(torch, dtype)
    count = int(np.prod(shape)) * torch_dtype.itemsize
    raw = torch.arange(count) % (2 if dtype == "bool" else 251)
    return raw.to(torch.uint8).view(torch_dtype).view(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pack"


@pytest.fixture
def pack(path: Path) -> Iterator[Pack]:
    pack_bytes(path, metadata={"format": "pt", "é": "\n"})
    with stream_pack.open(path) as pack:
        yield pack


def test_a_pack_is_a_mapping_in_the_order_of_the_file(pack: Pack) -> None:
    # ST#571
    assert list(pack) == list(tensors())
    assert len(pack) == 7
    assert "norm" in pack
    assert "nor" not in pack
    assert "\ud800" not in pack
    assert 5 not in pack  # type: ignore[comparison-overlap]
    assert dict(pack.items()).keys() == tensors().keys()
    assert pack.get("nothing") is None
    assert pack.metadata == {"format": "pt", "é": "\n"}
    offsets = [view.file_offset for name, view in pack.items() if name not in ("head", "rows", "none")]
    assert offsets == sorted(offsets)


def test_a_name_that_is_not_there_is_a_key_error_that_says_so(pack: Pack) -> None:
    with pytest.raises(KeyError, match="no tensor 'nothing'") as caught:
        pack["nothing"]
    assert isinstance(caught.value, UnknownTensorError)
    assert caught.value.tensor == "nothing"


def test_what_a_view_says_of_itself_is_true(pack: Pack, path: Path) -> None:
    data = path.read_bytes()
    region = places(data).region
    for name, tensor in tensors().items():
        view = pack[name]
        assert view.name == name
        assert f"torch.{view.dtype}" == str(tensor.dtype)
        assert view.shape == tuple(tensor.shape)
        assert view.nbytes == tensor.nbytes
        assert view.file_offset == region + view.offset
        assert data[view.file_offset : view.file_offset + view.nbytes] == bits(tensor) == view.raw()
        assert torch.equal(view.torch(), tensor)
        assert view.torch().dtype == tensor.dtype


@pytest.mark.parametrize("dtype", WHOLE_BYTES)
def test_every_dtype_comes_back_through_torch_bit_for_bit(dtype: str, path: Path) -> None:
    expected = {"matrix": pattern(dtype), "number": pattern(dtype, ()), "nothing": pattern(dtype, (2, 0))}
    pack_bytes(path, expected)
    with stream_pack.open(path) as pack:
        for name, tensor in expected.items():
            found = pack[name].torch()
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert bits(found) == bits(tensor) == pack[name].raw()


@pytest.mark.parametrize("dtype", [name for name in WHOLE_BYTES if name not in (*ML_DTYPES, "complex32")])
def test_dtypes_of_numpy_come_back_through_numpy_bit_for_bit(dtype: str, path: Path) -> None:
    tensor = pattern(dtype)
    pack_bytes(path, {"matrix": tensor, "number": pattern(dtype, ()), "nothing": pattern(dtype, (0, 3))})
    with stream_pack.open(path) as pack:
        array = pack["matrix"].numpy()
        assert array.dtype == np.dtype(dtype)
        assert np.array_equal(array.view(np.uint8), tensor.numpy().view(np.uint8))
        assert not array.flags.writeable
        assert pack["number"].numpy().shape == ()
        assert pack["nothing"].numpy().shape == (0, 3)
        assert not pack["nothing"].numpy().flags.writeable


@pytest.mark.parametrize("dtype", ML_DTYPES)
def test_small_floats_come_as_ml_dtypes(dtype: str, path: Path) -> None:
    # ST#598, ST#683
    tensor = pattern(dtype)
    pack_bytes(path, {"w": tensor})
    with stream_pack.open(path) as pack:
        array = pack["w"].numpy()
        assert array.dtype == np.dtype(getattr(ml_dtypes, dtype))
        assert array.tobytes() == bits(tensor)


def test_without_torch_the_error_says_what_is_missing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack_bytes(path, {"w": pattern("bfloat16")})
    # None: as if torch were not installed.  To take it out and in again would change the order of the modules, which is
    # where pickle looks for what does not say where it is from.
    monkeypatch.setitem(sys.modules, "torch", None)
    with stream_pack.open(path) as opened:
        for call in (lambda: opened["w"].torch(), lambda: stream_pack.load_file(path), opened.materialize):
            with pytest.raises(MissingPackageError, match=r"not installed: pip install torch; \.numpy\(\)") as raised:
                call()
            assert (raised.value.package, isinstance(raised.value, ImportError)) == ("torch", True)


def test_complex32_is_nothing_for_numpy(path: Path) -> None:
    pack_bytes(path, {"w": pattern("complex32")})
    with stream_pack.open(path) as pack, pytest.raises(TypeError, match=r"\.raw\(\) or \.torch\(\)"):
        pack["w"].numpy()


def test_packed_float4_comes_back_exactly_as_it_went_in(path: Path) -> None:
    tensor = torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).view(2, 4)
    pack_bytes(path, {"w": tensor})
    with stream_pack.open(path) as pack:
        view = pack["w"]
        assert (view.dtype, view.shape) == ("float4_e2m1fn", (2, 8))
        found = view.torch()
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert view.raw() == bytes(range(8))
        row = pack.get_slice("w")[1]
        assert row.torch().shape == (4,)
        assert row.raw() == bytes(range(4, 8))
        with pytest.raises(IndexError, match="whole bytes"):
            pack.get_slice("w")[1, 1:4]
        with pytest.raises(TypeError, match=r"\.raw\(\)"):
            view.numpy()


@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_packed_integers_come_as_bytes_only(dtype: str, path: Path) -> None:
    with stream_pack.Writer(path, {"w": stream_pack.Spec(dtype, (2, 4))}) as writer:
        writer.write("w", [b"\x10\x32", b"\x54\x76"])
    with stream_pack.open(path, verify="full") as pack:
        assert pack["w"].shape == (2, 4)
        assert bytes(pack["w"].raw()) == b"\x10\x32\x54\x76"
        for typed in (pack["w"].numpy, pack["w"].torch):
            with pytest.raises(TypeError, match=r"\.raw\(\)"):
                typed()


def test_a_dtype_of_the_future_is_bytes_with_a_shape(path: Path) -> None:
    data = bytearray(pack_bytes(path, {"w": torch.arange(6.0).reshape(2, 3)}))
    place = data.index(b"float32")
    data[place : place + 7] = b"float99"
    path.write_bytes(reseal(data))
    with stream_pack.open(path) as pack:
        assert (pack["w"].dtype, pack["w"].shape, pack["w"].nbytes) == ("float99", (2, 3), 24)
        assert pack["w"].raw() == torch.arange(6.0).numpy().tobytes()
        assert pack.get_slice("w")[1].raw() == torch.arange(3.0, 6.0).numpy().tobytes()
        for typed in (pack["w"].numpy, pack["w"].torch):
            with pytest.raises(TypeError, match="float99"):
                typed()


def test_a_known_dtype_with_other_bits_is_refused(path: Path) -> None:
    data = bytearray(pack_bytes(path, {"w": torch.arange(6, dtype=torch.int16)}))
    place = data.index(b"int16\0")
    data[place : place + 5] = b"int32"
    path.write_bytes(reseal(data))
    with pytest.raises(FormatError, match="32 bits for the dtype 'int32', found 16"):
        stream_pack.open(path)


def test_tied_tensors_have_one_storage_of_exactly_their_bytes(pack: Pack) -> None:
    # ST#98, ST#202
    embed, head, rows = pack["embed"].torch(), pack["head"].torch(), pack["rows"].torch()
    assert embed.data_ptr() == head.data_ptr()
    assert rows.data_ptr() == embed.data_ptr() + 32 * 32 * 4
    storages = {t.untyped_storage()._cdata for t in (embed, head, rows)}
    assert len(storages) == 1
    assert embed.untyped_storage().nbytes() == embed.nbytes
    head[0, 0] = 7
    assert embed[0, 0] == 7
    assert pack["flags"].torch().untyped_storage().nbytes() == 3


def test_saving_one_tensor_does_not_save_the_file(pack: Pack, tmp_path: Path) -> None:
    torch.save(pack["norm"].torch(), tmp_path / "one.pt")
    assert (tmp_path / "one.pt").stat().st_size < 2000


@needs_proc
def test_numpy_arrays_stand_in_the_shared_mapping_at_the_bytes_of_the_file(path: Path) -> None:
    pack_bytes(path)
    with stream_pack.open(path) as pack:
        base = pack["embed"]
        first = base.numpy().ctypes.data - base.file_offset
        for name in ("embed", "norm", "step", "flags"):
            view = pack[name]
            assert view.numpy().ctypes.data == first + view.file_offset
        before = base.numpy().copy()
        with path.open("r+b") as file:  # the same physical pages: a change of the file shows
            file.seek(base.file_offset)
            file.write(np.float32(123).tobytes())
        assert base.numpy()[0, 0] == 123
        assert np.array_equal(base.numpy()[1:], before[1:])


@needs_proc
def test_nothing_is_copied_until_somebody_writes(path: Path) -> None:
    # rtp-llm#1218: r--s, Anonymous 0 until .torch(), and after it until someone writes
    tensor = torch.arange(1 << 18, dtype=torch.int32)
    data = pack_bytes(path, {"w": tensor, "other": tensor + 1})
    with stream_pack.open(path, verify="lazy") as pack:
        assert pack["w"].numpy().sum(dtype=np.int64) == int(tensor.sum())
        shared = mapped_file(path)
        assert set(shared.permissions) == {"r--s"}
        assert shared.anonymous == 0
        found = pack["w"].torch()
        assert torch.equal(found, tensor)
        assert torch.equal(pack["other"].torch(), tensor + 1)
        private = mapped_file(path)
        assert set(private.permissions) == {"r--s", "rw-p"}
        assert private.anonymous == 0
        found[0] = 99
        assert mapped_file(path).anonymous == 4096
        assert path.read_bytes() == data
        assert pack["w"].numpy()[0] == 0


def test_in_place_operations_neither_warn_nor_crash_nor_reach_the_file(path: Path) -> None:
    # PT#46741, PT#129077: the whole of it in a child where every warning is an error
    data = pack_bytes(path, {"w": torch.arange(6.0), "c": pattern("complex32"), "e": torch.empty(0, 3)})
    program = """
import sys, torch, stream_pack
with stream_pack.open(sys.argv[1]) as pack:
    for name in pack:
        pack[name].torch()
    w = pack["w"].torch()
w.add_(1).mul_(2)
torch.nn.Parameter(w).data.zero_()
state = stream_pack.load_file(sys.argv[1])
state["w"].add_(1)
assert state["w"].tolist() == [1, 2, 3, 4, 5, 6]
assert w.tolist() == [0] * 6
"""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, path], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert path.read_bytes() == data


def test_a_writable_numpy_array_is_copy_on_write_too(path: Path) -> None:
    data = pack_bytes(path, {"w": torch.arange(6.0)})
    with stream_pack.open(path) as pack:
        array = pack["w"].numpy(writable=True)
        array += 1
        assert array.tolist() == [1, 2, 3, 4, 5, 6]
        assert pack["w"].numpy().tolist() == [0, 1, 2, 3, 4, 5]
    assert path.read_bytes() == data


KEYS = [
    (slice(0, 2),),
    (slice(1, None),),
    (slice(2, 2),),
    (slice(-1, None),),
    (1,),
    (-1, 2),
    (1, slice(1, 3)),
    (0, 1, slice(2, 4)),
    (2, 2, 3),
    (slice(None),),
    (Ellipsis,),
    (1, Ellipsis),
    (slice(1, 2), 1),
    (slice(5, 100),),
    (np.int64(1),),
    (np.int64(-1), np.uint8(2), slice(np.int32(1), np.int64(3))),
]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_a_leading_slice_is_what_numpy_says_and_is_no_copy(key: tuple[object, ...], path: Path) -> None:
    tensor = torch.arange(3 * 3 * 5.0).reshape(3, 3, 5)
    pack_bytes(path, {"first": torch.ones(1), "w": tensor})
    expected = tensor.numpy()[key]  # type: ignore[index]
    with stream_pack.open(path, verify="lazy") as pack:
        whole = pack["w"]
        part = pack.get_slice("w")[key]
        assert part.shape == expected.shape
        assert part.nbytes == expected.nbytes
        assert np.array_equal(part.numpy(), expected)
        assert torch.equal(part.torch(), tensor[key])  # type: ignore[index]
        assert part.raw() == expected.tobytes()
        if expected.size:
            step = tensor[key].data_ptr() - tensor.data_ptr()  # type: ignore[index]
            assert part.file_offset == whole.file_offset + step
            assert part.numpy().ctypes.data == whole.numpy().ctypes.data + step
            assert part.torch().data_ptr() == whole.torch().data_ptr() + step


@pytest.mark.parametrize("key", [(slice(0, 2), slice(0, 1)), (slice(None, None, 2),), (slice(0, 2), 1)], ids=str)
def test_a_part_that_is_not_contiguous_is_refused_with_advice(key: object, pack: Pack) -> None:
    with pytest.raises(IndexError, match=r"not contiguous; slice \.numpy\(\) or \.torch\(\)"):
        pack.get_slice("embed")[key]


@pytest.mark.parametrize(
    "key",
    [
        *(96, -97, np.int64(96), (0, 0, 0), "x", None, True, np.True_, 1.0, (..., ...)),
        *(np.array([1, 2]), np.array([1]), torch.tensor([1]), (0, np.array([1, 2]))),
        *(slice(None, None, 0), slice("a", None), slice(np.array([1, 2]), None)),
    ],
    ids=str,
)
def test_a_part_that_is_not_there_is_an_index_error(key: object, pack: Pack) -> None:
    with pytest.raises(IndexError):
        pack.get_slice("embed")[key]


def test_a_slice_speaks_of_the_whole_tensor_as_safetensors_does(pack: Pack) -> None:
    part = pack.get_slice("norm")
    assert (part.get_shape(), part.get_dtype()) == ([7], "BF16")
    with pytest.raises(UnknownTensorError):
        pack.get_slice("nothing")


def test_an_empty_pack_and_a_pack_of_nothing_but_shapes_open(path: Path) -> None:
    # tensorizer#55: no mmap of length 0
    for content in ({}, {"e": torch.empty(0), "f": torch.empty(3, 0, 2, dtype=torch.bfloat16)}):
        pack_bytes(path, content)
        with stream_pack.open(path, verify="full") as pack:
            assert list(pack) == list(content)
            for name, tensor in content.items():
                assert pack[name].torch().shape == tensor.shape
                assert pack[name].materialize().shape == tensor.shape
                assert bytes(pack[name].raw()) == b""
                assert pack[name].numpy().shape == tuple(tensor.shape)


def test_odd_names_are_kept_exactly(path: Path) -> None:
    names = ["", "../../etc/x", "a/b", "\u00e9", "e\u0301", "new\nline", "nul\0", "x" * 5000, "\U0001f600"]
    pack_bytes(path, {name: torch.tensor(number) for number, name in enumerate(names)})
    with stream_pack.open(path) as pack:
        assert list(pack) == names
        for number, name in enumerate(names):
            assert int(pack[name].numpy()) == number


def test_a_closed_pack_says_that_it_is_closed(path: Path) -> None:
    pack_bytes(path)
    pack = stream_pack.open(path)
    view, empty = pack["embed"], pack["none"]
    pack.close()
    calls: list[Callable[[], object]] = [
        view.numpy,
        view.torch,
        view.raw,
        empty.torch,
        empty.numpy,
        lambda: pack["embed"],
        lambda: pack.metadata,
    ]
    calls += [lambda: len(pack), lambda: list(pack), lambda: "x" in pack, pack.verify, lambda: pack.get_slice("norm")]
    for call in calls:
        with pytest.raises(StateError, match="closed"):
            call()
    assert "closed" in repr(pack)
    pack.close()


def test_notes_of_a_tensor_are_read(path: Path) -> None:
    from stream_pack.format.head import encode_footer, encode_head
    from stream_pack.format.header_kinds import MPS
    from stream_pack.format.layout import Policy, plan

    builder = CatalogBuilder()
    builder.add("a", BY_NAME["uint8"], (0,), storage=0, start=0)
    builder.add("b", BY_NAME["uint8"], (0,), storage=0, start=0, notes={"type": "Q4_0", "by": "hand"})
    encoded = encode_head(plan(builder.build(storages_nbytes=0, metadata={"k": "v"}), Policy()), MPS)
    footer = encode_footer(encoded.head, b"")
    path.write_bytes(encoded.front + bytes(encoded.padding_nbytes) + encoded.locator + footer)
    with stream_pack.open(path, verify="full") as pack:
        assert pack.notes("a") == {}
        assert pack.notes("b") == {"type": "Q4_0", "by": "hand"}
        assert pack.metadata == {"k": "v"}


def test_numpy_and_indexing_take_a_view_as_it_is(path: Path) -> None:
    array = np.arange(24, dtype="<f4").reshape(6, 4)
    stream_pack.save_file({"w": array}, path)
    with stream_pack.open(path) as pack:
        view = pack["w"]
        same = np.asarray(view)
        assert same.ctypes.data == view.numpy().ctypes.data
        assert np.array_equal(same, array)
        assert np.asarray(view, np.float64).dtype == np.float64
        copied = np.array(view)
        copied[0] = 7
        assert np.array_equal(view[2:4].numpy(), array[2:4])
        assert view[1].shape == (4,)


def test_a_checkpoint_instead_of_a_pack_gets_the_command_that_makes_one(path: Path) -> None:
    torch.save({"w": torch.ones(3)}, path)
    with pytest.raises(stream_pack.NotAPackError, match="make a pack of it with `stream-pack convert`"):
        stream_pack.open(path)
