"""Windows and checks, without any Metal: compared with brute force and with Apple's numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stream_pack.errors import AlignmentError, LimitError, MetalBufferError, OptionError
from stream_pack.metal.rules import NO_WINDOW, Windows, check_limit, check_range, plan_windows

PAGE = 16384
GIB = 1 << 30


def windows_of(extents: list[tuple[int, int]], limit: int) -> Windows:
    offsets, nbytes = np.array(extents, np.int64).reshape(-1, 2).T
    return plan_windows(offsets, nbytes, max_buffer_length=limit)


def pages(offset: int, nbytes: int) -> tuple[int, int]:
    return offset // PAGE, -(-(offset + nbytes) // PAGE)


def brute_force(extents: list[tuple[int, int]], limit: int) -> tuple[list[tuple[int, int]], list[int]]:
    """One page and one tensor at a time, in plain integers."""
    windows: list[tuple[int, int]] = []
    of = [NO_WINDOW] * len(extents)
    for tensor in sorted(range(len(extents)), key=lambda t: extents[t][0]):
        begin, end = pages(*extents[tensor])
        if extents[tensor][1] == 0 or end - begin > limit // PAGE:
            continue
        if not windows or max(end, windows[-1][1]) - windows[-1][0] > limit // PAGE:
            windows.append((begin, end))
        windows[-1] = (windows[-1][0], max(end, windows[-1][1]))
        of[tensor] = len(windows) - 1
    return [(begin * PAGE, end * PAGE) for begin, end in windows], of


def fewest(extents: list[tuple[int, int]], limit: int) -> int:
    """How many windows any plan needs that keeps the tensors in order, by trying every cut."""
    spans = [pages(*e) for e in sorted(extents) if e[1] and pages(*e)[1] - pages(*e)[0] <= limit // PAGE]
    best = [0] + [len(spans)] * len(spans)
    for end in range(1, len(spans) + 1):
        for begin in range(end):
            group = spans[begin:end]
            if max(last for _, last in group) - group[0][0] <= limit // PAGE:
                best[end] = min(best[end], best[begin] + 1)
    return best[-1]


extents_in_any_order = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 12 * PAGE), st.integers(0, 12).map(lambda page: page * PAGE)),
        st.one_of(st.just(0), st.integers(1, 300), st.integers(1, 5).map(lambda n: n * PAGE), st.integers(1, 6 * PAGE)),
    ),
    max_size=12,
)
limits = st.integers(1, 8).flatmap(lambda n: st.integers(n * PAGE, (n + 1) * PAGE - 1))


@given(extents_in_any_order, limits)
@example([(0, PAGE), (PAGE, PAGE), (2 * PAGE, PAGE + 1)], PAGE)
@example([(5, 10), (0, 4 * PAGE), (PAGE, 10)], 4 * PAGE)
def test_windows_are_those_that_a_page_by_page_search_finds(extents: list[tuple[int, int]], limit: int) -> None:
    plan = windows_of(extents, limit)
    assert (list(zip(plan.begins.tolist(), plan.ends.tolist())), plan.of.tolist()) == brute_force(extents, limit)


def test_thousands_of_random_packs_agree_with_the_search_page_by_page() -> None:
    random = np.random.default_rng(7)
    for _ in range(3000):
        count = int(random.integers(0, 30))
        nbytes = random.choice([0, 1, 256, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE], count)
        gaps = random.choice([0, 16, 256, PAGE], count)
        ends = np.cumsum(nbytes + gaps)
        extents = list(zip((ends - nbytes).tolist(), nbytes.tolist()))
        limit = int(random.integers(1, 6)) * PAGE
        plan = windows_of(extents, limit)
        expected, of = brute_force(extents, limit)
        assert list(zip(plan.begins.tolist(), plan.ends.tolist())) == expected
        assert plan.of.tolist() == of


@given(extents_in_any_order, limits)
def test_every_tensor_lies_whole_in_its_window_and_no_window_is_too_long(
    extents: list[tuple[int, int]], limit: int
) -> None:
    plan = windows_of(extents, limit)
    assert all(0 < end - begin <= limit for begin, end in zip(plan.begins, plan.ends))
    assert not (plan.begins % PAGE).any()
    assert not (plan.ends % PAGE).any()
    for (offset, nbytes), window in zip(extents, plan.of.tolist()):
        if window == NO_WINDOW:
            begin, end = pages(offset, nbytes)
            assert nbytes == 0 or (end - begin) * PAGE > limit
        else:
            assert plan.begins[window] <= offset
            assert offset + nbytes <= plan.ends[window]
    members = [plan.tensors(window).tolist() for window in range(len(plan))]
    assert sorted(t for tensors in members for t in tensors) == [
        t for t, w in enumerate(plan.of.tolist()) if w != NO_WINDOW
    ]
    assert all(plan.of[t] == w for w, tensors in enumerate(members) for t in tensors)


@given(
    st.lists(st.tuples(st.integers(0, 2 * PAGE), st.integers(1, 3 * PAGE)), max_size=9),
    st.integers(1, 5).map(lambda n: n * PAGE),
)
def test_no_other_plan_needs_fewer_windows(steps: list[tuple[int, int]], limit: int) -> None:
    extents, at = [], 0
    for gap, nbytes in steps:
        extents.append((at + gap, nbytes))
        at += gap + nbytes
    assert len(windows_of(extents, limit)) == fewest(extents, limit)


@pytest.mark.parametrize(("nbytes", "windows"), [(8 * PAGE, 1), (8 * PAGE + 1, 0), (9 * PAGE, 0)], ids=str)
def test_a_tensor_fits_up_to_exactly_the_limit(nbytes: int, windows: int) -> None:
    assert len(windows_of([(0, nbytes)], 8 * PAGE)) == windows


def test_a_tensor_of_the_limit_that_starts_inside_a_page_does_not_fit() -> None:
    plan = windows_of([(256, 8 * PAGE)], 8 * PAGE)
    assert plan.of.tolist() == [NO_WINDOW]


def test_neighbours_may_share_the_page_where_one_ends_and_the_next_begins() -> None:
    plan = windows_of([(0, 2 * PAGE - 100), (2 * PAGE - 100, 2 * PAGE - 100)], 3 * PAGE)
    assert list(zip(plan.begins.tolist(), plan.ends.tolist())) == [(0, 2 * PAGE), (PAGE, 4 * PAGE)]


def test_a_limit_between_two_pages_is_the_lower_one() -> None:
    assert len(windows_of([(0, PAGE), (PAGE, 2 * PAGE)], 3 * PAGE)) == 1
    assert len(windows_of([(0, PAGE), (PAGE, 2 * PAGE)], 3 * PAGE - 1)) == 2


def test_a_limit_below_one_page_is_refused() -> None:
    assert check_limit(PAGE) == PAGE
    with pytest.raises(LimitError, match="16383 bytes: expected at least one page of 16384"):
        check_limit(PAGE - 1)


def test_a_limit_is_a_whole_number() -> None:
    assert check_limit(np.int64(3 * PAGE)) == 3 * PAGE  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"3500000000\.0: expected an int, a number of bytes"):
        check_limit(3.5e9)  # type: ignore[arg-type]


def test_llama_3_8b_takes_five_windows_at_three_and_a_half_gib_and_one_at_sixteen() -> None:
    # Its 291 tensors in bf16, 16.06 GB, in the order of its own files; all but the norms start at pages.
    layer = [4096 * 4096, 1024 * 4096, 1024 * 4096, 4096 * 4096, *[14336 * 4096] * 3, 4096, 4096]
    elements = [128256 * 4096, *layer * 32, 4096, 128256 * 4096]
    assert len(elements) == 291
    extents, at = [], 0
    for count in elements:
        alignment = PAGE if 2 * count >= 1 << 20 else 256
        at = -(-at // alignment) * alignment
        extents.append((at, 2 * count))
        at += 2 * count
    assert at > 16.06e9
    assert len(windows_of(extents, 7 * GIB // 2)) == 5
    assert len(windows_of(extents, 16 * GIB)) == 1


def test_tensors_beyond_32_bits_keep_their_places() -> None:
    plan = windows_of([(0, 10 * GIB), (10 * GIB, 6 * GIB), (2**61, 256)], 10 * GIB)
    assert plan.begins.tolist() == [0, 10 * GIB, 2**61]
    assert plan.ends.tolist() == [10 * GIB, 16 * GIB, 2**61 + PAGE]


def test_a_hundred_thousand_windows_of_one_page_are_planned_at_once() -> None:
    count = 100_000
    plan = windows_of([(tensor * PAGE, 256) for tensor in range(count)], PAGE)
    assert plan.of.tolist() == list(range(count))


def test_the_numbers_of_mps_data_types_are_built_as_apple_builds_them() -> None:
    from stream_pack.format.dtypes import BY_NAME, DTYPES
    from stream_pack.metal.rules import MPS_DATA_TYPES

    kinds = {"uint": 0, "int": 0x2000_0000, "float": 0x1000_0000, "complex": 0x1100_0000}
    for name, number in MPS_DATA_TYPES.items():
        assert number & 0xFF == DTYPES[BY_NAME[name]].bits, name
        kind = name.rstrip("0123456789")
        expected = {"bool": 0x8000_0000, "bfloat": 0x9000_0000}.get(kind, kinds.get(kind))
        assert number & ~0xFF == expected, name
    assert "float64" not in MPS_DATA_TYPES


RANGE = {"memory": (4 * PAGE, 20 * PAGE), "page_nbytes": PAGE, "max_buffer_length": 8 * PAGE}


@pytest.mark.parametrize(("address", "nbytes"), [(4 * PAGE, 8 * PAGE), (19 * PAGE, PAGE)])
def test_whole_pages_inside_the_mapping_are_a_buffer(address: int, nbytes: int) -> None:
    check_range(address, nbytes, **RANGE)  # type: ignore[arg-type]
    # It raises nothing; outside of the mapping it would.
    with pytest.raises(MetalBufferError, match="not inside the mapping"):
        check_range(address + 16 * PAGE, nbytes, **RANGE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("address", "nbytes", "error", "message"),
    [
        (4 * PAGE, 0, MetalBufferError, "of 0 bytes: Metal has no empty"),
        (4 * PAGE, -PAGE, MetalBufferError, "Metal has no empty"),
        (4 * PAGE + 256, PAGE, AlignmentError, "the address 0x10100 is not a multiple of the page"),
        (4 * PAGE, PAGE + 4096, AlignmentError, "the length 0x5000 is not a multiple of the page"),
        (3 * PAGE, 2 * PAGE, MetalBufferError, "not inside the mapping"),
        (19 * PAGE, 2 * PAGE, MetalBufferError, "not inside the mapping"),
        (21 * PAGE, PAGE, MetalBufferError, "not inside the mapping"),
        (4 * PAGE, 9 * PAGE, MetalBufferError, "the device allows 131072; take several windows"),
    ],
)
def test_what_the_documentation_forbids_is_refused_with_the_reason(
    address: int, nbytes: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_range(address, nbytes, **RANGE)  # type: ignore[arg-type]


def test_a_device_whose_limit_is_no_whole_number_of_pages_has_no_buffer_beyond_it() -> None:
    limits = {**RANGE, "max_buffer_length": 8 * PAGE - 1}
    check_range(4 * PAGE, 7 * PAGE, **limits)  # type: ignore[arg-type]
    with pytest.raises(MetalBufferError, match="the device allows 131071"):
        check_range(4 * PAGE, 8 * PAGE, **limits)  # type: ignore[arg-type]


def test_pages_of_4096_bytes_are_enough_where_the_machine_has_them() -> None:
    limits = {"memory": (0, 8192), "max_buffer_length": 4096}
    check_range(4096, 4096, page_nbytes=4096, **limits)  # type: ignore[arg-type]
    # It raises nothing; with larger pages it would.
    with pytest.raises(AlignmentError):
        check_range(4096, 4096, page_nbytes=PAGE, **limits)  # type: ignore[arg-type]
