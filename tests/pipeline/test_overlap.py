"""Stages in threads: the same items in the same order, whatever goes wrong on either side."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Generator, Iterator

import pytest

from stream_pack.pipeline.overlap import overlap


def stage_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "stream_pack-stage"]


@pytest.mark.parametrize("weight", [0, 1, 1 << 19, 1 << 21])
def test_items_come_in_order_whatever_they_weigh(weight: int) -> None:
    assert list(overlap(iter(range(2000)), weigh=lambda _: weight)) == list(range(2000))
    assert stage_threads() == []


def test_an_error_comes_where_it_was_raised() -> None:
    def items() -> Iterator[int]:
        yield from range(5)
        raise LookupError("after five")

    seen: list[int] = []
    with pytest.raises(LookupError, match="after five"):
        seen.extend(overlap(items(), weigh=lambda _: 1))
    stages = overlap(items(), weigh=lambda _: 1)
    assert [next(stages) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(LookupError):
        next(stages)


def test_leaving_early_ends_the_thread_and_closes_the_source() -> None:
    closed = threading.Event()

    def items() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.set()

    stage = overlap(items(), weigh=lambda _: 1 << 20)
    assert next(stage) == 1
    stage.close()
    assert closed.is_set()
    assert stage_threads() == []


def test_only_a_few_mebibytes_wait_between_two_stages() -> None:
    made = 0

    def items() -> Iterator[int]:
        nonlocal made
        while True:
            made += 1
            yield made

    most = 0
    stage = overlap(items(), weigh=lambda _: 1 << 20)
    for number in stage:
        most = max(most, made - number)
        if number == 2000:
            break
    stage.close()
    # Two batches in the queue, one in the producer's hand, one being consumed, one item being made.
    assert 0 < most <= 5


def test_stages_chain() -> None:
    squares = (n * n for n in overlap(iter(range(300)), weigh=lambda _: 1))
    assert list(overlap(squares, weigh=lambda _: 1)) == [n * n for n in range(300)]


def test_an_error_while_the_source_closes_reaches_the_consumer() -> None:
    class Closing(Generator[int, None, None]):
        def send(self, value: None) -> int:
            raise StopIteration

        def throw(self, *_: object) -> int:
            raise StopIteration

        def close(self) -> None:
            raise OSError("cannot close")

    with pytest.raises(OSError, match="cannot close"):
        list(overlap(Closing(), weigh=lambda _: 1))


def test_without_a_thread_to_be_had_the_items_come_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert list(overlap(iter(range(5)), weigh=lambda _: 1)) == [0, 1, 2, 3, 4]


def test_a_signal_that_comes_just_before_a_wait_ends_it() -> None:
    """Such a one wakes nobody: ``interrupt_main`` leaves its mark in the same way, and no thread is interrupted."""
    came_late: list[bool] = []
    ended = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        came_late.append(not ended.wait(20))

    def interrupt() -> None:
        waiting.wait(20)
        time.sleep(0.2)  # by then it waits; if not, the test shows nothing
        _thread.interrupt_main()

    waiting = threading.Event()
    threading.Thread(target=interrupt).start()
    stage = overlap(items(), weigh=lambda _: 1 << 20)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert next(stage) == 1
        with pytest.raises(KeyboardInterrupt):
            waiting.set()
            next(stage)
    finally:
        signal.signal(signal.SIGINT, before)
        ended.set()
    stage.close()
    assert came_late in ([], [False])
