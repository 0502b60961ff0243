"""Windows and buffers above 2**32 bytes, over a sparse file: no real gigabytes, and no memory."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np
import pytest

import stream_pack
from stream_pack.errors import TensorTooLarge
from stream_pack.format.catalog import CatalogBuilder
from stream_pack.format.dtypes import BY_NAME
from stream_pack.format.head import encode_footer, encode_head
from stream_pack.format.header_kinds import MPS
from stream_pack.format.layout import Policy, plan
from stream_pack.metal import Device
from stream_pack.metal.plan import plan_metal
from stream_pack.metal.rules import IOS_HINT
from tests.metal.standin import StandIn
from tests.support.memory import anonymous_nbytes, needs_proc
from tests.support.smaps import mapped_file

pytestmark = needs_proc

MIB = 1 << 20
GIB = 1 << 30
SHAPES = {"first": (GIB // 4,), "wide": (6 * GIB // 4,), "after": (GIB // 4 - 5,), "last": (3,)}


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    """A pack of 8 GiB whose tensors are zeros, but for their own number in the last byte."""
    builder = CatalogBuilder()
    for number, (name, shape) in enumerate(SHAPES.items()):
        builder.add(name, BY_NAME["float32"], shape, storage=number, start=0)
    encoded = encode_head(plan(builder.build(storages_nbytes=8 * GIB), Policy()), MPS)
    found = encoded.head
    path = tmp_path / "sparse.pack"
    with path.open("wb") as file:
        file.write(encoded.front + bytes(encoded.padding_nbytes) + encoded.locator)
        ends = found.index.buffer_offsets + found.index.buffer_nbytes
        for number, end in enumerate(ends.tolist()):
            file.seek(found.region_file_offset + end - 1)
            file.write(bytes([number + 1]))
        # Opening does not look at checksums; none of them is right.
        file.seek(found.footer_file_offset)
        file.write(encode_footer(found, bytes(found.index.checksums_nbytes)))
    assert os.stat(path).st_blocks * 512 < MIB
    return path


def test_a_tensor_of_six_gib_is_bound_whole_and_in_place(sparse: Path) -> None:
    device = Device.default(StandIn(max_buffer_length=6 * GIB).runtime)
    before = anonymous_nbytes()
    with stream_pack.metal.open(sparse, device=device) as weights:
        assert [window.nbytes for window in weights.windows] == [GIB, 6 * GIB, GIB + 16384]
        for number, name in enumerate(SHAPES):
            view = weights[name]
            last = view.buffer.contents() + view.offset + view.nbytes - 1
            assert ctypes.string_at(last, 1) == bytes([number + 1]), name
        assert weights["wide"].nbytes == 6 * GIB
        assert weights.own_buffer("wide").nbytes == 6 * GIB
        entry = mapped_file(sparse)
        assert entry.nbytes > 8 * GIB
        assert entry.anonymous == 0
    assert anonymous_nbytes() - before < 4 * MIB


def test_the_plan_warns_of_what_old_systems_and_phones_cannot_do(sparse: Path) -> None:
    with stream_pack.open(sparse) as pack:
        plan = plan_metal(pack, max_buffer_length=8 * GIB)
    assert plan.warnings == ("4 GiB or more: MPS aborts on systems before macOS 15 ('wide')", IOS_HINT)
    assert "working set: 8.00 GiB (Macs recommend" in plan.to_text()


def test_it_is_refused_where_buffers_are_shorter_by_one_page(sparse: Path) -> None:
    standin = StandIn(max_buffer_length=6 * GIB - 16384)
    with pytest.raises(TensorTooLarge, match="'wide': its 6442450944 bytes"):
        stream_pack.metal.open(sparse, device=Device.default(standin.runtime))
    assert standin.live() == 0


def test_offsets_beyond_32_bits_are_whole_numbers(sparse: Path) -> None:
    device = Device.default(StandIn().runtime)
    with stream_pack.metal.open(sparse, device=device) as weights:
        assert len(weights.windows) == 1
        assert weights["after"].offset == 7 * GIB
        assert weights["last"].offset == 8 * GIB - 20 + (-(8 * GIB - 20)) % 256
        assert np.frombuffer(
            ctypes.string_at(weights["last"].buffer.address + weights["last"].offset, 12), np.uint8
        ).tolist() == [*[0] * 11, 4]
