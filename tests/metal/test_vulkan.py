"""A real GPU driver, Mesa's lavapipe, reads tensors in place from windows of a mapped pack.

It proves place and lifetime; of alignment it demands little, so the rules are proved elsewhere.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np
import pytest

import stream_pack
from stream_pack.metal import Device
from tests.metal.standin import StandIn
from tests.metal.vulkan.api import Gpu, find_loader
from tests.support.smaps import mapped_file

pytestmark = pytest.mark.vulkan

SHADER = Path(__file__).with_name("vulkan") / "pick.spv"
MIB = 1 << 20


@pytest.fixture
def gpu() -> Gpu:
    loader = find_loader()
    if loader is None:
        pytest.skip("no Vulkan loader (Debian: libvulkan1 mesa-vulkan-drivers)")
    try:
        return Gpu(loader, driver="llvmpipe")
    except LookupError as error:
        missing = f"no lavapipe (Debian: mesa-vulkan-drivers): {error}"
        if os.environ.get("CI"):
            pytest.fail(missing)  # it is installed there
        pytest.skip(missing)


def test_a_gpu_driver_reads_tensors_of_two_windows_where_the_file_is_mapped(gpu: Gpu, tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    count = 300_000
    first = random.integers(0, 2**32, count, np.uint32)
    second = random.integers(0, 2**32, count + 1, np.uint32)
    path = tmp_path / "model.pack"
    stream_pack.save_file({"small": np.ones(9, np.float32), "first": first, "second": second}, path)

    standin = StandIn()
    with stream_pack.metal.open(path, device=Device.default(standin.runtime), max_buffer_length=2 * MIB) as weights:
        views = [weights["first"], weights["second"]]
        assert len({view.buffer.address for view in views}) == 2
        # The very ranges that Metal gets.
        windows = [gpu.buffer(v.buffer.nbytes, imported=v.buffer.contents()) for v in views]
        output, memory = gpu.buffer(8 * count, imported=None)
        gpu.run(
            SHADER,
            [windows[0][0], windows[1][0], output],
            [views[0].offset // 4, views[1].offset // 4, count],
            groups=-(-count // 64),
        )
        read = np.frombuffer(gpu.read(memory, 8 * count), np.uint32).reshape(-1, 2)
        np.testing.assert_array_equal(read[:, 0], first)
        np.testing.assert_array_equal(read[:, 1], second[:count])

        entry = mapped_file(path)
        assert set(entry.permissions) == {"r--s"}
        assert entry.anonymous == 0
        # In place: a change of the file is what the driver reads next.
        with stream_pack.open(path) as pack, path.open("r+b") as file:
            file.seek(pack["first"].file_offset)
            file.write(b"\1\2\3\4")
        gpu.run(SHADER, [windows[0][0], windows[1][0], output], [views[0].offset // 4, 0, 1], groups=1)
        assert gpu.read(memory, 4) == b"\1\2\3\4"
        offsets = [view.offset // 4 for view in views]
    # The weights are closed, the views are not gone: the driver still reads, to the last element.
    del weights
    gpu.run(SHADER, [windows[0][0], windows[1][0], output], [*offsets, count], groups=-(-count // 64))
    read = np.frombuffer(gpu.read(memory, 8 * count), np.uint32).reshape(-1, 2)
    np.testing.assert_array_equal(read[:, 1], second[:count])
    gpu.close()
    assert ctypes.string_at(views[1].buffer.address + views[1].offset, 4) == second[:1].tobytes()
    views.clear()
    assert mapped_file(path).permissions == ()
    assert standin.violations == []
