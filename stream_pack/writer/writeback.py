"""Writing to descriptors: all of a regular file by position, or what a stream takes."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Sequence
from contextlib import suppress

__all__ = ["WritebackFile", "rest_of", "write_some"]

EARLY_NBYTES = 8 << 20
"""Bytes after which the disk is told to begin with them: enough for long writes, few against any large pack."""


class WritebackFile:
    """The regular file open at descriptor ``fd``, which stays the caller's; ``name`` is what errors call it."""

    def __init__(self, fd: int, *, name: str) -> None:
        self._fd = fd
        self._name = name
        self._unsent = (0, 0)

    def write(self, position: int, parts: Sequence[memoryview]) -> None:
        """Write all of ``parts``, one after the other, from ``position`` on.  Copies: none.  Raises: OSError."""
        while parts:
            written = os.pwritev(self._fd, parts, position)
            if written == 0:
                raise OSError(errno.EIO, "a write of several bytes wrote none", self._name)
            self._send_early(position, position + written)
            position += written
            parts = rest_of(parts, written)

    def _send_early(self, begin: int, end: int) -> None:
        """Have the disk begin with what was written, so that a final fsync does not wait for all of it."""
        first, last = self._unsent
        if begin != last:
            first = begin
        if end - first >= EARLY_NBYTES:
            # Linux starts to write dirty pages that are said to be no longer needed, does not wait for them, and drops
            # only pages that are clean, which these are not yet.  Elsewhere the call is missing, or does less.
            if hasattr(os, "posix_fadvise"):
                with suppress(OSError):  # advice: a file system may have no use for it
                    os.posix_fadvise(self._fd, first, end - first, os.POSIX_FADV_DONTNEED)
            first = end
        self._unsent = (first, end)


def rest_of(parts: Sequence[memoryview], written: int) -> Sequence[memoryview]:
    """What is left of ``parts`` after their first ``written`` bytes."""
    for number, part in enumerate(parts):
        if written < len(part):
            return [part[written:], *parts[number + 1 :]]
        written -= len(part)
    return []


def write_some(descriptor: int, parts: Sequence[memoryview]) -> int:
    """Write the beginning of ``parts``, as much as the descriptor takes; returns how many bytes that was.

    Waits for a descriptor that takes nothing now: another program that shares the pipe or terminal may have made it
    non-blocking, as ssh does.  Raises: OSError.
    """
    while True:
        try:
            return os.writev(descriptor, parts)
        except BlockingIOError:
            waiting = select.poll()
            waiting.register(descriptor, select.POLLOUT)
            waiting.poll()
