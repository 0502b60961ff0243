"""What is read together of a pack, against runs found by hand."""

from __future__ import annotations

import pytest

from stream_pack.format.catalog import CatalogBuilder
from stream_pack.format.dtypes import BY_NAME
from stream_pack.format.index import Index
from stream_pack.format.layout import Policy, plan
from stream_pack.sources.pack.block_runs import block_runs
from tests.sources.source_suite import ranges


def index_of(*buffer_nbytes: int) -> Index:
    builder = CatalogBuilder()
    for buffer, nbytes in enumerate(buffer_nbytes):
        builder.add(f"t{buffer}", BY_NAME["uint8"], (nbytes,), storage=buffer, start=0)
    return plan(builder.build(storages_nbytes=0), Policy(block_nbytes=4096)).index


INDEX = index_of(20_000, 4096, 4096, 10)


def test_requests_that_share_a_block_are_one_run_and_runs_stand_in_the_order_of_the_pack() -> None:
    wanted = [(0, 12_288, 1), (0, 4000, 200), (0, 100, 8), (0, 8192, 10), (0, 4200, 1), (0, 110, 2)]
    runs = block_runs(ranges(wanted), INDEX, together=True)
    # Blocks 0 and 1 are joined by the range across them; 2 and 3 are neighbours, and share nothing.
    assert runs.of.tolist() == [2, 0, 0, 1, 0, 0]
    assert runs.buffers.tolist() == [0, 0, 0]
    assert (runs.begins.tolist(), runs.ends.tolist()) == ([100, 8192, 12_288], [4201, 8202, 12_289])


def test_a_run_reaches_as_far_as_the_longest_of_its_requests() -> None:
    runs = block_runs(ranges([(0, 0, 20_000), (0, 16, 1), (0, 15_000, 8)]), INDEX, together=True)
    assert (runs.of.tolist(), runs.ends.tolist()) == ([0, 0, 0], [20_000])


def test_buffers_have_no_block_in_common_though_one_ends_where_a_block_does() -> None:
    whole = [(3, 0, 10), (2, 0, 4096), (1, 0, 4096), (0, 0, 20_000)]
    runs = block_runs(ranges(whole), INDEX, together=True)
    assert runs.of.tolist() == [3, 2, 1, 0]
    assert runs.ends.tolist() == [20_000, 4096, 4096, 10]


def test_in_turn_every_request_is_its_own_run() -> None:
    runs = block_runs(ranges([(1, 8, 8), (0, 0, 8), (0, 8, 8)]), INDEX, together=False)
    assert runs.of.tolist() == [0, 1, 2]
    assert runs.buffers.tolist() == [1, 0, 0]
    assert (runs.begins.tolist(), runs.ends.tolist()) == ([8, 0, 8], [16, 8, 16])


@pytest.mark.parametrize("together", [True, False])
def test_nothing_wanted_is_no_run(together: bool) -> None:
    assert len(block_runs(ranges([]), INDEX, together=together).buffers) == 0
