"""Fewer threads, then smaller chunks: how a conversion is made to fit into memory."""

from __future__ import annotations

import re
import resource
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from stream_pack.errors import LimitError
from stream_pack.pipeline.budget import UNLIMITED, Budget, MemoryWatch, budget
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.pipeline.memory import anonymous_nbytes
from tests.sources.byte_sources import Dribble
from tests.support.memory import needs_proc

MIB = 1 << 20
UNIT = 1 if sys.platform == "darwin" else 1024  # getrusage(2)


def fit(
    max_memory: int | None, *, jobs: int = 4, tensors: int = 0, blocks: int = 0, held: int = 20 * MIB, source: int = 0
) -> Budget:
    return budget(
        max_memory=max_memory,
        chunk_nbytes=MIB,
        jobs=jobs,
        tensors=tensors,
        blocks=blocks,
        source_nbytes=source,
        held_nbytes=held,
    )


def least(**conditions: int) -> int:
    with pytest.raises(LimitError) as caught:
        fit(1, **conditions)
    assert f"at least {caught.value.limit} bytes" in str(caught.value)
    return caught.value.limit


def test_without_a_limit_nothing_is_taken_away() -> None:
    free = fit(None)
    assert (free.chunk_nbytes, free.jobs) == (MIB, 4)


def test_the_least_that_is_named_is_enough_and_one_byte_less_is_not() -> None:
    limit = least()
    assert fit(limit).peak_nbytes <= limit
    with pytest.raises(LimitError):
        fit(limit - 1)


def test_what_the_source_holds_counts_like_what_the_process_holds() -> None:
    for limit in (None, 2 * least()):
        assert fit(limit and limit + 5 * MIB, source=5 * MIB) == fit(limit and limit + 5 * MIB, held=25 * MIB)
    assert least(source=5 * MIB) == least() + 5 * MIB


def test_threads_go_first_then_chunks_shrink() -> None:
    free = fit(None)
    ways = [fit(limit) for limit in range(free.peak_nbytes + 300 * MIB, least(), -(MIB // 4))]
    chosen = list(dict.fromkeys((way.jobs, way.chunk_nbytes) for way in ways))
    assert chosen[:3] == [(4, MIB), (2, MIB), (1, MIB)]
    assert [chunk for _, chunk in chosen[2:]] == [MIB >> k for k in range(len(chosen) - 2)]
    assert all(jobs == 1 for jobs, _ in chosen[2:])


def test_what_is_left_makes_windows_larger_but_never_goes_beyond_the_limit() -> None:
    for limit in range(least(), 2000 * MIB, 5 * MIB):
        way = fit(limit)
        assert way.peak_nbytes <= limit
        assert way.chunk_nbytes <= way.window_nbytes <= 256 * MIB
    assert fit(2000 * MIB).window_nbytes == 256 * MIB


def test_what_the_process_has_and_every_tensor_and_block_count() -> None:
    assert least(held=50 * MIB) == least() + 30 * MIB
    assert least(tensors=1000) > least() + 80_000
    assert least(blocks=1000) >= least() + 16_000  # a checksum is held twice at the end


def test_more_jobs_are_never_made_of_fewer() -> None:
    assert fit(2000 * MIB, jobs=1).jobs == 1


def test_where_the_kernel_does_not_tell_the_peak_of_all_pages_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_such_file(path: Path) -> bytes:
        raise FileNotFoundError(path)

    told = anonymous_nbytes()
    monkeypatch.setattr(Path, "read_bytes", no_such_file)
    assert told <= anonymous_nbytes() == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT


@needs_proc
def test_the_memory_of_this_process_is_what_the_kernel_says() -> None:
    status = Path("/proc/self/status").read_text()
    kib = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert kib is not None
    assert abs(anonymous_nbytes() - 1024 * int(kib[1])) < 4 * MIB


@pytest.mark.parametrize("step", [999, 1 << 20])
def test_a_watch_looks_at_memory_each_time_64_kib_have_come_until_it_ends(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Dribble(bytes(1 << 20), step=step)
    looked: list[int] = []

    def look() -> int:
        looked.append(source.taken)
        return 0

    monkeypatch.setattr("stream_pack.pipeline.budget.anonymous_nbytes", look)
    stream = ByteStream(source)
    with MemoryWatch(1 << 40).over(stream):
        for _ in range(512):
            stream.read_exactly(1000, what="bytes")
    assert 65536 <= looked[0] < 65536 + 999
    assert all(65536 <= after - before < 65536 + 999 for before, after in pairwise(looked))
    assert 512_000 - looked[-1] < 65536
    count = len(looked)
    stream.read_exactly(400_000, what="bytes")
    assert len(looked) == count


def test_a_watch_refuses_what_does_not_fit_beside_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stream_pack.pipeline.budget.anonymous_nbytes", lambda: 50 * MIB)
    watch = MemoryWatch(60 * MIB)
    watch.allow(8 * MIB)
    with pytest.raises(LimitError, match="reading what the source holds") as caught:
        watch.allow(8 * MIB + 1)
    assert caught.value.limit > 60 * MIB
    UNLIMITED.allow(1 << 60)
