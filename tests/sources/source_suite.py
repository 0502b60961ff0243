"""What every source owes: a test class that the tests of each source inherit.

A subclass says how to make the source (fixture ``make``) and, from somewhere else, what is in it
(fixture ``expected``).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeAlias

import numpy as np
import pytest

from stream_pack.errors import SourceError
from stream_pack.format.catalog import Catalog
from stream_pack.format.dtypes import DTYPES
from stream_pack.pipeline.adapt.select import take_rows
from stream_pack.pipeline.adapt.source import AdaptedSource
from stream_pack.pipeline.chunks import Zeros
from stream_pack.pipeline.places import NOWHERE, SourceFile
from stream_pack.pipeline.source import Requests, Source, StreamOptions, Traits
from stream_pack.pipeline.spool import Spool
from stream_pack.sources.sets.composite import JoinedSource, Member

__all__ = ["Expected", "MakeSource", "SourceSuite", "catalog_rows", "collect", "options", "requests_for"]

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Expected:
    """One tensor, as an independent reader sees it: ``data`` is row-major and little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


MakeSource: TypeAlias = Callable[[], Source]


def options(
    *, chunk_nbytes: int = 4 * MIB, jobs: int = 1, in_order: bool = False, spool: Spool | None = None
) -> StreamOptions:
    """Stream options; without ``spool`` there is no disk space to be had."""
    return StreamOptions(chunk_nbytes=chunk_nbytes, jobs=jobs, in_order=in_order, spool=spool or Spool("nowhere"))


def catalog_rows(catalog: Catalog) -> list[tuple[str, str, tuple[int, ...], int]]:
    """(name, dtype, shape, nbytes) of every tensor."""
    return [
        (name, DTYPES[catalog.dtypes[k]].name, catalog.shape(k), int(catalog.nbytes[k]))
        for k, name in enumerate(catalog.names)
    ]


def requests_for(catalog: Catalog, tensors: Iterable[int] | None = None) -> tuple[list[int], Requests]:
    """One buffer for each of ``tensors`` (default: all) that has bytes; returns these tensors too."""
    chosen = range(len(catalog)) if tensors is None else tensors
    kept = [k for k in chosen if catalog.nbytes[k]]
    requests = Requests(storages=catalog.storages[kept], starts=catalog.starts[kept], nbytes=catalog.nbytes[kept])
    return kept, requests


def ranges(rows: Iterable[tuple[int, int, int]]) -> Requests:
    """Requests from (storage, start, nbytes)."""
    columns = np.array(list(rows), np.int64).reshape(-1, 3)
    return Requests(storages=columns[:, 0], starts=columns[:, 1], nbytes=columns[:, 2])


def collect(source: Source, requests: Requests, stream_options: StreamOptions) -> list[bytes]:
    """The bytes of every buffer, joined only after the last chunk: a source never writes to a chunk again."""
    chunks: list[list[memoryview | bytes | Zeros]] = [[] for _ in range(len(requests))]
    for buffer, chunk in source.stream(requests, stream_options):
        assert len(chunk) > 0
        if not isinstance(chunk, Zeros):
            assert len(chunk) <= stream_options.chunk_nbytes
            assert memoryview(chunk).format == "B"
            assert memoryview(chunk).c_contiguous
        chunks[buffer].append(chunk)
    return [b"".join(bytes(part.nbytes) if isinstance(part, Zeros) else part for part in parts) for parts in chunks]


def stored(file: SourceFile, offset: int, nbytes: int) -> bytes:
    """What a file holds there."""
    if file.descriptor is not None:
        return os.pread(file.descriptor, nbytes, offset)
    assert file.path is not None
    with open(file.path, "rb") as opened:
        opened.seek(offset)
        return opened.read(nbytes)


class SourceSuite:
    """Inherit as ``class TestX(SourceSuite)`` and define the fixtures ``make`` and ``expected``."""

    chooses_order: ClassVar[bool] = True
    """Whether the source can give its bytes in any order; a pipe cannot."""

    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeSource:
        raise NotImplementedError

    @pytest.fixture
    def expected(self) -> dict[str, Expected]:
        """By name, in the order that the catalog must have."""
        raise NotImplementedError

    @pytest.fixture
    def spool(self, tmp_path: Path) -> Spool:
        return Spool(tmp_path)

    def test_the_catalog_is_what_an_independent_reader_sees(
        self, make: MakeSource, expected: dict[str, Expected]
    ) -> None:
        with make() as source:
            assert catalog_rows(source.catalog) == [
                (name, tensor.dtype, tensor.shape, len(tensor.data)) for name, tensor in expected.items()
            ]

    @pytest.mark.parametrize("jobs", [1, 4])
    @pytest.mark.parametrize("chunk_nbytes", [1, 7, 4096, 4 * MIB])
    def test_every_byte_of_every_tensor_arrives_once_in_its_place(
        self, make: MakeSource, expected: dict[str, Expected], spool: Spool, chunk_nbytes: int, jobs: int
    ) -> None:
        with make() as source:
            tensors, requests = requests_for(source.catalog)
            data = collect(source, requests, options(chunk_nbytes=chunk_nbytes, jobs=jobs, spool=spool))
            for k, received in zip(tensors, data, strict=True):
                name = source.catalog.names[k]
                assert received == expected[name].data, name

    def test_some_tensors_can_be_left_out(self, make: MakeSource, expected: dict[str, Expected], spool: Spool) -> None:
        with make() as source:
            every_second = range(1, len(source.catalog), 2)
            tensors, requests = requests_for(source.catalog, every_second)
            data = collect(source, requests, options(chunk_nbytes=7, spool=spool))
            names = [source.catalog.names[k] for k in tensors]
            assert data == [expected[name].data for name in names]

    def test_a_part_of_a_tensor_can_be_requested(
        self, make: MakeSource, expected: dict[str, Expected], spool: Spool
    ) -> None:
        with make() as source:
            catalog = source.catalog
            tensors = [k for k in range(len(catalog)) if catalog.nbytes[k] >= 3]
            middles = ranges(
                (int(catalog.storages[k]), int(catalog.starts[k]) + 1, int(catalog.nbytes[k]) - 2) for k in tensors
            )
            data = collect(source, middles, options(chunk_nbytes=7, spool=spool))
            assert data == [expected[catalog.names[k]].data[1:-1] for k in tensors]

    def test_bytes_that_two_buffers_want_go_to_both(
        self, make: MakeSource, expected: dict[str, Expected], spool: Spool
    ) -> None:
        with make() as source:
            tensors, _ = requests_for(source.catalog)
            twice = [k for k in tensors for _ in range(2)]
            _, requests = requests_for(source.catalog, twice)
            data = collect(source, requests, options(chunk_nbytes=7, spool=spool))
            assert data == [expected[source.catalog.names[k]].data for k in twice]

    def test_places_hold_the_bytes_that_are_streamed(
        self, make: MakeSource, expected: dict[str, Expected], spool: Spool
    ) -> None:
        with make() as source:
            catalog = source.catalog
            tensors, requests = requests_for(catalog)
            places = source.places(requests)
            assert len(places.numbers) == len(places.offsets) == len(requests)
            middles = Requests(requests.storages, requests.starts + 1, requests.nbytes - 1)
            inside = source.places(middles).offsets
            for k, number, offset, later in zip(tensors, places.numbers.tolist(), places.offsets.tolist(), inside):
                assert later == (offset if offset == NOWHERE else offset + 1)
                if offset != NOWHERE:
                    data = expected[catalog.names[k]].data
                    assert stored(places.files[number], offset, len(data)) == data
            # To ask changes nothing for the stream.
            received = collect(source, requests, options(chunk_nbytes=4096, spool=spool))
            assert received == [expected[catalog.names[k]].data for k in tensors]

    def test_in_order_means_one_buffer_after_the_other(
        self, make: MakeSource, expected: dict[str, Expected], spool: Spool
    ) -> None:
        if not self.chooses_order:
            return  # A pipe gives its bytes as they come; the writer spools.
        with make() as source:
            backwards = range(len(source.catalog) - 1, -1, -1)
            tensors, requests = requests_for(source.catalog, backwards)
            stream_options = options(chunk_nbytes=7, jobs=4, in_order=True, spool=spool)
            pieces = [(b, bytes(chunk)) for b, chunk in source.stream(requests, stream_options)]  # type: ignore[arg-type]
            buffers = [buffer for buffer, _ in pieces]
            assert buffers == sorted(buffers)
            data = [b"".join(part for b, part in pieces if b == n) for n in range(len(tensors))]
            assert data == [expected[source.catalog.names[k]].data for k in tensors]

    def test_a_source_that_nobody_wants_bytes_of_still_ends_well(self, make: MakeSource, spool: Spool) -> None:
        with make() as source:
            assert collect(source, ranges([]), options(spool=spool)) == []
            assert source.verification

    def test_the_spool_takes_no_more_than_was_announced(self, make: MakeSource, spool: Spool) -> None:
        with make() as source:
            _, requests = requests_for(source.catalog)
            announced = source.demand(requests, in_order=False, chunk_nbytes=MIB).spool_nbytes
            taken = spool.peak_nbytes
            collect(source, requests, options(spool=spool))
            assert spool.peak_nbytes <= taken + announced

    def test_a_wrapper_says_what_the_source_says(self, make: MakeSource) -> None:
        """Whatever traits there are, now or later: each is set to a value that no source has by default."""
        with make() as source:
            rows = list(range(len(source.catalog)))[::-1]
            refused = {rows[0]: SourceError("refused"), rows[-1]: SourceError("refused too")}
            source.catalog = dataclasses.replace(source.catalog, refused=refused)
            source.traits = marked = Traits("marked", source.traits.chooses_order, 12345, True, ("w",), ("seen",))
            names = [source.catalog.names[row] for row in rows]
            adapted = AdaptedSource(source, take_rows(source.catalog, np.array(rows), names), rows)
            joined = JoinedSource([Member("member", source, rows)], kind="marked", metadata={}, remarks=("joined",))
            assert adapted.traits == marked
            assert joined.traits == dataclasses.replace(
                marked, warnings=("'member': w",), remarks=("joined", "'member': seen")
            )
            moved = {at: refused[row] for at, row in enumerate(rows) if row in refused}
            assert adapted.catalog.refused == joined.catalog.refused == moved

    @pytest.mark.parametrize("in_order", [False, True])
    def test_a_wrapper_demands_what_the_source_demands(self, make: MakeSource, in_order: bool) -> None:
        with make() as source:
            catalog = source.catalog
            rows = range(len(catalog))
            _, requests = requests_for(catalog)
            wanted = source.demand(requests, in_order=in_order, chunk_nbytes=7)
            joined = JoinedSource([Member("m", source, rows)], kind="k", metadata={})
            for wrapper in (AdaptedSource(source, catalog, rows), joined):
                found = wrapper.demand(requests, in_order=in_order, chunk_nbytes=7)
                assert found.spool_nbytes == wanted.spool_nbytes
                assert (found.arrival is None) == (wanted.arrival is None)
                assert wrapper.checksums == source.checksums
                places, told = source.places(requests), wrapper.places(requests)
                assert places.files == told.files
                assert (places.numbers.tolist(), places.offsets.tolist()) == (
                    told.numbers.tolist(),
                    told.offsets.tolist(),
                )
                for given, expected in zip(found.arrival or (), wanted.arrival or ()):
                    assert given.tolist() == expected.tolist()

    def test_it_tells_what_it_is_and_what_it_verified(self, make: MakeSource, spool: Spool) -> None:
        with make() as source:
            _, requests = requests_for(source.catalog)
            collect(source, requests, options(spool=spool))
            assert source.traits.kind
            assert source.verification

    def test_closing_twice_and_closing_early_are_both_fine(self, make: MakeSource) -> None:
        source = make()
        source.close()
        source.close()

    def test_a_stream_can_be_left_half_way(self, make: MakeSource, spool: Spool) -> None:
        with make() as source:
            _, requests = requests_for(source.catalog)
            stream = source.stream(requests, options(chunk_nbytes=1, spool=spool))
            assert next(iter(stream), None) is not None
            stream.close()  # type: ignore[attr-defined]
