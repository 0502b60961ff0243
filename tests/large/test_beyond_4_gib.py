"""Positions and lengths above 2**32, with sparse sources and files: nothing here takes real gigabytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import stream_pack
from stream_pack.catalog import Catalog, CatalogBuilder
from stream_pack.dtypes import BY_NAME
from stream_pack.writer.source import Piece, Requests, Source, StreamOptions, Zeros

GIB = 1 << 30


class SparseSource(Source):
    """Tensors of zeros that end in 8 bytes of their own: their number, little-endian."""

    def __init__(self, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
        builder = CatalogBuilder()
        total = 0
        for number, (name, (dtype, shape)) in enumerate(tensors.items()):
            total += builder.add(name, BY_NAME[dtype], shape, storage=number, start=0)
        self._catalog = builder.build(storages_nbytes=total)

    @property
    def catalog(self) -> Catalog:
        return self._catalog

    @property
    def kind(self) -> str:
        return "sparse"

    @property
    def sparse(self) -> bool:
        return True

    @property
    def verification(self) -> str:
        return "nothing to verify"

    def stream(self, requests: Requests, options: StreamOptions) -> Iterator[Piece]:
        for buffer, nbytes in enumerate(requests.nbytes.tolist()):
            if nbytes > 8:
                yield buffer, Zeros(nbytes - 8)
            yield buffer, int(requests.storages[buffer]).to_bytes(8, "little")


def tail(path: Path, end: int) -> int:
    with open(path, "rb") as file:
        return int.from_bytes(os.pread(file.fileno(), 8, end - 8), "little")


@pytest.fixture
def sparse_path(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "sparse.pack"
    yield path
    path.unlink(missing_ok=True)


def test_a_tensor_may_stand_above_4_gib(sparse_path: Path) -> None:
    report = stream_pack.convert(
        SparseSource({"a": ("uint8", (5 * GIB,)), "b": ("float64", (3,)), "c": ("int64", (1,))}),
        sparse_path,
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
    from stream_pack import graph, head

    with open(sparse_path, "rb") as file:
        data = memoryview(file.read(16384))
    index = head.decode(data).index
    assert index.shape(0) == (2**31,)
    values = graph.decode(data[24:])
    assert (values.datatypes.tolist(), values.num_dims.tolist()) == ([0], [0])
    assert values.nbytes.tolist() == [2**31]
