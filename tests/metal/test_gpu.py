"""What a program does with the buffers: a blit of every tensor into memory of the GPU's own, and comparison.

On a Mac this is the proof that the GPU reads the mapped file; on the stand-ins, that every call made there is right.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import stream_pack
from stream_pack.metal import Device, MetalView, Residency, objc
from stream_pack.metal.objc import MESSAGES, Messages
from tests.metal.bench import KINDS, Bench, gone
from tests.metal.standin import BLIT_MESSAGES

Arrays = dict[str, NDArray[np.generic]]
MIB = 1 << 20
COMPLETED = 4


class Gpu:
    """Copies tensors with a command queue."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.messages = Messages(device.runtime, MESSAGES | BLIT_MESSAGES)
        self.queue = self.messages.send(device.pointer, "newCommandQueue")

    def copy(self, view: MetalView) -> bytes:
        """The tensor's bytes, as the GPU reads them."""
        send = self.messages.send
        whole_words = -(-view.nbytes // 4) * 4  # a blit copies multiples of 4; padding follows every tensor
        target = send(self.device.pointer, "newBufferWithLength:options:", whole_words, 0)
        with self.messages.pool():
            commands = send(self.queue, "commandBuffer")
            encoder = send(commands, "blitCommandEncoder")
            send(
                encoder,
                "copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:",
                view.buffer.pointer,
                view.offset,
                target,
                0,
                whole_words,
            )
            send(encoder, "endEncoding")
            send(commands, "commit")
            send(commands, "waitUntilCompleted")
            assert send(commands, "status") == COMPLETED
        copied = ctypes.string_at(send(target, "contents"), view.nbytes)
        send(target, "release")
        return copied

    def close(self) -> None:
        self.messages.send(self.queue, "release")


@pytest.mark.parametrize("limit", [None, 3 * MIB])
def test_the_gpu_reads_every_tensor_of_the_file_where_it_lies(
    bench: Bench, pack_path: Path, arrays: Arrays, limit: int | None
) -> None:
    device = bench.device()
    gpu = Gpu(device)
    with stream_pack.metal.open(pack_path, device=device, max_buffer_length=limit) as weights:
        for name, array in arrays.items():
            if array.nbytes:
                assert gpu.copy(weights[name]) == array.tobytes(), name
    gpu.close()


def test_the_gpu_reads_windows_of_one_mib(bench: Bench, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    arrays = {f"t{n}": random.integers(0, 255, 300_000 + n, np.uint8) for n in range(12)}
    path = tmp_path / "model.pack"
    stream_pack.save_file(arrays, path)
    device = bench.device()
    gpu = Gpu(device)
    with stream_pack.metal.open(path, device=device, max_buffer_length=MIB) as weights:
        assert len(weights.windows) == 4
        for name, array in arrays.items():
            assert gpu.copy(weights[name]) == array.tobytes(), name
    gpu.close()


def test_the_gpu_reads_a_buffer_that_begins_with_a_tensor(bench: Bench, pack_path: Path, arrays: Arrays) -> None:
    device = bench.device()
    gpu = Gpu(device)
    with stream_pack.metal.open(pack_path, device=device) as weights:
        own = weights.own_buffer("head")
        view = weights["head"]
        alone = MetalView(view.name, view.dtype, view.shape, view.nbytes, 0, own, weights.own_buffer)
        assert gpu.copy(alone) == arrays["head"].tobytes()
    gpu.close()


def test_the_deallocator_is_called_after_the_gpu_has_used_the_buffer(bench: Bench, pack_path: Path) -> None:
    device = bench.device()
    gpu = Gpu(device)
    with stream_pack.metal.open(pack_path, device=device) as weights:
        window = weights.windows[0]
        gpu.copy(weights["head"])
    token = window.token
    assert objc.kept(token)
    del window, weights
    gpu.close()
    assert gone(bench, token)


@pytest.mark.parametrize("bench", [kind for kind in KINDS if kind != "c"], indirect=True)
def test_residency_where_the_system_has_it(bench: Bench, pack_path: Path, arrays: Arrays) -> None:
    device = bench.device()
    if not device.has_residency_sets:
        pytest.skip("this device has no residency sets")
    gpu = Gpu(device)
    with stream_pack.metal.open(pack_path, device=device) as weights:
        residency = Residency(device, weights.windows)
        assert gpu.copy(weights["head"]) == arrays["head"].tobytes()
        residency.end()
    gpu.close()
