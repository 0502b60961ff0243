"""Positions and lengths above 2**32, with sparse sources and files: nothing here takes real gigabytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import stream_pack
from stream_pack.format.header import To
from tests.support.sparse_source import SparseSource

GIB = 1 << 30


def tail(path: Path, end: int) -> int:
    with open(path, "rb") as file:
        return int.from_bytes(os.pread(file.fileno(), 8, end - 8), "little")


@pytest.fixture
def sparse_path(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "sparse.pack"
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("to", ["mps", "xnnpack", "ptd"])
def test_a_tensor_may_stand_above_4_gib(to: To, sparse_path: Path) -> None:
    report = stream_pack.convert(
        SparseSource({"a": ("uint8", (5 * GIB,)), "b": ("float64", (3,)), "c": ("int64", (1,))}), sparse_path, to=to
    )
    assert report.target_nbytes == sparse_path.stat().st_size > 5 * GIB
    with stream_pack.open(sparse_path) as pack:
        b = pack["b"]
        assert b.offset == 5 * GIB
        assert tail(sparse_path, b.file_offset + 24) == 1
        assert pack["c"].numpy().tolist() == [2]
        assert pack["c"].torch().tolist() == [2]
        assert not pack.verify(jobs=2).damages


def test_a_tensor_may_have_more_than_4_gi_elements(sparse_path: Path) -> None:
    shape = (2, 2**31 + 8)
    stream_pack.convert(SparseSource({"x": ("uint8", shape), "y": ("int64", ())}), sparse_path)
    with stream_pack.open(sparse_path) as pack:
        assert pack["x"].shape == shape
        array = pack["x"].numpy()
        assert array.size > 2**32
        assert array[1, -8:].tolist() == [0] * 8
        assert pack["x"].torch()[1, -9:].tolist() == [0] * 9
        assert pack["y"].numpy().item() == 1


def test_a_dim_above_31_bits_is_valid_for_us_and_invalid_for_mps(sparse_path: Path) -> None:
    stream_pack.convert(SparseSource({"x": ("int8", (2**31,))}), sparse_path)
    from stream_pack.format import graph_mps
    from stream_pack.format.head import decode_head

    with open(sparse_path, "rb") as file:
        data = memoryview(file.read(16384))
    index = decode_head(data).index
    assert index.shape(0) == (2**31,)
    values = graph_mps.decode(data[24:])
    assert (values.datatypes.tolist(), values.num_dims.tolist()) == ([0], [0])
    assert values.nbytes.tolist() == [2**31]
