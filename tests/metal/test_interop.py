"""Tensors handed to PyTorch, MLX and pyobjc without a copy.

On Linux PyTorch takes a Metal capsule and makes an mps tensor of it, whose place can be told, but the process dies when
it ends: in a process of its own, which leaves by os._exit.  MLX and pyobjc are stood in for by modules that note what
they are called with.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from ctypes import c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import stream_pack
from stream_pack.errors import AlignmentError, MetalBufferError, MetalUnavailable, UnsupportedDtype
from stream_pack.metal import Device, MetalView, Weights, interop
from tests.metal.bench import Bench
from tests.metal.standin import StandIn

Arrays = dict[str, NDArray[np.generic]]
ROOT = Path(__file__).parent.parent.parent
on_a_mac = sys.platform == "darwin"


class DLTensor(ctypes.Structure):
    """dlpack.h, DLTensor."""

    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", ctypes.POINTER(c_int64)),
        ("strides", ctypes.POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    """dlpack.h, DLManagedTensor."""

    _fields_ = (("tensor", DLTensor), ("context", c_void_p), ("deleter", c_void_p))


Deleter = ctypes.CFUNCTYPE(None, c_void_p)
api = ctypes.PyDLL(None)
api.PyCapsule_GetPointer.restype = c_void_p
api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
api.PyCapsule_SetName.argtypes = (ctypes.py_object, ctypes.c_char_p)
USED = b"used_dltensor"


def take(capsule: object) -> DLManagedTensor:
    """Take a capsule over, as a consumer does."""
    pointer = api.PyCapsule_GetPointer(capsule, b"dltensor")
    api.PyCapsule_SetName(capsule, USED)
    return DLManagedTensor.from_address(pointer)


@pytest.fixture
def weights(standin: StandIn, pack_path: Path) -> Iterator[Weights]:
    with stream_pack.metal.open(pack_path, device=Device.default(standin.runtime)) as weights:
        yield weights


@pytest.fixture
def mlx(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What mlx.core.from_dlpack was given."""
    given: list[Any] = []
    core = ModuleType("mlx.core")

    def from_dlpack(producer: Any, *, copy: bool | None) -> object:
        assert copy is False
        assert producer.__dlpack_device__() == (8, 0)
        given.append(producer.__dlpack__(stream=None, dl_device=(8, 0), copy=False))
        return SimpleNamespace(reshape=lambda shape: ("reshaped", shape))

    core.from_dlpack = from_dlpack  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlx", ModuleType("mlx"))
    monkeypatch.setitem(sys.modules, "mlx.core", core)
    return given


@pytest.mark.parametrize(
    ("name", "code", "bits", "shape", "strides"),
    [
        ("embedding", 2, 32, [300, 1024], [1024, 1]),
        ("scale", 2, 32, [1], [1]),
        ("bias", 2, 16, [37], [1]),
        ("ids", 0, 64, [11, 3], [3, 1]),
        ("mask", 6, 8, [5], [1]),
    ],
)
def test_a_capsule_says_which_buffer_and_where_in_it(
    weights: Weights, mlx: list[Any], arrays: Arrays, name: str, code: int, bits: int,
    shape: list[int], strides: list[int],
) -> None:  # fmt: skip
    view = weights[name]
    array = interop.to_mlx(view)
    if not arrays[name].shape:
        assert array == ("reshaped", ())
    tensor = take(mlx[0]).tensor
    assert tensor.data == view.buffer.pointer
    assert (tensor.device_type, tensor.device_id) == (8, 0)
    assert (tensor.code, tensor.bits, tensor.lanes) == (code, bits, 1)
    assert tensor.shape[: tensor.ndim] == shape
    # PyTorch looks at byte_offset only beside strides.
    assert tensor.strides[: tensor.ndim] == strides
    assert tensor.byte_offset == view.offset


def test_who_takes_a_capsule_keeps_the_buffer_until_its_deleter_is_called(
    standin: StandIn, weights: Weights, mlx: list[Any]
) -> None:
    interop.to_mlx(weights["head"])
    taken = take(mlx.pop())
    weights.__exit__(None, None, None)
    gc.collect()
    assert standin.live() == 1
    Deleter(taken.deleter)(ctypes.addressof(taken))
    assert standin.live() == 0


def test_a_capsule_that_nobody_takes_lets_the_buffer_go(
    standin: StandIn, weights: Weights, mlx: list[Any]
) -> None:
    interop.to_mlx(weights["head"])
    weights.__exit__(None, None, None)
    assert standin.live() == 1
    mlx.clear()
    gc.collect()
    assert standin.live() == 0


def test_a_copy_is_not_what_is_lent(weights: Weights) -> None:
    with pytest.raises(BufferError, match="in place"):
        interop._Producer(weights["head"]).__dlpack__(copy=True)


def test_a_dtype_that_dlpack_or_mps_lacks_is_refused_by_name(
    standin: StandIn, tmp_path: Path, mlx: list[Any]
) -> None:
    stream_pack.save_file({"w": np.ones(3)}, tmp_path / "p")
    device = Device.default(standin.runtime)
    with stream_pack.metal.open(tmp_path / "p", device=device) as weights:
        for hand in (interop.to_mlx, interop.to_torch, interop.mps_graph_feed):
            with pytest.raises(UnsupportedDtype, match="'w' is float64"):
                hand(weights["w"])
    assert mlx == []


def test_a_tensor_without_bytes_cannot_be_an_mlx_array(weights: Weights, mlx: list[Any]) -> None:
    with pytest.raises(MetalBufferError, match="has no bytes"):
        interop.to_mlx(weights["empty"])


def test_a_torch_that_ignores_byte_offset_is_found_out(
    weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    # What torch up to 2.9 makes of the capsule: a tensor at the buffer's first byte.
    monkeypatch.setattr(torch.utils.dlpack, "from_dlpack", lambda capsule: torch.zeros(37))
    with pytest.raises(MetalUnavailable, match=r"torch 2\.10 or later, or view.own_buffer"):
        interop.to_torch(weights["bias"])


TORCH = """
import os, sys, gc
import torch
import stream_pack.metal
from stream_pack.metal import Device, interop
from tests.metal.standin import StandIn

standin = StandIn()
with stream_pack.metal.open(sys.argv[1], device=Device.default(standin.runtime)) as weights:
    tensors = {}
    for name in weights:
        view = weights[name]
        if view.nbytes and view.shape:  # reshaping one without dims takes a real device
            tensor = tensors[name] = interop.to_torch(view)
            assert tensor.device.type == "mps"
            assert tensor.shape == view.shape, name
            assert tensor.untyped_storage().data_ptr() == view.buffer.pointer
            assert tensor.storage_offset() * tensor.itemsize == view.offset
            assert tensor.is_contiguous()
            with stream_pack.open(sys.argv[1]) as pack:
                assert tensor.dtype == pack[name].torch().dtype
    del tensor, view
del weights
gc.collect()
assert standin.live() == 1
tensors.clear()
gc.collect()
assert standin.live() == 0, standin.live()
assert standin.violations == []
print("done", flush=True)
os._exit(0)
"""


@pytest.mark.skipif(on_a_mac, reason="the real PyTorch would use the stand-in's buffers")
def test_torch_takes_every_tensor_with_its_offset_and_keeps_the_buffer(pack_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", TORCH, pack_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.stdout, result.stderr, result.returncode) == ("done\n", "", 0)


EXIT = """
import atexit, ctypes, sys
import stream_pack.metal
from stream_pack.metal import Device, interop
from tests.metal.standin import StandIn
from tests.metal.test_interop import take

def at_last():  # registered first, so it runs last
    print("deleter", taken.deleter, "live", standin.live())

atexit.register(at_last)
standin = StandIn()
weights = stream_pack.metal.open(sys.argv[1], device=Device.default(standin.runtime))
taken = take(interop._lent().capsule(weights["head"]))
"""


def test_at_exit_what_others_still_hold_is_left_to_them_without_a_deleter(pack_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-X", "dev", "-c", EXIT, pack_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.stdout, result.stderr) == ("deleter None live 1\n", "")
    assert result.returncode == 0


@pytest.fixture
def pyobjc(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """pyobjc's calls, as far as they are used."""
    calls: list[tuple[object, ...]] = []

    class TensorData:
        @classmethod
        def alloc(cls) -> TensorData:
            return cls()

        def initWithMTLBuffer_shape_dataType_(self, *arguments: object) -> TensorData:  # noqa: N802
            calls.append(arguments)
            return self

    objc = ModuleType("objc")
    objc.objc_object = lambda *, c_void_p: ("pyobjc", c_void_p)  # type: ignore[attr-defined]
    graph = ModuleType("MetalPerformanceShadersGraph")
    graph.MPSGraphTensorData = TensorData  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "objc", objc)
    monkeypatch.setitem(sys.modules, "MetalPerformanceShadersGraph", graph)
    return calls


def test_a_graph_is_fed_a_buffer_that_begins_with_the_tensor(
    weights: Weights, pyobjc: list[tuple[object, ...]]
) -> None:
    own = weights.own_buffer("head")
    interop.mps_graph_feed(weights["head"])
    assert pyobjc == [(("pyobjc", own.pointer), [260, 2048], 0x1000_0020)]
    with pytest.raises(AlignmentError, match="'bias'"):
        interop.mps_graph_feed(weights["bias"])


def test_a_device_of_pyobjc_is_used_as_it_is(
    standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = Device.default(standin.runtime)
    monkeypatch.setattr("stream_pack.metal.objc.native", lambda: standin.runtime)
    pointer = c_void_p(theirs.pointer)
    handle = SimpleNamespace(__c_void_p__=lambda: pointer)
    ours = interop.device_of_pyobjc(handle)
    assert ours.pointer == pointer.value
    del theirs
    assert ours.name
    assert standin.violations == []


# On a Mac, with the real libraries.


def native(bench: Bench, module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    assert bench.kind == "native"


def every(weights: Weights) -> Iterator[MetalView]:
    return (view for view in weights.values() if view.nbytes)


mac_only = pytest.mark.parametrize(
    "bench", [pytest.param("native", marks=[] if on_a_mac else [pytest.mark.skip("needs a Mac")])], indirect=True
)  # fmt: skip


@mac_only
def test_torch_on_a_mac_reads_what_the_cpu_reads(bench: Bench, pack_path: Path) -> None:
    native(bench, "torch")
    import torch

    assert torch.backends.mps.is_available()
    with (
        stream_pack.metal.open(pack_path, device=bench.device()) as weights,
        stream_pack.open(pack_path) as pack,
    ):
        for view in every(weights):
            assert torch.equal(interop.to_torch(view).cpu(), pack[view.name].torch()), view.name
        assert interop.to_torch(weights["empty"]).shape == (0, 7)


@mac_only
def test_mlx_on_a_mac_reads_what_the_cpu_reads(
    bench: Bench, pack_path: Path, arrays: Arrays
) -> None:
    native(bench, "mlx")
    with stream_pack.metal.open(pack_path, device=bench.device()) as weights:
        for view in every(weights):
            np.testing.assert_array_equal(np.array(interop.to_mlx(view)), arrays[view.name])


@mac_only
def test_pyobjc_on_a_mac_sees_the_same_buffer(bench: Bench, pack_path: Path) -> None:
    native(bench, "Metal")
    with stream_pack.metal.open(pack_path, device=bench.device()) as weights:
        window = weights.windows[0]
        assert interop.as_pyobjc(window).length() == window.nbytes
        if importlib.util.find_spec("MetalPerformanceShadersGraph") is not None:
            assert list(interop.mps_graph_feed(weights["head"]).shape()) == [260, 2048]
