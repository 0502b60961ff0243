"""Running a stage of the flow in a thread of its own, so that reading, hashing and writing overlap.

Read, XXH3, CRC-32 and write all release the GIL; what costs is handing an item to another thread,
so small items travel in batches.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["BATCH_WEIGHT", "DEPTH", "overlap"]

T = TypeVar("T")

BATCH_WEIGHT = 1 << 20
BATCH_ITEMS = 256
DEPTH = 2
"""Batches that wait between two stages: enough to ride out a hiccup, few enough to keep memory small."""

LOOK_SECONDS = 1.0
"""How long a wait lasts without Python being able to run the handler of a signal.  One that comes just before a wait
does not end it, and a silent pipe would let it last for ever."""

ABANDON_SECONDS = 1.0
"""How long an early end waits for a stage that may be blocked in a read of a silent pipe."""


@dataclass(frozen=True, slots=True)
class _End:
    """The last thing in a queue: why the stage ended, None when it was done."""

    error: BaseException | None


def overlap(items: Iterator[T], *, weigh: Callable[[T], int]) -> Generator[T, None, None]:
    """Yield the items of ``items``, which runs ahead in a background thread.

    ``weigh`` gives the bytes an item holds; about 4 MiB (or one item more) wait at any time.

    Lifetime: closing the generator, or leaving its loop by an exception, ends the thread and closes ``items`` there.
    Raises: whatever ``items`` raises, at the place in the sequence where it did.
    """
    batches: queue.Queue[list[T] | _End] = queue.Queue(DEPTH)
    stop = threading.Event()
    thread = threading.Thread(target=_run, args=(items, weigh, batches, stop), name="stream_pack-stage", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # No thread to be had (containers limit them): then one after the other.
        yield from items
        return
    try:
        while True:
            batch = _get(batches)
            if isinstance(batch, _End):
                if batch.error is not None:
                    raise batch.error
                return
            yield from batch
            # Not kept until the next batch is there: its chunks are the memory that counts.
            del batch
    finally:
        stop.set()
        _drain(batches)
        thread.join(ABANDON_SECONDS)


def _run(
    items: Iterator[T], weigh: Callable[[T], int], batches: queue.Queue[list[T] | _End], stop: threading.Event
) -> None:
    error: BaseException | None = None
    batch: list[T] = []
    weight = 0
    try:
        for item in items:
            batch.append(item)
            weight += weigh(item)
            del item
            if weight >= BATCH_WEIGHT or len(batch) >= BATCH_ITEMS:
                if not _put(batches, batch, stop):
                    break
                batch, weight = [], 0
    except BaseException as caught:  # handed to the consumer, whatever it is
        error = caught
    if isinstance(items, Generator):
        try:
            items.close()
        except BaseException as caught:  # a consumer that is never told of the end waits for ever
            error = error or caught
    if batch:
        _put(batches, batch, stop)
    _put(batches, _End(error), stop)


def _get(batches: queue.Queue[list[T] | _End]) -> list[T] | _End:
    while True:
        try:
            return batches.get(timeout=LOOK_SECONDS)
        except queue.Empty:
            continue


def _put(batches: queue.Queue[list[T] | _End], batch: list[T] | _End, stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            batches.put(batch, timeout=0.1)
            return True
        except queue.Full:
            continue
    return False


def _drain(batches: queue.Queue[list[T] | _End]) -> None:
    while True:
        try:
            batches.get_nowait()
        except queue.Empty:
            return
