"""The plan, against arithmetic by hand and a search over all pairs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stream_pack.errors import LimitError
from stream_pack.format.align import Alignment
from stream_pack.format.catalog import Catalog, CatalogBuilder
from stream_pack.format.dtypes import BY_NAME
from stream_pack.format.index import NO_BUFFER
from stream_pack.format.layout import Layout, Policy, plan

U8 = BY_NAME["uint8"]
F32 = BY_NAME["float32"]


def catalog_of(ranges: Sequence[tuple[int, int, int]], *, storages_nbytes: int = 0) -> Catalog:
    """uint8 tensors t0, t1, ... of (storage, start, nbytes)."""
    builder = CatalogBuilder()
    for number, (storage, start, nbytes) in enumerate(ranges):
        builder.add(f"t{number}", U8, (nbytes,), storage=storage, start=start)
    return builder.build(storages_nbytes=storages_nbytes)


def places(layout: Layout) -> list[tuple[int, int] | None]:
    """(buffer, start) of each tensor."""
    index = layout.index
    return [
        None if buffer == NO_BUFFER else (buffer, start)
        for buffer, start in zip(index.tensor_buffers.tolist(), index.tensor_starts.tolist(), strict=True)
    ]


def test_small_tensors_stand_256_bytes_apart_and_large_ones_on_pages() -> None:
    mib = 1 << 20
    layout = plan(catalog_of([(0, 0, 4), (1, 0, 300), (2, 0, mib), (3, 0, 1), (4, 0, mib + 1), (5, 0, 5)]), Policy())
    assert layout.index.buffer_offsets.tolist() == [
        0,
        256,
        16384,  # the first page after 256 + 300
        16384 + mib,
        2 * 16384 + mib,  # the first page after the single byte
        2 * 16384 + 2 * mib + 256,  # the first multiple of 256 after mib + 1 bytes
    ]
    assert layout.region_nbytes == 3 * 16384 + 2 * mib
    assert layout.padding_nbytes == layout.region_nbytes - (4 + 300 + mib + 1 + mib + 1 + 5)


def test_the_alignments_asked_for_are_used_and_recorded() -> None:
    alignment = Alignment(small=64, large=65536, large_nbytes=1000)
    index = plan(catalog_of([(0, 0, 1), (1, 0, 2), (2, 0, 1000), (3, 0, 3)]), Policy(alignment)).index
    assert index.buffer_offsets.tolist() == [0, 64, 65536, 65536 + 1024]
    assert index.alignment == alignment


def test_tied_tensors_are_one_buffer() -> None:
    layout = plan(catalog_of([(7, 0, 100), (8, 0, 50), (7, 0, 100)]), Policy())
    assert places(layout) == [(0, 0), (1, 0), (0, 0)]
    assert layout.index.buffer_nbytes.tolist() == [100, 50]
    assert (layout.tied, layout.shared_nbytes, layout.tensors_nbytes) == (1, 100, 250)


def test_a_view_at_an_aligned_start_lies_inside_its_base() -> None:
    layout = plan(catalog_of([(0, 512, 100), (0, 0, 4096)], storages_nbytes=5000), Policy())
    assert places(layout) == [(0, 512), (0, 0)]
    assert layout.index.buffer_nbytes.tolist() == [4096]
    assert (layout.buffer_storages.tolist(), layout.buffer_starts.tolist()) == ([0], [0])
    assert (layout.unused_nbytes, layout.repeated_nbytes) == (904, 0)


def test_a_view_at_another_start_is_stored_apart_because_alignment_wins() -> None:
    layout = plan(catalog_of([(0, 0, 4096), (0, 12, 8)], storages_nbytes=4096), Policy())
    assert places(layout) == [(0, 0), (1, 0)]
    assert layout.buffer_starts.tolist() == [0, 12]
    assert (layout.unused_nbytes, layout.repeated_nbytes) == (0, 8)


def test_a_large_view_must_start_on_a_page_of_its_base() -> None:
    mib = 1 << 20
    ranges = [(0, 0, 4 * mib), (0, 256, mib), (0, 16384, mib)]
    assert places(plan(catalog_of(ranges), Policy())) == [(0, 0), (1, 0), (0, 16384)]


def test_partly_overlapping_views_are_stored_apart() -> None:
    layout = plan(catalog_of([(0, 0, 600), (0, 256, 600)], storages_nbytes=1000), Policy())
    assert places(layout) == [(0, 0), (1, 0)]
    assert (layout.repeated_nbytes, layout.unused_nbytes) == (1200 - 856, 1000 - 856)


def test_a_view_of_the_gap_between_two_tensors_is_not_shared() -> None:
    # [0, 512) and [512, 1024) are stored; nobody has [256, 768) whole.
    assert places(plan(catalog_of([(0, 0, 512), (0, 512, 512), (0, 256, 512)]), Policy())) == [(0, 0), (1, 0), (2, 0)]


def test_the_longest_host_is_taken_and_of_equals_the_first() -> None:
    ranges = [(0, 256, 100), (0, 0, 1000), (0, 0, 2000), (0, 0, 2000)]
    layout = plan(catalog_of(ranges), Policy())
    assert places(layout) == [(0, 256), (0, 0), (0, 0), (0, 0)]
    assert layout.index.buffer_nbytes.tolist() == [2000]


def test_buffers_stand_in_the_order_of_the_first_tensor_that_uses_them() -> None:
    # t0 lies inside t2, so t2's buffer is the first.
    layout = plan(catalog_of([(1, 256, 10), (0, 0, 20), (1, 0, 600)]), Policy())
    assert layout.buffer_storages.tolist() == [1, 0]


def test_tensors_without_bytes_have_no_buffer() -> None:
    builder = CatalogBuilder()
    builder.add("empty", F32, (3, 0, 2), storage=0, start=0)
    builder.add("scalar", F32, (), storage=1, start=0)
    layout = plan(builder.build(storages_nbytes=4), Policy())
    assert places(layout) == [None, (0, 0)]
    assert layout.index.shape(0) == (3, 0, 2)
    assert layout.index.shape(1) == ()


def test_a_catalog_without_tensors_has_an_empty_region() -> None:
    layout = plan(catalog_of([]), Policy())
    assert (layout.region_nbytes, len(layout.index)) == (0, 0)


def test_one_element_expanded_to_a_tebibyte_is_refused_without_allocating() -> None:
    builder = CatalogBuilder()
    builder.add("big", U8, (2**40,), storage=1, start=0)
    builder.derive(1, of=0, begin=0, end=1)
    catalog = builder.build(storages_nbytes=1)
    with pytest.raises(LimitError, match=r"1 bytes of the source would become 1099511627776"):
        plan(catalog, Policy())
    assert plan(catalog, Policy(allow_blowup=True)).repeated_nbytes == 2**40 - 1


def test_many_transposed_copies_of_one_storage_count_its_bytes_once() -> None:
    builder = CatalogBuilder()
    for number in range(1, 6):
        builder.add(f"t{number}", U8, (1 << 20,), storage=number, start=0)
        builder.derive(number, of=0, begin=0, end=1 << 20)
    # 5 MiB are at most 4 x 1 MiB and the 1 MiB that never counts as a blow-up; 6 MiB are not.
    assert plan(builder.build(storages_nbytes=1 << 20), Policy()).repeated_nbytes == 4 << 20
    builder.add("t6", U8, (1 << 20,), storage=6, start=0)
    builder.derive(6, of=0, begin=0, end=1 << 20)
    with pytest.raises(LimitError, match="allow-blowup"):
        plan(builder.build(storages_nbytes=1 << 20), Policy())


def test_forty_gibibytes_in_twelve_tensors_plan_without_data() -> None:
    nbytes = 40 * 2**30 // 12
    layout = plan(catalog_of([(number, 0, nbytes) for number in range(12)]), Policy())
    assert int(layout.index.buffer_offsets[-1]) > 2**35


@pytest.mark.parametrize("count", [2, 3])
def test_tensors_past_the_limit_of_a_pack_are_refused(count: int) -> None:
    with pytest.raises(LimitError, match=r"2\*\*62"):
        plan(catalog_of([(number, 0, 2**61 + 1) for number in range(count)]), Policy())


def brute_force_host(ranges: Sequence[tuple[int, int, int]], tensor: int, alignment: Alignment) -> int:
    storage, start, nbytes = ranges[tensor]
    unit = alignment.large if nbytes >= alignment.large_nbytes else alignment.small
    best = tensor
    for other, (its_storage, its_start, its_nbytes) in enumerate(ranges):
        inside = its_start <= start and start + nbytes <= its_start + its_nbytes
        equal = (its_start, its_nbytes) == (start, nbytes)
        shares = its_storage == storage and inside and (equal or (start - its_start) % unit == 0)
        if shares and (-its_nbytes, other) < (-ranges[best][2], best):
            best = other
    return best


RANGES = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 24).map(lambda n: 16 * n), st.integers(1, 400)), min_size=1, max_size=14
)


# Each range inside the one before, by so many steps at its start and at its end.
NESTED = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=24).flatmap(
    lambda insets: st.permutations(
        [
            (0, 16 * begin, 2000 - 16 * begin - 16 * end)
            for begin, end in itertools.accumulate(insets, lambda one, more: (one[0] + more[0], one[1] + more[1]))
            if begin + end < 125
        ]
    )
)


@given(st.one_of(RANGES, NESTED))
@example([(0, 0, 10), (0, 16, 400), (0, 0, 200), (0, 32, 10), (0, 32, 300)])
def test_hosts_are_those_a_search_over_all_pairs_finds(ranges: list[tuple[int, int, int]]) -> None:
    alignment = Alignment(small=16, large=64, large_nbytes=100)
    layout = plan(catalog_of(ranges), Policy(alignment))
    index = layout.index
    for tensor, (storage, start, nbytes) in enumerate(ranges):
        host = brute_force_host(ranges, tensor, alignment)
        buffer = int(index.tensor_buffers[tensor])
        assert buffer == int(index.tensor_buffers[host])
        assert int(layout.buffer_storages[buffer]) == storage
        # The bytes a reader finds are the tensor's own bytes of the source.
        assert int(layout.buffer_starts[buffer] + index.tensor_starts[tensor]) == start
        assert int(index.tensor_starts[tensor]) + nbytes <= int(index.buffer_nbytes[buffer])


@given(RANGES)
def test_buffers_are_aligned_ascend_and_waste_no_more_than_they_must(ranges: list[tuple[int, int, int]]) -> None:
    alignment = Alignment(small=16, large=64, large_nbytes=100)
    index = plan(catalog_of(ranges), Policy(alignment)).index
    end = 0
    for offset, nbytes in zip(index.buffer_offsets.tolist(), index.buffer_nbytes.tolist(), strict=True):
        unit = 64 if nbytes >= 100 else 16
        assert offset == -(-end // unit) * unit
        end = offset + nbytes


@given(RANGES)
def test_source_bytes_and_pack_bytes_differ_by_what_the_layout_says(ranges: list[tuple[int, int, int]]) -> None:
    held = np.zeros((2, 1000), bool)
    for storage, start, nbytes in ranges:
        held[storage, start : start + nbytes] = True
    layout = plan(catalog_of(ranges, storages_nbytes=2000), Policy())
    stored = int(layout.index.buffer_nbytes.sum())
    assert layout.unused_nbytes == 2000 - int(held.sum())
    assert stored == 2000 - layout.unused_nbytes + layout.repeated_nbytes
    assert layout.region_nbytes == stored + layout.padding_nbytes


def test_a_staircase_of_overlapping_views_does_not_take_quadratic_time() -> None:
    # 20,000 views of which each overlaps its neighbours; a quadratic search would compare 4e8 pairs.
    count = 20_000
    ranges = [(0, 16 * number, 40) for number in range(count)]
    layout = plan(catalog_of(ranges), Policy(Alignment(small=16), allow_blowup=True))
    assert len(layout.index.buffer_nbytes) == count


def test_a_staircase_inside_every_step_of_another_does_not_take_quadratic_time() -> None:
    # Each of 50,000 small views fits into all of 50,000 overlapping large ones of equal length.
    count = 50_000
    longest = [(0, 16 * number, 16 * count) for number in range(count)]
    inside = [(0, 16 * count, number + 1) for number in range(15)]
    inside += [(0, 16 * count, 16 * number) for number in range(1, count - 15)]
    layout = plan(catalog_of(longest + inside), Policy(Alignment(small=16), allow_blowup=True))
    assert len(layout.index.buffer_nbytes) == count
    first_that_reaches = [1] * 15 + list(range(1, count - 15))
    assert layout.index.tensor_buffers.tolist() == [*range(count), *first_that_reaches]


@pytest.mark.parametrize(
    ("small", "large", "large_nbytes"),
    [(8, 16384, 1), (24, 16384, 1), (2**31, 2**31, 1), (512, 256, 1), (256, 16384, 0)],
)
def test_alignments_that_make_no_sense_are_refused(small: int, large: int, large_nbytes: int) -> None:
    with pytest.raises(LimitError):
        Alignment(small=small, large=large, large_nbytes=large_nbytes)


def test_block_lengths_are_powers_of_two_from_4_kib_to_1_gib() -> None:
    for block_nbytes in (4096, 1 << 30):
        Policy(block_nbytes=block_nbytes)
    for block_nbytes in (0, 2048, 4097, 1 << 31):
        with pytest.raises(LimitError):
            Policy(block_nbytes=block_nbytes)


def test_every_pair_of_dtype_table_entries_differs() -> None:
    from stream_pack.format.dtypes import DTYPES

    for one, other in itertools.combinations(DTYPES, 2):
        assert one.name != other.name
        assert one.torch is None or one.torch != other.torch
        assert one.safetensors is None or one.safetensors != other.safetensors
