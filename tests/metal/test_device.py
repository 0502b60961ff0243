"""Devices, and buffers over memory: what is asked of Metal, and what is refused before it is asked."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from stream_pack.errors import AlignmentError, MetalBufferError, MetalUnavailable
from stream_pack.metal import Device, Residency, objc
from tests.metal.bench import Bench
from tests.metal.standin import StandIn
from tests.support.forks import in_a_forked_child

PAGE = mmap.PAGESIZE


@pytest.fixture
def memory(tmp_path: Path) -> NDArray[np.uint8]:
    """Eight pages of a file, mapped as packs are."""
    path = tmp_path / "bytes"
    path.write_bytes(np.arange(8 * PAGE, dtype=np.uint8).tobytes())
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    return np.frombuffer(mapped, np.uint8)


def test_a_device_tells_what_the_runtime_says_of_it(standin: StandIn) -> None:
    device = Device.default(standin.runtime)
    assert device.name == "Stand-in ✓"
    assert repr(device) == "<Device 'Stand-in ✓'>"
    assert device.max_buffer_length == 1 << 34
    assert device.recommended_working_set == 1 << 40
    assert device.has_unified_memory is True
    assert device.has_residency_sets is True


def test_nothing_autoreleased_is_left_in_a_thread_without_a_pool(standin: StandIn) -> None:
    device = Device.default(standin.runtime)
    assert standin.calls == ["new", "drain"]
    assert device.name
    assert standin.calls[2:] == ["new", "name", "UTF8String", "drain"]
    assert standin.violations == []


def test_a_device_is_given_back_when_it_is_collected(standin: StandIn) -> None:
    Device.default(standin.runtime)
    assert standin.calls[2:] == ["new", "release", "drain"]
    assert standin.violations == []


def test_a_device_of_someone_else_is_retained_and_given_back(standin: StandIn) -> None:
    theirs = Device.default(standin.runtime)
    ours = Device.retained(standin.runtime, theirs.pointer)
    del theirs
    assert ours.max_buffer_length == 1 << 34
    assert standin.violations == []


def test_a_buffer_stands_on_the_memory_itself(bench: Bench, memory: NDArray[np.uint8]) -> None:
    address = memory.ctypes.data
    buffer = bench.device().wrap(memory, address + PAGE, 2 * PAGE)
    assert (buffer.address, buffer.nbytes) == (address + PAGE, 2 * PAGE)
    assert buffer.contents() == address + PAGE
    assert hex(buffer.pointer) in repr(buffer)


def test_metal_is_told_pages_shared_storage_and_a_block_that_no_other_live_buffer_has(
    memory: NDArray[np.uint8],
) -> None:
    seen: list[tuple[int, ...]] = []

    class Spy(StandIn):
        def _wrap(self, receiver: int, *words: int) -> int | None:
            seen.append(words[:4])
            return super()._wrap(receiver, *words)

    spy = Spy()
    device = Device.default(spy.runtime)
    address = memory.ctypes.data
    buffers = [device.wrap(memory, address + page * PAGE, PAGE) for page in range(3)]
    assert [words[:3] for words in seen] == [(buffer.address, PAGE, 0) for buffer in buffers]
    assert len({words[3] for words in seen}) == 3
    last = buffers.pop()
    del last
    buffers.append(device.wrap(memory, address, PAGE))
    assert seen[3][3] == seen[2][3]
    assert spy.violations == []


@pytest.mark.parametrize(
    ("shift", "nbytes", "error"),
    [
        (0, 0, MetalBufferError),
        (256, PAGE, AlignmentError),
        (0, PAGE + 256, AlignmentError),
        (-PAGE, PAGE, MetalBufferError),
        (7 * PAGE, 2 * PAGE, MetalBufferError),
        (0, 4 * PAGE, MetalBufferError),
    ],
    ids=["empty", "address", "length", "before", "behind", "too long"],
)
def test_what_the_documentation_forbids_is_refused_before_metal_is_asked(
    memory: NDArray[np.uint8], shift: int, nbytes: int, error: type[Exception]
) -> None:
    standin = StandIn(max_buffer_length=3 * PAGE)
    device = Device.default(standin.runtime)
    standin.calls.clear()
    references = sys.getrefcount(memory)
    with pytest.raises(error) as caught:
        device.wrap(memory, memory.ctypes.data + shift, nbytes)
    del caught
    assert set(standin.calls) <= {"maxBufferLength"}
    assert sys.getrefcount(memory) == references


@pytest.mark.parametrize("deallocates", [False, True])
def test_a_buffer_that_metal_does_not_make_is_an_error_and_keeps_nothing(
    memory: NDArray[np.uint8], deallocates: bool
) -> None:
    standin = StandIn(deallocates=deallocates)
    device = Device.default(standin.runtime)
    # Over the same memory, and it must not lose its owner instead.
    other = device.wrap(memory, memory.ctypes.data, PAGE)
    standin.nil = True
    references = sys.getrefcount(memory)
    with pytest.raises(MetalBufferError, match="returned no buffer for .*increased-memory-limit") as caught:
        device.wrap(memory, memory.ctypes.data, PAGE)
    assert caught.value.nbytes == PAGE
    del caught
    assert sys.getrefcount(memory) == references
    assert objc.kept(other.token)
    token = other.token
    del other
    assert not objc.kept(token)
    assert standin.violations == []


def test_without_a_device_metal_is_unavailable() -> None:
    with pytest.raises(MetalUnavailable, match="found no device"):
        Device.default(StandIn(device=False).runtime)


def test_behind_rosetta_metal_is_unavailable_and_not_even_asked() -> None:
    standin = StandIn(translated=True)
    with pytest.raises(MetalUnavailable, match="use an arm64 Python"):
        Device.default(standin.runtime)
    assert standin.calls == []


@pytest.mark.skipif(sys.platform == "darwin", reason="this is a Mac, which has Metal")
def test_elsewhere_metal_is_unavailable_and_the_error_knows_what_to_do() -> None:
    with pytest.raises(MetalUnavailable, match="metal-plan"):
        Device.default()


def test_the_real_device_of_a_mac_has_what_apple_promises(bench: Bench) -> None:
    device = bench.device()
    assert device.name
    assert device.max_buffer_length >= 256 << 20
    assert device.recommended_working_set > 0
    assert device.has_unified_memory


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_after_fork_the_child_is_told_so_and_sends_nothing(memory: NDArray[np.uint8]) -> None:
    standin = StandIn()
    device = Device.default(standin.runtime)
    buffers = [device.wrap(memory, memory.ctypes.data, PAGE)]
    calls = list(standin.calls)

    def drop() -> None:
        buffers.clear()
        assert standin.calls == calls, standin.calls

    assert in_a_forked_child(drop) == "nothing"
    for action in (
        lambda: device.wrap(memory, memory.ctypes.data, PAGE),
        lambda: buffers[0].contents(),
        lambda: device.name,
        lambda: device.has_unified_memory,
        lambda: Device.default(standin.runtime),
    ):
        assert "MetalUnavailable: Metal does not work after a fork, and process" in in_a_forked_child(action)
    assert standin.live() == 1


def test_residency_is_asked_for_and_ended(memory: NDArray[np.uint8]) -> None:
    standin = StandIn()
    device = Device.default(standin.runtime)
    buffers = [device.wrap(memory, memory.ctypes.data + at, PAGE) for at in (0, PAGE)]
    pointers = [buffer.pointer for buffer in buffers]
    residency = Residency(device, buffers)
    assert standin.resident == standin.requested == pointers
    buffers.clear()
    assert standin.live() == 2
    residency.end()
    residency.end()
    assert standin.resident == []
    assert standin.live() == 0
    assert standin.violations == []


def test_residency_that_nobody_ended_ends_when_it_is_collected(memory: NDArray[np.uint8]) -> None:
    standin = StandIn()
    device = Device.default(standin.runtime)
    Residency(device, [device.wrap(memory, memory.ctypes.data, PAGE)])
    assert standin.live() == 0


@pytest.mark.parametrize("lacking", [{"macos": 14}, {"families": frozenset({2002})}], ids=str)
def test_residency_needs_macos_15_and_a_gpu_of_apples(lacking: dict[str, object]) -> None:
    standin = StandIn(**lacking)  # type: ignore[arg-type]
    with pytest.raises(MetalUnavailable, match="need macOS 15"):
        Residency(Device.default(standin.runtime), [])
    assert "newResidencySetWithDescriptor:error:" not in standin.calls
