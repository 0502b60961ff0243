"""How much memory a conversion takes, and how to make it take less.

What counts is resident anonymous memory of the whole process: what a machine, or a container, runs out of.  Pages of
mapped files do not count; the kernel takes them back when it wants to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stream_pack.errors import LimitError
from stream_pack.pipeline.bytestream import READ_AHEAD_NBYTES, ByteStream
from stream_pack.pipeline.memory import anonymous_nbytes
from stream_pack.pipeline.overlap import BATCH_WEIGHT, DEPTH
from stream_pack.text import human_nbytes

__all__ = ["UNLIMITED", "Budget", "MemoryWatch", "allow_memory", "budget"]

WINDOW_NBYTES = 8 << 20
"""What a strided tensor is gathered in without a limit.  A window of a transposed matrix touches most pages of
it, so fewer windows mean fewer passes over the file: 8 for a matrix of 1 GiB where 1 MiB would take 64."""

MAX_WINDOW_NBYTES = 256 << 20
"""Above it a pass over the file is saved now and then, at a cost to the processor's caches."""

WINDOWS = 3
"""Windows in memory at once beyond the chunks in flight: one is gathered, and of two others the last chunks wait."""

MIN_CHUNK_NBYTES = 64 << 10
"""Smaller chunks save no memory that matters beside the interpreter's, and cost more calls than bytes."""

TENSOR_NBYTES = 100
"""For each tensor: columns of requests and places while streaming; or, where that is more, what reading the list of
tensors or encoding the head took for a moment (measured with 100,000 tensors: 40, and 110 with a .ptd)."""

BLOCK_NBYTES = 24
"""What it holds for each block: its checksum in a page, in the column, and in the bytes that are written."""

STEP_MEMORY_NBYTES = 2 << 20
"""What the next step of parsing may take before memory is looked at again."""

SLACK_NBYTES = 4 << 20
STAGE_SLACK_NBYTES = 2 << 20
"""Stacks of threads, and what the allocator keeps of freed chunks (measured)."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a conversion may use, and the peak it then comes to.  Units: bytes."""

    chunk_nbytes: int
    window_nbytes: int
    jobs: int
    peak_nbytes: int


def budget(
    *,
    max_memory: int | None,
    chunk_nbytes: int,
    jobs: int,
    tensors: int,
    blocks: int,
    source_nbytes: int,
    held_nbytes: int,
) -> Budget:
    """The fastest way to stream that stays below ``max_memory``; without a limit, just how much it takes.

    ``chunk_nbytes`` and ``jobs`` are the most that is wanted.  ``tensors`` and ``blocks`` of the pack have columns.
    ``source_nbytes`` is what the source says that it holds while it streams; ``held_nbytes`` what the process has now,
    the catalog and the plan among it.

    Raises: LimitError naming the minimum.
    """
    fixed = held_nbytes + source_nbytes + tensors * TENSOR_NBYTES + blocks * BLOCK_NBYTES
    if max_memory is None:
        peak = fixed + _in_flight_nbytes(chunk_nbytes, WINDOW_NBYTES, jobs)
        return Budget(chunk_nbytes, WINDOW_NBYTES, jobs, peak)
    ways = [(chunk_nbytes, fewer) for fewer in sorted({jobs, min(jobs, 2), 1}, reverse=True)]
    while ways[-1][0] > MIN_CHUNK_NBYTES:
        ways.append((max(MIN_CHUNK_NBYTES, ways[-1][0] // 2), 1))
    for chunk, fewer in ways:
        spare = max_memory - fixed - _in_flight_nbytes(chunk, chunk, fewer)
        if spare >= 0:
            window = min(MAX_WINDOW_NBYTES, chunk + spare // WINDOWS)
            peak = fixed + _in_flight_nbytes(chunk, window, fewer)
            return Budget(chunk, window, fewer, peak)
    chunk, fewer = ways[-1]
    least = fixed + _in_flight_nbytes(chunk, chunk, fewer)
    raise LimitError(
        f"this conversion needs at least {least} bytes of memory ({human_nbytes(least)}), {human_nbytes(held_nbytes)} "
        f"of them for the program and the list of tensors; the limit is {max_memory}: raise --max-memory (max_memory=)",
        value=max_memory,
        limit=least,
    )


def allow_memory(nbytes: int, max_memory: int | None, *, what: str) -> None:
    """Refuse ``what`` if the ``nbytes`` that it is about to take are more than ``max_memory`` leaves.

    For steps before the budget of the conversion can be known.

    Raises: LimitError naming the minimum memory of the conversion.
    """
    if max_memory is None:
        return
    now = anonymous_nbytes() + nbytes
    if now > max_memory:
        least = now + _in_flight_nbytes(MIN_CHUNK_NBYTES, MIN_CHUNK_NBYTES, 1)
        raise LimitError(
            f"this conversion needs at least {least} bytes of memory ({human_nbytes(least)}), {human_nbytes(now)} of "
            f"them for the program and {what}; the limit is {max_memory}: raise --max-memory (max_memory=)",
            value=max_memory,
            limit=least,
        )


@dataclass(frozen=True, slots=True)
class MemoryWatch:
    """Keeps ``max_memory`` while the head of a checkpoint, of unknown length, becomes objects; None: no limit."""

    max_memory: int | None = None

    def allow(self, nbytes: int) -> None:
        """Refuse ``nbytes`` more for what has been read if they and one step do not fit.  Raises: LimitError."""
        what = "reading what the source holds"
        allow_memory(nbytes + STEP_MEMORY_NBYTES, self.max_memory, what=what)

    @contextmanager
    def over(self, stream: ByteStream) -> Iterator[None]:
        """Inside, look at memory whenever :data:`READ_AHEAD_NBYTES` more have come from ``stream``."""
        unseen = 0

        def look(nbytes: int) -> None:
            nonlocal unseen
            unseen += nbytes
            if unseen >= READ_AHEAD_NBYTES:
                unseen = 0
                self.allow(0)

        stream.on_read = look
        try:
            yield
        finally:
            stream.on_read = None


UNLIMITED = MemoryWatch()


def _in_flight_nbytes(chunk_nbytes: int, window_nbytes: int, jobs: int) -> int:
    """Most bytes of tensor data in memory at any time."""
    batch = BATCH_WEIGHT + chunk_nbytes
    # Between two stages some batches wait, one is filled and one is used up.  The source's own check is a stage too.
    stages = (0, 2, 3)[min(jobs, 3) - 1]
    waiting = stages * ((DEPTH + 2) * batch + STAGE_SLACK_NBYTES)
    # A chunk read, its float32 and the result of a cast; the sink's batch.
    return SLACK_NBYTES + waiting + 3 * chunk_nbytes + batch + WINDOWS * window_nbytes
