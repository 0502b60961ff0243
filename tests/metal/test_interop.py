"""Tensors handed to PyTorch, MLX and pyobjc without a copy.

On Linux PyTorch takes a Metal capsule and makes an mps tensor of it, whose place can be told, but the process dies when
it ends: in a process of its own, which leaves by os._exit.  MLX takes the capsule, and only then refuses it, for want
of Metal; for what it does on a Mac stands an extension that takes capsules by the same library, nanobind.  NumPy,
PyTorch and MLX also take the same structures over the CPU's memory.  pyobjc is stood in for by modules that note what
they are called with; test_pyobjc_metadata.py compares these with pyobjc's own metadata.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
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
from tests.metal.consumers import require
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


def run_python(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def weights(standin: StandIn, pack_path: Path) -> Iterator[Weights]:
    with stream_pack.metal.open(pack_path, device=Device.default(standin.runtime)) as weights:
        yield weights


@pytest.fixture
def mlx(consumer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What stands for MLX on a Mac."""
    monkeypatch.setitem(sys.modules, "mlx", ModuleType("mlx"))
    monkeypatch.setitem(sys.modules, "mlx.core", consumer)
    return consumer


def held() -> int:
    """How many tensors other libraries hold."""
    gc.collect()
    return len(interop._lent().held)


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
    weights: Weights, mlx: ModuleType, arrays: Arrays, name: str, code: int, bits: int,
    shape: list[int], strides: list[int],
) -> None:  # fmt: skip
    view = weights[name]
    array = interop.to_mlx(view)
    if not arrays[name].shape:
        array, reshaped = array
        assert reshaped == ()
    assert array.data == view.buffer.pointer
    assert array.device == (8, 0)
    assert array.dtype == (code, bits, 1)
    assert array.shape == shape
    assert array.strides == strides
    assert array.byte_offset == view.offset


def test_strides_are_said_because_pytorch_looks_at_the_offset_only_beside_them(weights: Weights) -> None:
    with interop._lent().capsule(weights["head"]) as capsule:
        tensor = take(capsule).tensor
        assert tensor.strides[:2] == [2048, 1]
        interop._lent().held.clear()


def test_an_array_keeps_its_buffer_and_the_file_mapped_and_lets_go_once(
    standin: StandIn, weights: Weights, mlx: ModuleType
) -> None:
    before = held()
    array = interop.to_mlx(weights["head"])
    weights.__exit__(None, None, None)
    gc.collect()
    assert standin.live() == 1
    del array
    assert (held(), standin.live()) == (before, 0)
    assert standin.violations == []


def test_a_thousand_arrays_in_four_threads_are_all_given_back(weights: Weights, mlx: ModuleType) -> None:
    before = held()

    def work() -> None:
        for _ in range(50):
            kept = [interop.to_mlx(weights[name]) for name in ("embedding", "bias", "ids", "head", "mask")]
            assert len({array.byte_offset for array in kept}) == 5

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert held() == before


def test_a_capsule_that_nobody_took_lets_the_buffer_go_and_cannot_be_taken_later(
    standin: StandIn, weights: Weights
) -> None:
    with interop._lent().capsule(weights["head"]) as capsule:
        weights.__exit__(None, None, None)
        assert standin.live() == 1
    assert standin.live() == 0
    with pytest.raises(ValueError, match="incorrect name"):
        take(capsule)


def test_a_capsule_that_was_taken_cannot_be_taken_again(weights: Weights, consumer: ModuleType) -> None:
    before = held()
    with interop._lent().capsule(weights["head"]) as capsule:
        producer = interop._Producer(capsule)
        array = consumer.from_dlpack(producer)
        with pytest.raises(BufferError, match="given once"):
            producer.__dlpack__()
    with pytest.raises(ValueError, match="incorrect name"):
        take(capsule)
    del array
    assert held() == before


def test_a_capsule_itself_can_be_taken_too(weights: Weights, consumer: ModuleType) -> None:
    # nanobind renames one that it did not ask for.
    before = held()
    with interop._lent().capsule(weights["head"]) as capsule:
        array = consumer.from_dlpack(capsule)
    assert held() == before + 1
    del array
    assert held() == before


def asks_twice(consumer: ModuleType, producer: Any) -> object:
    array = consumer.from_dlpack(producer)
    return array, producer.__dlpack__()


CONSUMERS: dict[str, tuple[Callable[[ModuleType, Any], object], type[Exception]]] = {
    "has taken it": (lambda consumer, producer: consumer.refuse(producer, copy=False), ValueError),
    "looks at the device": (lambda consumer, producer: np.from_dlpack(producer), BufferError),
    "only asked": (lambda consumer, producer: producer.__dlpack__() and 1 / 0, ZeroDivisionError),
    "asks twice": (asks_twice, BufferError),
    "asks for a copy": (lambda consumer, producer: producer.__dlpack__(copy=True), BufferError),
}


@pytest.mark.parametrize("when", CONSUMERS)
def test_a_library_that_refuses_a_capsule_says_why_and_keeps_nothing(
    standin: StandIn, weights: Weights, consumer: ModuleType, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    take_it, error = CONSUMERS[when]
    monkeypatch.setitem(sys.modules, "mlx", ModuleType("mlx"))
    core = SimpleNamespace(from_dlpack=lambda producer, *, copy: take_it(consumer, producer))
    monkeypatch.setitem(sys.modules, "mlx.core", core)
    before = held()
    # NumPy before 2.1 raises a RuntimeError.
    with pytest.raises((error, RuntimeError)):
        interop.to_mlx(weights["head"])
    assert held() == before
    weights.close()
    assert standin.live() == 0


TEMPORARY = """
import gc, sys
from pathlib import Path
import stream_pack.metal
from stream_pack.metal import Device, interop
from tests.metal.consumers import load_consumer
from tests.metal.standin import StandIn

sys.modules["mlx"] = sys.modules["mlx.core"] = load_consumer(Path(sys.argv[2]))
standin = StandIn()
weights = stream_pack.metal.open(sys.argv[1], device=Device.default(standin.runtime))
for name in ("embedding", "scale", "head") * 50:
    try:
        [interop.to_mlx(weights[name]), 1 / 0]
    except ZeroDivisionError:
        pass
weights.close()
assert (standin.live(), standin.violations, interop._lent().held) == (0, [], {})
print("done")
"""


def test_a_temporary_array_that_an_exception_drops_gives_its_buffer_back_and_the_exception_arrives(
    pack_path: Path, mlx: ModuleType, consumer_folder: Path
) -> None:
    result = run_python("-X", "dev", "-c", TEMPORARY, pack_path, consumer_folder)
    assert (result.stdout, result.stderr, result.returncode) == ("done\n", "", 0)


MLX = """
import gc, sys
import mlx.core
import stream_pack.metal
from stream_pack.metal import Device, interop
from tests.metal.standin import StandIn

standin = StandIn()
with stream_pack.metal.open(sys.argv[1], device=Device.default(standin.runtime)) as weights:
    for name in ("embedding", "scale", "bias", "ids", "head", "mask") * 20:
        try:
            interop.to_mlx(weights[name])
        except ValueError as error:
            assert str(error) == "Metal DLPack import is not available.", error
        else:
            raise AssertionError(name)
    try:
        interop.to_mlx(weights["head"])
    except ValueError:
        pass
    weights.close()
gc.collect()
assert interop._lent().held == {}
assert (standin.live(), standin.violations) == (0, [])
assert mlx.core.zeros(1).reshape(()).shape == ()  # as to_mlx makes a tensor without dims
print("done")
"""


@pytest.mark.skipif(on_a_mac, reason="there MLX has Metal: see below")
def test_mlx_without_metal_says_so_and_everything_is_given_back(pack_path: Path) -> None:
    require("mlx")
    # Freed memory is overwritten, so that a second use of it is seen.
    environment = {**os.environ, "MALLOC_PERTURB_": "165", "MALLOC_CHECK_": "3"}
    result = run_python("-c", MLX, pack_path, env=environment)
    assert (result.stdout, result.stderr, result.returncode) == ("done\n", "", 0)


ON_THE_CPU = """
import gc, importlib, sys
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import stream_pack
from stream_pack.metal import MetalView, interop
from tests.metal.consumers import load_consumer

interop.KDL_METAL = 1  # kDLCPU: the same structures, over memory that anybody can read
held = interop._lent().held

class Memory:  # in place of an MTLBuffer
    def __init__(self, address):
        self.pointer = address

def view_of(pack, name):
    whole = np.frombuffer(pack[name].raw(), np.uint8)
    address = whole.__array_interface__["data"][0]
    offset = address % 4096
    found = pack[name]
    return MetalView(name, found.dtype, found.shape, found.nbytes, offset, Memory(address - offset), None)

def same(array, name):
    return np.array_equal(np.asarray(array), pack[name].numpy())

library = sys.argv[2]
takes = {
    "numpy": lambda producer: np.from_dlpack(producer),
    "torch": lambda producer: importlib.import_module("torch").from_dlpack(producer),
    "mlx": lambda producer: importlib.import_module("mlx.core").from_dlpack(producer),
    "consumer": lambda producer: load_consumer(Path(sys.argv[3])).from_dlpack(producer),
}[library]
with stream_pack.open(sys.argv[1]) as pack:
    for name in ("embedding", "bias", "ids", "head", "mask"):
        view = view_of(pack, name)
        with interop._lent().capsule(view) as capsule:
            array = takes(interop._Producer(capsule))
            named = interop._lent()._is_valid(capsule, interop._lent()._name)
            left = (bool(named), interop._lent()._get_destructor(capsule) is not None)
            # NumPy and PyTorch rename it; MLX, and the extension that stands for it, clear its destructor.
            assert left == ((True, False) if library in ("mlx", "consumer") else (False, True)), left
        gc.collect()
        assert len(held) == (library != "mlx"), (name, held)  # MLX copies memory of the CPU's
        if library == "consumer":
            assert array.data + array.byte_offset == view._buffer.pointer + view.offset
        else:
            assert same(array, name), name
        del array
        gc.collect()
        assert held == {}, name
print("done")
"""


@pytest.mark.parametrize("library", ["numpy", pytest.param("torch", marks=pytest.mark.slow), "mlx", "consumer"])
def test_libraries_that_read_the_cpus_memory_read_the_tensor_and_give_it_back(
    pack_path: Path, library: str, request: pytest.FixtureRequest, consumer_folder: Path
) -> None:
    if library == "consumer":
        request.getfixturevalue("consumer")
    elif library == "mlx":
        require("mlx")
    environment = {**os.environ, "MALLOC_PERTURB_": "165", "MALLOC_CHECK_": "3"}
    result = run_python("-c", ON_THE_CPU, pack_path, library, consumer_folder, env=environment)
    assert (result.stdout, result.stderr, result.returncode) == ("done\n", "", 0)


def test_a_copy_is_not_what_is_lent_nor_is_memory_of_the_cpus(weights: Weights) -> None:
    with interop._lent().capsule(weights["head"]) as capsule:
        producer = interop._Producer(capsule)
        with pytest.raises(BufferError, match="in place"):
            producer.__dlpack__(copy=True)
        with pytest.raises(BufferError, match=r"on device \(8, 0\), not on \(1, 0\)"):
            producer.__dlpack__(dl_device=(1, 0))
        assert producer.__dlpack__(dl_device=(8, 0)) is capsule


def test_a_dtype_that_dlpack_or_mps_lacks_is_refused_by_name(standin: StandIn, tmp_path: Path, mlx: ModuleType) -> None:
    before = held()
    stream_pack.save_file({"w": np.ones(3)}, tmp_path / "p")
    device = Device.default(standin.runtime)
    with stream_pack.metal.open(tmp_path / "p", device=device) as weights:
        for hand in (interop.to_mlx, interop.to_torch, interop.mps_graph_feed):
            with pytest.raises(UnsupportedDtype, match="'w' has the dtype 'float64'"):
                hand(weights["w"])
    assert held() == before


def test_a_dtype_that_torch_lacks_too_is_refused_in_the_same_way(
    standin: StandIn, pack_path: Path, mlx: ModuleType
) -> None:
    with stream_pack.metal.open(pack_path, device=Device.default(standin.runtime)) as weights:
        for name in ("bias", "empty"):
            view = dataclasses.replace(weights[name], dtype="int4")
            for hand in (interop.to_mlx, interop.to_torch):
                with pytest.raises(UnsupportedDtype, match=f"'{name}' has the dtype 'int4'"):
                    hand(view)


def test_a_tensor_without_bytes_cannot_be_an_mlx_array(weights: Weights, mlx: ModuleType) -> None:
    with pytest.raises(MetalBufferError, match="has no bytes"):
        interop.to_mlx(weights["empty"])


def test_a_torch_that_ignores_byte_offset_is_found_out(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    # What torch up to 2.9 makes of the capsule: a tensor at the buffer's first byte.
    monkeypatch.setattr(torch.utils.dlpack, "from_dlpack", lambda capsule: torch.zeros(37))
    with pytest.raises(MetalUnavailable, match=r"torch 2\.10 or later, or view.own_buffer"):
        interop.to_torch(weights["bias"])


def test_a_tensor_without_dims_or_bytes_has_its_shape_in_torch_too(
    weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    # Stand-ins on the CPU: reshaping, and a tensor without bytes, take a real device.
    view = weights["scale"]
    memory = torch.empty(view.offset // 4 + 1)
    made = memory[-1:]
    assert made.storage_offset() * 4 == view.offset > 0
    monkeypatch.setattr(torch.utils.dlpack, "from_dlpack", lambda capsule: made)
    assert interop.to_torch(view).shape == ()
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "empty", lambda shape, **how: asked.append({"shape": shape, **how}))
    interop.to_torch(weights["empty"])
    assert asked == [{"shape": (0, 7), "dtype": torch.float32, "device": "mps"}]


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
    # A temporary goes while an exception is on its way.
    try:
        print(interop.to_torch(view), 1 / 0)
    except ZeroDivisionError as error:
        assert error.__context__ is None
    del tensor, view
del weights
gc.collect()
assert standin.live() == 1
# Another tensor on the same storage, whose Python object is collected with a cycle.
other = tensors["head"].detach()
cycle = [other.untyped_storage()]
cycle.append(cycle)
del cycle
tensors.clear()
gc.collect()
assert standin.live() == 1
del other
gc.collect()
assert standin.live() == 0, standin.live()
assert standin.violations == []
print("done", flush=True)
os._exit(0)
"""


@pytest.mark.skipif(on_a_mac, reason="the real PyTorch would use the stand-in's buffers")
def test_torch_takes_every_tensor_with_its_offset_and_keeps_the_buffer(pack_path: Path) -> None:
    result = run_python("-c", TORCH, pack_path)
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
with interop._lent().capsule(weights["head"]) as capsule:
    taken = take(capsule)
"""


def test_at_exit_what_others_still_hold_is_left_to_them_without_a_deleter(pack_path: Path) -> None:
    result = run_python("-X", "dev", "-c", EXIT, pack_path)
    assert (result.stdout, result.stderr) == ("deleter None live 1\n", "")
    assert result.returncode == 0


def test_a_graph_is_fed_a_buffer_that_begins_with_the_tensor(
    weights: Weights, pyobjc: list[tuple[object, ...]]
) -> None:
    own = weights.own_buffer("head")
    interop.mps_graph_feed(weights["head"])
    assert pyobjc == [(("pyobjc", own.pointer), [260, 2048], 0x1000_0020)]
    with pytest.raises(AlignmentError, match="'bias'"):
        interop.mps_graph_feed(weights["bias"])


def test_a_graph_is_fed_a_tensor_without_dims_as_one_element(
    standin: StandIn, tmp_path: Path, pyobjc: list[tuple[object, ...]]
) -> None:
    stream_pack.save_file({"scale": np.array(2.5, np.float32)}, tmp_path / "p")
    with stream_pack.metal.open(tmp_path / "p", device=Device.default(standin.runtime)) as weights:
        interop.mps_graph_feed(weights["scale"])
    assert pyobjc[0][1:] == ([1], 0x1000_0020)


def test_a_device_of_pyobjc_is_used_as_it_is(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with stream_pack.metal.open(pack_path, device=bench.device()) as weights, stream_pack.open(pack_path) as pack:
        for view in every(weights):
            assert torch.equal(interop.to_torch(view).cpu(), pack[view.name].torch()), view.name
        assert interop.to_torch(weights["empty"]).shape == (0, 7)


@mac_only
@pytest.mark.filterwarnings("default")  # another library's warnings are not ours
def test_mlx_on_a_mac_reads_what_the_cpu_reads(bench: Bench, pack_path: Path, arrays: Arrays) -> None:
    native(bench, "mlx")
    with stream_pack.metal.open(pack_path, device=bench.device()) as weights:
        for view in every(weights):
            np.testing.assert_array_equal(np.array(interop.to_mlx(view)), arrays[view.name])


@mac_only
@pytest.mark.filterwarnings("default")
def test_pyobjc_on_a_mac_sees_the_same_buffer(bench: Bench, pack_path: Path) -> None:
    native(bench, "Metal")
    with stream_pack.metal.open(pack_path, device=bench.device()) as weights:
        window = weights.windows[0]
        assert interop.as_pyobjc(window).length() == window.nbytes
        if importlib.util.find_spec("MetalPerformanceShadersGraph") is not None:
            assert list(interop.mps_graph_feed(weights["head"]).shape()) == [260, 2048]
