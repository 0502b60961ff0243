"""Windows and buffers above 2**32 bytes, over a sparse file: no real gigabytes, and no memory."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import stream_pack
from stream_pack.errors import TensorTooLarge
from stream_pack.format.catalog import CatalogBuilder
from stream_pack.format.dtypes import BY_NAME
from stream_pack.format.head import encode_footer, encode_head
from stream_pack.format.header_kinds import MPS
from stream_pack.format.layout import Policy, plan
from stream_pack.metal import Device, interop
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
    return sparse_pack(tmp_path / "sparse.pack", SHAPES, "float32", storages_nbytes=8 * GIB)


def sparse_pack(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str, *, storages_nbytes: int) -> Path:
    builder = CatalogBuilder()
    for number, (name, shape) in enumerate(shapes.items()):
        builder.add(name, BY_NAME[dtype], shape, storage=number, start=0)
    encoded = encode_head(plan(builder.build(storages_nbytes=storages_nbytes), Policy()), MPS)
    found = encoded.head
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
    assert plan.warnings == (
        "4 GiB or more: MPS may abort, also on macOS 15, and be wrong without an error on macOS 26 ('wide')",
        IOS_HINT,
    )
    assert "working set: 8.00 GiB (Macs recommend" in plan.to_text()


def test_where_buffers_are_shorter_by_one_page_it_is_refused_and_the_others_are_used(sparse: Path) -> None:
    limit = 6 * GIB - 16384
    standin = StandIn(max_buffer_length=limit)
    with pytest.warns(RuntimeWarning, match="too large for one MTLBuffer.*'wide'"):
        weights = stream_pack.metal.open(sparse, device=Device.default(standin.runtime))
    assert weights.too_large == ("wide",)
    for ask in (weights.__getitem__, weights.own_buffer):
        with pytest.raises(TensorTooLarge, match="'wide': its 6442450944 bytes") as caught:
            ask("wide")
        assert (caught.value.tensors, caught.value.nbytes, caught.value.limit) == (("wide",), 6 * GIB, limit)
    for number, name in enumerate(SHAPES):
        if name != "wide":
            view = weights[name]
            assert ctypes.string_at(view.buffer.contents() + view.offset + view.nbytes - 1, 1) == bytes([number + 1])
            del view
    weights.close()
    with stream_pack.open(sparse) as pack:
        plan = plan_metal(pack, max_buffer_length=limit)
    assert plan.summary() == (
        "Metal: 2 windows of at most 6.00 GiB, 2.00 GiB mapped, nothing copied; "
        "1 of 4 tensors (6.00 GiB) cannot be used in place"
    )


@pytest.fixture
def long_dim(tmp_path: Path) -> Path:
    """A pack with dims on both sides of what MPS and MLX can have; sparse."""
    shapes = {"just": (2**31 - 1,), "long": (2**31,), "inside": (1, 2**31, 1), "none": (0, 2**31)}
    return sparse_pack(tmp_path / "long.pack", shapes, "uint8", storages_nbytes=2**31)


def test_a_dim_beyond_31_bits_is_warned_of_and_given_to_nobody_who_cannot_have_it(
    long_dim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    made: list[str] = []
    mlx = SimpleNamespace(from_dlpack=lambda producer, *, copy: made.append("mlx"))
    graph = SimpleNamespace(MPSGraphTensorData=SimpleNamespace(alloc=lambda: Graph()))

    class Graph:
        def initWithMTLBuffer_shape_dataType_(self, *_: object) -> None:  # noqa: N802
            made.append("graph")

    for name, module in (
        ("mlx", SimpleNamespace()),
        ("mlx.core", mlx),
        ("MetalPerformanceShadersGraph", graph),
        ("objc", SimpleNamespace(objc_object=lambda *, c_void_p: c_void_p)),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    with stream_pack.open(long_dim) as pack:
        plan = plan_metal(pack, max_buffer_length=8 * GIB)
    assert "a dim above 2147483647: MPS aborts, and MLX has no such shape ('long' and 1 more)" in plan.warnings
    with stream_pack.metal.open(long_dim, device=Device.default(StandIn().runtime)) as weights:
        for name in ("long", "inside"):
            for hand_out in (interop.to_mlx, interop.mps_graph_feed):
                with pytest.raises(
                    TensorTooLarge, match=f"'{name}' has the shape .*no dims above 2147483647"
                ) as caught:
                    hand_out(weights[name])
                assert (caught.value.tensors, caught.value.limit) == ((name,), 2147483647)
            # As PyTorch on a Mac makes it, at the right place.
            offset = weights[name].offset
            placed = torch.empty(offset + 2**31, dtype=torch.uint8, device="meta")[offset:]
            monkeypatch.setattr(torch.utils.dlpack, "from_dlpack", lambda capsule, placed=placed: placed)
            with pytest.warns(RuntimeWarning, match=f"'{name}' has the shape .*operations of MPS abort"):
                assert interop.to_torch(weights[name]) is placed
        assert made == []
        interop.to_mlx(weights["just"])
        interop.mps_graph_feed(weights["just"])
    assert made == ["mlx", "graph"]


def test_a_graph_is_fed_four_gib_with_a_warning(sparse: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alloc = SimpleNamespace(initWithMTLBuffer_shape_dataType_=lambda *about: about)
    graph = SimpleNamespace(MPSGraphTensorData=SimpleNamespace(alloc=lambda: alloc))
    monkeypatch.setitem(sys.modules, "MetalPerformanceShadersGraph", graph)
    monkeypatch.setitem(sys.modules, "objc", SimpleNamespace(objc_object=lambda *, c_void_p: c_void_p))
    with stream_pack.metal.open(sparse, device=Device.default(StandIn().runtime)) as weights:
        with pytest.warns(RuntimeWarning, match="'wide' has 6442450944 bytes: .*may abort, also on macOS 15"):
            assert interop.mps_graph_feed(weights["wide"])[1] == [6 * GIB // 4]
        assert interop.mps_graph_feed(weights["first"])[1] == [GIB // 4]


def test_offsets_beyond_32_bits_are_whole_numbers(sparse: Path) -> None:
    device = Device.default(StandIn().runtime)
    with stream_pack.metal.open(sparse, device=device) as weights:
        assert len(weights.windows) == 1
        assert weights["after"].offset == 7 * GIB
        assert weights["last"].offset == 8 * GIB - 20 + (-(8 * GIB - 20)) % 256
        assert np.frombuffer(
            ctypes.string_at(weights["last"].buffer.address + weights["last"].offset, 12), np.uint8
        ).tolist() == [*[0] * 11, 4]
